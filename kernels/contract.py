"""Define what a fused kernel computes and what it is given: one contract for every backend.

With scores s_ij of one head, over the tiles that the lists name (base 2 or e, as a backend likes):

    s_ij = cap(scale q_i . k_j) + bias_ij,  -inf where not visible;  cap(x) = c tanh(x / c) or x
    m_i = max_j s_ij      l_i = sum_j exp(s_ij - m_i)      p_ij = exp(s_ij - m_i - log l_i)
    out_i = sum_j p_ij f_ij v_j                            f_ij, of dropout, is 0 or 1/(1 - rate)

A sink joins m and l once all keys are summed, unless the row is fully masked. Backward, with
D_i = do_i . out_i - dlse_i, which the caller computes:

    ds_ij = p_ij (f_ij do_i . v_j - D_i)                   du_ij = ds_ij (1 - tanh^2)
    dv_j = sum_i p_ij f_ij do_i     dq_i = scale sum_j du_ij k_j     dk_j = scale sum_i du_ij q_i

Where a pair is not visible, p, ds and du are selected to be 0, not multiplied: q_i . k_j and
do_i . v_j may overflow there.

Queries, keys, values and cotangents must be finite, hidden ones and padding too, since 0 times NaN
is NaN. A bias may be -inf. Tiles that the lists skip are not read, and what a copy finds after the
end of an array has no influence. The kernels of `cpu` and `portable` ask for nothing: there NaN or
inf in a query, key or value reaches exactly the queries that see it. Their out, and log l or m, are
NaN, and they pass no gradient on.
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

LOWEST = -3.4028235e38  # where a running maximum starts: finite, so never inf - inf

Array = jax.Array | np.ndarray
Vectors = tuple[Array, ...]
Shaped = jax.Array | jax.ShapeDtypeStruct
Index = jax.Array | int  # i32[]


@dataclass(frozen=True)
class Problem:
    """All that is known of a call when tracing; hashable."""

    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    visible: Program | None = None
    """The mask, called with (query vectors, key vectors) of shapes that broadcast to a tile. It
    never shows a key at a negative position (key vector 0). Where there are `Operands.pairs`, their
    tile is given as one more key vector. None: every listed tile is full.
    """
    nondeterministic: bool = False
    """Whether dq may be summed in the order in which programs finish: other bits in every run."""
    fixed_slopes: bool = False
    """Whether the gradient of slopes is left out, as where they are those of ALiBi's paper."""
    wide: bool = False
    """Whether the forward kernel returns its output in float32, of which a backward pass computes
    D: that of an output rounded to 16 bits would be off in rows with few large weights."""
    packs: bool = False
    """Whether `transformer_jax.kernels.packed_queries` stands around every kernel but `decode`. The
    queries of the call are then not padded, and its lists have one tile of queries, which the heads
    that read one key head share. A kernel itself sees nothing of it: more queries of fewer heads.
    """
    interpret: Any = False
    """False on the device; on a CPU the argument of the backend's interpreter, of its own type."""
    processors: int | None = None
    """How many multiprocessors an NVIDIA chip has; None where it is not known."""


@dataclass(frozen=True)
class Blocks:
    """The tile sizes of one kernel; `stages` tiles are in flight."""

    q: int
    k: int
    stages: int = 2
    slack: float = 0.0
    """How far, in base 2, a row's maximum may rise above the m that a forward kernel subtracts
    before it takes the new one and rescales what it has summed, up to 15; 0: not at all. The
    results are the same: m is at most so much less, and log l more. Hopper's kernel has it."""


