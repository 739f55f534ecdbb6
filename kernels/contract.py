"""What a fused kernel computes, and what it is given: one contract for every backend.

With scores s_ij of one head, over the tiles that the lists name (base 2 or e, as a backend likes):

    s_ij = cap(scale q_i . k_j) + bias_ij,  -inf where not visible;  cap(x) = c tanh(x / c) or x
    m_i = max_j s_ij      l_i = sum_j exp(s_ij - m_i)      p_ij = exp(s_ij - m_i - log l_i)
    out_i = sum_j p_ij f_ij v_j                            f_ij, of dropout, is 0 or 1/(1 - rate)

A sink joins m and l once the keys are done, unless the row has seen none. Backward, with
D_i = do_i . out_i - dlse_i, which the caller computes:

    ds_ij = p_ij (f_ij do_i . v_j - D_i)                   du_ij = ds_ij (1 - tanh^2)
    dv_j = sum_i p_ij f_ij do_i     dq_i = scale sum_j du_ij k_j     dk_j = scale sum_i du_ij q_i

Where a pair is not visible, p, ds and du are selected to be 0, not multiplied: q_i . k_j and
do_i . v_j may overflow there.

Every backend is a module with `refuse`, `forward`, `gradient_queries`, `gradient_keys` and
`gradient_bias`; `transformer_jax.kernels.fused` calls them. One that does not refuse a problem that
is `unordered` has `gradient_unordered`, of dq, dk and dv together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOWEST = -3.4028235e38  # where a running maximum starts: finite, so never inf - inf

Vectors = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Problem:
    """What is known when tracing; hashable."""

    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    visible: Callable[[Vectors, Vectors], jax.Array] | None = None
    """(query vectors, key vectors), of shapes that broadcast to a tile, to bool: elementwise, and
    with the rule that a key at a negative position (key vector 0) is never seen. Where there are
    `Operands.pairs`, their tile is given as one more key vector. None: every tile visited is full.
    """
    mark: bool = True
    """Whether log is NaN in rows whose out is not finite, or that met a product q_i . k_j that is
    not, seen or unseen: the caller then repeats on cleaned inputs, without marks."""
    unordered: bool = False
    """Whether dq may be summed in the order in which programs finish, never twice the same."""
    fixed_slopes: bool = False
    """Whether nobody asks for the gradient of slopes, as where they are those of ALiBi's paper."""
    interpret: Any = False
    """False on the device; on a CPU what the backend's interpreter takes."""


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of one kernel; `stages` tiles are in flight."""

    q: int
    k: int
    stages: int = 2
    slack: float = 0.0
    """How far, in base 2, a row's maximum may rise above the m that a forward kernel subtracts
    before it takes the new one and rescales what it has summed, up to 15; 0: not at all. The
    results are the same: m is at most so much less, and log l more. Only Hopper's kernel has it."""


class Operands(NamedTuple):
    """Arrays, already padded: T and S are multiples of the tile sizes of every kernel."""

    query: jax.Array  # [B, T, N, H]; zeros behind the end
    key: jax.Array  # [B, S, K, H]; zeros behind the end
    value: jax.Array  # [B, S, K, Hv]; zeros behind the end
    q_vectors: Vectors = ()  # i32[B or 1, T] each; vector 0 is the positions
    k_vectors: Vectors = ()  # i32[B or 1, S] each; vector 0 is the positions, -1 behind the end
    pairs: jax.Array | None = None  # i8[B or 1, N or 1, T, S]: what a mask reads of each pair
    bias: jax.Array | None = None  # [B or 1, N or 1, T or 1, S or 1], f32 or the query's dtype
    slopes: jax.Array | None = None  # f32[B or 1, N]: ALiBi, s -= slope |q - k| of the positions
    sinks: jax.Array | None = None  # f32[B or 1, N]
    dropout: jax.Array | None = None  # u32[2, B, N]: words a and b of transformer_jax.dropout


def learns_slopes(problem: Problem, operands: Operands) -> bool:
    """Whether a backward kernel returns what the slopes' gradient is summed of."""
    return operands.slopes is not None and not problem.fixed_slopes


class Lists(NamedTuple):
    """For each row of tiles, those to visit: order[..., :full] without a mask, then to [:seen].

    Rows are query tiles and columns key tiles, or the other way round in `gradient_keys` and
    `gradient_unordered`. Behind `seen`, `order` repeats the last visited column (0 without one), so
    that a pipeline which prefetches it loads nothing new.
    """

    order: jax.Array  # i32[B or 1, N or 1, rows, columns]
    full: jax.Array  # i32[B or 1, N or 1, rows]
    seen: jax.Array  # i32[B or 1, N or 1, rows]: full and partial


class Saved(NamedTuple):
    """What the backward kernels read of the forward pass, besides the operands."""

    do: jax.Array  # [B, T, N, Hv]
    high: jax.Array  # f32[B, N, T]: m; +inf in rows of p 0, also where s is NaN or inf by a bias
    log: jax.Array  # f32[B, N, T]: log l
    D: jax.Array  # f32[B, N, T]


SKIPPED, PARTIAL, FULL = 0, 1, 2  # classes of tiles, as in transformer_jax.tiles


def lists_of(classes: jax.Array) -> Lists:  # of [B or 1, N or 1, rows, columns]
    """Full tiles first, then partial ones, then the last of these once more."""
    full = (classes == FULL).sum(axis=-1, dtype=jnp.int32)
    seen = (classes != SKIPPED).sum(axis=-1, dtype=jnp.int32)
    order = jnp.argsort(-classes, axis=-1, stable=True).astype(jnp.int32)
    last = jnp.take_along_axis(order, jnp.maximum(seen - 1, 0)[..., None], axis=-1)
    steps = jnp.arange(order.shape[-1], dtype=jnp.int32)[None, None, None]
    return Lists(jnp.where(steps < jnp.maximum(seen, 1)[..., None], order, last), full, seen)


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel returns: inside a `shard_map`, varying over the mesh as its inputs do."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(
        shape, dtype, **({"manual_axis_type": axes} if axes.varying else {})
    )


def vary(tree: Any, like: Any = None) -> Any:
    """Inside a `shard_map`, arrays that are the same on all devices as different ones on each, if
    others of `tree` and `like` are: as loops want what they carry. Gradients are then summed."""
    leaves = jax.tree.leaves((tree, like))
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def one(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(one, tree) if axes else tree


def no_mesh() -> contextlib.AbstractContextManager:
    """Outside of `jax.set_mesh`: what is traced here fits into a program of any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


# Arithmetic of a tile that both backends share


def mix(x: jax.Array) -> jax.Array:
    """lowbias32, as in transformer_jax.dropout."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def threshold(rate: float) -> int:
    """A weight is kept where its 32 bits are at least this."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep(
    a: jax.Array,  # u32[], of the batch row and head
    b: jax.Array,  # u32[]
    q_index: jax.Array,  # u32[block_q, 1] or broadcast: indices in the array, not positions
    k_index: jax.Array,  # u32[1, block_k] or broadcast
    rate: float,
) -> jax.Array:  # bool[block_q, block_k]
    """Which weights dropout keeps: the bits of transformer_jax.dropout.keep_tile."""
    a = mix(a ^ q_index)
    b = mix(b + a)
    return mix((mix(k_index) ^ a) + b) >= jnp.uint32(threshold(rate))
