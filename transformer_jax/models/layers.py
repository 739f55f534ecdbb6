"""Layers of a transformer: linen modules that own parameters and call pure functions.

Passing a `key` turns dropout on. A module receives its key as an argument, splits it once and
passes on the parts, so looped and scanned stacks draw the same random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamShapeError

from transformer_jax.config import CustomPositions, Learned, ModelConfig, Sinusoidal
from transformer_jax.models import ops
from transformer_jax.models import positions as pos
from transformer_jax.models.adapters import AdaptedKernel, product
from transformer_jax.models.functional import F32, activate, dropout, gated, xielu
from transformer_jax.models.module import Module
from transformer_jax.models.places import Visit
from transformer_jax.models.quantized import QuantizedKernel, QuantizedTable, table_logits
from transformer_jax.sharding import gathered
from transformer_jax.values import short_repr


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> jax.Array:
    """Declare an f32 parameter, or only check its shape if it already exists.

    `module.param` would trace the initializer to compare shapes, which takes half of the total
    tracing time.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, F32)
    module._state.children[name] = "params"  # mark it as declared, as `module.param` does
    value = nn.unbox(module.get_variable("params", name))
    if np.shape(value) != shape:
        path = "/".join(module.path)
        raise ScopeParamShapeError(name, path, np.shape(value), shape)
    return value


_FIELDS = {
    "embed/bias": "logit_bias", "embed/projection": "embedding_dim",
    "embed/norm": "embedding_norm", "query/bias": "qkv_bias",
    "key/bias": "qkv_bias", "value/bias": "qkv_bias", "up/bias": "ff_bias", "gate/bias": "ff_bias",
    "down/bias": "ff_bias", "out/bias": "out_bias", "bias": "use_bias", "gate": "glu",
    "router": "experts", "router/bias": "experts", "shared": "experts", "shared_gate": "experts",
    "selection_bias": "experts",
    "output": "tie_embeddings", "positions": "positions", "relative_bias": "positions",
    "shaw_key": "positions", "shaw_value": "positions", "source_tokens": "source_vocab_size",
    "types": "type_vocab_size",
    "alpha_positive": "activation", "alpha_negative": "activation",
    "query_scale": "qk_norm", "key_scale": "qk_norm", "query_norm_bias": "qk_norm_bias",
    "key_norm_bias": "qk_norm_bias", "sinks": "attention_sinks",
    "attention/gate": "attention_gate", "cross_attention/gate": "attention_gate",
    "classifier": "num_classes", "pooler": "pooler", "head_dense": "masked_token_head",
    "head_norm": "masked_token_head", "cross_attention": "kind", "encoder": "kind",
    "gated_delta": "mixers", "norm_gated_delta": "mixers", "attention": "mixers",
    "short_conv": "mixers", "norm_short_conv": "mixers",
    "latent_attention": "mixers", "norm_latent_attention": "mixers",
    "decoder": "kind", "feed_forward": "d_ff", "inputs": "inputs", "blocks": "scan_layers",
    "block_": "num_layers", "own": "block",
    "norm_attention": "norm_order", "norm_feed_forward": "norm_order", "norm": "norm_order",
    "out_norm_attention": "norm_order", "out_norm_feed_forward": "norm_order",
    "cell_": "num_layers", "hidden_": "num_layers", "words_": "order", "direct": "direct",
    "w_query": "attention", "w_key": "attention", "v": "attention", "w": "attention",
}  # fmt: skip
"""Config field that creates each parameter, keyed by the end of the parameter's path."""


def refuse_surplus(module: nn.Module) -> None:
    """Raise ValueError if `params` contains parameters that the module has not declared.

    Flax would silently ignore such parameters, for example an extra layer or a bias that the config
    does not have. Subclasses defined elsewhere, and modules that share a scope with their parent,
    are not checked because they may declare more parameters later.
    """
    parent_scope = getattr(module.parent, "scope", None)
    ours = type(module).__module__.startswith("transformer_jax.")
    if not ours or parent_scope is module.scope:
        return
    declared = module._state.children
    for name in module.variables.get("params", {}):
        if name in declared:
            continue
        path, config = (*module.path, name), getattr(module, "config", None)
        field = _FIELDS.get("/".join(path[-2:])) or _FIELDS.get(name.rstrip("0123456789"), "")
        sized = {"gated_delta", "short_conv", "latent_attention"} & {*module.path}
        field = sized.pop() if sized else field  # these mixers have biases of their own
        if field == "num_layers" and "blocks" in declared:
            field = "scan_layers"
        elif field == "num_layers" and getattr(config, "num_decoder_layers", None) is not None:
            field = "num_decoder_layers" if "decoder" in path else field
        value = getattr(config, field, NotImplemented) if field else NotImplemented
        rule = "which the config does not use"
        if value is not NotImplemented:
            rule = f"but {field} is {value!r}"
        raise ValueError(f"parameters contain {'/'.join(path)}, {rule}")


