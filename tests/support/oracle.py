"""Reference attention and gradients from the formulas, in NumPy float64 without library code.

Tests compare every implementation of attention in this project with this one. Heads are explicit
loops, a mask is a plain predicate of a pair of positions, and the gradients are derived by hand:

    x = scale q k^T          c = softcap tanh(x / softcap)      z = c + bias, only where allowed
    p = exp(z) / (sum exp(z) + exp(sink))                       lse = log of the denominator
    out = (p * keep) v       keep = 0 or 1 / (1 - rate), the dropout multipliers

    dv = (p * keep)^T dout   dp = (dout v^T) * keep             delta = sum(p * dp)
    dz = p * (dp - delta + dlse)                                dbias = dz
    dx = dz (1 - tanh(x / softcap)^2)                           dq = scale dx k,  dk = scale dx^T q
    dsink = sum over rows of exp(sink - lse) * (dlse - delta)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Predicate = Callable[[int, int, int, int], bool]  # batch row, head, query and key position


class Attention(NamedTuple):
    out: np.ndarray  # [B, T, N, Hv]
    lse: np.ndarray  # [B, T, N]
    weights: np.ndarray  # [B, N, T, S], before dropout


class Gradients(NamedTuple):
    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, K, H]
    value: np.ndarray  # [B, S, K, Hv]
    scores: np.ndarray  # [B, N, T, S]: scores after the softcap, equal to those of a full bias
    sinks: np.ndarray  # [N]


def double(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def allowed(
    predicate: Predicate,
    q_positions: np.ndarray,  # [T] or [B, T]
    k_positions: np.ndarray,  # [S] or [B, S]; negative is an empty slot
    *,
    batch: int = 1,
    heads: int = 1,
) -> np.ndarray:
    """Evaluate the predicate for each pair, as bool[B, N, T, S]; empty slots are hidden."""
    q_positions = np.broadcast_to(q_positions, (batch, np.shape(q_positions)[-1]))
    k_positions = np.broadcast_to(k_positions, (batch, np.shape(k_positions)[-1]))
    result = np.zeros((batch, heads, q_positions.shape[1], k_positions.shape[1]), bool)
    for b in range(batch):
        for n in range(heads):
            for i, q in enumerate(q_positions[b].tolist()):
                for j, k in enumerate(k_positions[b].tolist()):
                    result[b, n, i, j] = k >= 0 and predicate(b, n, q, k)
    return result


def causal() -> Predicate:
    return lambda b, n, q, k: k <= q


def window(left: int | None, right: int | None = None) -> Predicate:
    def inside(b: int, n: int, q: int, k: int) -> bool:
        if left is not None and q - k >= left:
            return False
        return right is None or k - q < right

    return inside


def padding(valid: np.ndarray) -> Predicate:
    return lambda b, n, q, k: 0 <= k < valid.shape[1] and bool(valid[b, k])


def segments(q_ids: np.ndarray, k_ids: np.ndarray | None = None) -> Predicate:
    keys = q_ids if k_ids is None else k_ids

    def same(b: int, n: int, q: int, k: int) -> bool:
        if not (0 <= q < q_ids.shape[1] and 0 <= k < keys.shape[1]):
            return False
        return int(q_ids[b, q]) == int(keys[b, k])

    return same


def prefix(lengths: np.ndarray) -> Predicate:
    return lambda b, n, q, k: k < int(lengths[b])


def dense(array: np.ndarray) -> Predicate:
    """Return the predicate of an array [T, S] or [B, N, T, S]; each axis may have length 1."""
    full = array if array.ndim == 4 else array[None, None]

    def look_up(*at: int) -> bool:
        index = tuple(0 if n == 1 else i for i, n in zip(at, full.shape, strict=True))
        inside = all(i < n for i, n in zip(index, full.shape, strict=True))
        return min(at) >= 0 and inside and bool(full[index])

    return look_up


def both(a: Predicate, b: Predicate) -> Predicate:
    return lambda *at: a(*at) and b(*at)


def either(a: Predicate, b: Predicate) -> Predicate:
    return lambda *at: a(*at) or b(*at)


def negation(a: Predicate) -> Predicate:
    return lambda *at: not a(*at)


def attention(
    query: np.ndarray,  # [B, T, N, H]
    key: np.ndarray,  # [B, S, K, H]
    value: np.ndarray,  # [B, S, K, Hv]
    *,
    mask: np.ndarray | None = None,  # bool, broadcasts to [B, N, T, S]
    bias: np.ndarray | None = None,  # broadcasts to [B, N, T, S]
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,  # [N]
    keep: np.ndarray | None = None,  # [B, N, T, S] dropout multipliers
) -> Attention:
    batch, num_queries, heads, _ = query.shape
    num_keys = key.shape[1]
    out = np.zeros((batch, num_queries, heads, value.shape[3]))
    lse = np.full((batch, num_queries, heads), -np.inf)
    weights = np.zeros((batch, heads, num_queries, num_keys))
    for b, n, kv, cell in _heads(query, key, value, mask, bias, sinks, keep):
        x = _scores(query[b, :, n], key[b, :, kv], scale)
        z = (x if softcap is None else softcap * np.tanh(x / softcap)) + cell.bias
        p, lse[b, :, n] = _softmax(z, cell.mask, cell.sink)
        weights[b, n] = p
        out[b, :, n] = (p * cell.keep) @ double(value[b, :, kv])
    return Attention(out, lse, weights)


def attention_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out_cotangent: np.ndarray,  # [B, T, N, Hv]
    lse_cotangent: np.ndarray | None = None,  # [B, T, N]
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    keep: np.ndarray | None = None,
) -> Gradients:
    heads, factor = query.shape[2], _scale(query, scale)
    dq, dk, dv = (np.zeros(x.shape) for x in (query, key, value))
    dscores = np.zeros((query.shape[0], heads, query.shape[1], key.shape[1]))
    dsinks = np.zeros(heads)
    for b, n, kv, cell in _heads(query, key, value, mask, bias, sinks, keep):
        q, k, v = (double(a) for a in (query[b, :, n], key[b, :, kv], value[b, :, kv]))
        x = _scores(q, k, scale)
        tanh = np.zeros_like(x) if softcap is None else np.tanh(x / softcap)
        z = (x if softcap is None else softcap * tanh) + cell.bias
        p, lse = _softmax(z, cell.mask, cell.sink)
        dout = double(out_cotangent[b, :, n])
        dlse = np.zeros(len(q)) if lse_cotangent is None else double(lse_cotangent[b, :, n])
        dp = (dout @ v.T) * cell.keep
        delta = (p * dp).sum(axis=1)
        dz = p * (dp - delta[:, None] + dlse[:, None])
        dx = dz * (1 - tanh**2)
        dq[b, :, n] = factor * dx @ k
        dk[b, :, kv] += factor * dx.T @ q
        dv[b, :, kv] += (p * cell.keep).T @ dout
        dscores[b, n] = dz
        seen = np.isfinite(lse)
        dsinks[n] += np.sum(np.exp(cell.sink - lse[seen]) * (dlse - delta)[seen])
    return Gradients(dq, dk, dv, dscores, dsinks)


def chi_squared_level(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-squared statistic is at least this large."""
    from scipy.special import chdtrc  # the import takes 0.2 s and few tests need it

    return float(chdtrc(freedom, statistic))


