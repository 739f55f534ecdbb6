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

    The weights are captured after the softmax and before dropout. A row sums to 1, to less with
    `attention_sinks`, and to 0 if it sees nothing or belongs to a padding token. Under `jax.jit`, a
    looped stack computes and stores only the layers that the program uses.

    Args:
        model: a model from `build(config)`, with or without edits.
        params: its parameters.
        tokens: i32[B, T], or an array that matches the config's `inputs`.
        **arguments: other arguments of the model's call, such as `positions` and `source`. To get
            weights over a cache, capture them instead: `model.apply(..., capture=(...))` or
            `generate(..., capture=("block_*/attention/weights",))`.

    Returns:
        Dict from "attention", and for an encoder-decoder also "cross_attention" and
        "encoder/attention", to weights f32[B, L, N, T, S]. A recurrent model has a single attention
        without heads: f32[B, T, S], whose rows of padding tokens are not 0.

    Raises:
        ValueError: if the model has no attention, or a cache is passed.
    """
    if "cache" in arguments:
        rule = "capture weights over a cache with capture=('block_*/attention/weights',)"
        raise ValueError(f"attention_weights takes no cache: {rule}")
    names = tuple(name for name in places(model) if name.endswith("attention/weights"))
    if not names:
        raise ValueError(f"{type(model).__name__}: this model has no attention weights")
    if isinstance(model, Encoder):  # an encoder without a token table has no logits to return
        arguments["method"] = "encode"
    captured = model.apply({"params": params}, tokens, capture=names, **arguments)[-1]
    found: dict[str, list[jax.Array]] = {}
    for name, value in captured.items():
        found.setdefault(re.sub(r"block_\d+/", "", name).removesuffix("/weights"), []).append(value)
    in_blocks = any("block_" in name for name in names)
    return {kind: jnp.stack(each, axis=1) if in_blocks else each[0] for kind, each in found.items()}
