"""Head scores, attention rollout and attention entropy.

The functions take attention weights as input. `attention_weights(model, params,
tokens)["attention"]` returns the weights of all layers and heads, f32[B, L, N, T, S].

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

    The tokens of a row are drawn without replacement. Therefore, each repeated token has exactly
    one earlier occurrence and is predictable only from the repetition (Olsson et al. 2022).

    Args:
        key: a single random key.
        vocab_size: the vocabulary size. Tokens are drawn from 0..vocab_size - 1.
        rows: the number of rows.
        period: the number of tokens before the repetition.

    Returns:
        The tokens, i32[rows, 2 * period].

    Raises:
        ValueError: if `period` is greater than `vocab_size`, or if a number is not positive.
    """
    if rows < 1 or not 1 <= period <= vocab_size:
        rule = f"period must be from 1 to {vocab_size} (vocab_size), and rows must be positive"
        raise ValueError(f"period is {period}, rows is {rows}: {rule}")
    keys = jax.random.split(key, rows)
    draw = lambda key: jax.random.choice(key, vocab_size, (period,), replace=False)  # noqa: E731
    once = jax.vmap(draw)(keys).astype(jnp.int32)
    return jnp.concatenate([once, once], axis=1)


@short_repr
class HeadScores(NamedTuple):
    """Average attention of each head to three kinds of tokens, as a number from 0 to 1."""

    previous_token: jax.Array
    """f32[L, N]: attention to the previous token."""
    duplicate_token: jax.Array
    """f32[L, N]: attention to the earlier occurrence of the same token."""
    induction: jax.Array
    """f32[L, N]: attention to the token after the earlier occurrence, which an induction head
    copies."""


def head_scores(weights: jax.Array, period: int) -> HeadScores:
    """Return the scores of attention heads on tokens that repeat after `period` tokens.

    previous = mean_t A[t, t - 1] over t >= 1, duplicate = mean_t A[t, t - P] and induction = mean_t
    A[t, t - P + 1] over t >= P; all three are also averaged over the rows (Olsson et al. 2022,
    prefix matching).

    Args:
        weights: f32[B, ..., T, T], attention weights on `repeated_tokens`, such as the
            f32[B, L, N, T, T] from `attention_weights`.
        period: P, the distance between a token and its repetition.

    Returns:
        Three scores, each f32[...]. For the weights of a model, each is f32[L, N].

    Raises:
        ValueError: if the weights are not square, or if P is not in 2..T - 1. With P = 1, the
            previous token would also be the earlier occurrence.
    """
    T = _check_weights(weights)
    if not 2 <= period < T:
        raise ValueError(f"period is {period}: must be from 2 to {T - 1} for {T} tokens")

    def score(offset: int, first: int) -> jax.Array:
        """Return the mean weight of token t - `offset` for queries t >= `first`."""
        diagonal = jnp.diagonal(weights, -offset, axis1=-2, axis2=-1)  # queries t >= offset
        return diagonal[..., first - offset :].mean(axis=(0, -1))

    return HeadScores(score(1, 1), score(period, period), score(period - 1, period))


def attention_rollout(weights: jax.Array) -> jax.Array:  # f32[B, L, T, T]
    """Return the attention rollout, the share of each input token in each token after each layer.

    R_l = (A_l + I) / 2 R_(l - 1) and R_0 = I (Abnar & Zuidema 2020, section 3), where A_l is the
    mean over heads and I represents the residual stream. The rows of (A_l + I) / 2 are normalized
    to sum to 1.

    Args:
        weights: f32[B, L, N, T, T], the result of `attention_weights`.

    Returns:
        The rollout, f32[B, L, T, T], whose rows sum to 1. The entry of the last layer covers the
        whole model.

    Raises:
        ValueError: if the shape of the weights is not [B, L, N, T, T].
    """
    T = _check_weights(weights)
    if weights.ndim != 5:
        raise ValueError(f"weights have shape {list(weights.shape)}: must be [B, L, N, T, T]")
    mixed = weights.astype(jnp.float32).mean(axis=2) + jnp.eye(T)[None, None]
    # with attention sinks, rows sum to less than 1
    mixed = mixed / mixed.sum(axis=-1, keepdims=True)

    def follow(rolled: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        rolled = jnp.einsum("BTS,BSU->BTU", layer, rolled, precision="highest")
        return rolled, rolled

    first = jnp.broadcast_to(jnp.eye(T)[None], mixed[:, 0].shape)
    return jax.lax.scan(follow, first, mixed.swapaxes(0, 1))[1].swapaxes(0, 1)


def attention_entropy(weights: jax.Array) -> jax.Array:  # f32[..., T]
    """Return the entropy in nats of each row of weights, -sum_s A[t, s] ln A[t, s].

    The entropy is 0 if a head attends to one token only, and ln n if it attends to n tokens
    equally. A weight of 0 adds 0 to the entropy and has a gradient of 0.

    Args:
        weights: f32[..., T, S], attention weights.

    Returns:
        The entropies, f32[..., T].
    """
    positive = weights > 0
    # replace weights of 0 with 1, because 1 ln 1 = 0 and ln 0 would make the gradient NaN
    safe = jnp.where(positive, weights, 1).astype(jnp.float32)
    return -(safe * jnp.log(safe)).sum(axis=-1)


def _check_weights(weights: jax.Array) -> int:
    """Return T for weights [B, ..., T, T]; raise ValueError if the shape is different."""
    shape = list(getattr(weights, "shape", ()))
    if len(shape) < 3 or shape[-1] != shape[-2]:
        rule = "must be [B, ..., T, T], from a prompt that is read at once, without a cache"
        raise ValueError(f"weights have shape {shape}: {rule}")
    return int(shape[-1])