def sum_to(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Sum over the axes that broadcasting `shape` to `array.shape` repeats."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    repeated = tuple(i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1)
    return array.sum(axis=repeated, keepdims=True)


def alibi(slopes: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray) -> np.ndarray:
    """Return minus slope times distance (Press et al. 2022), [1, N, T, S]."""
    distance = np.abs(q_positions[:, None] - k_positions[None, :])
    return -double(slopes)[None, :, None, None] * distance[None, None]


def t5_bucket(distance: int, *, bidirectional: bool, buckets: int, longest: int) -> int:
    """Return the bucket of k - q: half are exact, the rest logarithmic (Raffel et al. 2020)."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = math.log(distance / exact) / math.log(longest / exact) * (buckets - exact)
    return first + min(exact + int(far), buckets - 1)


def dropout_keep(
    words: np.ndarray,  # u32[W], the data of the key
    rate: float,
    shape: tuple[int, int, int, int],  # B, N, T, S, or 1, 1, T, S if rows and heads share them
) -> np.ndarray:
    """Return the dropout multipliers by the formulas of dropout.py, in 64-bit integers."""

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    def absorb(a, b, word):
        a = mix(a ^ word)
        return a, mix(b + a & 0xFFFFFFFF)

    index = [np.arange(n, dtype=np.uint64) for n in shape]
    row, head, query, key = np.ix_(*index)
    a, b = np.uint64([0x9E3779B9]), np.uint64([0x85EBCA6B])
    for word in (*(np.uint64([w]) for w in words), row * shape[1] + head, query):
        a, b = absorb(a, b, word)
    bits = mix((mix(key) ^ a) + b & 0xFFFFFFFF)
    return np.where(bits >= round(rate * 2**32), 1 / (1 - rate), 0.0)


class _Cell(NamedTuple):
    mask: np.ndarray  # [T, S]
    bias: np.ndarray  # [T, S]
    sink: float
    keep: np.ndarray  # [T, S]


def _heads(query, key, value, mask, bias, sinks, keep):
    """Yield each batch row, each query head n, its key head n // G, and their inputs."""
    batch, num_queries, heads, _ = query.shape
    group = heads // key.shape[2]
    full = (batch, heads, num_queries, key.shape[1])
    mask = np.broadcast_to(True if mask is None else mask, full)
    bias = np.broadcast_to(0.0 if bias is None else double(bias), full)
    keep = np.broadcast_to(1.0 if keep is None else double(keep), full)
    for b in range(batch):
        for n in range(heads):
            sink = -np.inf if sinks is None else float(double(sinks)[n])
            yield b, n, n // group, _Cell(mask[b, n], bias[b, n], sink, keep[b, n])


def _scale(query: np.ndarray, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[3]) if scale is None else scale


def _scores(q: np.ndarray, k: np.ndarray, scale: float | None) -> np.ndarray:
    factor = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    return factor * double(q) @ double(k).T


def _softmax(z: np.ndarray, mask: np.ndarray, sink: float) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [T, S] and log-denominators [T]; rows that see nothing get zeros and -inf."""
    weights, lse = np.zeros_like(z), np.full(len(z), -np.inf)
    for i in range(len(z)):
        seen = z[i, mask[i]]
        if seen.size == 0:
            continue
        top = max(seen.max(), sink)
        terms = np.exp(seen - top)
        total = terms.sum() + math.exp(sink - top)
        weights[i, mask[i]], lse[i] = terms / total, top + math.log(total)
    return weights, lse
