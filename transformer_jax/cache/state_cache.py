"""Immutable cache of a layer with a state of fixed size instead of keys and values.

The first axis of every array is B, so rows can be gathered, forked and reset like those of a
`KVCache`. A state cannot drop a token that it includes. Therefore, a cache with slack R keeps the
last R tokens pending: their keys, values and decays are stored next to the state, which is that
before these tokens. `rewind` drops pending tokens, and each call reads the others again.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.kv_cache import kept_length
from transformer_jax.config import GatedDelta, ShortConv
from transformer_jax.tracing import concrete_value
from transformer_jax.values import value_class


@value_class(pytree=True, exportable=True)
class PendingTokens:
    """Last tokens of each row, which the state does not include yet.

    Attributes:
        count: i32[B], the number of pending tokens, at most R. They come first in each row.
        inputs: [B, R, C], their inputs to the short convolution.
        key: f32[B, R, Nk, H], their keys. This and the following are None in a short_conv layer.
        value: f32[B, R, N, Hv], their values.
        decay: f32[B, R, N] or f32[B, R, N, H], the logarithms of their decays.
        beta: f32[B, R, N], the strengths of their writes.
    """

    count: jax.Array  # i32[B]
    inputs: jax.Array  # [B, R, C]
    key: jax.Array | None = None  # f32[B, R, Nk, H]
    value: jax.Array | None = None  # f32[B, R, N, Hv]
    decay: jax.Array | None = None  # f32[B, R, N] or f32[B, R, N, H]
    beta: jax.Array | None = None  # f32[B, R, N]


@value_class(pytree=True, exportable=True)
class StateCache:
    """Immutable state of a layer after all tokens so far, except those that are pending.

    Attributes:
        state: f32[B, N, H, Hv], the matrix of each head, which maps keys to values; None in a
            short_conv layer.
        tail: [B, W - 1, C], the last inputs of the short convolution before the pending tokens.
        length: i32[B], the position of the next token, which counts pending tokens.
        pending: the last R tokens, which `rewind_cache` can drop; None if the slack is 0.
    """

    state: jax.Array | None  # f32[B, N, H, Hv]
    tail: jax.Array  # [B, W - 1, C]
    length: jax.Array  # i32[B]
    pending: PendingTokens | None = None

    @property
    def slack(self) -> int:
        """Return R, the maximum number of tokens that can be dropped."""
        return 0 if self.pending is None else int(self.pending.inputs.shape[1])


def init(
    batch: int,
    sizes: GatedDelta | ShortConv,
    channels: int,
    dtype: jax.typing.DTypeLike,
    slack: int = 0,
) -> StateCache:
    """Create the state before the first token, whose leaves do not share memory.

    Args:
        batch: B, the number of rows.
        sizes: the sizes of the layer.
        channels: C, the number of channels of the convolution.
        dtype: dtype of the convolution's inputs, which is the compute dtype.
        slack: R, the maximum number of pending tokens.
    """
    of_state, of_tail = shapes(sizes, channels)
    pending = None
    if slack:
        inputs = jnp.zeros((batch, slack, channels), dtype)
        pending = PendingTokens(count=jnp.zeros(batch, jnp.int32), inputs=inputs)
        if isinstance(sizes, GatedDelta):
            N, H, Hv = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
            zeros = lambda *shape: jnp.zeros((batch, slack, *shape), jnp.float32)  # noqa: E731
            pending = replace(
                pending,
                key=zeros(sizes.num_key_heads, H),
                value=zeros(N, Hv),
                decay=zeros(N) if sizes.decay_rank is None else zeros(N, H),
                beta=zeros(N),
            )
    return StateCache(
        state=None if of_state is None else jnp.zeros((batch, *of_state), jnp.float32),
        tail=jnp.zeros((batch, *of_tail), dtype),
        length=jnp.zeros(batch, jnp.int32),
        pending=pending,
    )


def shapes(
    sizes: GatedDelta | ShortConv, channels: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the shapes of a row's state, [N, H, Hv] or None, and of its tail, [W - 1, C]."""
    tail = sizes.conv_width - 1, channels
    if isinstance(sizes, ShortConv):
        return None, tail
    return (sizes.num_value_heads, sizes.key_dim, sizes.value_dim), tail


def advance(
    cache: StateCache,
    state: jax.Array | None,  # f32[B, N, H, Hv]
    tail: jax.Array,  # [B, W - 1, C]
    positions: jax.Array,  # i32[B, T]; negative means padding
    pending: PendingTokens | None = None,
) -> StateCache:
    """Return the cache after new tokens, given the state and the tail before the pending ones."""
    newest = positions.max(axis=1, initial=-1) + 1
    length = jnp.maximum(cache.length, newest)
    return replace(cache, state=state, tail=tail, length=length, pending=pending)


def rewind(
    cache: StateCache,
    length: jax.Array,  # i32[B]
) -> StateCache:
    """Drop the pending tokens of each row at positions >= length[b].

    Args:
        cache: a cache with B rows.
        length: i32[B], the number of tokens to keep in each row, clipped to the range from 0 to the
            current length.

    Raises:
        ValueError: If `length` is not an integer array [B], or if a row would drop a token that is
            not pending. If the lengths are traced, the state and tail of such a row become NaN,
            and so do all outputs that depend on them.
    """
    if cache.pending is None:
        rule = "a layer with a state can drop only its last `slack` tokens: init_cache(.., slack=n)"
        raise ValueError(f"rewind_cache of a StateCache with slack 0: {rule}")
    kept = kept_length(cache.length, length)
    count = cache.pending.count - (cache.length - kept)
    known = concrete_value(count)
    if known is not None and (known < 0).any():
        row = int(np.argmax(known < 0))
        rule = f"must be at least {int(kept[row]) - known[row]}, because the state of the layer"
        raise ValueError(
            f"length[{row}] is {int(length[row])}: {rule} already includes these tokens "
            f"(init_cache had slack={cache.slack})"
        )
    lost = (count < 0)[:, None, None]
    state = cache.state
    return replace(
        cache,
        state=None if state is None else jnp.where(lost[..., None], jnp.nan, state),
        tail=jnp.where(lost, jnp.nan, cache.tail),
        length=kept,
        pending=replace(cache.pending, count=jnp.maximum(count, 0)),
    )
