"""Compiled programs for `inspect`.

z is the logit of an answer at one position of the prompt, minus the logit of the other answer, if
there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax import interpret
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.interpret.lens import why_not_additive
from transformer_jax.models.editing import Edit
from transformer_jax.models.places import places
from transformer_jax.programs import program
from transformer_jax.pytree import Array, Params
from transformer_jax.text.reading import call_arguments

MOST_LOGITS = 2**26
"""Maximum number of logits in memory for the forward passes of one batch."""

Metric = Callable[[jax.Array], jax.Array]


def _metric(ids: Array, at: int) -> Metric:
    """Return z as a function of logits f32[1, T, V], for one or two IDs, i32[1] or i32[2]."""

    def metric(logits: jax.Array) -> jax.Array:
        first, *rest = (logits[0, at, i] for i in ids)
        return first - rest[0] if rest else first

    return metric


def _batch_size(config: ModelConfig, tokens: Array) -> int:
    """Return the number of forward passes over a prompt that run in one batch."""
    return max(1, MOST_LOGITS // (tokens.shape[1] * config.vocab_size))


@program(static=("model", "at"))
def logits(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array], at: int
) -> jax.Array:  # f32[V]
    """Return the logits at one position."""
    found = model.apply({"params": params}, jnp.asarray(tokens), **call_arguments(inputs))
    return jnp.asarray(found[0][0, at])


@program(static=("model", "count", "size"))
def lens(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array], count: int, size: int
) -> tuple[jax.Array, jax.Array]:  # f32[L + 1, T, count], i32[L + 1, T, count]
    """Return probabilities and IDs (below `size`) of the likeliest tokens after each block."""
    logits = interpret.logit_lens(model, params, jnp.asarray(tokens), **call_arguments(inputs))[0]
    p = jax.nn.softmax(logits, axis=-1)
    best, ids = jax.lax.top_k(p[..., :size], count)
    return best, ids


def branches(config: ModelConfig) -> list[str]:
    """Return the attention branches of a block in the decoder, or in an encoder-only model.

    Raise ConfigError if a layer has no attention, because the results have an axis of all layers.
    """
    if not config.is_uniform:
        rule = "every layer must have attention to be inspected"
        raise ConfigError(f"mixers is {config.mixers}: {rule}")
    return ["attention", *(["cross_attention"] if config.kind == "encoder-decoder" else [])]


def streams(config: ModelConfig) -> list[str]:
    """Return the places of a block that are patched token by token."""
    forward = ["feed_forward/output"] if config.ff_dim else []
    return ["residual", *(f"{b}/output" for b in branches(config)), *forward]


def depth(config: ModelConfig) -> int:
    """Return the number of inspected blocks."""
    return config.num_layers if config.kind == "encoder" else config.decoder_layers


@program(static=("model", "at"))
def patched(
    model: Any, params: Params, clean: Array, corrupted: Array, inputs: dict[str, Array],
    ids: Array, at: int,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:  # fmt: skip
    """Return z for both prompts, and for the corrupted prompt after copying clean values.

    The values of z with copied activations are f32[P, L, T] for the `streams`, and f32[L, N] for
    each of the `branches`.
    """
    config, metric, rest = model.config, _metric(ids, at), call_arguments(inputs)
    clean, corrupted = jnp.asarray(clean), jnp.asarray(corrupted)
    put = partial(
        interpret.patch, model, params, clean, corrupted, metric=metric,
        batch_size=_batch_size(config, clean), **rest,
    )  # fmt: skip
    names = streams(config)
    by_token = put(places=[f"block_*/{name}" for name in names])
    by_head = [put(places=f"block_*/{b}/heads", each=("head",)) for b in branches(config)]
    z = lambda x: metric(model.apply({"params": params}, x, **rest)[0])  # noqa: E731
    return z(clean), z(corrupted), by_token.reshape(len(names), depth(config), -1), by_head


@program(static=("model", "at"))
def without(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array], ids: Array, at: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Return z and, for each of the `branches`, the change in z without each head, f32[L, N]."""
    config, metric, rest = model.config, _metric(ids, at), call_arguments(inputs)
    size = depth(config), config.num_heads

    def value(edit: dict[str, Edit]) -> jax.Array:
        return metric(model.edited(edit).apply({"params": params}, jnp.asarray(tokens), **rest)[0])

    whole = value({})

    def silenced(branch: str, head: jax.Array) -> jax.Array:
        # The mask covers all layers, so the head's index can be traced and one program serves all
        # heads.
        mask = (jnp.arange(size[0] * size[1]) != head).astype(jnp.float32).reshape(size)
        return value(interpret.scale(f"block_*/{branch}/heads", mask)) - whole

    heads = jnp.arange(size[0] * size[1])
    batch_size = min(_batch_size(config, tokens), len(heads))
    return whole, [
        jax.lax.map(partial(silenced, branch), heads, batch_size=batch_size).reshape(size)
        for branch in branches(config)
    ]


@program(static=("model",))
def weights(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array]
) -> jax.Array:  # f32[B, L, N, T, T]
    """Return the weights of self-attention, in the decoder if the model is an encoder-decoder."""
    capture = ("block_*/attention/weights",)
    found = model.apply(
        {"params": params}, jnp.asarray(tokens), capture=capture, **call_arguments(inputs)
    )
    # Captured values are in the order of the requested names, and `*` expands in the order of
    # blocks.
    return jnp.stack(list(found[-1].values()), axis=1)


@program(static=("model",))
def attention_weights(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array]
) -> dict[str, jax.Array]:
    """Return the weights of every attention layer, keyed by place."""
    capture = tuple(name for name in places(model) if name.endswith("attention/weights"))
    found = model.apply(
        {"params": params}, jnp.asarray(tokens), capture=capture, **call_arguments(inputs)
    )
    return dict(found[-1])


@program(static=("model", "at"))
def attributed(
    model: Any, params: Params, tokens: Array, inputs: dict[str, Array], ids: Array,
    baseline: Array, at: int,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], interpret.LogitAttribution | None]:  # fmt: skip
    """Return (z, z of the baseline, token shares) and the contributions of the parts.

    The contributions are None if z is not a sum of parts.
    """
    metric, rest = _metric(ids, at), call_arguments(inputs)
    tokens = jnp.asarray(tokens)
    start = jnp.full(tokens.shape, baseline)
    shares = interpret.integrated_gradients(model, params, tokens, start, metric, **rest)[0]
    value, base = (metric(model.apply({"params": params}, x, **rest)[0]) for x in (tokens, start))
    # With a norm after each branch, or a softcap, the logits are not a sum of parts.
    if why_not_additive(model.config) is not None:
        return (value, base, shares), None
    parts = interpret.logit_attribution(model, params, tokens, *ids, **rest)
    return (value, base, shares), jax.tree.map(lambda x: x[..., at], parts)
