"""Attention that writes every score down: the reference, differentiated by JAX itself.

With x_ij = q_i . k_j for the pairs that the mask lets see each other:

    s_ij = softcap tanh(scale x_ij / softcap) + bias_ij
    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))
    out_i = sum_j p_ij v_j        lse_i = log(sum_j exp(s_ij) + exp(sink))

The division follows the product with v, so neither pass reads the scores to normalise them.

A product with a masked weight is 0 only while the other factor is finite. Where a mask is given,
rows of query, key or value that hold NaN or inf are therefore replaced by zeros, and a score that
one of them takes part in, and that the mask lets through, becomes NaN. A query with such a score
is broken: its output and lse are NaN, it passes no gradient on, and no other query notices.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from transformer_jax.dropout import keep_tile, key_words
from transformer_jax.masks import Mask


@runtime_checkable
class Bias(Protocol):
    """A pytree that adds to the scores as a function of positions: ALiBi, T5's relative bias.

    Where its own arrays differ by batch row and the positions do too, "blockwise" refuses it.
    """

    def materialize(
        self,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # f32[B or 1, N or 1, T, S]
        ...


class Softmax(NamedTuple):
    """exp(s - max), what it is to be divided by, and which rows are not to be believed."""

    exponentials: jax.Array  # [B, N, T, S]
    denominator: jax.Array  # [B, N, T]
    lse: jax.Array  # [B, N, T], -inf where a row sees nothing
    broken: jax.Array  # bool[B, N, T]

    @property
    def weights(self) -> jax.Array:  # [B, N, T, S]
        weights = self.exponentials / self.denominator[..., None]
        return jnp.where(self.broken[..., None], jnp.nan, weights)

    def average(self, value: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        """sum_j weights_ij keep_ij value_j: [B, S, K, Hv] to [B, T, N, Hv]."""
        weights = self.exponentials if keep is None else self.exponentials * keep
        (B, N, T, S), K = weights.shape, value.shape[2]
        weights = weights.reshape(B, K, N // K * T, S).astype(value.dtype)
        out = einsum("BKRS,BSKH->BKRH", weights, value).reshape(B, N, T, value.shape[3])
        out = jnp.where(self.broken[..., None], jnp.nan, out / self.denominator[..., None])
        return out.swapaxes(1, 2)


class Poison(NamedTuple):
    """Rows of the inputs that are not finite."""

    queries: jax.Array  # bool[B, N, T]
    keys: jax.Array  # [B, N, 1, S], NaN or 0


def reference_attention(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,  # an array [B or 1, N or 1, T or 1, S or 1]
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv] in query's dtype, lse f32[B, T, N]
    """Attention and the log of its softmax's denominator; arguments are taken as checked."""
    visible = see(query, key, mask, q_positions, k_positions)
    bias = _bias(query, key, bias, q_positions, k_positions)
    query, key, value, poison = clean(visible, query, key, value)
    scores = _scores(query, key, visible, bias, scale, softcap)
    keep = None if dropout_key is None else _keep(query, key, dropout_rate, dropout_key)
    result = softmax(scores, visible, poison, sinks)
    return result.average(value, keep).astype(query.dtype), result.lse.swapaxes(1, 2)


def reference_weights(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
) -> jax.Array:  # f32[B, N, T, S]
    """The softmax's weights; arguments are taken as checked."""
    visible = see(query, key, mask, q_positions, k_positions)
    bias = _bias(query, key, bias, q_positions, k_positions)
    query, key, _, poison = clean(visible, query, key, key)
    scores = _scores(query, key, visible, bias, scale, softcap)
    return softmax(scores, visible, poison, sinks).weights


def see(
    query: jax.Array,  # [B, T, ...]
    key: jax.Array,  # [B, S, K, ...]
    mask: Mask | None,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
) -> jax.Array | None:  # bool[B or 1, N or 1, T or 1, S]
    """Which query sees which key; None where every query sees every key."""
    if mask is None and k_positions is None:
        return None
    q, k = _positions(query, q_positions), _positions(key, k_positions)
    if mask is None:
        return (k >= 0)[:, None, None, :]
    visible = mask.allows(q, k)
    return visible if k_positions is None else visible & (k >= 0)[:, None, None, :]


def finite_rows(x: jax.Array) -> jax.Array:  # [..., H] to bool[...]
    """Rows without NaN and inf, by a product with a vector: faster on a CPU than a reduction."""
    x = jax.lax.stop_gradient(x)
    weights = jnp.full(x.shape[-1:], 0.5 / x.shape[-1], x.dtype)  # a sum that cannot overflow
    return jnp.isfinite(einsum("...H,H->...", x, weights))


