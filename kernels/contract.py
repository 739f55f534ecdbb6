"""Contract of the fused kernels, with the inputs and results that all backends share.

The scores s_ij of one head are computed over the listed tiles, in base 2 or e depending on the
backend:

    x_ij = cap(scale q_i . k_j) + bias_ij                  cap(x) = c tanh(x / c) or x
    s_ij = g(x_ij) with a function of the score, or x_ij; -inf where not visible
    m_i = max_j s_ij      l_i = sum_j exp(s_ij - m_i)      p_ij = exp(s_ij - m_i - log l_i)
    out_i = sum_j p_ij f_ij v_j                            dropout factor f_ij: 0 or 1/(1 - rate)

A sink is added to m and l after all keys, unless the row is fully masked. For the backward pass,
the caller computes D_i = do_i . out_i - dlse_i. The gradients are:

    ds_ij = p_ij (f_ij do_i . v_j - D_i) g'(x_ij)          du_ij = ds_ij (1 - tanh^2)
    dv_j = sum_i p_ij f_ij do_i     dq_i = scale sum_j du_ij k_j     dk_j = scale sum_i du_ij q_i

If a pair is not visible, p, ds and du are set to 0 by a select instead of a product, because q_i .
k_j and do_i . v_j may overflow.

All queries, keys, values and cotangents must be finite, even if they are hidden or padding, because
0 times NaN is NaN. A bias may be -inf. Tiles that are not listed are not read, and data that a copy
reads past the end of an array has no effect. The kernels in `cpu` and `portable` do not require
finite inputs. A NaN or inf in a query, key or value affects only the queries that see it. For these
queries, out is NaN, log l or m is NaN, and no gradient is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from transformer_jax.kernels import Target
    from transformer_jax.kernels.program import Program
    from transformer_jax.kernels.score_function import ScoreProgram

LOWEST = -3.4028235e38  # initial running maximum, which is finite to avoid inf - inf

Array = jax.Array | np.ndarray
Vectors = tuple[Array, ...]
Shaped = jax.Array | jax.ShapeDtypeStruct
Index = jax.Array | int  # i32[]


@dataclass(frozen=True)
class Problem:
    """Static, hashable description of a call."""

    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    visible: Program | None = None
    """Mask function, which is called with (query vectors, key vectors) whose shapes broadcast to a
    tile. It hides every key at a negative position (key vector 0). If `Operands.pairs` is present,
    its tile is passed as an additional key vector. If the mask is None, every listed tile is full.
    """
    score: ScoreProgram | None = None
    """Function of a score, which is called with (scores, q positions, k positions, values)."""
    nondeterministic: bool = False
    """Whether dq may be summed in the order in which programs finish, so that its last bits
    vary."""
    fixed_slopes: bool = False
    """Whether the slopes have no gradient, as is the case for the fixed slopes of the ALiBi
    paper."""
    invariant: bool = False
    """Whether the results of a row must not depend on the numbers of rows, queries and keys."""
    wide: bool = False
    """Whether the forward kernel returns its output in float32. The backward pass computes D from
    the output. If the output were rounded to 16 bits, D would be inaccurate in rows with few large
    weights."""
    packs: bool = False
    """Whether `transformer_jax.kernels.packed_queries` wraps every kernel except `decode`. If it
    does, the queries of the call are not padded, and the lists contain one tile of queries for all
    heads that share a key head. The kernel itself receives more queries and fewer heads. """
    interpret: Any = False
    """False on the device. On a CPU, this is the argument for the backend's interpreter."""
    processors: int | None = None
    """Number of multiprocessors on an NVIDIA chip, or None if it is unknown."""


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of one kernel, and the number of tiles in flight (`stages`)."""

    q: int
    k: int
    stages: int = 2
    slack: float = 0.0
    """Maximum amount, in base 2, by which the maximum of a row may exceed the subtracted m before
    the forward kernel updates m and rescales its sums, from 0 (always update) to 15. The results
    are equivalent, because m is at most `slack` less than the maximum, and log l is larger by the
    same difference. Only the Hopper kernel supports this field."""


class Operands(NamedTuple):
    """Input arrays of a call. Except on a CPU, T and S are multiples of all tile sizes.

    `decode` accepts unpadded queries, and keys and values that are not longer than the vectors. If
    `pages` is set, key and value are pools of shape [P, page, K, H or Hv], and their scales have
    shape [P, page, K].
    """

    query: jax.Array  # [B, T, N, H]; zeros after the end
    key: jax.Array  # [B, S, K, H]; zeros after the end
    value: jax.Array  # [B, S, K, Hv]; zeros after the end
    q_vectors: Vectors = ()  # i32[B or 1, T] each; vector 0 contains the positions
    k_vectors: Vectors = ()  # i32[B or 1, S] each; vector 0: positions, -1 after the end
    pairs: jax.Array | None = None  # i8[B or 1, N or 1, T, S]: bits of each pair that a mask reads
    bias: jax.Array | None = None  # [B or 1, N or 1, T or 1, S or 1], f32 or the query's dtype
    slopes: jax.Array | None = None  # f32[B or 1, N]: ALiBi, s -= slope |q - k| of the positions
    sinks: jax.Array | None = None  # f32[B or 1, N]
    dropout: jax.Array | None = None  # u32[2, B, N]: the words a and b of kernels/dropout.py
    k_scale: jax.Array | None = None  # f32[B, S, K] if key is int8; only `decode` reads it
    v_scale: jax.Array | None = None  # f32[B, S, K] if value is int8
    pages: jax.Array | None = None  # i32[B, M], each in 0..P - 1; only `decode` reads it
    score_values: Vectors | None = None
    """Values that `Problem.score` reads, f32 or i32[B or 1, N or 1, T or 1, S or 1], with T or S
    equal to 1; None without a function."""

    @property
    def page(self) -> int | None:
        """Number of keys per page, or None if the keys are not in pages."""
        return None if self.pages is None else self.key.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys per batch row."""
        return self.key.shape[1] * (1 if self.pages is None else self.pages.shape[1])

    def of_first_queries(self, T: int) -> Operands:
        """Return the operands of the first T queries."""

        def first(x: jax.Array | None) -> jax.Array | None:  # [.., T or 1, S or 1]
            return x if x is None or x.shape[2] == 1 else x[:, :, :T]

        return self._replace(
            query=self.query[:, :T],
            q_vectors=tuple(x[:, :T] for x in self.q_vectors),
            pairs=first(self.pairs),
            bias=first(self.bias),
            score_values=jax.tree.map(first, self.score_values),
        )


