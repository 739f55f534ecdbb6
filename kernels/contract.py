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

Every backend is a module with `refuse`, `blocks`, the constants `LIST_BYTES` (the most that lists
of tiles may take, or None), `HEADS_FIRST` (whether results come as [B, N, T, H], transposed),
`SHORTEST` (the shortest tile of a short sequence, or None), `DECODE_ROWS` (the most queries of a
key head, T N / K, that its decode kernel takes; 0 without one), `INT8` (whether that one reads
int8 with scales), `PAGE` (the number of keys of which a page is a multiple where that one reads
pages of a pool in place; 0: it reads none), `PACKS` (whether few queries of several heads are
packed as rows of one tile, `Problem.packs`) and `PORTABLE` (a module of the same kernels in plain
JAX, for other platforms and derivatives of the kernels, or None), and these kernels, one for each
of `chips.Kind`:

    forward(problem, operands, lists, blocks)                     out, m, log l
    decode(problem, operands, lists, blocks)                      out, m, log l
    backward_dq(problem, operands, lists, blocks, saved)          dq, and rows of dslopes or None
    backward_dkdv(problem, operands, lists, blocks, saved)        dk, dv
    backward_bias(problem, operands, lists, blocks, saved)        dbias
    backward_single_pass(problem, operands, lists, blocks, saved) dq, dk, dv[, rows of dslopes]
    backward_single_pass_rows(...)                                the same, from lists by query

Queries, keys, values and cotangents must be finite, hidden ones and padding too, since 0 times NaN
is NaN. A bias may be -inf. Tiles that the lists skip are not read, and what a copy finds after the
end of an array has no influence. The kernels of `cpu` and `portable` ask for nothing: there NaN or
inf in a query, key or value reaches exactly the queries that see it. Their out, and log l or m, are
NaN, and they pass no gradient on.

`backward_single_pass` is only called where the backend does not refuse a problem that is
`nondeterministic`. That of `cpu` is deterministic, and the only one there. `decode` is called with
T queries that are not padded and no dropout, where nobody differentiates. Its lists have one row,
which the heads that read one key head share. Keys and values may lie in the pages of a pool, which
it alone reads: key j of batch row b lies in page `pages[b, j // page]`, at j % page of its slots.
Vectors, pairs, bias and lists are by j there, too, S = M page.
A module may have `prepare(lists)`, which adds to lists what its kernels make of them, and
`sums_fit(S, H, Hv)`: whether `backward_single_pass_rows`, which is deterministic, is taken in place
of those of dq and of dk and dv.
`transformer_jax.kernels.gradient` calls them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

LOWEST = -3.4028235e38  # where a running maximum starts: finite, so never inf - inf

Vectors = tuple[jax.Array, ...]
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Problem:
    """Say what is known of a call when tracing; hashable."""

    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    visible: Callable[[Vectors, Vectors], jax.Array] | None = None
    """The mask, from (query vectors, key vectors), of shapes that broadcast to a tile, to bool. It
    is elementwise, and never shows a key at a negative position (key vector 0). Where there are
    `Operands.pairs`, their tile is given as one more key vector. None: every listed tile is full.
    """
    nondeterministic: bool = False
    """Whether dq may be summed in the order in which programs finish: other bits in every run."""
    fixed_slopes: bool = False
    """Whether the gradient of slopes is left out, as where they are those of ALiBi's paper."""
    packs: bool = False
    """Whether `transformer_jax.kernels.packed_queries` stands around every kernel but `decode`. The
    queries of the call are then not padded, and its lists have one tile of queries, which the heads
    that read one key head share. A kernel itself sees nothing of it: more queries of fewer heads.
    """
    interpret: Any = False
    """False on the device; on a CPU the argument of the backend's interpreter."""
    processors: int | None = None
    """How many multiprocessors an NVIDIA chip has; None where it is not known."""


@dataclass(frozen=True)
class Blocks:
    """Give the tile sizes of one kernel; `stages` tiles are in flight."""

    q: int
    k: int
    stages: int = 2
    slack: float = 0.0
    """How far, in base 2, a row's maximum may rise above the m that a forward kernel subtracts
    before it takes the new one and rescales what it has summed, up to 15; 0: not at all. The
    results are the same: m is at most so much less, and log l more. Hopper's kernel has it."""