def refuse_rngs(module: nn.Module, key: jax.Array | None) -> None:
    """Raise ValueError if `model.apply` received a 'dropout' key in `rngs` and no `key` argument.

    None of these modules reads flax's `rngs`, so dropout would silently be off. Keys with other
    names, such as those that `nnx.bridge` passes, are allowed. If the model is inside another
    module, all keys are allowed, because the layers of that module may use them.
    """
    scope = module.scope
    if key is not None or scope is None or scope.path or module.is_initializing():
        return
    if "dropout" in scope.rngs:
        rule = "pass the dropout key as an argument: model.apply(variables, ..., key=key)"
        raise ValueError(f"rngs contains 'dropout': {rule}")


class Norm(Module):
    """LayerNorm or RMSNorm over the last axis, or the identity if the config has no norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        cfg = self.config
        if cfg.norm is None:
            refuse_surplus(self)
            return x
        scale = norm_scale(self, "scale", cfg, x.shape[-1])
        centred, bias = cfg.norm == "layernorm", None
        if centred and cfg.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],))
        refuse_surplus(self)
        return ops.norm(x, scale, bias, cfg.norm_eps, centred=centred, invariant=cfg.invariant)


def norm_scale(module: nn.Module, name: str, config: ModelConfig, *shape: int) -> jax.Array:
    """Declare a norm's scale, which is initially 1, and return it as f32[shape]."""
    if config.norm_unit_offset:
        # in Gemma, the parameter is scale - 1
        return 1.0 + parameter(module, name, nn.initializers.zeros, shape).astype(F32)
    return parameter(module, name, nn.initializers.ones, shape).astype(F32)


class Linear(Module):
    """Linear layer x W + b over the last `contract` axes, in the compute dtype.

    W is initialized from N(0, std^2). Only the dropout of low-rank adapters uses the key.
    """

    config: ModelConfig
    features: tuple[int, ...]
    contract: int = 1
    use_bias: bool | None = None
    std: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        cfg = self.config
        std = cfg.init_std if self.std is None else self.std
        shape = (*x.shape[x.ndim - self.contract :], *self.features)
        kernel = parameter(self, "kernel", nn.initializers.normal(std), shape)
        bias = None
        if cfg.use_bias if self.use_bias is None else self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.features).astype(cfg.dtype)
        refuse_surplus(self)
        x = x.astype(cfg.dtype)
        if isinstance(kernel, AdaptedKernel | QuantizedKernel):
            name = str(self.name)
            return product(x, kernel, bias, self.contract, key, name, invariant=cfg.invariant)
        return ops.project(x, kernel, bias, self.contract, invariant=cfg.invariant)


def branch_std(config: ModelConfig, depth: int | None) -> float:
    """Return the initial std of a branch's output matrix: std / sqrt(branches), as in GPT-2.

    A stack sums 2 L branches, or L branches if there are no feed-forward branches.
    """
    depth = config.num_layers if depth is None else depth
    return config.init_std / ((2 if config.ff_dim else 1) * depth) ** 0.5


class FeedForward(Module):
    """Feed-forward layer act(x W_up) W_down.

    With `glu`, it is (act(x W_gate) * (x W_up)) W_down (Shazeer 2020).
    """

    config: ModelConfig
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""

    @nn.compact
    def __call__(
        self, x: jax.Array, key: jax.Array | None = None, visit: Visit | None = None
    ) -> jax.Array:  # [B, T, D] -> [B, T, D]
        cfg = self.config
        linear = partial(Linear, cfg, use_bias=cfg.ff_bias)
        hidden = linear((cfg.ff_dim,), name="up")(x, key)
        if cfg.glu:
            gate = linear((cfg.ff_dim,), name="gate")(x, key)
            hidden = gated(gate, hidden, cfg.activation, cfg.glu_limit, cfg.glu_unit_offset)
        elif cfg.activation == "xielu":
            start = dict(alpha_positive=0.8, alpha_negative=0.3)  # their softplus
            alphas = (
                parameter(self, name, nn.initializers.constant(np.log(np.expm1(value))), (1,))
                for name, value in start.items()
            )
            hidden = xielu(hidden, *alphas)
        else:
            hidden = activate(hidden, cfg.activation)
        hidden = hidden if visit is None else visit("feed_forward/hidden", hidden)
        down = linear((cfg.d_model,), name="down", std=branch_std(cfg, self.depth))
        refuse_surplus(self)
        y = down(hidden, key)
        return y if visit is None else visit("feed_forward/output", y)


@short_repr
class OutputLayer(NamedTuple):
    """Operands of the logits, which are x table^T + bias before a softcap."""

    x: jax.Array  # [B, T, D]
    table: jax.Array  # [V, D]
    bias: jax.Array | None  # [V]


