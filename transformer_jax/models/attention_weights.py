"""Return the weights of attention of all layers and heads."""

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
    """Return the weights by which each token averages values, of all layers and heads.

    They are captured after the softmax and before dropout. A row sums to 1, to less by the share of
    `attention_sinks`, and to 0 if it sees nothing or belongs to a padding token. Under `jax.jit`, a
    looped stack computes and stores only the layers that the program uses.

    Args:
        model: what `build(config)` gave, which may be edited.
        params: its parameters.
        tokens: i32[B, T], or what the config's inputs describe.
        **arguments: the others of the model's call, such as `positions` and `source`. With a cache,
            capture the weights where they are needed: `model.apply(..., capture=(...))` or
            `generate(..., capture=("block_*/attention/weights",))`.

    Returns:
        f32[B, L, N, T, S] by the name of the attention: "attention", and of an encoder-decoder also
        "cross_attention" and "encoder/attention". A recurrent model has no layers: f32[B, T, S], in
        which rows of padding tokens are not 0.

    Raises:
        ValueError: if the model has no attention, or a cache is given.
    """
    if "cache" in arguments:
        rule = "weights over a cache are captured: capture=('block_*/attention/weights',)"
        raise ValueError(f"attention_weights takes no cache: {rule}")
    names = tuple(name for name in places(model) if name.endswith("attention/weights"))
    if not names:
        raise ValueError(f"{type(model).__name__}: this model has no attention weights")
    # an encoder without a table of tokens, as of pictures, has no logits to return
    given = dict(arguments, method="encode") if isinstance(model, Encoder) else arguments
    captured = model.apply({"params": params}, tokens, capture=names, **given)[-1]
    found: dict[str, list[jax.Array]] = {}
    for name, value in captured.items():
        found.setdefault(re.sub(r"block_\d+/", "", name).removesuffix("/weights"), []).append(value)
    in_blocks = any("block_" in name for name in names)
    return {kind: jnp.stack(own, axis=1) if in_blocks else own[0] for kind, own in found.items()}
