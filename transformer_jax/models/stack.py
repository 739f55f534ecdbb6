"""Stack blocks, looped or scanned, and convert parameters between the two."""

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
from transformer_jax.config import Alibi, ModelConfig, OwnPositions, Shaw
from transformer_jax.config.positions import distance_buckets
from transformer_jax.models.block import Block, BlockInputs, PositionBias
from transformer_jax.models.experts import ROUTED
from transformer_jax.models.functional import split_key
from transformer_jax.models.layers import Norm, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.places import Captured, Visit
from transformer_jax.pytree import Params


class Stack(Module):
    """Blocks one after the other: a loop (`block_0`, ...) or a scan over stacked parameters."""

    config: ModelConfig
    depth: int
    cross: bool = False
    bidirectional: bool = False

    def setup(self) -> None:
        cfg, windows = self.config, self.config.windows
        block = Block
        if cfg.remat in ("full", "dots"):  # what only attention computes again is the block's own
            policy = None  # nothing is kept but what a block reads
            if cfg.remat == "dots":
                policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            # in a loop, XLA would join the second computation with the first
            static = () if cfg.scan_layers else (6,)  # the number of the layer
            block = nn.remat(
                Block, prevent_cse=not cfg.scan_layers, policy=policy, static_argnums=static
            )
        if cfg.scan_layers:
            lifted: dict[str, object] = dict(
                variable_axes={"params": 0, ROUTED: 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            self.blocks = nn.scan(
                block,
                methods={
                    # gathered as [B, L, ...]: every leaf of a result leads with its rows
                    "scan_step": dict(
                        lifted, in_axes=(0, 0, nn.broadcast, nn.broadcast), out_axes=1
                    ),
                    "scan_cross_cache": dict(lifted, in_axes=nn.broadcast, out_axes=1),
                },
            )(cfg, self.cross, self.depth, windows[0])
        else:
            self.block = [
                block(cfg, self.cross, self.depth, windows[i % len(windows)], i)
                # ALBERT has one block, which every layer runs (Lan et al. 2020)
                for i in range(1 if cfg.share_layers else self.depth)
            ]
        # one table of biases for all layers, as in T5 (Raffel et al. 2020, 2.1)
        if (distances := distance_buckets(cfg.positions)) is not None:
            normal = nn.initializers.normal(cfg.init_std)
            shape = distances.buckets, cfg.num_heads
            self.relative_bias = parameter(self, "relative_bias", normal, shape)
        if cfg.norm_order != "post":
            self.norm = Norm(cfg)
        refuse_surplus(self)

    def init_cross_cache(
        self,
        memory: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]
    ) -> Layers:
        """Compute every block's keys and values of an encoder's output."""
        if self.config.scan_layers:
            return cast(Any, self.blocks).scan_cross_cache(memory, positions)[1]
        return tuple(block.init_cross_cache(memory, positions) for block in self.block)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        given: BlockInputs,  # its mask and bias are not read
        masks: tuple[Mask | None, ...],  # layer i has masks[i % len(masks)]
        visit: Visit,  # of what stands around the blocks; all captured values are added to it
        *,
        cache: ModelCache | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Run the blocks: return the output and the updated cache.

        The output is normalised, unless `norm_order` is "post".
        """
        cfg = self.config
        x = visit("embedding", x)

        bias: PositionBias | None = None
        if isinstance(cfg.positions, Alibi):
            bias = biases.ALiBi(biases.alibi_slopes(cfg.num_heads))
        elif isinstance(cfg.positions, OwnPositions):
            bias = cfg.positions.bias(cfg.num_heads)
        elif (distances := distance_buckets(cfg.positions)) is not None:
            bias = biases.RelativeBias(
                self.relative_bias,
                bidirectional=self.bidirectional,
                max_distance=distances.max_distance,
            )
        if cache is None and not isinstance(cfg.positions, Shaw):
            # the layers, which attend to x itself, share what is planned of a mask
            heads = (cfg.num_heads, cfg.kv_heads, cfg.kv_heads)
            widths = (cfg.key_dim, cfg.key_dim, cfg.value_dim)
            sizes = [(*x.shape[:2], n, width) for n, width in zip(heads, widths, strict=True)]
            qkv = [jax.ShapeDtypeStruct(size, cfg.dtype) for size in sizes]
            plan = partial(
                plan_mask,
                *qkv,
                bias=bias,
                q_positions=given.positions,
                k_positions=given.positions,
                dropout_rate=0.0 if key is None else cfg.attention_dropout,
                dropout_key=key if cfg.attention_dropout else None,
                implementation=cfg.implementation,
            )
            planned: Any = tuple(None if mask is None else plan(mask=mask) for mask in masks)
            masks = planned  # a plan takes the place of its mask

        layers = None if cache is None else cache.layers
        cross = None if cache is None else cache.cross
        if cfg.scan_layers:
            own = replace(given, mask=masks[0], bias=bias)
            # the split of the loop below: looped and scanned draw the same numbers
            keys = None if key is None else jax.random.split(key, self.depth)
            numbers, blocks = jnp.arange(self.depth), cast(Any, self.blocks)
            kept: Captured = {}
            if not self.is_initializing() and own.places.of_few_blocks(self.depth):
                block = Block(cfg, self.cross, self.depth, cfg.windows[0], parent=None)
                step = partial(block.apply, method="scan_step")
                # one block tells the shapes of all: the carry of a scan must exist before it begins
                first = jax.tree.map(lambda leaf: leaf[0], (blocks.variables, numbers, keys))
                shapes = jax.eval_shape(step, first[0], (x, layers, {}), *first[1:], cross, own)[1]
                kept = own.places.empty(shapes, self.depth)
            carry = x, layers, kept
            (x, layers, kept), found = blocks.scan_step(carry, numbers, keys, cross, own)
            visit.captured |= own.places.collect(found) | kept
        else:
            updated: list[Any] = []  # of one class of cache, or None
            # one value for each mask of the window pattern, which the layers share
            inputs = [replace(given, mask=mask, bias=bias) for mask in masks]
            for i, own_key in enumerate(split_key(key, self.depth)):
                own = inputs[i % len(masks)]
                layer = layers[i] if isinstance(layers, tuple) else None
                cross_cache: Any = cross[i] if isinstance(cross, tuple) else None
                x, layer, found = self.block[i % len(self.block)](
                    x, own, layer, cross_cache, own_key, i
                )
                updated.append(layer)
                visit.captured |= {f"block_{i}/{name}": value for name, value in found.items()}
            layers = None if layers is None else tuple(updated)
        # a post-norm block ends with a norm, so the stack has none
        if cfg.norm_order != "post":
            x = visit("final_norm", self.norm(x))
        cache = None if cache is None or layers is None else replace(cache, layers=layers)
        return x, cache


def stack_layers(params: Params) -> Params:
    """Return a looped model's parameters as its scanned twin has them.

    `block_0`, `block_1`, ... become `blocks`, whose leaves lead with L. Names and numbers stay.
    """
    # by number: as text, block_10 would come before block_9
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
    """Return a scanned model's parameters as its looped twin has them: undo `stack_layers`."""
    out: dict[str, Any] = {}
    for name, value in params.items():
        if name == "blocks":
            depth = jax.tree.leaves(value)[0].shape[0]
            for i in range(depth):
                out[f"block_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], value)
        else:
            out[name] = unstack_layers(value) if isinstance(value, Mapping) else value
    return out
