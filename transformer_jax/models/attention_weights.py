"""Attention weights of all layers and heads."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.places import places
from transformer_jax.models.transformer import Encoder
from transformer_jax.pytree import Params


def attention_weights(
    model: CheckedModule, params: Params, tokens: jax.Array, **arguments: Any
) -> dict[str, jax.Array]:
    """Return the attention weights of all layers and heads.

    The weights are captured after the softmax and before dropout. Each row sums to 1, or to less
    than 1 with `attention_sinks`. The row of a padding token, or of a token that sees no keys, sums
    to 0. Under `jax.jit`, a looped stack computes and stores only the layers that the program uses.

    Args:
        model: a model from `build(config)`, with or without edits.
        params: parameters of the model.
        tokens: i32[B, T], or an array that matches the config's `inputs`.
        **arguments: other arguments of the model, such as `positions` and `source`. To get the
            weights over a cache, capture them with `model.apply(..., capture=(...))` or
            `generate(..., capture=("block_*/attention/weights",))`.

    Returns:
        Dict from "attention" to weights f32[B, L, N, T, S] of the L layers with attention. The key
        for layers with latent attention is "latent_attention". For an encoder-decoder, the dict
        also has the keys "cross_attention" and "encoder/attention". A recurrent
        model has a single attention layer without heads, so its weights are f32[B, T, S], and the
        rows of its padding tokens are not 0.

    Raises:
        ValueError: If the model has no attention, or if a cache is passed.
    """
    if "cache" in arguments:
        rule = "capture weights over a cache with capture=('block_*/attention/weights',)"
        raise ValueError(f"attention_weights does not accept a cache: {rule}")
    names = tuple(name for name in places(model) if name.endswith("attention/weights"))
    if not names:
        raise ValueError(f"{type(model).__name__} has no attention weights")
    if isinstance(model, Encoder):  # an encoder without a token table has no logits to return
        arguments["method"] = "encode"
    captured = model.apply({"params": params}, tokens, capture=names, **arguments)[-1]
    found: dict[str, list[jax.Array]] = {}
    for name, value in captured.items():
        found.setdefault(re.sub(r"block_\d+/", "", name).removesuffix("/weights"), []).append(value)
    in_blocks = any("block_" in name for name in names)
    return {kind: jnp.stack(each, axis=1) if in_blocks else each[0] for kind, each in found.items()}
