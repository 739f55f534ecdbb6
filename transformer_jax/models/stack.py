"""Looped and scanned stacks of blocks, and the conversion of parameters between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import biases
from transformer_jax.attention.api import plan_mask
from transformer_jax.attention.masks import Mask
from transformer_jax.cache.model_cache import Layers, ModelCache
from transformer_jax.config import Alibi, CustomPositions, Learned, ModelConfig, Shaw, T5Buckets
from transformer_jax.models.block import Block, BlockInputs, PositionBias
from transformer_jax.models.experts import ROUTED
from transformer_jax.models.functional import split_key
from transformer_jax.models.layers import Norm, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.places import Captured, Visit
from transformer_jax.pytree import Params


class Stack(Module):
    """Sequence of blocks, run as a loop (`block_0`, ...) or as a scan over stacked parameters."""

    config: ModelConfig
    depth: int
    cross: bool = False
    bidirectional: bool = False

    def setup(self) -> None:
        cfg, windows = self.config, self.config.windows
        block = Block
        if cfg.remat in ("full", "dots"):  # `Attention` itself implements remat="attention"
            policy = None  # save only the inputs of each block
            if cfg.remat == "dots":
                policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            # in a loop, XLA would merge the recomputation with the first computation (prevent_cse)
            static = () if cfg.scan_layers else (6,)  # the layer number
            block = nn.remat(
                Block, prevent_cse=not cfg.scan_layers, policy=policy, static_argnums=static
            )
        if cfg.scan_layers:
            lifted: dict[str, object] = dict(
                variable_axes={"params": 0, ROUTED: 0},
                # Without this, all layers would start with the same values.
                split_rngs={"params": True},
                length=self.depth,
            )
            self.blocks = nn.scan(
                block,
                methods={
                    # out_axes=1 results in [B, L, ...], because rows are the first axis of every
                    # cache leaf
                    "scan_step": dict(
                        lifted, in_axes=(0, 0, nn.broadcast, nn.broadcast), out_axes=1
                    ),
                    "scan_cross_cache": dict(lifted, in_axes=nn.broadcast, out_axes=1),
                },
            )(cfg, self.cross, self.depth, windows[0])
        else:
            self.block = [
                block(cfg, self.cross, self.depth, windows[i % len(windows)], i)
                # in ALBERT, all layers share one block (Lan et al. 2020)
                for i in range(1 if cfg.share_layers else self.depth)
            ]
        # all layers share one bias table, as in T5 (Raffel et al. 2020, 2.1)
        if isinstance(cfg.positions, Learned | T5Buckets) and cfg.positions.buckets is not None:
            normal = nn.initializers.normal(cfg.init_std)
            shape = cfg.positions.buckets, cfg.num_heads
            self.relative_bias = parameter(self, "relative_bias", normal, shape)
        if cfg.norm_order != "post":
            self.norm = Norm(cfg)
        refuse_surplus(self)

    def init_cross_cache(
        self,
        memory: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]
    ) -> Layers:
        """Compute the cross-attention keys and values of each block from an encoder's output."""
        if self.config.scan_layers:
            return cast(Any, self.blocks).scan_cross_cache(memory, positions)[1]
        return tuple(block.init_cross_cache(memory, positions) for block in self.block)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: BlockInputs,  # without mask and bias, which this method sets
        masks: tuple[Mask | None, ...],  # layer i has masks[i % len(masks)]
        visit: Visit,  # visits the places outside the blocks, and collects all captured values
        *,
        cache: ModelCache | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Run the blocks and return the output and the updated cache.

        A final norm is applied to the output unless `norm_order` is "post".
        """
        cfg = self.config
        x = visit("embedding", x)

        bias: PositionBias | None = None
        if isinstance(cfg.positions, Alibi):
            bias = biases.ALiBi(biases.alibi_slopes(cfg.num_heads))
        elif isinstance(cfg.positions, CustomPositions):
            bias = cfg.positions.bias(cfg.num_heads)
        elif isinstance(cfg.positions, Learned | T5Buckets) and cfg.positions.buckets is not None:
            bias = biases.RelativeBias(
                self.relative_bias,
                bidirectional=self.bidirectional,
                max_distance=cfg.positions.max_distance,
            )
        if cache is None and not isinstance(cfg.positions, Shaw):
            # plan each mask once, because all self-attention layers share its tile plan
            heads = (cfg.num_heads, cfg.kv_heads, cfg.kv_heads)
            widths = (cfg.key_dim, cfg.key_dim, cfg.value_dim)
            if (latent := cfg.latent_attention) is not None and not cfg.has_heads:
                heads = (cfg.num_heads,) * 3
                widths = (latent.key_dim, latent.key_dim, latent.value_dim)
            sizes = [(*x.shape[:2], n, width) for n, width in zip(heads, widths, strict=True)]
            qkv = [jax.ShapeDtypeStruct(size, cfg.dtype) for size in sizes]
            plan = partial(
                plan_mask,
                *qkv,
                bias=bias,
                q_positions=inputs.positions,
                k_positions=inputs.positions,
                dropout_rate=0.0 if key is None else cfg.attention_dropout,
                dropout_key=key if cfg.attention_dropout else None,
                implementation=cfg.attention_implementation,
            )
            planned: Any = tuple(None if mask is None else plan(mask=mask) for mask in masks)
            masks = planned  # the plans replace their masks

        layers = None if cache is None else cache.layers
        cross = None if cache is None else cache.cross
        if cfg.scan_layers:
            inputs = replace(inputs, mask=masks[0], bias=bias)
            # split the key as the loop below does, so that both draw the same random numbers
            keys = None if key is None else jax.random.split(key, self.depth)
            numbers, blocks = jnp.arange(self.depth), cast(Any, self.blocks)
            sparse: Captured = {}
            if not self.is_initializing() and inputs.places.sparse(self.depth):
                block = Block(cfg, self.cross, self.depth, cfg.windows[0], parent=None)
                step = partial(block.apply, method="scan_step")
                # get the shapes from one block, because a scan needs an initial carry
                first = jax.tree.map(lambda leaf: leaf[0], (blocks.variables, numbers, keys))
                carry: tuple[jax.Array, Layers | None, Captured] = x, layers, {}
                shapes = jax.eval_shape(step, first[0], carry, *first[1:], cross, inputs)[1]
                sparse = inputs.places.empty(shapes, self.depth)
            (x, layers, sparse), dense = blocks.scan_step(
                (x, layers, sparse), numbers, keys, cross, inputs
            )
            visit.captured |= inputs.places.collect(dense) | sparse
        else:
            updated: list[Any] = []  # KVCache, PagedCache or None
            # one value for each mask in the window pattern, shared by the layers that use the mask
            per_mask = [replace(inputs, mask=mask, bias=bias) for mask in masks]
            for i, block_key in enumerate(split_key(key, self.depth)):
                layer = layers[i] if isinstance(layers, tuple) else None
                cross_cache: Any = cross[i] if isinstance(cross, tuple) else None
                x, layer, captured = self.block[i % len(self.block)](
                    x, per_mask[i % len(masks)], layer, cross_cache, block_key, i
                )
                updated.append(layer)
                visit.captured |= {f"block_{i}/{name}": value for name, value in captured.items()}
            layers = None if layers is None else tuple(updated)
        # a post-norm block already ends with a norm
        if cfg.norm_order != "post":
            x = visit("final_norm", self.norm(x))
        cache = None if cache is None or layers is None else replace(cache, layers=layers)
        return x, cache


def stack_layers(params: Params) -> Params:
    """Convert the parameters of a looped model to the parameters of the scanned model.

    `block_0`, `block_1`, ... become `blocks`, whose leaves have a leading axis L.
    """
    # sort by number, because as strings, block_10 would precede block_9
    names = sorted((n for n in params if n.startswith("block_")), key=lambda n: int(n[6:]))
    out: dict[str, Any] = {
        name: stack_layers(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name not in names
    }
    if names:
        out["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[n] for n in names))
    return out


def unstack_layers(params: Params) -> Params:
    """Convert the parameters of a scanned model to the parameters of the looped model.

    This function is the inverse of `stack_layers`.
    """
    out: dict[str, Any] = {}
    for name, value in params.items():
        if name == "blocks":
            depth = jax.tree.leaves(value)[0].shape[0]
            for i in range(depth):
                out[f"block_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], value)
        else:
            out[name] = unstack_layers(value) if isinstance(value, Mapping) else value
    return out
