"""ModernBERT (Warner et al. 2024), an encoder with RoPE, gates and a window for each layer.

Block 0 has no norm before attention, because the embeddings have one. In a layer with a window, a
query sees local_attention / 2 tokens on each side, and RoPE has a different base. The only dropout
rates in use are `embedding_dropout` and `attention_dropout`. A classifier reads the output of the
layers of the masked-token head, which are applied to the first token, to the mean of a text or to
each token.
"""

from __future__ import annotations

from dataclasses import replace

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.classes import (
    HEAD_NAMES,
    encoder_class,
    labels,
    named_head,
)
from transformer_jax.untrusted_files import JsonObject

BASES = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
EVERY = 3
WINDOW = 128


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    block = "model.layers.{i}"
    qkv_bias, ff_bias = k.effective(config, "qkv_bias"), k.effective(config, "ff_bias")
    heads = {f"attention/{name}": config.d_model for name in ("query", "key", "value")}
    hidden = {f"feed_forward/{name}": config.ff_dim for name in ("gate", "up")}
    out = {"attention/out": "attn.Wo", "norm_feed_forward": "mlp_norm"}
    mappings = t.blocks("encoder", config.num_layers, [
        *t.named(config, block, {"norm_attention": "attn_norm"}),
        *t.fused(f"{block}.attn.Wqkv", 1, heads, qkv_bias),
        *t.named(config, block, out),
        *t.fused(f"{block}.mlp.Wi", 1, hidden, ff_bias),
        *t.named(config, block, {"feed_forward/down": "mlp.Wo"}),
    ])  # fmt: skip
    first = "encoder/block_0/norm_attention/"
    head = []
    if config.masked_token_head or config.pooling == "transform":
        dense = t.linear("head_dense", "head.dense", bias=config.use_bias)
        end = t.output_matrix(config, "decoder")
        end = t.linear("classifier", "classifier") if config.num_classes is not None else end
        head = [*dense, *t.norm("head_norm", "head.norm", config.use_bias), *end]
    return [
        t.TensorMapping("embed/tokens", "model.embeddings.tok_embeddings.weight"),
        *t.norm("embed/norm", "model.embeddings.norm", config.use_bias),
        *(m for m in mappings if config.first_norm or not m.param.startswith(first)),
        *t.norm("encoder/norm", "model.final_norm", config.use_bias),
        *head,
    ]


def _read_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Detect the layers after the stack.

    Their tensors have the same names for all classifiers.
    """
    head, classes = "head.dense.weight" in keys.names, "classifier.weight" in keys.names
    bias, act = fields["use_bias"], fields["activation"]
    head_bias, decoder_bias = keys.flag("classifier_bias", False), keys.flag("decoder_bias", True)
    tied = keys.flag("tie_word_embeddings", True)
    if head and head_bias is not bias:
        keys.fail("classifier_bias", head_bias, f"must equal norm_bias, {bias}")
    if head and keys.choice("classifier_activation", k.ACTIVATIONS, "gelu") != act:
        name = keys.take("classifier_activation", "gelu")
        keys.fail("classifier_activation", name, f"must match hidden_activation, {act!r}")
    keys.ignore("classifier_activation")
    if not classes:
        keys.ignore("classifier_pooling")
        if not head:
            return {}
        return dict(masked_token_head=True, logit_bias=decoder_bias, tie_embeddings=tied)
    of = named_head(keys)
    if of is None:
        rule = f"must name a class ...{' or ...'.join(HEAD_NAMES.values())}"
        keys.fail("architectures", keys.take("architectures", None), rule)
    reads = keys.choice("classifier_pooling", {"cls": "first", "mean": "mean"}, "cls")
    return dict(
        num_classes=labels(keys),
        classes_of=of,
        pooler="transform",
        pooler_reads=reads if of == "text" else "each",
    )


def _write_heads(config: ModelConfig) -> JsonObject:
    keys: JsonObject = dict(
        classifier_activation=k.activation().write(config.activation),
        classifier_bias=config.use_bias,
        decoder_bias=config.logit_bias,
        tie_word_embeddings=config.tie_embeddings,
        cls_token_id=None,  # transformers' defaults exceed a small vocabulary
        sep_token_id=None,
    )
    if config.num_classes is not None:
        pooling = "mean" if config.pooler_reads == "mean" else "cls"
        keys |= dict(num_labels=config.num_classes, classifier_pooling=pooling)
    return keys


def _read_layers(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read the windows of the layers and their RoPE."""
    every = keys.integer("global_attn_every_n_layers", EVERY)
    types = d.types_or(keys, fields["num_layers"], lambda i: i % every != 0)
    window = d.window_pattern(types, keys.integer("local_attention", WINDOW) // 2 + 1)
    far, near = (
        # Pass a copy, because read_rope may shorten max_len.
        d.read_rope(keys, dict(fields), kind, float(keys.positive(KEYS[kind], base, above=1)))
        for kind, base in BASES.items()
    )
    # If every layer has a window, only the local base is used.
    if "full_attention" not in types:
        far = near
    if "sliding_attention" in types and near != far:
        if replace(near, base=far.base) != far or near.scaling is not None:
            value = keys.take("rope_parameters", None)
            keys.fail(
                "rope_parameters", value, "layers may differ only in rope_theta, without scaling"
            )
        far = replace(far, window_base=near.base)
    return dict(positions=far, window=window)


def _write_layers(config: ModelConfig) -> JsonObject:
    rope, windows = d.rope_of(config), d.write_windows(config)
    kinds, width = windows["layer_types"], windows["sliding_window"]
    scaling = dict(rope_type="default") | d.write_rope(config).get("rope_scaling", {})
    near = rope.base if rope.window_base is None else rope.window_base
    bases = {"full_attention": rope.base, "sliding_attention": near}
    every = next((i for i, kind in enumerate(kinds) if i and kind == "full_attention"), len(kinds))
    return dict(
        {KEYS[kind]: base for kind, base in bases.items()},  # read, like `every`, by version 4
        local_attention=WINDOW if width is None else 2 * (width - 1),
        layer_types=kinds,
        global_attn_every_n_layers=every,
        rope_parameters={kind: scaling | dict(rope_theta=base) for kind, base in bases.items()},
    )


MODERNBERT = t.Family(
    "modernbert",
    [
        k.Fixed(kind="encoder", glu=True, embedding_norm=True, first_norm=False),
        *k.standard_sizes(50368, 768, 1152, 22, 12, 8192),
        k.Key("hidden_activation", "activation", k.activation(), "gelu"),
        k.Key("norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("norm_bias", "use_bias", k.flag, False),
        k.Flag(
            "attention_bias",
            False,
            on=dict(qkv_bias=True, out_bias=True),
            off=dict(qkv_bias=False, out_bias=False),
        ),
        k.Key("mlp_bias", "ff_bias", k.flag, False),
        k.Key("embedding_dropout", "dropout", k.rate, 0.0),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Key("mlp_dropout", None, k.rate, 0.0),
        k.Code(_read_heads, _write_heads),
        k.Code(_read_layers, _write_layers),
    ],
    _table,
    lambda config: encoder_class(config, "ModernBert"),
    prefix="model.",
    head_tensors=("head.*", "decoder.*", "classifier.*"),
    tied_copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
