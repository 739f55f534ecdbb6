"""Head scores, attention rollout and attention entropy.

The functions take attention weights. `attention_weights(model, params, tokens)["attention"]`
returns those of all layers and heads, f32[B, L, N, T, S].

Sources: Elhage et al. 2021 and Olsson et al. 2022 (arXiv:2209.11895), "In-context learning and
induction heads"; Wang et al. 2023 (arXiv:2211.00593), appendix H; Abnar & Zuidema 2020
(arXiv:2005.00928).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.values import short_repr


def repeated_tokens(
    key: jax.Array, vocab_size: int, *, rows: int = 4, period: int = 25
) -> jax.Array:  # i32[rows, 2 * period]
    """Return rows of random tokens, each followed by one repetition of the same tokens.

    The tokens of a row are drawn without replacement, so each repeated token has exactly one
    earlier occurrence, and only the repetition makes it predictable (Olsson et al. 2022).

    Args:
        key: a single key.
        vocab_size: tokens are drawn from 0..vocab_size - 1.
        rows: number of rows.
        period: number of tokens before the repetition.

    Returns:
        i32[rows, 2 * period].

    Raises:
        ValueError: if `period` is above `vocab_size`, or a number is not positive.
    """
    if rows < 1 or not 1 <= period <= vocab_size:
        rule = f"period must be in 1..{vocab_size} (vocab_size), and rows must be positive"
        raise ValueError(f"period is {period}, rows is {rows}: {rule}")
    keys = jax.random.split(key, rows)
    draw = lambda key: jax.random.choice(key, vocab_size, (period,), replace=False)  # noqa: E731
    once = jax.vmap(draw)(keys).astype(jnp.int32)
    return jnp.concatenate([once, once], axis=1)


@short_repr
class HeadScores(NamedTuple):
    """Average attention of each head to three kinds of tokens, from 0 to 1."""

    previous_token: jax.Array
    """f32[L, N]: to the previous token."""
    duplicate_token: jax.Array
    """f32[L, N]: to the earlier occurrence of the same token."""
    induction: jax.Array
    """f32[L, N]: to the token after the earlier occurrence, which an induction head copies."""


def head_scores(weights: jax.Array, period: int) -> HeadScores:
    """Return the scores of heads on tokens that repeat after `period` tokens.

    previous = mean_t A[t, t - 1] over t >= 1, duplicate = mean_t A[t, t - P] and induction = mean_t
    A[t, t - P + 1] over t >= P, and over the rows (Olsson et al. 2022, prefix matching).

    Args:
        weights: f32[B, ..., T, T], attention weights on `repeated_tokens`, such as the
            [B, L, N, T, T] of `attention_weights`.
        period: P, the distance between a token and its repetition.

    Returns:
        f32[...] each; [L, N] for the weights of a model.

    Raises:
        ValueError: if the weights are not square, or P is not in 2..T - 1. With P = 1 the previous
            token would also be the earlier occurrence.
    """
    T = _check_weights(weights)
    if not 2 <= period < T:
        raise ValueError(f"period is {period}: must be in 2..{T - 1} for {T} tokens")

    def score(offset: int, first: int) -> jax.Array:
        """Return the mean weight from queries t >= `first` to the token t - `offset`."""
        diagonal = jnp.diagonal(weights, -offset, axis1=-2, axis2=-1)  # queries t >= offset
        return diagonal[..., first - offset :].mean(axis=(0, -1))

    return HeadScores(score(1, 1), score(period, period), score(period - 1, period))


def attention_rollout(weights: jax.Array) -> jax.Array:  # f32[B, L, T, T]
    """Return the attention rollout: the share of each input token in each token after each layer.

    R_l = (A_l + I) / 2 R_(l - 1), R_0 = I (Abnar & Zuidema 2020, section 3), with A_l the mean over
    heads, I the residual stream, and rows of (A_l + I) / 2 normalized to sum to 1.

    Args:
        weights: f32[B, L, N, T, T], as `attention_weights` returns them.

    Returns:
        f32[B, L, T, T] with rows that sum to 1. The last layer's entry covers the whole model.

    Raises:
        ValueError: if the weights are not [B, L, N, T, T].
    """
    T = _check_weights(weights)
    if weights.ndim != 5:
        raise ValueError(f"weights have shape {list(weights.shape)}: must be [B, L, N, T, T]")
    mixed = weights.astype(jnp.float32).mean(axis=2) + jnp.eye(T)[None, None]
    # attention sinks make rows sum to less than 1
    mixed = mixed / mixed.sum(axis=-1, keepdims=True)

    def follow(rolled: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        rolled = jnp.einsum("BTS,BSU->BTU", layer, rolled, precision="highest")
        return rolled, rolled

    first = jnp.broadcast_to(jnp.eye(T)[None], mixed[:, 0].shape)
    return jax.lax.scan(follow, first, mixed.swapaxes(0, 1))[1].swapaxes(0, 1)


def attention_entropy(weights: jax.Array) -> jax.Array:  # f32[..., T]
    """Return the entropy of each row of weights, -sum_s A[t, s] ln A[t, s], in nats.

    The entropy is 0 if a head attends to one token, and ln n if it attends to n tokens equally. A
    weight of 0 contributes 0, with gradient 0.

    Args:
        weights: f32[..., T, S].

    Returns:
        f32[..., T].
    """
    positive = weights > 0
    # zero weights are replaced by 1 (1 ln 1 = 0), because ln 0 would make the gradient NaN
    safe = jnp.where(positive, weights, 1).astype(jnp.float32)
    return -(safe * jnp.log(safe)).sum(axis=-1)


def _check_weights(weights: jax.Array) -> int:
    """Return T for weights [B, ..., T, T]; raise ValueError for other shapes."""
    shape = list(getattr(weights, "shape", ()))
    if len(shape) < 3 or shape[-1] != shape[-2]:
        rule = "must be [B, ..., T, T], from a prompt that is read at once, without a cache"
        raise ValueError(f"weights have shape {shape}: {rule}")
    return int(shape[-1])
