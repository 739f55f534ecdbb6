"""Count the multiplications and additions that a transformer's products take, from its config."""

from __future__ import annotations

import math
from typing import Any

import jax

from transformer_jax.config import ModelConfig
from transformer_jax.models.factory import init_params
from transformer_jax.models.stack import unstack_layers


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the operations of reading one sequence, all of whose tokens get logits.

    2 x the elements of each matrix x the tokens that it multiplies, and of each attention
    2 N (H + Hv) for each pair of a query and a key that its mask lets through (Kaplan et al. 2020,
    2.1; causal pairs are counted once, not the square). `length` is that of the target of an
    encoder-decoder, whose source has `source_length`. Norms, activations and look-ups are left out.
    Where the config has `inputs`, their projection is left out too.
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes = jax.eval_shape(unstack_layers, shapes)
    total = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if names[-1] == "kernel":
            total += 2 * math.prod(leaf.shape) * _tokens(names, config, length, source_length)
    if config.inputs is None or config.kind == "encoder-decoder":
        total += 2.0 * config.vocab_size * config.d_model * length
    causal = config.kind != "encoder"
    target = length if config.kind != "encoder" else 0
    pair = 2.0 * config.num_heads * (config.key_dim + config.value_dim)
    if config.kind != "decoder":
        source = length if config.kind == "encoder" else source_length
        total += pair * sum(_pairs(w, source, False) for w in _windows(config, config.num_layers))
    if target:
        depth = config.decoder_layers if config.kind == "encoder-decoder" else config.num_layers
        total += pair * sum(_pairs(w, target, causal) for w in _windows(config, depth))
        if config.kind == "encoder-decoder":
            total += pair * depth * target * source_length
    return total


def training_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the operations of learning from one sequence: the backward pass takes two of its own.

    What `remat` computes again is not counted, as is usual where utilisation is measured.
    """
    return 3.0 * forward_flops(config, length, source_length)


def _windows(config: ModelConfig, depth: int) -> list[int | None]:
    return [config.windows[i % len(config.windows)] for i in range(depth)]


def _pairs(window: int | None, length: int, causal: bool) -> float:
    """Count the pairs of a query and a key that a window lets through."""
    reach = length if window is None else min(window, length)
    before = reach * (reach + 1) / 2 + (length - reach) * reach  # the query itself included
    return before if causal else 2 * before - length


def _tokens(names: list[str], config: ModelConfig, length: int, source_length: int) -> Any:
    """Return how many tokens a kernel multiplies."""
    if config.kind != "encoder-decoder":
        return 1 if names[0] in ("pooler", "classifier") else length
    of_memory = "cross_attention" in names and names[-2] in ("key", "value")
    return source_length if names[0] == "encoder" or of_memory else length
