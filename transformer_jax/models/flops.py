"""Count the multiplications and additions that a transformer's products take, from its config."""

from __future__ import annotations

import math

import jax

from transformer_jax.config import ModelConfig
from transformer_jax.models.factory import init_params
from transformer_jax.models.stack import unstack_layers


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the operations of reading one sequence, all of whose tokens get logits.

    2 x the elements of each matrix x the tokens that it multiplies, and of each attention
    2 N (H + Hv) for each pair of a query and a key that its mask lets through (Kaplan et al. 2020,
    2.1; causal pairs are counted once, not the square). Of experts those count that a token is
    given to. `length` is that of the target of an encoder-decoder, whose source has
    `source_length`. Norms, activations and look-ups are left out; a classifier has logits of its
    classes, and none of tokens.
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes = jax.eval_shape(unstack_layers, shapes)
    total = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if names[-1] == "kernel":
            tokens = _tokens(names, config, length, source_length)
            times = config.num_layers if config.share_layers and "block_0" in names else 1
            total += 2 * math.prod(leaf.shape) * tokens * _share(names, config) * times
    if config.num_classes is None and config.has_logits:
        total += 2.0 * config.vocab_size * config.embedding_width * length
    causal = config.kind != "encoder"
    target = length if config.kind != "encoder" else 0
    pair = 2.0 * config.num_heads * (config.key_dim + config.value_dim)
    if config.kind != "decoder":
        source = length if config.kind == "encoder" else source_length
        windows = _windows(config, config.num_layers)
        total += pair * sum(_pairs(w, source, False, config.sink_tokens) for w in windows)
    if target:
        depth = config.decoder_layers if config.kind == "encoder-decoder" else config.num_layers
        windows = _windows(config, depth)
        total += pair * sum(_pairs(w, target, causal, config.sink_tokens) for w in windows)
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


def _pairs(window: int | None, length: int, causal: bool, sinks: int) -> float:
    """Count the pairs of a query and a key that a window and the sink tokens let through."""
    reach = length if window is None else min(window, length)
    before = reach * (reach + 1) / 2 + (length - reach) * reach  # the query itself included
    past = length - reach  # keys that the last query has before its window, one less for each
    some = min(sinks, past)
    before += some * (some + 1) / 2 + (past - some) * some
    if causal:
        return before
    after = reach * (reach + 1) / 2 + (length - reach) * reach
    return before + after - length


def active_params(config: ModelConfig) -> int:
    """Count the parameters that a token meets: of experts, those that it is given to."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    total = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        total += math.prod(leaf.shape) * _share(names, config)
    return round(total)


def _share(names: list[str], config: ModelConfig) -> float:
    """Return which part of a parameter a token meets."""
    of_experts = names[-3:-2] == ["feed_forward"] and names[-2] in ("up", "gate", "down")
    if config.experts is None or not of_experts:
        return 1.0
    return config.experts.top_k / config.experts.count


def _tokens(names: list[str], config: ModelConfig, length: int, source_length: int) -> int:
    """Return how many tokens a kernel multiplies."""
    if config.kind != "encoder-decoder":
        pools = "head_dense" if config.pooling == "transform" else "pooler"
        once = (pools, "classifier") if config.classes_of == "text" else (pools,)
        return 1 if names[0] in once and config.pooler_reads != "each" else length
    of_memory = "cross_attention" in names and names[-2] in ("key", "value")
    return source_length if names[0] in ("encoder", "inputs") or of_memory else length
