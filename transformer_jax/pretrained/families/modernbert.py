"""Map ModernBERT (Warner et al. 2024): an encoder with a rotation, gates and windows by layer.

Its block 0 has no norm before attention, since the embeddings have one. In a layer with a window a
query sees local_attention / 2 tokens on each side, and the rotation has a base of its own. Of the
rates of dropout `embedding_dropout` and `attention_dropout` are kept. A classifier reads the
layers of the masked-token head, of the first token, of the mean of a text, or of each token.
"""

from __future__ import annotations

from dataclasses import replace

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families.classes import (
    HEAD_NAMES,
    labels,
    named_head,
    write_head,
)
from transformer_jax.pretrained.families.decoder_keys import (
    biases,
    layer_types,
    read_rope,
    rope_of,
    window_pattern,
    write_rope,
    write_windows,
)
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    activation_key,
    blocks,
    fused,
    linear,
    norm,
    output_matrix,
)
from transformer_jax.untrusted_files import JsonObject

BASES = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
EVERY = 3
WINDOW = 128


def _norm(config: ModelConfig, param: str, tensor: str) -> list[TensorMapping]:
    return norm(param, tensor)[: 1 + config.use_bias]


def _table(config: ModelConfig) -> list[TensorMapping]:
    bias, out_bias, ff_bias = biases(config)
    block = "model.layers.{i}"
    heads = {f"attention/{name}": config.d_model for name in ("query", "key", "value")}
    hidden = {f"feed_forward/{name}": config.ff_dim for name in ("gate", "up")}
    mappings = blocks(
        "encoder",
        config.num_layers,
        [
            *_norm(config, "norm_attention", f"{block}.attn_norm"),
            *fused(f"{block}.attn.Wqkv", 1, heads, bias),
            *linear("attention/out", f"{block}.attn.Wo", LINEAR_OUT, out_bias),
            *_norm(config, "norm_feed_forward", f"{block}.mlp_norm"),
            *fused(f"{block}.mlp.Wi", 1, hidden, ff_bias),
            *linear("feed_forward/down", f"{block}.mlp.Wo", bias=ff_bias),
        ],
    )
    first = "encoder/block_0/norm_attention/"
    head = []
    if config.masked_token_head or config.pooling == "transform":
        dense = linear("head_dense", "head.dense", bias=config.use_bias)
        end = output_matrix(config, "decoder")
        end = linear("classifier", "classifier") if config.num_classes is not None else end
        head = [*dense, *_norm(config, "head_norm", "head.norm"), *end]
    return [
        TensorMapping("embed/tokens", "model.embeddings.tok_embeddings.weight"),
        *_norm(config, "embed/norm", "model.embeddings.norm"),
        *(m for m in mappings if config.first_norm or not m.param.startswith(first)),
        *_norm(config, "encoder/norm", "model.final_norm"),
        *head,
    ]


