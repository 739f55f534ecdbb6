"""Kimi Linear (Kimi Team 2025): layers with a state, latent attention, and experts.

The layers with a state are Kimi Delta Attention: each channel of a key has its own decay. Latent
attention has no positional encoding.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import Experts, GatedDelta, ModelConfig
from transformer_jax.config.mixers import Mixer
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.deepseek import (
    latent_keys,
    latent_mappings,
    read_groups,
    shared_width,
)
from transformer_jax.pretrained.families.experts import MIXTRAL_NAMES, NAMES, expert_mappings
from transformer_jax.pretrained.families.hybrid import mixers_of_types, separate_mappings
from transformer_jax.pretrained.families.llama import llama_family
from transformer_jax.untrusted_files import JsonObject

_MATRICES = dict(beta="b", decay_latent="f_a", decay="f_b", gate_latent="g_a", gate="g_b")


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    block = "model.layers.{i}"
    module = f"{block}.self_attn"
    delta = separate_mappings(module, _MATRICES, t.Layout("heads"))
    latent = latent_mappings(config, module)
    dense = t.named(config, block, t.gated_names("mlp"))
    routed = expert_mappings(config, "block_sparse_moe", MIXTRAL_NAMES, "shared_experts")

    def mappings(i: int) -> list[t.TensorMapping]:
        mixer = config.mixer(i)
        names = {f"norm_{mixer}": "input", "norm_feed_forward": "post_attention"}
        norms = {param: f"{name}_layernorm" for param, name in names.items()}
        own = delta if mixer == "gated_delta" else latent
        last = routed if config.has_experts(i) else dense
        return t.named(config, block, norms) + own + last

    return t.decoder(config, "model.embed_tokens", mappings, "model.norm")


_MIXERS: dict[str, Mixer] = {
    "linear_attention": "gated_delta", "full_attention": "latent_attention",
}  # fmt: skip
_LISTS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
_SIZES = {
    "num_heads": ("linear_num_heads", 32), "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip
"""Names of the sizes in transformers and their defaults, keyed by their names in
`linear_attn_config`."""


def _read_layers(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read the mixers and the sizes of layers with a state.

    Published files contain them in `linear_attn_config`. When transformers saves a model, it also
    writes them outside this object.
    """
    spec, layers = keys.take("linear_attn_config", None), fields["num_layers"]
    if not isinstance(spec, dict | None):
        keys.fail("linear_attn_config", spec, "must be an object or null")
    inner = k.ConfigKeys(spec or {}, f"{keys.where}: linear_attn_config")
    sizes = []
    for name, (theirs, default) in _SIZES.items():
        if name in inner.content:
            sizes.append(inner.integer(name))
            if keys.take(theirs, None) not in (None, sizes[-1]):
                rule = f"must equal linear_attn_config.{name}, {sizes[-1]}"
                keys.fail(theirs, keys.take(theirs), rule)
        else:
            sizes.append(keys.integer(theirs, default))
    types = keys.take("layer_types", None)
    if any(name in inner.content for name in _LISTS):
        listed = _types_of_lists(inner, layers)
        if types not in (None, listed):
            keys.fail("layer_types", types, "must agree with the lists in linear_attn_config")
        types = listed
    inner.check_all_read()
    if types is None:
        types = [[*_MIXERS][i > 0 and i % 4 == 0] for i in range(layers)]
    heads, width, window = sizes
    found = dict(num_key_heads=heads, num_value_heads=heads, conv_width=window)
    found |= dict.fromkeys(("key_dim", "value_dim", "decay_rank", "gate_rank"), width)
    mixers = mixers_of_types(keys, fields, types, _MIXERS)
    return mixers | {f"gated_delta.{name}": size for name, size in found.items()}


