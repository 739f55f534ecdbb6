"""Reference implementation of attention: materializes all scores and is differentiated by JAX.

With x_ij = q_i . k_j for the pairs that the mask allows:

    s_ij = score_mod(softcap tanh(scale x_ij / softcap) + bias_ij)
    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))
    out_i = sum_j p_ij v_j        lse_i = log(sum_j exp(s_ij) + exp(sink))

The division comes after the product with v, so neither pass reads the scores just to normalize
them. For 16-bit inputs, the backward pass differentiates the normalized weights instead. Separate
derivatives of the product and the division would combine a rounded cotangent with an unrounded one,
so a query that sees a single key would have a nonzero gradient.

NaN and inf need special care. The product with a masked weight is 0 only if the other factor is
finite, and a softcap or an exponential may turn inf into a finite number. Therefore, rows of the
query, key or value that contain NaN or inf are replaced by zeros, and their scores become NaN if
the mask allows them. A query with such a score is broken: its output and lse are NaN, and it has no
gradient, but no other query is affected. Without a mask, a key affects every query of its heads, so
no scores need to be changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from transformer_jax.attention.arguments import AttentionCall, Implementation
from transformer_jax.attention.biases import Bias
from transformer_jax.checks import largest
from transformer_jax.kernels.dropout import keep
from transformer_jax.values import short_repr


@short_repr
class Softmax(NamedTuple):
    """exp(s - max), its denominator, and a mask of the broken rows, whose results are NaN."""

    exponentials: jax.Array  # [B, N, T, S]
    denominator: jax.Array  # [B, N, T]
    lse: jax.Array  # [B, N, T], -inf in a fully masked row
    broken: jax.Array  # bool[B, N, T]

    @property
    def weights(self) -> jax.Array:  # [B, N, T, S]
        weights = self.exponentials / self.denominator[..., None]
        return jnp.where(self.broken[..., None], jnp.nan, weights)

    def average(self, value: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        """Return sum_j weights_ij keep_ij value_j: [B, S, K, Hv] to [B, T, N, Hv]."""
        # 16-bit dtypes use a separate backward pass
        if jnp.finfo(value.dtype).bits < 32:
            out = _average(self.exponentials, self.denominator, keep, value)
        else:
            out = _weigh(self.exponentials, keep, value) / self.denominator[..., None]
        return jnp.where(self.broken[..., None], jnp.nan, out).swapaxes(1, 2)


@jax.custom_jvp
def _average(
    exponentials: jax.Array,  # [B, N, T, S]
    denominator: jax.Array,  # [B, N, T]
    keep: jax.Array | None,  # [B, N, T, S]
    value: jax.Array,  # [B, S, K, Hv]
) -> jax.Array:  # [B, N, T, Hv]
    return _weigh(exponentials, keep, value) / denominator[..., None]


@_average.defjvp
def _average_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    exponentials, denominator, keep, value = primals
    d_exponentials, d_denominator, _, d_value = tangents
    weights = exponentials / denominator[..., None]
    d_weights = (d_exponentials - weights * d_denominator[..., None]) / denominator[..., None]
    # if the weight is 0, the product of the cotangent and the value may overflow
    d_weights = jnp.where(exponentials > 0, d_weights, 0.0)
    d_out = _weigh(d_weights, keep, value) + _weigh(weights, keep, d_value)
    return _average(*primals), d_out


def _weigh(weights: jax.Array, keep: jax.Array | None, value: jax.Array) -> jax.Array:
    """Return sum_j weights_ij keep_ij value_j, rounded once to the value's dtype."""
    weights = weights if keep is None else weights * keep
    (B, N, T, _), K = weights.shape, value.shape[2]
    weights = rearrange(weights, "B (K G) T S -> B K (G T) S", K=K).astype(value.dtype)
    return einsum("BKRS,BSKH->BKRH", weights, value).reshape(B, N, T, value.shape[3])


@short_repr
class Nonfinite(NamedTuple):
    """Queries and keys affected by a row that contains NaN or inf."""

    queries: jax.Array  # bool[B, N, T]: affected by their own row, or by a key that all queries see
    keys: jax.Array | None  # [B, N, 1, S], NaN or 0, to add to the scores; None without a mask


class Xla(Implementation):
    """Reference implementation, which supports all options and derivatives in O(T S) memory."""

    reads_score_mod = True

    def refuse(self, call: AttentionCall) -> str | None:
        """Return None, because the reference supports every call."""
        return None

    def refuse_part(self, call: AttentionCall) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        result, value = _softmax_of(call)
        kept = None
        if call.dropout_rate:
            words, (_, T, _, S) = call.head_words(), call.sizes
            assert words is not None
            a, b = words[..., None, None]
            first = (0, 0) if call.first is None else call.first.astype(jnp.uint32)
            q = (first[0] + jnp.arange(T, dtype=jnp.uint32))[None, None, :, None]
            k = (first[1] + jnp.arange(S, dtype=jnp.uint32))[None, None, None, :]
            stays = keep(a, b, q, k, call.dropout_rate)
            kept = jnp.where(stays, 1 / (1 - call.dropout_rate), 0.0)
        return result.average(value, kept).astype(call.query.dtype), result.lse.swapaxes(1, 2)


def reference_weights(call: AttentionCall) -> jax.Array:  # f32[B, N, T, S]
    """Return the softmax weights."""
    return _softmax_of(call)[0].weights


