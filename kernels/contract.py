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
`SHORTEST` (the shortest tile of a short sequence, or None), `REPAIRS` (whether its kernels keep
the rule on what is not finite themselves: log l is NaN in the rows that it breaks) and `PORTABLE`
(a module of the same kernels in plain JAX, for other platforms and derivatives of the kernels, or
None), and these kernels, one for each of `chips.Kind`:

    forward(problem, operands, lists, blocks)                     out, m, log l
    backward_dq(problem, operands, lists, blocks, saved)          dq, and rows of dslopes or None
    backward_dkdv(problem, operands, lists, blocks, saved)        dk, dv
    backward_bias(problem, operands, lists, blocks, saved)        dbias
    backward_single_pass(problem, operands, lists, blocks, saved) dq, dk, dv[, rows of dslopes]

The last one is only called where the backend does not refuse a problem that is `nondeterministic`.
That of `cpu` is deterministic, and the only one there.
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
    detect_nonfinite: bool = True
    """Whether log l is NaN in rows whose output is not finite, or that met a product q_i . k_j that
    is not, visible or not: the caller then runs the repair pass, which detects nothing again."""
    nondeterministic: bool = False
    """Whether dq may be summed in the order in which programs finish: other bits in every run."""
    fixed_slopes: bool = False
    """Whether the gradient of slopes is left out, as where they are those of ALiBi's paper."""
    interpret: Any = False
    """False on the device; on a CPU the argument of the backend's interpreter."""


@dataclass(frozen=True)
class Blocks:
    """Give the tile sizes of one kernel; `stages` tiles are in flight."""

    q: int
    k: int
    stages: int = 2
    slack: float = 0.0
    """How far, in base 2, a row's maximum may rise above the m that a forward kernel subtracts
    before it takes the new one and rescales what it has summed, up to 15; 0: not at all. The
    results are the same: m is at most so much less, and log l more. Only Hopper's kernel has it."""


class Operands(NamedTuple):
    """Hold the arrays of a call, padded: T and S are multiples of every kernel's tile sizes."""

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


class Saved(NamedTuple):
    """Hold what the backward kernels read of the forward pass, besides the operands."""

    do: jax.Array  # [B, T, N, Hv]
    row_max: jax.Array  # f32[B, N, T]: m; +inf in rows of p 0, also where a bias makes s nonfinite
    log_sum: jax.Array  # f32[B, N, T]: log l
    D: jax.Array  # f32[B, N, T]


class Refused(NotImplementedError):
    """Say why an implementation does not run a call; any other error inside one goes through."""


SKIPPED, PARTIAL, FULL = 0, 1, 2  # classes of tiles, as in transformer_jax.attention.block_plan


def tile_lists(classes: Any) -> TileLists:  # of [B or 1, N or 1, rows, columns]
    """Return the lists of tiles of some classes: full, then partial, then the last one repeated.

    NumPy's arrays give NumPy's.
    """
    xp: Any = np if isinstance(classes, np.ndarray) else jnp
    full = (classes == FULL).sum(axis=-1, dtype=np.int32)
    seen = (classes != SKIPPED).sum(axis=-1, dtype=np.int32)
    order = xp.argsort(-classes, axis=-1, stable=True).astype(np.int32)
    last = xp.take_along_axis(order, xp.maximum(seen - 1, 0)[..., None], axis=-1)
    steps = xp.arange(order.shape[-1], dtype=np.int32)[None, None, None]
    return TileLists(xp.where(steps < xp.maximum(seen, 1)[..., None], order, last), full, seen)


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