class Embed(Module):
    """Token, position and type embeddings, and the output matrix.

    Both stacks of an encoder-decoder share the token vectors unless the config has a
    `source_vocab_size`. The target has its own position table and its own norm (Lewis et al. 2020).
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        width = cfg.embedding_width
        # `__call__` multiplies by sqrt(width), so the vectors initially have unit variance
        std = width**-0.5 if cfg.scale_embeddings else cfg.init_std
        normal = nn.initializers.normal(std)
        if cfg.kind != "encoder" or cfg.inputs is None:
            self.tokens = parameter(self, "tokens", normal, (cfg.vocab_size, width))
        if cfg.source_vocab_size is not None:
            shape = cfg.source_vocab_size, width
            self.source_tokens = parameter(self, "source_tokens", normal, shape)
        sides = ("", "target_") if cfg.kind == "encoder-decoder" else ("",)
        if isinstance(cfg.positions, Learned):
            shape = cfg.max_len + cfg.positions.offset, width
            self.tables = [parameter(self, f"{side}positions", normal, shape) for side in sides]
        if cfg.type_vocab_size is not None:
            self.types = parameter(self, "types", normal, (cfg.type_vocab_size, width))
        if cfg.embedding_norm:
            self.norms = [Norm(cfg, name=f"{side}norm") for side in sides]
        if not cfg.tie_embeddings:
            self.output = parameter(self, "output", normal, (cfg.vocab_size, width))
        if cfg.embedding_dim is not None:
            self.projection = Linear(cfg, (cfg.d_model,))
        if cfg.logit_bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros, (cfg.vocab_size,))
        refuse_surplus(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T], or [B, T, D] from an `InputLayer`
        token_positions: jax.Array,  # i32[B, T] or [T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
        target: bool = False,
    ) -> jax.Array:  # [B, T, D]
        """Return E[token] (times a scale) plus position and type vectors, or zeros for padding.

        If there is an embedding norm with a bias, it maps the zeros to that bias.
        """
        cfg = self.config
        if tokens.ndim == 3:
            x = tokens.astype(F32)
        else:
            separate = cfg.source_vocab_size is not None and not target
            table: jax.Array | QuantizedTable = self.source_tokens if separate else self.tokens
            x = (
                table.look_up(tokens)
                if isinstance(table, QuantizedTable)
                else ops.lookup(table, tokens)
            )
            scale = cfg.embedding_width**0.5 if cfg.scale_embeddings else cfg.embedding_scale
            x = x if scale is None else x * scale
        # The vectors are added in f32, and the sum is rounded to the compute dtype once, at the
        # end.
        added = None
        if isinstance(cfg.positions, Learned):
            added = pos.learned(self.tables[target], token_positions, cfg.positions.offset)
        elif isinstance(cfg.positions, Sinusoidal):
            width = cfg.embedding_width
            added = pos.sinusoidal_of(cfg.positions, token_positions, width).astype(F32)
        elif isinstance(cfg.positions, CustomPositions):
            added = cfg.positions.embed(pos.in_rows(token_positions), cfg.embedding_width)
        if added is not None:
            x = x + (added if added.ndim == 3 else added[None])
        if cfg.type_vocab_size is not None:
            # In BERT, a single text has type 0, whose vector is not zero.
            x = x + ops.lookup(self.types, jnp.zeros_like(tokens) if types is None else types)
        if token_positions.ndim == 2:  # otherwise, 0 * NaN from padding would enter gradients
            x = jnp.where((token_positions < 0)[:, :, None], 0.0, x)
        if cfg.embedding_norm:
            x = self.norms[target](x)
        x = dropout(x, cfg.dropout, key).astype(cfg.dtype)
        return x if cfg.embedding_dim is None else self.projection(x)

    def output_layer(self, x: jax.Array) -> OutputLayer:  # [B, T, D]
        """Return the operands of the logits, so that a loss can compute them in chunks."""
        cfg = self.config
        x = x if cfg.logit_scale is None else x * cfg.logit_scale
        table = self.tokens if cfg.tie_embeddings else self.output
        table = gathered(table.astype(cfg.dtype), x, slice(2))
        return OutputLayer(x, table, self.bias if cfg.logit_bias else None)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> f32[B, T, V]
        """Return the softcapped logits (scale) x E^T (+ bias), always in f32."""
        cfg = self.config
        table: jax.Array | QuantizedTable = self.tokens if cfg.tie_embeddings else self.output
        x = x if cfg.logit_scale is None else x * cfg.logit_scale
        bias = self.bias if cfg.logit_bias else None
        if isinstance(table, QuantizedTable):
            y = table_logits(x, table, bias, invariant=cfg.invariant)
        else:
            y = ops.logits(x, table, bias, invariant=cfg.invariant)
        if cfg.logit_softcap is not None:
            y = cfg.logit_softcap * jnp.tanh(y / cfg.logit_softcap)
        return y