def _types_of_lists(keys: k.ConfigKeys, layers: int) -> list[str]:
    """Return the type of each layer. The lists count layers from 1."""
    found: dict[int, str] = {}
    for name, kind in _LISTS.items():
        numbers = keys.take(name, None)
        rule = f"must be a list of numbers from 1 to {layers}, each in only one list"
        if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
            keys.fail(name, numbers, rule)
        if {*numbers} & found.keys() or not {*numbers} <= {*range(1, layers + 1)}:
            keys.fail(name, numbers, rule)
        found |= dict.fromkeys(numbers, kind)
    for n in range(1, layers + 1):
        if n not in found:
            rule = f"must contain {n}, which is not in kda_layers either"
            keys.fail("full_attn_layers", keys.take("full_attn_layers"), rule)
    return [found[n] for n in range(1, layers + 1)]


def _write_layers(config: ModelConfig) -> JsonObject:
    names = {mixer: name for name, mixer in _MIXERS.items()}
    kinds = [names.get(config.mixer(i)) for i in range(config.num_layers)]
    lists = {
        name: [i + 1 for i, found in enumerate(kinds) if found == kind]
        for name, kind in _LISTS.items()
    }
    sizes = config.gated_delta or GatedDelta()
    numbers = dict(zip(_SIZES, (sizes.num_key_heads, sizes.key_dim, sizes.conv_width), strict=True))
    return dict(linear_attn_config=lists | numbers)


def _read_dense(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read the number of first layers without experts."""
    count, types = keys.take("first_k_dense_replace", None), keys.take("mlp_layer_types", None)
    if types is None:
        first = 1 if count is None else keys.integer("first_k_dense_replace", least=0)
    else:
        layers = fields["num_layers"]
        first = types.count("dense") if isinstance(types, list) else -1
        if first < 0 or types != ["dense"] * first + ["sparse"] * (layers - first):
            rule = f"must be a list of {layers} (num_hidden_layers): first 'dense', then 'sparse'"
            keys.fail("mlp_layer_types", types, rule)
        if count not in (None, first):
            keys.fail("first_k_dense_replace", count, "must agree with mlp_layer_types")
    return {"experts.dense_layers": first}


def _write_dense(config: ModelConfig) -> JsonObject:
    return dict(first_k_dense_replace=0 if config.experts is None else config.experts.dense_layers)


def _write_groups(config: ModelConfig) -> JsonObject:
    experts = config.experts or Experts()
    return dict(num_expert_group=experts.groups, topk_group=experts.top_groups)


KIMI_LINEAR = llama_family(
    "kimi_linear",
    [
        *k.standard_sizes()[:-1],
        k.Key("model_max_length", "max_len", k.integer),
        k.same("num_key_value_heads", "num_heads", "num_attention_heads"),
        k.Fixed(tie_embeddings=False),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Fixed(norm="rmsnorm", glu=True, use_bias=False, positions=None),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("hidden_act", "activation", k.activation(), "silu"),
        *latent_keys(query_rank=None),
        k.Key("num_experts", "experts.count", k.integer, 256),
        k.Key("num_experts_per_token", "experts.top_k", k.integer, 8),
        k.Key("moe_intermediate_size", "experts.d_ff", k.integer, 1024),
        k.Key("routed_scaling_factor", "experts.scale", k.decimal, 2.446),
        k.Key("moe_renormalize", "experts.normalize", k.flag, True),
        k.Fixed(
            **{
                "experts.score": "sigmoid",
                "experts.selection_bias": True,  # balances the experts without a loss
                "experts.balance_loss": 0.0,
            }
        ),
        k.Code(_read_dense, _write_dense),
        shared_width("num_shared_experts", 1),
        k.Code(
            partial(
                read_groups,
                best=2,
                usual=(1, 1),
                names=("num_expert_group", "num_experts_per_token"),
            ),
            _write_groups,
        ),
        k.Fixed(**{"gated_delta.gate_activation": "sigmoid"}),
        k.Code(_read_layers, _write_layers),
        k.FixedKeys(mla_use_nope=True, tie_word_embeddings=False),
    ],
    architecture="KimiLinearForCausalLM",
    table=_table,
    # transformers gives the matrices of the first layers this name when it saves a model
    old_suffixes={f".block_sparse_moe.{name}.weight": f".mlp.{name}.weight" for name in NAMES},
)