class Operands(NamedTuple):
    """Hold the arrays of a call, padded: T and S are multiples of every kernel's tile sizes.

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


def dequantise(
    q: jax.Array,  # i8[..., H]
    scale: jax.Array,  # f32[...]
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:  # [..., H]
    """Return scale * q, computed in f32."""
    return (q.astype(jnp.float32) * scale[..., None]).astype(dtype)


def rows_of_pages(
    x: jax.Array,  # [P, page, ..]
    pages: jax.Array,  # i32[B, M]; an entry that is no page reads some page
) -> jax.Array:  # [B, M * page, ..]
    """Return the pages of each row one after the other, which is a copy."""
    (B, M), (_, page, *rest) = pages.shape, x.shape
    return x[clip_pages(pages, x.shape[0])].reshape(B, M * page, *rest)


def clip_pages(pages: jax.Array, P: int) -> jax.Array:  # i32[B, M]
    """Return a table that names only pages of the pool."""
    return jnp.clip(pages.astype(jnp.int32), 0, P - 1)


def learns_slopes(problem: Problem, operands: Operands) -> bool:
    """Return whether a backward kernel returns the rows that the slopes' gradient sums."""
    return operands.slopes is not None and not problem.fixed_slopes


class TileLists(NamedTuple):
    """List for each row of tiles those to visit: the full ones first, then those that are masked.

    Rows are query tiles and columns key tiles; in `backward_dkdv` and `backward_single_pass` they
    are the other way round. `order[..., :full]` needs no mask, `order[..., full:seen]` does. After
    `seen`, `order` repeats the last visited column (0 without one), so that a pipeline which
    prefetches it loads nothing new.
    """

    order: jax.Array  # i32[B or 1, N or 1, rows, columns]
    full: jax.Array  # i32[B or 1, N or 1, rows]
    seen: jax.Array  # i32[B or 1, N or 1, rows]: full and partial
    visits: jax.Array | None = None  # i32[B or 1, N or 1, 1, rows * columns]: of `tpu.prepare`
    rows: jax.Array | None = None  # i32[B or 1, N or 1, rows]: of `hopper.prepare`
    visit_counts: jax.Array | None = None  # i32[B or 1, N or 1, 1]: of `tpu.prepare`


class Saved(NamedTuple):
    """Hold what the backward kernels read of the forward pass, besides the operands."""

    do: jax.Array  # [B, T, N, Hv]
    row_max: jax.Array  # f32[B, N, T]: m; +inf in rows of p 0: fully masked ones, and NaN
    log_sum: jax.Array  # f32[B, N, T]: log l; 0 in rows of p 0
    D: jax.Array  # f32[B, N, T]; 0 in rows of p 0


class Refused(NotImplementedError):
    """Say why an implementation does not run a call; any other error inside one goes through."""


SKIPPED, PARTIAL, FULL = 0, 1, 2  # classes of tiles, as in transformer_jax.attention.block_plan


def tile_lists(classes: Any) -> TileLists:  # of [B or 1, N or 1, rows, columns]
    """Return the lists of tiles of some classes: full, then partial, then the last one repeated.

    NumPy's arrays give NumPy's. Of others a tile's place is counted, which compiles to two passes
    over pairs of tiles, where a sort would be a dozen.
    """
    xp: Any = np if isinstance(classes, np.ndarray) else jnp
    is_full, is_partial = classes == FULL, classes == PARTIAL
    full = is_full.sum(axis=-1, dtype=np.int32)
    seen = full + is_partial.sum(axis=-1, dtype=np.int32)
    steps = xp.arange(classes.shape[-1], dtype=np.int32)[None, None, None]
    wanted = xp.minimum(steps, xp.maximum(seen - 1, 0)[..., None])
    if xp is np:
        order: Any = np.argsort(-classes, axis=-1, kind="stable").astype(np.int32)
        return TileLists(xp.take_along_axis(order, wanted, axis=-1), full, seen)
    alike = classes[..., :, None] == classes[..., None, :]
    earlier = steps[..., None, :] < steps[..., :, None]
    before = (alike & earlier).sum(axis=-1, dtype=np.int32)
    place = jnp.where(is_full, before, jnp.where(is_partial, full[..., None] + before, -1))
    here = place[..., None, :] == wanted[..., :, None]
    return TileLists(
        jnp.where(here, steps[..., None, :], 0).sum(axis=-1, dtype=np.int32), full, seen
    )


def result(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's result: in a `shard_map`, it varies over the mesh as `like`."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(
        shape, dtype, **({"manual_axis_type": axes} if axes.varying else {})
    )


def vary(tree: Tree, like: Any = None) -> Tree:
    """Mark arrays as different on each device of a `shard_map`, if others of `like` or `tree` are.

    A loop wants what it carries to be of one kind. Gradients of what was the same on all devices
    are then summed over them. Outside of a `shard_map` nothing happens.
    """
    leaves = jax.tree.leaves((tree, like))
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def one(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(one, tree) if axes else tree


def once(condition: jax.Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `change(tree)` where the condition holds, else the tree.

    It is a loop of one step or none, because a conditional would copy the tree.
    """
    step = lambda state: (jnp.zeros_like(state[0]), change(state[1]))  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0], step, (condition, tree))[1]


def no_mesh() -> contextlib.AbstractContextManager:
    """Return a context without the mesh of `jax.set_mesh`: programs traced in it fit any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