class Operands(NamedTuple):
    """The arrays of a call. Unless a CPU runs it, T and S are multiples of all tile sizes.

    Those of `decode` have T queries, and keys and values of any length up to that of the vectors.
    With `pages`, key and value are pools [P, page, K, H or Hv], and their scales [P, page, K].
    """

    query: jax.Array  # [B, T, N, H]; zeros after the end
    key: jax.Array  # [B, S, K, H]; zeros after the end
    value: jax.Array  # [B, S, K, Hv]; zeros after the end
    q_vectors: Vectors = ()  # i32[B or 1, T] each; vector 0 is the positions
    k_vectors: Vectors = ()  # i32[B or 1, S] each; vector 0 is the positions, -1 after the end
    pairs: jax.Array | None = None  # i8[B or 1, N or 1, T, S]: what a mask reads of each pair
    bias: jax.Array | None = None  # [B or 1, N or 1, T or 1, S or 1], f32 or the query's dtype
    slopes: jax.Array | None = None  # f32[B or 1, N]: ALiBi, s -= slope |q - k| of the positions
    sinks: jax.Array | None = None  # f32[B or 1, N]
    dropout: jax.Array | None = None  # u32[2, B, N]: the words a and b of kernels/dropout.py
    k_scale: jax.Array | None = None  # f32[B, S, K], where key is int8: `decode` alone reads it
    v_scale: jax.Array | None = None  # f32[B, S, K], where value is int8
    pages: jax.Array | None = None  # i32[B, M], each in 0..P - 1: `decode` alone reads it

    @property
    def page(self) -> int | None:
        """Return how many keys a page has; None where keys lie in no pages."""
        return None if self.pages is None else self.key.shape[1]

    @property
    def keys(self) -> int:
        """Return how many keys a batch row has."""
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
        )


def learns_slopes(problem: Problem, operands: Operands) -> bool:
    """Return whether a backward kernel returns the rows that the slopes' gradient sums."""
    return operands.slopes is not None and not problem.fixed_slopes


def out_dtype(problem: Problem, operands: Operands) -> DTypeLike:
    """Return the dtype of a forward kernel's output."""
    return jnp.float32 if problem.wide else operands.query.dtype


class TileLists(NamedTuple):
    """The tiles that each row of tiles visits: full ones first, then those that are masked.

    Rows are query tiles and columns key tiles; in those of the kinds "dkdv" and "single_pass" they
    are the other way round. `order[..., :full]` needs no mask, `order[..., full:seen]` does. After
    `seen`, `order` repeats the last visited column (0 without one), so that a pipeline which
    prefetches it loads nothing new.
    """

    order: jax.Array  # i32[B or 1, N or 1, rows, columns]
    full: jax.Array  # i32[B or 1, N or 1, rows]
    seen: jax.Array  # i32[B or 1, N or 1, rows]: full and partial
    visits: jax.Array | None = None  # i32[B or 1, N or 1, 1, rows * columns]: of `tpu`
    rows: jax.Array | None = None  # i32[B or 1, N or 1, rows]: of NVIDIA's
    visit_counts: jax.Array | None = None  # i32[B or 1, N or 1, 1]: of `tpu`


class Saved(NamedTuple):
    """The results of the forward pass that the backward kernels read, and the cotangents."""

    do: jax.Array  # [B, T, N, Hv]
    row_max: jax.Array  # f32[B, N, T]: m; +inf in rows of p 0: fully masked ones, and NaN
    log_sum: jax.Array  # f32[B, N, T]: log l; 0 in rows of p 0
    D: jax.Array  # f32[B, N, T]; 0 in rows of p 0


class Refused(NotImplementedError):
    """The reason why an implementation does not run a call; other errors inside one go through."""


SKIPPED, PARTIAL, FULL = 0, 1, 2  # classes of tiles, as in transformer_jax.attention.block_plan