def clean(
    visible: jax.Array | None,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
) -> tuple[jax.Array, jax.Array, jax.Array, Poison | None]:
    """The same without rows that are not finite, and which those are.

    Where all is visible nothing is changed: whatever is not finite reaches every query by itself.
    """
    if visible is None:
        return query, key, value, None
    good_query = finite_rows(query)
    good_key = finite_rows(key) & finite_rows(value)
    query = jnp.where(good_query[..., None], query, 0)
    key, value = (jnp.where(good_key[..., None], x, 0) for x in (key, value))
    by_key = jnp.where(good_key, 0.0, jnp.nan).swapaxes(1, 2)[:, :, None, :]
    by_key = jnp.repeat(by_key, query.shape[2] // key.shape[2], axis=1)
    return query, key, value, Poison(~good_query.swapaxes(1, 2), by_key)


def softmax(
    scores: jax.Array,  # [B, N, T, S]
    visible: jax.Array | None = None,  # broadcasts to scores
    poison: Poison | None = None,
    sinks: jax.Array | None = None,  # [N]
) -> Softmax:
    """Of what is visible; a row that sees nothing has no weight, one with a NaN is broken."""
    if visible is not None:
        assert poison is not None
        scores = jnp.where(visible, scores + poison.keys.astype(scores.dtype), -jnp.inf)
    top = jax.lax.stop_gradient(scores)
    top = jnp.where(jnp.isnan(top), jnp.inf, top)  # XLA's maximum loses a NaN at some lengths
    top = top.max(axis=-1, initial=-jnp.inf)  # [B, N, T]
    blind, broken = jnp.isneginf(top), jnp.isposinf(top)
    if poison is not None:
        broken = broken | (poison.queries & ~blind)
    dead, sink = blind | broken, None
    if sinks is not None:
        sink = sinks.astype(scores.dtype)[None, :, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    top = jnp.where(dead, 0.0, top)
    exponentials = jnp.exp(jnp.where(broken[..., None], -jnp.inf, scores) - top[..., None])
    denominator = exponentials.sum(axis=-1)
    if sink is not None:
        denominator = denominator + jnp.exp(jnp.where(dead, -jnp.inf, sink) - top)
    denominator = jnp.where(dead, 1.0, denominator)
    lse = jnp.where(blind, -jnp.inf, jnp.where(broken, jnp.nan, top + jnp.log(denominator)))
    return Softmax(exponentials, denominator, lse, broken)


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Sums in float32 or wider; float32 is not rounded to less on the way in."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide: Any = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=wide)


def _scores(query, key, visible, bias, scale, softcap) -> jax.Array:  # [B, N, T, S]
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    rows = query.swapaxes(1, 2).reshape(B, K, N // K * T, H)  # the heads of a group in a column
    scores = einsum("BKRH,BSKH->BKRS", rows, key).reshape(B, N, T, S)
    if isinstance(scale, jax.Array):
        if visible is not None:
            scores = jnp.where(visible, scores, 0.0)  # a hidden overflow has no slope
        scale = scale.astype(scores.dtype)
    scores = scores * (H**-0.5 if scale is None else scale)
    if softcap is not None:
        if visible is not None:
            scores = jnp.where(visible, scores, 0.0)  # a hidden overflow has no slope
        scores = softcap * jnp.tanh(scores / softcap)
    return scores if bias is None else scores + bias.astype(scores.dtype)


def _keep(query, key, rate: float, dropout_key: jax.Array) -> jax.Array:  # [B, N, T, S]
    """What dropout multiplies the weights by."""
    (rows, queries, heads, _), keys = query.shape, key.shape[1]
    keep = keep_tile(
        key_words(dropout_key),
        rate,
        head_index=jnp.arange(rows * heads, dtype=jnp.int32).reshape(rows, heads),
        q_index=jnp.arange(queries, dtype=jnp.int32),
        k_index=jnp.arange(keys, dtype=jnp.int32),
    )
    return jnp.where(keep, 1 / (1 - rate), 0.0)


def _bias(query, key, bias, q_positions, k_positions) -> jax.Array | None:
    if isinstance(bias, Bias):
        return bias.materialize(_positions(query, q_positions), _positions(key, k_positions))
    return bias


def _positions(x: jax.Array, positions: jax.Array | None) -> jax.Array:  # i32[B or 1, length]
    if positions is None:
        return jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return positions if positions.ndim == 2 else positions[None]
