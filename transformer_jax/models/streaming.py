"""Windowed attention over unbounded streams, one chunk at a time.

The results equal those of windowed attention over the whole sequence, no matter how the sequence is
split into chunks. The state contains the last W keys. Use one of the following:

    Decoder with a window       tokens; its ModelCache is the state
    StreamingEncoder            vectors, such as speech frames; the state is also a ModelCache
    stream_attention            arrays, one layer; the state is a KVCache

Positions are int32, so you must move a stream to smaller positions with `rebase_cache` or
`rebase_state` before it reaches position 2^31 - 1 (248 days of 10 ms frames). This does not change
the results, because a window depends only on differences between positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.biases import Bias
from transformer_jax.attention.masks import Causal, Mask, Predicate, Prefix, Window
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache.model_cache import (
    ModelCache,
    cache_limit,
    check_is_cache,
    refuse_pages,
    refuse_past_int32,
    refuse_state,
)
from transformer_jax.checks import as_int32, check_count, check_not_consumed
from transformer_jax.config import CustomPositions, Learned, ModelConfig, Rope, Sinusoidal
from transformer_jax.models import positions as pos
from transformer_jax.models.arguments import CheckedModule, check_cache_room, positions_and_masks
from transformer_jax.models.block import BlockInputs
from transformer_jax.models.functional import dropout, split_key
from transformer_jax.models.layers import Linear, Norm, refuse_rngs
from transformer_jax.models.places import Captured, Places
from transformer_jax.models.stack import Stack
from transformer_jax.pytree import Array
from transformer_jax.tracing import concrete_value


def receptive_field(config: ModelConfig) -> int:
    """Count the inputs that affect one output of a causal stack: 1 + sum over layers (W - 1).

    Sinks are not counted, although they affect all outputs.
    """
    if config.has_state:
        raise ValueError(f"mixers is {config.mixers}: layers with a state have no window")
    windows = [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
    if None in windows:
        raise ValueError(f"window is {config.window}: layers without a window see everything")
    return 1 + sum(window - 1 for window in windows if window is not None)


@dataclass(frozen=True)
class _Chunks:
    chunk: int
    history: int
    sinks: int

    def __call__(self, q: jax.Array, k: jax.Array) -> jax.Array:
        after = k - q // self.chunk * self.chunk  # adding positions could overflow int32
        kept = (k >= 0) & (k < self.sinks)
        return (kept | (after >= -self.history)) & (after < self.chunk)


def chunk_mask(chunk: int, history: int, sinks: int = 0) -> Mask:
    """Return a mask that lets a query see its whole chunk and `history` frames before the chunk.

    chunk_mask(2, 1)

    # # . .
    # # . .
    . # # #
    . # # #

    Args:
        chunk: number of frames per chunk, at least 1.
        history: number of visible frames before the chunk, at least 0.
        sinks: number of frames at the start of the stream that are also visible unless they follow
            the query's chunk, at least 0.

    Raises:
        ValueError: If an argument is below its minimum.
    """
    check_count("chunk", chunk, 1)
    check_count("history", history, 0)
    check_count("sinks", sinks, 0)
    return Predicate(_Chunks(chunk, history, sinks))


class StreamingEncoder(CheckedModule):
    """Causal windowed stack for vectors, which applies W_in x and then the blocks of the config.

    Attributes:
        config: a config of kind "decoder" with one window for all layers.
        frame_dim: size of a frame.
        chunk: chunk size C; None means causal attention. A frame sees its whole chunk (which starts
            at a multiple of C), the W - C frames before the chunk, and the sinks that do not follow
            the chunk. Every row of a call must start at a multiple of C. Otherwise, a traced row
            becomes NaN.
    """

    config: ModelConfig
    frame_dim: int
    chunk: int | None = None

    def __post_init__(self) -> None:
        config, chunk = self.config, self.chunk
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config is of type {type(config).__name__}: must be a ModelConfig")
        window = _window(config)
        if not config.is_uniform:
            raise ValueError(f"mixers is {config.mixers}: a StreamingEncoder needs attention")
        if config.kind != "decoder":
            rule = "must be 'decoder', since a StreamingEncoder is a causal stack"
            raise ValueError(f"kind is {config.kind!r}: {rule}")
        if isinstance(config.positions, Learned):
            rule = "a stream outgrows any table; use 'rope', 'alibi', 't5', ..."
            raise ValueError(f"positions is {config.positions!r}: {rule}")
        scales = "scale_embeddings", "embedding_scale", "logit_scale"
        for name in (*scales, "logit_bias", "logit_softcap"):
            if getattr(config, name):
                rule = "not applicable, since frames have no token table"
                raise ValueError(f"{name} is {getattr(config, name)!r}: {rule}")
        check_count("frame_dim", self.frame_dim, 1)
        if chunk is not None:
            check_count("chunk", chunk, 1)
        if chunk is not None and chunk > window:
            raise ValueError(f"chunk is {chunk}: must be from 1 to window, {window}")
        super().__post_init__()

    def setup(self) -> None:
        cfg = self.config
        self.input = Linear(cfg, (cfg.d_model,), std=self.frame_dim**-0.5)
        if cfg.embedding_norm:
            self.input_norm = Norm(cfg)
        self.encoder = Stack(cfg, cfg.num_layers)

    def __call__(
        self,
        frames: jax.Array,  # [B, T, frame_dim]
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        cache: ModelCache | None = None,
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> tuple[jax.Array, ModelCache | None] | tuple[jax.Array, ModelCache | None, Captured]:
        """Return the features of the frames, and the updated cache.

        Args:
            frames: [B, T, frame_dim].
            positions: negative means padding. None means arange(T), or the positions that follow
                the cache if one is passed. For a ragged chunk, use
                `cache.next_positions(state.length, valid)`.
            cache: the cache from `init_cache` or the previous call; None means a new stream.
            key: a single PRNG key, which turns dropout on.
            capture: names of the places (see `transformer_jax.places`) whose values are returned.

        Returns:
            The features [B, T, D] in the compute dtype, and the cache. With `capture`, a dict of
            the captured values is also returned.

        Raises:
            ValueError: If an argument does not match the config or the cache, or if a row with
                known positions does not start at a multiple of `chunk`.
        """
        cfg = self.config
        refuse_rngs(self, key)
        if cache is not None:
            check_is_cache(cache)
        shape, dtype = getattr(frames, "shape", None), getattr(frames, "dtype", None)
        if shape is None or dtype is None:
            raise ValueError(
                f"frames are of type {type(frames).__name__}: must be an array [B, T, D_in]"
            )
        floating = jnp.issubdtype(dtype, jnp.floating)
        if len(shape) != 3 or shape[2] != self.frame_dim or not floating:
            rule = f"must be floating-point [B, T, {self.frame_dim}]"
            raise ValueError(f"frames are {dtype}{list(shape)}: {rule}")
        _check_positions("frames", shape, positions)
        if cache is not None and cache.length.shape[0] != shape[0]:
            rule = f"the cache has {cache.length.shape[0]}"
            raise ValueError(f"frames have {shape[0]} rows, but {rule}")
        positions = as_int32("positions", positions)
        refused = None
        if cache is not None:
            refuse_pages(cache, "a StreamingEncoder")
            limit = cache_limit(cfg, cache.capacity)
            if limit is not None:
                raise ValueError(f"capacity is {limit}: must be at least window, {cfg.window}")
            positions, refused = check_cache_room(cfg, cache, frames[:, :, 0], positions)
        if self.chunk is not None and positions is not None:
            # A call that starts inside a chunk would miss the frames of this chunk that are in
            # another call. Known positions raise an error, and traced positions result in NaN.
            known = concrete_value(positions)
            numpy: ModuleType = jnp if known is None else np
            p: Array = positions if known is None else known
            last = np.iinfo(np.int32).max
            first = numpy.where(p < 0, last, p).min(axis=1, initial=last)
            misaligned = (first % self.chunk != 0) & (p >= 0).any(axis=1)
            if known is not None and misaligned.any():
                row = int(np.argmax(misaligned))
                rule = f"must be a multiple of chunk, {self.chunk}"
                raise ValueError(f"row {row} starts at position {int(first[row])}: {rule}")
            refused = misaligned if refused is None else refused | misaligned
        mask: Mask = Causal()
        if self.chunk is not None:
            mask = chunk_mask(self.chunk, _window(cfg) - self.chunk, cfg.sink_tokens)
        token_positions, masks = positions_and_masks(
            cfg, shape[:2], positions, None, mask, causal=True
        )
        input_key, stack_key = split_key(key, 2)
        if token_positions.ndim == 2:  # otherwise, 0 * NaN from padding would enter gradients
            frames = jnp.where((token_positions < 0)[:, :, None], 0.0, frames)
        x = self.input(frames)
        if isinstance(cfg.positions, Sinusoidal):
            added = pos.sinusoidal_of(cfg.positions, token_positions, cfg.d_model).astype(x.dtype)
            x = x + (added if added.ndim == 3 else added[None])
        if cfg.embedding_norm:
            x = self.input_norm(x)
        x = dropout(x, cfg.dropout, input_key)
        places = Places.of(self, capture).with_facts(token_positions, whole=cache is None)
        inputs = BlockInputs(positions=positions, token_positions=token_positions, places=places)
        visit = places.visit(positions=token_positions)
        x, cache = self.encoder(x, inputs, masks, visit, cache=cache, key=stack_key)
        if refused is not None:
            x = jnp.where(refused[:, None, None], jnp.nan, x)
        return (x, cache, places.in_order(visit.captured)) if capture else (x, cache)


def stream_attention(
    state: kv.KVCache | None,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, T, K, H]
    value: jax.Array,  # [B, T, K, Hv]
    *,
    window: int | None = None,
    positions: jax.Array | None = None,  # i32[B, T]
    mask: Mask | None = None,
    rope: Rope | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    implementation: str | None = None,
) -> tuple[jax.Array, kv.KVCache | None]:  # [B, T, N, Hv]
    """Return the windowed attention of T new tokens in one layer, and the new state.

    Args:
        state: a ring buffer from `cache.init(batch, window, num_kv_heads, head_dim)`. With n sinks,
            it needs window + n slots, and the first n positions remain visible: Window(window) |
            Prefix([n]). None means that the call contains the whole sequence.
        query: [B, T, N, H].
        key: [B, T, K, H].
        value: [B, T, K, Hv].
        window: number of keys that a query sees, including its own. None means the capacity of the
            ring minus the number of sinks.
        positions: negative means padding; None means the positions that follow the state.
        mask: mask that replaces `Causal()`. The window also applies.
        rope: rotation to apply to queries and keys; None means no rotation.
        bias: position bias, such as `ALiBi`; None means no bias.
        scale: factor for q.k; None means 1 / sqrt(H).
        softcap: bound on the scores, above 0; None means no bound.
        sinks: [N], logits whose exponentials are added to the denominator of the softmax.
        implementation: name of the attention implementation; None chooses one automatically.

    Returns:
        The output [B, T, N, Hv], and the new state, or None if no state was passed.
    """
    if len(query.shape) != 4:
        raise ValueError(f"query has shape {query.shape}: must be [B, T, N, H]")
    _check_positions("queries", query.shape, positions)
    check_not_consumed(state)
    if state is None and window is None:
        raise ValueError("window is None without a state: pass one of them")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: must be at least 1")
    if state is not None:
        if window is not None and state.capacity - state.sinks < window:
            sinks_text = f" without {state.sinks} sinks" if state.sinks else ""
            capacity = f"capacity is {state.capacity - state.sinks}{sinks_text}"
            raise ValueError(f"{capacity}: must be at least window, {window}")
        if state.length.shape[0] != query.shape[0]:
            rule = f"the state has {state.length.shape[0]}"
            raise ValueError(f"query has {query.shape[0]} rows, but {rule}")
    if bias is not None and not isinstance(bias, Bias):
        kind = type(bias).__name__
        raise ValueError(f"bias is of type {kind}: must be a value such as ALiBi or RelativeBias")
    rows, count = query.shape[:2]
    positions = as_int32("positions", positions)
    refused, placed = None, positions
    if state is None:
        placed = jnp.arange(count)[None] if positions is None else positions
        placed = jnp.broadcast_to(placed, (rows, count))
    else:
        if positions is None:
            positions = kv.next_positions(state.length, jnp.ones((rows, count), bool))
        # An endless stream would overflow int32 unless `rebase_state` shifts it now and then.
        placed, refused = refuse_past_int32(positions)
    if rope is not None:
        query, key = (pos.apply_rope(x, placed, rope) for x in (query, key))
    seen, sinks_kept = placed, 0
    if state is not None:
        sinks_kept = state.sinks
        window = state.capacity - sinks_kept if window is None else window
        state, key, value, seen = kv.extend(state, key, value, placed, window)
    near: Mask = Window(window)
    if sinks_kept:
        near = near | Prefix(np.full(1, sinks_kept, np.int32))  # type: ignore[arg-type]
    out = dot_product_attention(
        query,
        key,
        value,
        mask=(Causal() if mask is None else mask) & near,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_positions=placed,
        k_positions=seen,
        implementation=implementation,
    )
    if refused is not None:
        out = jnp.where(refused[:, None, None, None], jnp.nan, out)
    return out, state


def rebase_state(state: kv.KVCache, rope: Rope | None = None, multiple: int = 1) -> kv.KVCache:
    """Shift a stream to smaller positions, by a multiple of its capacity and of `multiple` per row.

    Masks, biases and rotations depend only on differences between positions, so the results do not
    change.

    Args:
        state: a ring without sinks. The positions of sinks are fixed.
        rope: the rotation of the keys, or None if they are not rotated. Keys are rotated back, R(p
            - shift) = R(-shift) R(p), and rounded once in their dtype.
        multiple: the chunk size, at least 1.

    Raises:
        ValueError: If the state has sinks, or if the keys are both rotated and int8.
    """
    if state.sinks:
        raise ValueError(f"sinks is {state.sinks}: must be 0, since positions of sinks are fixed")
    check_count("multiple", multiple, 1)
    # a ring stores position p in slot p % S, so a key keeps its slot if S divides the shift
    step = math.lcm(state.capacity, multiple)
    shift = jnp.maximum(state.length - state.capacity, 0) // step * step  # [B]
    k = state.k
    if rope is not None:
        if not jnp.issubdtype(k.dtype, jnp.floating):
            raise ValueError(f"keys are {k.dtype}: must be floating-point to be rotated")
        if rope.scaling in ("yarn", "longrope"):
            rope = replace(rope, attention_factor=1.0)  # the keys already include it
        k = pos.apply_rope(k, jnp.broadcast_to(-shift[:, None], state.positions.shape), rope)
    positions = state.positions - shift[:, None]
    return replace(
        state,
        k=k,
        # A slot below the shift is empty, because the ring contains only the last positions.
        positions=jnp.where(state.positions < shift[:, None], -1, positions),
        length=state.length - shift,
    )


def rebase_cache(cache: ModelCache, config: ModelConfig, multiple: int = 1) -> ModelCache:
    """Apply `rebase_state` to all layers of a `Decoder` or `StreamingEncoder` with a window.

    Args:
        cache: a cache whose layers are rings.
        config: config of the model.
        multiple: the chunk size of a StreamingEncoder, if it has one.

    Raises:
        ValueError: If a layer is not a ring, or if its positions or sinks cannot be shifted.
    """
    if config.positions is not None and config.positions.absolute:
        rule = "absolute positions cannot be moved"
        raise ValueError(f"positions is {config.positions!r}: {rule}")
    if config.sink_tokens:
        rule = "must be 0, since positions of sinks are fixed"
        raise ValueError(f"sink_tokens is {config.sink_tokens}: {rule}")
    refuse_pages(cache, "rebase_cache")
    refuse_state(cache, "rebase_cache")
    if config.latent_attention is not None:
        raise ValueError(f"mixers is {config.mixers}: rebase_cache needs attention in every layer")
    window = _window(config)
    limit = cache_limit(config, cache.capacity)
    if limit is not None:
        rule = f"must be at least window, {config.window}, so that the cache is a ring"
        raise ValueError(f"capacity is {limit}: {rule}")
    if cache.cross is not None:
        raise ValueError("cache.cross is not None: only the cache of a decoder can be rebased")
    if isinstance(config.positions, CustomPositions):
        rule = "custom positions do not define how to move cached keys"
        raise ValueError(f"positions is {config.positions!r}: {rule}")
    order = config.positions

    def move(layer: kv.KVCache, number: int | None = None) -> kv.KVCache:
        rope = order.in_layer(window, number) if isinstance(order, Rope) else None
        return rebase_state(layer, rope, multiple)

    layers: Any = cache.layers
    if cache.is_scanned:
        return ModelCache(jax.vmap(move, in_axes=1, out_axes=1)(layers))
    return ModelCache(tuple(move(layer, number) for number, layer in enumerate(layers)))


def _window(config: ModelConfig) -> int:
    if config.window is None:
        raise ValueError("window is None: streaming requires a window")
    if isinstance(config.window, tuple):
        raise ValueError(f"window is {config.window}: streaming requires one window for all layers")
    return config.window


def _check_positions(name: str, shape: tuple[int, ...], positions: jax.Array | None) -> None:
    if positions is None:
        return
    if positions.shape != shape[:2] or not jnp.issubdtype(positions.dtype, jnp.integer):
        rule = f"must be integers {list(shape[:2])}, like {name}"
        raise ValueError(f"positions are {positions.dtype}{list(positions.shape)}: {rule}")