def tile_lists(classes: Array) -> TileLists:  # of [B or 1, N or 1, rows, columns]
    """Return the lists of tiles of some classes: full, then partial, then the last one repeated.

    NumPy's arrays give NumPy's.
    """
    xp: ModuleType = np if isinstance(classes, np.ndarray) else jnp
    is_full, is_partial = classes == FULL, classes == PARTIAL
    full = is_full.sum(axis=-1, dtype=np.int32)
    seen = full + is_partial.sum(axis=-1, dtype=np.int32)
    steps = xp.arange(classes.shape[-1], dtype=np.int32)[None, None, None]
    # after `seen` the last tile again, so that a pipeline that prefetches it loads nothing new
    wanted = xp.minimum(steps, xp.maximum(seen - 1, 0)[..., None])
    if xp is np:
        order = np.argsort(-classes, axis=-1, kind="stable").astype(np.int32)
        return TileLists(xp.take_along_axis(order, wanted, axis=-1), full, seen)
    # a tile's place is counted, which compiles to two passes over pairs of tiles: a sort would be a
    # dozen
    alike = classes[..., :, None] == classes[..., None, :]
    earlier = steps[..., None, :] < steps[..., :, None]
    before = (alike & earlier).sum(axis=-1, dtype=np.int32)
    place = jnp.where(is_full, before, jnp.where(is_partial, full[..., None] + before, -1))
    here = place[..., None, :] == wanted[..., :, None]
    return TileLists(
        jnp.where(here, steps[..., None, :], 0).sum(axis=-1, dtype=np.int32), full, seen
    )


# What a backend is

Kind = Literal["forward", "dq", "dkdv", "bias", "single_pass", "single_pass_rows", "decode"]
Kernel = Callable[..., jax.Array | tuple[jax.Array | None, ...]]
Kernels = Mapping[Kind, Kernel]


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """The kernels for one kind of device, and the calls that they take.

    `kernels` has functions of (problem, operands, lists, blocks), which return

        forward            out [B, T, N, Hv], m and log l, f32[B, N, T]
        decode             the same, of few queries that nobody differentiates

    and functions of (problem, operands, lists, blocks, saved) for the backward pass, which return

        dq                 dq, and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|
        dkdv               dk, dv
        bias               dbias, f32 of the bias's shape
        single_pass        dq, dk, dv, and with learned slopes f32[B, N, S], summed over i
        single_pass_rows   dq, dk, dv, and with learned slopes f32[B, N, T]; lists are by query

    A backend has `single_pass_rows`, or `dq` and `dkdv`, or `single_pass` alone if that is
    deterministic; `single_pass` is only called where `refuse` takes a problem that is
    `nondeterministic`. `decode` gets T queries that are not padded, without dropout. Its lists have
    one row, which the heads that read one key head share. It alone reads keys and values of int8
    and from pages of a pool: key j of batch row b lies in page `pages[b, j // page]`, at j % page
    of its slots, while vectors, pairs, bias and lists are by j there too, S = M page.
    """

    kernels: Kernels
    refuse: Callable[[Target, bool, Shaped, Shaped, Shaped], str | None]
    """Return why a target, which may be `nondeterministic`, cannot compute these query, key and
    value, or None."""
    blocks: Callable[..., Blocks]
    """Return the default tile sizes, of (kind, H, Hv, bytes of a number, K)."""
    list_bytes: int | None = None
    """The most bytes that lists of tiles may take; None: any number."""
    heads_first: bool = False
    """Whether results come as [B, N, T, H], transposed."""
    shortest: int | None = None
    """The shortest tile of a short sequence; None: short sequences are padded to whole tiles."""
    decode_rows: int = 0
    """The most queries of a key head, T N / K, that `decode` takes."""
    int8: bool = False
    """Whether `decode` reads int8 with scales."""
    page: int = 0
    """The number of keys of which a page that `decode` reads in place is a multiple; 0: none."""
    wide: bool = False
    """Whether `forward` writes float32 where `Problem.wide` asks for it."""
    narrow: bool = False
    """Whether it multiplies only 16-bit numbers."""
    packs: bool = False
    """Whether few queries of several heads are packed as rows of one tile: `Problem.packs`."""
    prepare: Callable[[TileLists], TileLists] = lambda lists: lists
    """Add to lists what the backend's kernels read in their place, once for a plan."""
    sums_fit: Callable[[int, int, int], bool] = lambda S, H, Hv: False
    """Whether `single_pass_rows` is taken in place of `dq` and `dkdv`, of (S, H, Hv)."""
    portable: Kernels | None = None
    """The same kernels in plain JAX, for other platforms and derivatives of the kernels."""