def _softmax_of(call: AttentionCall) -> tuple[Softmax, jax.Array]:
    """Return the softmax of the scores, and the value with nonfinite rows replaced by zeros."""
    visible = None  # every query sees every key; otherwise, bool[B or 1, N or 1, T or 1, S]
    if call.mask is not None or call.k_positions is not None:
        q, k = call.positions()
        visible = None if call.mask is None else call.mask.allows(q, k)
        if call.k_positions is not None:  # a key at a negative position is an empty slot
            used = (k >= 0)[:, None, None, :]
            visible = used if visible is None else visible & used
    bias = call.bias.materialize(*call.positions()) if isinstance(call.bias, Bias) else call.bias
    query, key, value, nonfinite = clean(visible, call.query, call.key, call.value)
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    # the heads of a group form the rows of one product, so keys are not repeated
    rows = rearrange(query, "B T (K G) H -> B K (G T) H", K=K)
    scores = einsum("BKRH,BSKH->BKRS", rows, key).reshape(B, N, T, S)
    # set hidden scores to 0: if they overflowed, their derivative, 0 * inf, would be NaN
    masked = (lambda s: s) if visible is None else lambda s: jnp.where(visible, s, 0.0)
    if call.scale_array is not None:
        by_head = call.scale_array.astype(scores.dtype).reshape(1, -1, 1, 1)  # [1, N or 1, 1, 1]
        scores = masked(scores) * by_head
    else:
        scores = scores * (H**-0.5 if call.scale is None else call.scale)
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(masked(scores) / call.softcap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if call.score_mod is not None:
        # hidden scores are 1, because functions such as sqrt have an infinite derivative at 0
        shown = scores if visible is None else jnp.where(visible, scores, 1.0)
        scores = call.score_mod(shown, *call.positions())
    return softmax(scores, visible, nonfinite, call.sinks), value


def finite_rows(x: jax.Array) -> jax.Array:  # [..., H] to bool[...]
    """Return whether each row contains only finite numbers."""
    x = jax.lax.stop_gradient(x)
    # on a CPU, a product with a vector is faster than a reduction, and this sum cannot overflow
    weights = jnp.full(x.shape[-1:], 0.5 / max(x.shape[-1], 1), x.dtype)
    return jnp.isfinite(einsum("...H,H->...", x, weights))


def clean(
    visible: jax.Array | None,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
) -> tuple[jax.Array, jax.Array, jax.Array, Nonfinite]:
    """Return the inputs with nonfinite rows replaced by zeros, and the affected queries."""
    good_query = finite_rows(query)
    good_key = finite_rows(key) & finite_rows(value)
    query = jnp.where(good_query[..., None], query, 0)
    key, value = (jnp.where(good_key[..., None], x, 0) for x in (key, value))
    bad_query, group = ~good_query.swapaxes(1, 2), query.shape[2] // key.shape[2]
    if visible is None:  # a key affects every query of its group
        bad_heads = jnp.repeat(~good_key.all(axis=1), group, axis=1)  # [B, N]
        return query, key, value, Nonfinite(bad_query | bad_heads[..., None], None)
    by_key = jnp.where(good_key, 0.0, jnp.nan).swapaxes(1, 2)[:, :, None, :]
    return query, key, value, Nonfinite(bad_query, jnp.repeat(by_key, group, axis=1))


def softmax(
    scores: jax.Array,  # [B, N, T, S]
    visible: jax.Array | None,  # broadcasts to scores
    nonfinite: Nonfinite,
    sinks: jax.Array | None = None,  # [N]
) -> Softmax:
    """Return the softmax of the visible scores. Rows with a visible nonfinite score are broken."""
    if visible is not None:
        assert nonfinite.keys is not None
        scores = jnp.where(visible, scores + nonfinite.keys.astype(scores.dtype), -jnp.inf)
    row_max = largest(jax.lax.stop_gradient(scores))  # [B, N, T]
    fully_masked = jnp.isneginf(row_max)
    broken = jnp.isposinf(row_max) | (nonfinite.queries & ~fully_masked)
    dead, sink = fully_masked | broken, None
    # the maximum includes the sink, which may be far above all scores
    if sinks is not None:
        sink = sinks.astype(scores.dtype)[None, :, None]
        row_max = jnp.maximum(row_max, jax.lax.stop_gradient(sink))
    row_max = jnp.where(dead, 0.0, row_max)
    below = jnp.where(broken[..., None], -jnp.inf, scores) - row_max[..., None]
    # the compiler may fuse the multiplication of a score with this subtraction, which skips a
    # rounding step and may make the difference positive
    below = below - jax.lax.stop_gradient(jnp.maximum(below, 0))
    exponentials = jnp.exp(below)
    denominator = exponentials.sum(axis=-1)
    if sink is not None:
        denominator = denominator + jnp.exp(jnp.where(dead, -jnp.inf, sink) - row_max)
    denominator = jnp.where(dead, 1.0, denominator)
    lse = jnp.where(broken, jnp.nan, row_max + jnp.log(denominator))
    return Softmax(exponentials, denominator, jnp.where(fully_masked, -jnp.inf, lse), broken)


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute an einsum that accumulates in at least float32, without rounding float32 inputs."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide: Any = np.promote_types(x.dtype, np.float32)  # JAX's dtype promotion may be set to strict
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=wide)
