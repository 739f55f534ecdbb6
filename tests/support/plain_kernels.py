"""Backend with dense arrays, to test the code around kernels without a GPU or TPU.

It follows the contract of the kernels, and visits exactly the listed tiles by expanding the lists
to a mask of T x S.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import (
    Backend,
    Blocks,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.dropout import keep

TILES = {"forward": Blocks(16, 32), "dq": Blocks(16, 16), "dkdv": Blocks(32, 16)}
LARGE = {
    "forward": Blocks(64, 32), "dq": Blocks(32, 16), "dkdv": Blocks(16, 32), "bias": Blocks(32, 32),
    "single_pass": Blocks(32, 16),
}  # fmt: skip


@dataclass(frozen=True)
class Plain(Target):
    name: Any = "plain"

    @property
    def backend(self):
        return BACKEND


@dataclass(frozen=True)
class Packing(Plain):
    """Target that packs queries of several heads into one tile, with large tiles."""

    @property
    def backend(self):
        return replace(BACKEND, packs=True, blocks=lambda kind, *_: LARGE[kind])


def refuse(where, nondeterministic, query, key, value):
    return None


def blocks(kind: str, H: int, Hv: int, width: int, K: int = 1) -> Blocks:
    return TILES.get(kind, Blocks(16, 32))


def apart(kernel):
    """Prevent fusion with other operations, as for a real kernel, so that bits do not change."""

    @functools.wraps(kernel)
    def call(problem, operands, lists, blocks, *saved):
        inputs = lax.optimization_barrier((operands, lists, *saved))
        return lax.optimization_barrier(kernel(problem, *inputs[:2], blocks, *inputs[2:]))

    return call


def visited(lists: TileLists, blocks: tuple[int, int], columns_are_keys: bool) -> tuple:
    """Return (visited, full) as bool[B or 1, N or 1, T, S]."""
    steps = jnp.arange(lists.order.shape[-1])[None, None, None]
    at = jax.nn.one_hot(lists.order, lists.order.shape[-1], dtype=bool)  # [.., row, step, column]
    some = (at & (steps < lists.seen[..., None])[..., None]).any(axis=-2)
    full = (at & (steps < lists.full[..., None])[..., None]).any(axis=-2)
    spread = lambda x: jnp.repeat(jnp.repeat(x, blocks[0], -2), blocks[1], -1)  # noqa: E731
    some, full = spread(some), spread(full)
    return (some, full) if columns_are_keys else (some.swapaxes(2, 3), full.swapaxes(2, 3))


def _scores(problem: Problem, operands: Operands, seen: jax.Array, full: jax.Array):
    """Return tanh, masked scores, dropout factors and distances, each [B, N, T, S]."""
    query, key = (x.astype(jnp.float32) for x in operands[:2])
    G = query.shape[2] // key.shape[2]
    raw = jnp.einsum("BTNH,BSNH->BNTS", query, jnp.repeat(key, G, 2))
    s, t = raw * problem.scale, None
    if problem.softcap is not None:
        t = jnp.tanh(s / problem.softcap)
        s = t * problem.softcap
    if operands.bias is not None:
        s = s + operands.bias
    q = tuple(x[:, None, :, None] for x in operands.q_vectors)
    k = tuple(x[:, None, None, :] for x in operands.k_vectors)
    distance = jnp.abs(q[0] - k[0]).astype(jnp.float32)
    if operands.slopes is not None:
        s = s - operands.slopes[:, :, None, None] * distance
    partial = seen & ~full
    if operands.pairs is not None:
        k += (operands.pairs.astype(jnp.int32),)
    visible = full if problem.visible is None else full | (partial & problem.visible(q, k))
    factor = jnp.float32(1)
    if operands.dropout is not None and problem.dropout_rate:
        a, b = operands.dropout[..., None, None]
        rows, columns = (jnp.arange(n, dtype=jnp.uint32) for n in raw.shape[2:])
        rows, columns = rows[None, None, :, None], columns[None, None, None]
        kept = keep(a, b, rows, columns, problem.dropout_rate)
        factor = jnp.where(kept, 1 / (1 - problem.dropout_rate), 0.0)
    return t, jnp.where(visible, s, -jnp.inf), factor, distance


@apart
def forward(problem, operands, lists, blocks):
    seen, full = visited(lists, (blocks.q, blocks.k), True)
    _, s, factor, _ = _scores(problem, operands, seen, full)
    row_max = s.max(axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(row_max), 0, row_max)[..., None])
    total = p.sum(axis=-1)
    fully_masked = total == 0
    weights = p * factor
    if operands.sinks is not None:
        sinks = operands.sinks[..., None]
        new = jnp.maximum(row_max, sinks)
        r = jnp.where(fully_masked, 0, jnp.exp(row_max - new))
        total = jnp.where(fully_masked, 0, total * r + jnp.exp(sinks - new))
        weights, row_max = weights * r[..., None], jnp.where(fully_masked, -jnp.inf, new)
    G = operands.query.shape[2] // operands.key.shape[2]
    value = jnp.repeat(operands.value.astype(jnp.float32), G, 2)
    total = jnp.where(fully_masked, 1, total)
    out = jnp.einsum("BNTS,BSNH->BNTH", weights, value) / total[..., None]
    log_sum = jnp.log(total)
    return out.swapaxes(1, 2).astype(operands.query.dtype), row_max, log_sum


def _differences(problem, operands, seen, full, saved: Residuals):
    t, s, factor, distance = _scores(problem, operands, seen, full)
    lost = jnp.isposinf(saved.row_max)[..., None]
    p = jnp.where(lost, 0, jnp.exp(s - saved.row_max[..., None] - saved.log_sum[..., None]))
    G = operands.query.shape[2] // operands.key.shape[2]
    value = jnp.repeat(operands.value.astype(jnp.float32), G, 2)
    do = saved.do.astype(jnp.float32)
    dp = jnp.einsum("BTNH,BSNH->BNTS", do, value) * factor
    hidden = jnp.isneginf(s)
    ds = jnp.where(hidden, 0, p * (dp - saved.D[..., None]))
    du = ds if t is None else jnp.where(hidden, 0, ds * (1 - t * t))
    return p * factor, ds, du * problem.scale, distance


@apart
def backward_dq(problem, operands, lists, blocks, saved):
    seen, full = visited(lists, (blocks.q, blocks.k), True)
    _, ds, du, distance = _differences(problem, operands, seen, full, saved)
    dq = _times_keys(operands, du)
    return dq, None if not learns_slopes(problem, operands) else -(ds * distance).sum(axis=-1)


def _times_keys(operands: Operands, du: jax.Array) -> jax.Array:
    G = operands.query.shape[2] // operands.key.shape[2]
    key = jnp.repeat(operands.key.astype(jnp.float32), G, 2)
    return jnp.einsum("BNTS,BSNH->BTNH", du, key).astype(operands.query.dtype)


@apart
def backward_single_pass(problem, operands, lists, blocks, saved):
    seen, full = visited(lists, (blocks.k, blocks.q), False)
    _, ds, du, distance = _differences(problem, operands, seen, full, saved)
    slopes = () if not learns_slopes(problem, operands) else (-(ds * distance).sum(axis=-2),)
    dk, dv = backward_dkdv(problem, operands, lists, blocks, saved)
    return _times_keys(operands, du), dk, dv, *slopes


@apart
def backward_dkdv(problem, operands, lists, blocks, saved):
    seen, full = visited(lists, (blocks.k, blocks.q), False)
    p, _, du, _ = _differences(problem, operands, seen, full, saved)
    K = operands.key.shape[2]

    def product(weights, x):
        full = jnp.einsum("BNTS,BTNH->BSNH", weights, x.astype(jnp.float32))
        full = full.reshape(*full.shape[:2], K, -1, full.shape[3]).sum(axis=3)
        return full.astype(operands.key.dtype)

    return product(du, operands.query), product(p, saved.do)


@apart
def backward_bias(problem, operands, lists, blocks, saved):
    seen, full = visited(lists, (blocks.q, blocks.k), True)
    _, ds, _, _ = _differences(problem, operands, seen, full, saved)
    axes = [i for i, n in enumerate(operands.bias.shape) if n == 1]
    return ds.sum(axis=tuple(axes), keepdims=True)


BACKEND = Backend(
    kernels={"forward": forward, "dq": backward_dq, "dkdv": backward_dkdv, "bias": backward_bias,
             "single_pass": backward_single_pass},
    refuse=refuse, blocks=blocks,
)  # fmt: skip
