"""Decoders in which most layers have a state: Qwen3-Next, Qwen3.5's text part and OLMo Hybrid.

The layers with a state are Gated DeltaNet (Yang et al. 2024). `layer_types` lists the mixers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformer_jax.config import GatedDelta, ModelConfig
from transformer_jax.config.mixers import Mixer
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.experts import expert_keys, expert_mappings
from transformer_jax.pretrained.families.llama import llama_family
from transformer_jax.untrusted_files import JsonObject

# Tensors

_ATTENTION = {
    "attention/query_scale": "self_attn.q_norm", "attention/key_scale": "self_attn.k_norm",
    "attention/key": "self_attn.k_proj", "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
}  # fmt: skip
States = Callable[[str, GatedDelta], list[t.TensorMapping]]
"""Function that maps the parameters of a layer with a state, given the name of its module."""


def _table(
    config: ModelConfig,
    states: States,
    feed_forward: Callable[[ModelConfig], list[t.TensorMapping]] | None = None,
) -> list[t.TensorMapping]:
    """Return the table of a model whose blocks have different mixers."""
    block, sizes = "model.layers.{i}", config.gated_delta or GatedDelta()
    last = feed_forward(config) if feed_forward else t.named(config, block, t.gated_names("mlp"))
    bias, query = k.effective(config, "qkv_bias"), f"{block}.self_attn.q_proj"
    if config.attention_gate:  # the rows of each head are its query and its gate
        rows = {"attention/query": config.key_dim, "attention/gate": config.value_dim}
        attention = t.fused(query, config.num_heads, rows, bias)
    else:
        attention = t.linear("attention/query", query, bias=bias)
    attention += t.named(config, block, _ATTENTION)

    def mappings(i: int) -> list[t.TensorMapping]:
        mixer = config.mixer(i)
        names = {f"norm_{mixer}": "input", "norm_feed_forward": "post_attention"}
        if config.norm_order_in(i) == "output":
            names = {
                f"out_norm_{mixer}": "post_attention", "out_norm_feed_forward": "post_feedforward"
            }  # fmt: skip
        norms = {param: f"{name}_layernorm" for param, name in names.items()}
        own = states(f"{block}.linear_attn", sizes) if mixer == "gated_delta" else attention
        return t.named(config, block, norms) + own + last

    return t.decoder(config, "model.embed_tokens", mappings, "model.norm")


def _vectors(module: str, norm: str, out: str, rate: t.Layout = t.FLAT) -> list[t.TensorMapping]:
    """Map the vectors of a layer with a state, and its output matrix."""
    found = [
        t.TensorMapping("gated_delta/decay_rate", f"{module}.A_log", rate),
        t.TensorMapping("gated_delta/decay_bias", f"{module}.dt_bias", t.FLAT),
        t.TensorMapping("gated_delta/head_scale", f"{module}.{norm}.weight"),
    ]
    return found + t.linear("gated_delta/out", f"{module}.{out}", t.LINEAR_OUT, bias=False)


def _parts(sizes: GatedDelta) -> dict[str, int]:
    """Return the number of channels of all queries, keys and values."""
    keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    return {"query": keys, "key": keys, "value": values}


def _joint_conv(module: str, sizes: GatedDelta) -> list[t.TensorMapping]:
    """Map the convolutions if they share one tensor."""
    found, start = list[t.TensorMapping](), 0
    for name, count in _parts(sizes).items():
        rows, start = t.Rows(1, start, count, sizes.channels), start + count
        layout = t.Layout("depthwise", rows=rows)
        found.append(t.TensorMapping(f"gated_delta/{name}_conv", f"{module}.conv1d.weight", layout))
    return found


def _of_key_heads(module: str, sizes: GatedDelta) -> list[t.TensorMapping]:
    """Map the layer of Qwen3-Next, whose two matrices have a run of rows per key head."""
    heads, width = sizes.num_key_heads, sizes.key_dim
    group = sizes.num_value_heads // heads
    values = group * sizes.value_dim
    rows = {"query": width, "key": width, "value": values, "gate": values}
    found = list[t.TensorMapping]()
    for name, counts in (("qkvz", rows), ("ba", dict(beta=group, decay=group))):
        each = {f"gated_delta/{param}": count for param, count in counts.items()}
        found += t.fused(f"{module}.in_proj_{name}", heads, each, bias=False)
    return found + _joint_conv(module, sizes) + _vectors(module, "norm", "out_proj")


def _of_parts(module: str, sizes: GatedDelta) -> list[t.TensorMapping]:
    """Map the layer of Qwen3.5, which has four input matrices."""
    each = {f"gated_delta/{param}": count for param, count in _parts(sizes).items()}
    found = t.fused(f"{module}.in_proj_qkv", 1, each, bias=False)
    for param, name in (("gate", "z"), ("beta", "b"), ("decay", "a")):
        found += t.linear(f"gated_delta/{param}", f"{module}.in_proj_{name}", bias=False)
    return found + _joint_conv(module, sizes) + _vectors(module, "norm", "out_proj")


def separate_mappings(
    module: str, matrices: dict[str, str], rate: t.Layout = t.FLAT
) -> list[t.TensorMapping]:
    """Map a layer whose matrices and convolutions have their own tensors."""
    found, names = list[t.TensorMapping](), dict(query="q", key="k", value="v")
    for param, name in (names | matrices).items():
        found += t.linear(f"gated_delta/{param}", f"{module}.{name}_proj", bias=False)
    for param, name in names.items():
        tensor, layout = f"{module}.{name}_conv1d.weight", t.Layout("depthwise")
        found.append(t.TensorMapping(f"gated_delta/{param}_conv", tensor, layout))
    return found + _vectors(module, "o_norm", "o_proj", rate)


def _of_olmo(module: str, sizes: GatedDelta) -> list[t.TensorMapping]:
    """Map the layer of OLMo Hybrid."""
    return separate_mappings(module, dict(beta="b", decay="a", gate="g"))


# Keys

_MIXERS: dict[str, Mixer] = {"linear_attention": "gated_delta", "full_attention": "attention"}
_EVERY = 4


def mixers_of_types(
    keys: k.ConfigKeys, fields: k.Fields, types: object, mixers: dict[str, Mixer]
) -> k.Fields:
    """Return the mixer of each layer, given the value of `layer_types`."""
    layers, names = fields["num_layers"], " and ".join(mixers)
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*mixers}:
        keys.fail(
            "layer_types", types, f"must be a list of {layers} (num_hidden_layers) of {names}"
        )
    if {*types} != {*mixers}:
        keys.fail("layer_types", types, f"must contain {names}")
    if fields["activation"] != "silu":  # it is also that of the convolution
        rule = "must be 'silu', because layers with a state have no other activation"
        keys.fail("hidden_act", keys.take("hidden_act"), rule)
    return dict(mixers=d.shortest([mixers[kind] for kind in types]))


def _read_mixers(keys: k.ConfigKeys, fields: k.Fields, is_olmo: bool = False) -> k.Fields:
    layers = fields["num_layers"]
    # transformers ignores the interval of OLMo Hybrid
    every = _EVERY if is_olmo else keys.integer("full_attention_interval", _EVERY)
    types = keys.take("layer_types", None)
    if types is None:
        types = [[*_MIXERS][(i + 1) % every == 0] for i in range(layers)]
        if is_olmo and layers < every:
            types[-1] = "full_attention"
    return mixers_of_types(keys, fields, types, _MIXERS)


def _write_mixers(config: ModelConfig) -> JsonObject:
    names = {mixer: name for name, mixer in _MIXERS.items()}
    mixers = [config.mixer(i) for i in range(config.num_layers)]
    return dict(layer_types=[names.get(mixer, mixer) for mixer in mixers])


_LAYERS = k.Code(_read_mixers, _write_mixers)
_SIZES: tuple[k.Entry, ...] = (
    k.Key("linear_num_key_heads", "gated_delta.num_key_heads", k.integer, 16),
    k.Key("linear_num_value_heads", "gated_delta.num_value_heads", k.integer, 32),
    k.Key("linear_key_head_dim", "gated_delta.key_dim", k.integer, 128),
    k.Key("linear_value_head_dim", "gated_delta.value_dim", k.integer, 128),
    k.Key("linear_conv_kernel_dim", "gated_delta.conv_width", k.integer, 4),
)


def _qwen(kv_heads: int) -> list[k.Entry]:
    """List the keys that Qwen3-Next and Qwen3.5 share."""
    return [
        *d.gated(kv_heads, head_dim=256),
        d.ATTENTION_BIAS,
        k.Fixed(norm_unit_offset=True, qk_norm=True, attention_gate=True),
        *_SIZES,
        _LAYERS,
        k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.25
        d.rope(part=0.25),
    ]


QWEN3_NEXT = llama_family(
    "qwen3_next",
    [
        *_qwen(2),
        k.Fixed(d_ff=None),
        *expert_keys("num_experts", 512, 10),
        k.Key("moe_intermediate_size", "experts.d_ff", k.integer, 512),
        k.Key("shared_expert_intermediate_size", "experts.shared_d_ff", k.integer, 512),
        k.Fixed(**{"experts.shared_gate": True}),
        k.Key("norm_topk_prob", "experts.normalize", k.flag, True),
        k.FixedKeys(decoder_sparse_step=1, mlp_only_layers=[]),
        k.Code(write=lambda config: dict(intermediate_size=config.expert_dim)),
    ],
    architecture="Qwen3NextForCausalLM",
    table=partial(_table, states=_of_key_heads, feed_forward=expert_mappings),
    ignored_tensors=("mtp.*",),
    rotates_parts=True,
)
QWEN3_5 = llama_family(
    "qwen3_5_text",
    _qwen(4),
    architecture="Qwen3_5ForCausalLM",
    table=partial(_table, states=_of_parts),
    ignored_tensors=("mtp.*", "model.visual.*"),
    old_prefixes={"model.language_model.": "model."},
    rotates_parts=True,
)


def _read_olmo_sizes(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    heads = fields["num_heads"]
    key_heads = keys.optional_integer("linear_num_key_heads", None) or heads
    value_heads = keys.optional_integer("linear_num_value_heads", None) or heads
    width = keys.optional_integer("linear_key_head_dim", None)
    width = int(0.75 * fields["d_model"] / key_heads) if width is None else width
    found = dict(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=width,
        value_dim=keys.optional_integer("linear_value_head_dim", None) or 2 * width,
    )
    return {f"gated_delta.{name}": size for name, size in found.items()}


def _write_olmo_sizes(config: ModelConfig) -> JsonObject:
    return {name: value for entry in _SIZES for name, value in entry.write(config).items()}


def _read_olmo_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    spec, base = keys.take("rope_parameters", None), keys.take("rope_theta", None)
    absent = spec is None and "rope_theta" in keys.content and base is None
    if absent or spec in ({"rope_theta": None}, {"rope_theta": None, "rope_type": "default"}):
        return dict(positions=None)
    if spec is None and base is None:
        rule = 'must be an object, such as {"rope_theta": null} for no RoPE'
        keys.fail("rope_parameters", None, f"{rule}: libraries differ on its default")
    return dict(positions=d.read_rope(keys, fields), max_len=fields["max_len"])


def _write_olmo_rope(config: ModelConfig) -> JsonObject:
    if config.positions is None:
        return dict(rope_parameters=dict(rope_type="default", rope_theta=None))
    keys = d.write_rope(config)
    spec = dict(rope_type="default") | keys.pop("rope_scaling", {})
    return keys | dict(rope_parameters=spec | dict(rope_theta=keys.pop("rope_theta")))


OLMO_HYBRID = llama_family(
    "olmo_hybrid",
    [
        *d.gated(),
        d.ATTENTION_BIAS,
        k.Fixed(norm_order="output", qk_norm=True, qk_norm_over="heads"),
        # transformers ignores rms_norm_eps in the norms of heads
        k.Fixed(**{"gated_delta.norm_order": "pre", "gated_delta.norm_eps": 1e-5}),
        k.Code(_read_olmo_sizes, _write_olmo_sizes),
        _SIZES[-1],
        k.Key("linear_allow_neg_eigval", "gated_delta.negative_eigenvalues", k.flag, True),
        k.Code(partial(_read_mixers, is_olmo=True), _write_mixers),
        k.Code(_read_olmo_rope, _write_olmo_rope),
    ],
    architecture="OlmoHybridForCausalLM",
    table=partial(_table, states=_of_olmo),
    old_suffixes={
        ".attention_layer_norm.weight": ".input_layernorm.weight",
        ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight",
    },
)