def learns_slopes(problem: Problem, operands: Operands) -> bool:
    """Whether a backward kernel returns rows that sum to the gradient of the slopes."""
    return operands.slopes is not None and not problem.fixed_slopes


def out_dtype(problem: Problem, operands: Operands) -> DTypeLike:
    """Return the dtype of a forward kernel's output."""
    return jnp.float32 if problem.wide else operands.query.dtype


class TileLists(NamedTuple):
    """Lists of the tiles that each row of tiles visits, with full tiles before masked tiles.

    Rows are query tiles and columns are key tiles, except that the kinds "dkdv" and "single_pass"
    swap them. The tiles in `order[..., :full]` need no mask, and the tiles in `order[...,
    full:seen]` do. After `seen`, `order` repeats the last visited column (0 if there is none), so
    that a pipeline that prefetches does not load any other tiles.
    """

    order: jax.Array  # i32[B or 1, N or 1, rows, columns]
    full: jax.Array  # i32[B or 1, N or 1, rows]
    seen: jax.Array  # i32[B or 1, N or 1, rows], full and partial tiles
    visits: jax.Array | None = None  # i32[B or 1, N or 1, 1, rows * columns], for `tpu`
    rows: jax.Array | None = None  # i32[B or 1, N or 1, rows], for NVIDIA
    visit_counts: jax.Array | None = None  # i32[B or 1, N or 1, 1], for `tpu`


class Residuals(NamedTuple):
    """Results of the forward pass that the backward kernels need, and the cotangents."""

    do: jax.Array  # [B, T, N, Hv]
    row_max: jax.Array  # f32[B, N, T]: m; +inf in rows with p = 0 (fully masked or NaN)
    log_sum: jax.Array  # f32[B, N, T]: log l; 0 in rows with p = 0
    D: jax.Array  # f32[B, N, T]; 0 in rows with p = 0


class Refused(NotImplementedError):
    """Error that an implementation raises for a call that it does not support."""


SKIPPED, PARTIAL, FULL = 0, 1, 2  # classes of tiles, as in transformer_jax.attention.block_plan