def _read(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    head, classes = "head.dense.weight" in names, "classifier.weight" in names
    masked = head and not classes
    keys.rate("mlp_dropout", 0.0)
    norm_bias, layers = keys.flag("norm_bias", False), keys.integer("num_hidden_layers", 22)
    act = keys.choice("hidden_activation", ACTIVATIONS, "gelu")
    head_bias, decoder_bias = keys.flag("classifier_bias", False), keys.flag("decoder_bias", True)
    tied = keys.flag("tie_word_embeddings", True)
    if head and head_bias is not norm_bias:
        keys.fail("classifier_bias", head_bias, f"must be norm_bias, {norm_bias}")
    if head and keys.choice("classifier_activation", ACTIVATIONS, "gelu") != act:
        said = keys.take("classifier_activation", "gelu")
        keys.fail("classifier_activation", said, f"must be hidden_activation, {act!r}")
    keys.ignore("classifier_activation")
    fields: Fields = dict(
        vocab_size=keys.integer("vocab_size", 50368),
        d_model=keys.integer("hidden_size", 768),
        d_ff=keys.integer("intermediate_size", 1152),
        num_layers=layers,
        num_heads=keys.integer("num_attention_heads", 12),
        head_dim=None,
        max_len=keys.integer("max_position_embeddings", 8192),
        norm_eps=keys.positive("norm_eps", 1e-5),
        activation=act,
        use_bias=norm_bias,
        dropout=keys.rate("embedding_dropout", 0.0),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )
    for name, said in (("qkv_bias", "attention_bias"), ("ff_bias", "mlp_bias")):
        fields[name] = keys.flag(said, False)
    fields["out_bias"] = fields["qkv_bias"]
    if masked:
        fields |= dict(masked_token_head=True, logit_bias=decoder_bias, tie_embeddings=tied)
    if classes:
        fields |= _classes(keys)
    else:
        keys.ignore("classifier_pooling")
    every = keys.integer("global_attn_every_n_layers", EVERY)
    types = layer_types(keys, layers) or [
        "sliding_attention" if i % every else "full_attention" for i in range(layers)
    ]
    window = window_pattern(types, keys.integer("local_attention", WINDOW) // 2 + 1)
    far, near = (
        read_rope(keys, dict(fields), kind, float(keys.positive(KEYS[kind], base, above=1)))
        for kind, base in BASES.items()
    )
    if "full_attention" not in types:
        far = near
    if "sliding_attention" in types and near != far:
        if replace(near, base=far.base) != far or near.scaling is not None:
            said = keys.take("rope_parameters", None)
            keys.fail(
                "rope_parameters", said, "layers may differ in rope_theta, and stretch nothing"
            )
        far = replace(far, window_base=near.base)
    return ModelConfig(
        **fields,
        kind="encoder",
        glu=True,
        embedding_norm=True,
        first_norm=False,
        positions=far,
        window=window,
    )


def _classes(keys: ConfigKeys) -> Fields:
    """Return the fields of a classifier: its tensors have the same names whatever it classifies."""
    of = named_head(keys)
    if of is None:
        rule = f"must be a class ...{' or ...'.join(HEAD_NAMES.values())}"
        keys.fail("architectures", keys.take("architectures", None), rule)
    reads = keys.choice("classifier_pooling", {"cls": "first", "mean": "mean"}, "cls")
    if of != "text":
        reads = "each"
    count = labels(keys)
    return dict(num_classes=count, classes_of=of, pooler="transform", pooler_reads=reads)


def _write(config: ModelConfig) -> JsonObject:
    rope, windows = rope_of(config), write_windows(config)
    kinds, width = windows["layer_types"], windows["sliding_window"]
    scaling = dict(rope_type="default") | write_rope(config).get("rope_scaling", {})
    near = rope.base if rope.window_base is None else rope.window_base
    bases = {"full_attention": rope.base, "sliding_attention": near}
    every = next((i for i, kind in enumerate(kinds) if i and kind == "full_attention"), len(kinds))
    keys: JsonObject = dict(
        architectures=["ModernBertForMaskedLM" if config.masked_token_head else "ModernBertModel"],
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        hidden_activation=activation_key(config.activation),
        classifier_activation=activation_key(config.activation),
        max_position_embeddings=config.max_len,
        norm_eps=config.norm_eps,
        norm_bias=config.use_bias,
        classifier_bias=config.use_bias,
        attention_bias=biases(config)[0],
        mlp_bias=biases(config)[2],
        decoder_bias=config.logit_bias,
        embedding_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        local_attention=WINDOW if width is None else 2 * (width - 1),
        layer_types=kinds,
        global_attn_every_n_layers=every,  # this and the next two are what version 4 reads
        rope_parameters={kind: scaling | dict(rope_theta=base) for kind, base in bases.items()},
        tie_word_embeddings=config.tie_embeddings,
        cls_token_id=None,  # or transformers takes two that a small vocabulary has not
        sep_token_id=None,
    )
    if config.num_classes is not None:
        keys |= write_head(config, "ModernBert")
        keys["classifier_pooling"] = "mean" if config.pooler_reads == "mean" else "cls"
    return keys | {KEYS[kind]: base for kind, base in bases.items()}


MODERNBERT = Family(
    "modernbert",
    _read,
    _write,
    _table,
    prefix="model.",
    head_tensors=("head.*", "decoder.*", "classifier.*"),
    tied_copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