def tile_lists(classes: Array) -> TileLists:  # from [B or 1, N or 1, rows, columns]
    """Return the `TileLists` for tile classes, as NumPy arrays if `classes` is a NumPy array."""
    xp: ModuleType = np if isinstance(classes, np.ndarray) else jnp
    is_full, is_partial = classes == FULL, classes == PARTIAL
    full = is_full.sum(axis=-1, dtype=np.int32)
    seen = full + is_partial.sum(axis=-1, dtype=np.int32)
    steps = xp.arange(classes.shape[-1], dtype=np.int32)[None, None, None]
    wanted = xp.minimum(steps, xp.maximum(seen - 1, 0)[..., None])
    if xp is np:
        order = np.argsort(-classes, axis=-1, kind="stable").astype(np.int32)
        return TileLists(xp.take_along_axis(order, wanted, axis=-1), full, seen)
    # counting the place of each tile compiles to two passes over pairs, and a sort compiles to
    # twelve
    same = classes[..., :, None] == classes[..., None, :]
    earlier = steps[..., None, :] < steps[..., :, None]
    before = (same & earlier).sum(axis=-1, dtype=np.int32)
    place = jnp.where(is_full, before, jnp.where(is_partial, full[..., None] + before, -1))
    here = place[..., None, :] == wanted[..., :, None]
    return TileLists(
        jnp.where(here, steps[..., None, :], 0).sum(axis=-1, dtype=np.int32), full, seen
    )


# The interface of a backend

Kind = Literal[
    "forward", "dq", "dkdv", "bias", "score", "single_pass", "single_pass_rows", "decode"
]
Kernel = Callable[..., jax.Array | tuple[jax.Array | None, ...]]
Kernels = Mapping[Kind, Kernel]


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """Kernels for one kind of device, with the calls that they support.

    `kernels` contains functions of (problem, operands, lists, blocks), which return:

        forward            out [B, T, N, Hv], m and log l, f32[B, N, T]
        decode             the same, for few queries that are not differentiated

    It also contains functions of (problem, operands, lists, blocks, saved) for the backward pass,
    which return:

        dq                 dq, and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|
        dkdv               dk, dv
        bias               dbias, f32 of the bias's shape
        score              for each floating-point value of a function of the score, the sums of its
                           gradient, f32[B, N, T], or f32[B, N, S] if it differs between keys
        single_pass        dq, dk, dv, and with learned slopes f32[B, N, S], summed over i
        single_pass_rows   dq, dk, dv, and with learned slopes f32[B, N, T]; lists are by query

    A backend has `single_pass_rows`, or `dq` and `dkdv`, or, if `single_pass` is deterministic,
    only `single_pass`. `single_pass` is called only if `refuse` accepts a `nondeterministic`
    problem. `decode` receives T queries, without padding or dropout. Its lists have one row for all
    heads that share a key head. Only `decode` supports keys and values in int8 and in the pages of
    a pool. Key j of batch row b is in slot j % page of page `pages[b, j // page]`. Vectors, pairs,
    bias and lists are still indexed by j, with S = M page.
    """

    kernels: Kernels
    refuse: Callable[[Target, bool, Shaped, Shaped, Shaped], str | None]
    """Function that returns why (target, nondeterministic, query, key, value) is not supported, or
    None."""
    blocks: Callable[..., Blocks]
    """Function that returns the default tile sizes for (kind, H, Hv, bytes per element, K)."""
    list_bytes: int | None = None
    """Maximum size of the tile lists in bytes. None means no limit."""
    heads_first: bool = False
    """Whether the results are transposed to [B, N, T, H]."""
    shortest: int | None = None
    """Size of the shortest tile for short sequences. None means that they are padded to whole
    tiles."""
    decode_rows: int = 0
    """Maximum number of queries per key head in `decode`, T N / K."""
    int8: bool = False
    """Whether `decode` supports int8 keys and values with scales."""
    page: int = 0
    """Number that must divide the page size for `decode` to read pages in place, or 0 if it never
    does."""
    score: bool = False
    """Whether the kernels support `Problem.score`."""
    wide: bool = False
    """Whether `forward` supports `Problem.wide`."""
    narrow: bool = False
    """Whether only 16-bit inputs are supported."""
    packs: bool = False
    """Whether short queries of several heads are packed as rows of one tile (`Problem.packs`)."""
    prepare: Callable[[TileLists], TileLists] = lambda lists: lists
    """Function that adds the backend's own fields to tile lists, once per plan."""
    sums_fit: Callable[[int, int, int], bool] = lambda S, H, Hv: False
    """Whether `single_pass_rows` replaces `dq` and `dkdv` for (S, H, Hv)."""
    portable: Kernels | None = None
    """The same kernels in plain JAX, for other platforms and for derivatives of the kernels."""
