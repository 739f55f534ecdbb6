"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), MPNet and DistilBERT.

These are post-norm encoders with learned positions. config.json is the same for all heads. The
tensors in the files determine which heads a checkpoint has. Dropout before a classifier is not
supported, and neither are dropout rates of DistilBERT that differ from `dropout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from transformer_jax.config import Learned, ModelConfig, Pooler
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families import classes as c
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t

ATTENTION = {
    "attention/query": "attention.self.query", "attention/key": "attention.self.key",
    "attention/value": "attention.self.value", "attention/out": "attention.output.dense",
    "norm_attention": "attention.output.LayerNorm",
}  # fmt: skip
"""Names of the matrices in an attention layer and of the norm after it."""


def embeddings_of(config: ModelConfig, prefix: str) -> list[t.TensorMapping]:
    """Map the embeddings of tokens, positions and types, and the norm of their sum."""
    embeddings = f"{prefix}.embeddings"
    types = t.TensorMapping("embed/types", f"{embeddings}.token_type_embeddings.weight")
    return [
        t.TensorMapping("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        t.TensorMapping("embed/positions", f"{embeddings}.position_embeddings.weight"),
        *([] if config.type_vocab_size is None else [types]),
        *t.norm("embed/norm", f"{embeddings}.LayerNorm"),
    ]


def bert_stack(
    config: ModelConfig, prefix: str, attention: Mapping[str, str] = ATTENTION
) -> list[t.TensorMapping]:
    """Map the embeddings and blocks, whose names are the same in BERT and RoBERTa."""
    names = {
        **attention, "feed_forward/up": "intermediate.dense", "feed_forward/down": "output.dense",
        "norm_feed_forward": "output.LayerNorm",
    }  # fmt: skip
    block = t.named(config, f"{prefix}.encoder.layer.{{i}}", names)
    return [*embeddings_of(config, prefix), *t.blocks("encoder", config.num_layers, block)]


def masked_head(config: ModelConfig, dense: str, scale: str, bias: str) -> list[t.TensorMapping]:
    """Map the masked-token head, if there is one."""
    if not config.masked_token_head:
        return []
    return [
        *t.linear("head_dense", dense),
        *t.norm("head_norm", scale),
        t.TensorMapping("embed/bias", bias),
    ]


def pooling_layers(config: ModelConfig, pooler: str, classifier: str) -> list[t.TensorMapping]:
    """Map the pooler and the classifier, if there are any."""
    if config.classes_of != "text":
        classifier = "classifier" if config.classes_of == "token" else c.SPANS
    return [
        *(t.linear("pooler", pooler) if config.pooling is not None else []),
        *(t.linear("classifier", classifier) if config.num_classes is not None else []),
    ]


POST_NORM: list[k.Entry] = [
    k.Fixed(kind="encoder", norm_order="post", embedding_norm=True),
    k.FixedKeys(tie_word_embeddings=True),
]
"""Entries that all these families share."""


def bert_sizes(
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    activation: str = "gelu",
    rate: float = 0.1,
    older: Mapping[str, str] | None = None,  # older names of some keys
) -> list[k.Entry]:
    """List the sizes, the activation, the norm and dropout. The arguments are default values."""

    def key(name: str, field: str, kind: k.Kind, default: k.JsonValue) -> k.Key:
        return k.Key(name, field, kind, default, older=(older or {}).get(name))

    return [
        key("hidden_size", "d_model", k.integer, width),
        key("num_hidden_layers", "num_layers", k.integer, 12),
        key("num_attention_heads", "num_heads", k.integer, heads),
        key("intermediate_size", "d_ff", k.integer, hidden),
        key("hidden_act", "activation", k.activation(), activation),
        key("layer_norm_eps", "norm_eps", k.positive, 1e-12),
        key("hidden_dropout_prob", "dropout", k.rate, rate),
        key("attention_probs_dropout_prob", "attention_dropout", k.rate, rate),
    ]


TYPES = k.Key("type_vocab_size", "type_vocab_size", k.integer, 2)


def _offset(config: ModelConfig) -> int:
    """Return the number of rows before the row of position 0, or 0 if there is no table."""
    return config.positions.offset if isinstance(config.positions, Learned) else 0


def vocabulary(size: int) -> list[k.Entry]:
    """List the keys of the vocabulary and the maximum length."""
    rows = "max_position_embeddings"
    return [
        k.Key("vocab_size", "vocab_size", k.integer, size),
        k.Code(
            lambda keys, fields: dict(max_len=keys.integer(rows, 512)),
            lambda config: {rows: config.max_len + _offset(config)},
        ),
    ]


# BERT


_BERT_HEAD = "cls.predictions.transform"


def _read_bert_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    names, pooler = keys.names, "bert.pooler.dense.weight"
    masked = f"{_BERT_HEAD}.dense.weight" in names
    classes, of = None, None
    if masked and "cls.seq_relationship.weight" in names:
        classes, of = 2, c.classes_of(keys, "cls.seq_relationship.weight", pooler)
    elif not masked:
        of = c.classes_of(keys, "classifier.weight", pooler)
    tanh: Pooler | None = "tanh" if pooler in names else None
    return c.head_fields(keys, masked=masked, pooler=tanh, classes_of=of, num_classes=classes)


BERT = t.Family(
    "bert",
    [
        *POST_NORM,
        *vocabulary(30522),
        *bert_sizes(),
        TYPES,
        k.Code(
            _read_bert_heads,
            lambda config: {} if config.masked_token_head else c.write_labels(config),
        ),
    ],
    lambda config: [
        *bert_stack(config, "bert"),
        *masked_head(
            config, f"{_BERT_HEAD}.dense", f"{_BERT_HEAD}.LayerNorm", "cls.predictions.bias"
        ),
        *pooling_layers(
            config,
            "bert.pooler.dense",
            "cls.seq_relationship" if config.masked_token_head else "classifier",
        ),
    ],
    partial(c.encoder_class, name="Bert", pretraining=True),
    prefix="bert.",
    ignored_tensors=("bert.embeddings.position_ids",),
    tied_copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_tensors=("cls.*", "classifier.*", "qa_outputs.*"),
    old_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
"""BERT. A model with a masked-token head and two classes is BertForPreTraining, whose classes
predict whether the second sentence follows the first."""


# RoBERTa


def _roberta_heads(config: ModelConfig, prefix: str) -> list[t.TensorMapping]:
    pooler = f"{prefix}.pooler.dense" if config.num_classes is None else "classifier.dense"
    return [
        *masked_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        *pooling_layers(config, pooler, "classifier.out_proj"),
    ]


def _roberta(
    vocab_size: int, prefix: str = "roberta", buckets: int | None = None, types: k.Key = TYPES
) -> list[k.Entry]:
    """List the keys of RoBERTa or of MPNet, whose attention also has distance biases."""

    def read_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        names = keys.names
        masked, text = "lm_head.dense.weight" in names, "classifier.out_proj.weight" in names
        of: ClassesOf | None = "text" if text else None
        if not text:  # a token classifier has a single matrix
            of = c.classes_of(keys, "classifier.weight", "classifier.dense.weight")
        pooled = text or (of is None and f"{prefix}.pooler.dense.weight" in names)
        # The masked-token head in transformers always uses gelu, but a ModelConfig has one
        # activation.
        if masked and fields["activation"] != "gelu":
            rule = "must be 'gelu' with a masked-token head, which always uses it"
            keys.fail("hidden_act", keys.take("hidden_act"), rule)
        pooler: Pooler | None = "tanh" if pooled else None
        return c.head_fields(keys, masked=masked, pooler=pooler, classes_of=of)

    def read_positions(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        # fairseq counts positions from the row after the row of the padding token.
        offset = keys.integer("pad_token_id", 1, least=0) + 1
        rows = fields["max_len"]
        if rows <= offset:
            keys.fail("max_position_embeddings", rows, f"must exceed pad_token_id + 1, {offset}")
        return dict(positions=Learned(offset=offset, buckets=buckets), max_len=rows - offset)

    return [
        *POST_NORM,
        *vocabulary(vocab_size),
        *bert_sizes(),
        types,
        k.Code(read_heads, c.write_labels),
        k.Code(read_positions, lambda config: dict(pad_token_id=_offset(config) - 1)),
    ]


ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    t.Family(
        model_type,
        _roberta(vocab_size),
        lambda config: [*bert_stack(config, "roberta"), *_roberta_heads(config, "roberta")],
        partial(c.encoder_class, name=name),
        prefix="roberta.",
        ignored_tensors=("roberta.embeddings.position_ids", "roberta.pooler.dense.*"),
        tied_copies={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        head_tensors=("lm_head.*", "classifier.*", "qa_outputs.*"),
        old_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    )
    for model_type, name, vocab_size in (
        ("roberta", "Roberta", 50265),
        ("xlm-roberta", "XLMRoberta", 30522),
        ("camembert", "Camembert", 30522),
    )
)
"""RoBERTa. XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al. 2020) are RoBERTa models
with different training data. A classifier has its own dense layer, and a pooler from pre-training
is ignored. Position 0 is row `pad_token_id` + 1 of the table."""


# MPNet

MPNET_ATTENTION = {
    **t.attention_names("attention.attn", "o", "q k v"), "norm_attention": "attention.LayerNorm",
}  # fmt: skip
BUCKETS = 32


MPNET = t.Family(
    "mpnet",
    [
        # transformers reads the number of token types but does not use it.
        *_roberta(30527, "mpnet", BUCKETS, k.Key("type_vocab_size", None, k.integer, 2)),
        k.FixedKeys(relative_attention_num_buckets=BUCKETS),
    ],
    lambda config: [
        *bert_stack(config, "mpnet", MPNET_ATTENTION),
        t.TensorMapping("encoder/relative_bias", "mpnet.encoder.relative_attention_bias.weight"),
        *_roberta_heads(config, "mpnet"),
    ],
    partial(c.encoder_class, name="MPNet"),
    prefix="mpnet.",
    ignored_tensors=("mpnet.embeddings.position_ids", "mpnet.pooler.dense.*"),
    tied_copies={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    head_tensors=("lm_head.*", "classifier.*", "qa_outputs.*"),
)
"""MPNet (Song et al. 2020), a RoBERTa model without token types and with T5's biases in
attention."""


# DistilBERT (Sanh et al. 2019)


def _distilbert_table(config: ModelConfig) -> list[t.TensorMapping]:
    embeddings, block = "distilbert.embeddings", "distilbert.transformer.layer.{i}"
    names = {
        **t.attention_names("attention", "out_lin", "q_lin k_lin v_lin"),
        "norm_attention": "sa_layer_norm", "feed_forward/up": "ffn.lin1",
        "feed_forward/down": "ffn.lin2", "norm_feed_forward": "output_layer_norm",
    }  # fmt: skip
    return [
        t.TensorMapping("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        t.TensorMapping("embed/positions", f"{embeddings}.position_embeddings.weight"),
        *t.norm("embed/norm", f"{embeddings}.LayerNorm"),
        *t.blocks("encoder", config.num_layers, t.named(config, block, names)),
        *masked_head(config, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        *pooling_layers(config, "pre_classifier", "classifier"),
    ]


def _read_distilbert_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    of = c.classes_of(keys, "classifier.weight", "pre_classifier.weight")
    return c.head_fields(
        keys,
        masked="vocab_transform.weight" in keys.names,
        pooler="relu" if of == "text" else None,
        classes_of=of,
    )


DISTILBERT = t.Family(
    "distilbert",
    [
        *POST_NORM,
        k.Key("vocab_size", "vocab_size", k.integer, 30522),
        k.Key("max_position_embeddings", "max_len", k.integer, 512),
        k.Key("dim", "d_model", k.integer, 768),
        k.Key("n_layers", "num_layers", k.integer, 6),
        k.Key("n_heads", "num_heads", k.integer, 12),
        k.Key("hidden_dim", "d_ff", k.integer, 3072),
        k.Key("activation", "activation", k.activation(), "gelu"),
        k.Fixed(norm_eps=1e-12),
        k.Key("dropout", "dropout", k.rate, 0.1),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.1),
        k.Code(_read_distilbert_heads, c.write_labels),
    ],
    _distilbert_table,
    partial(c.encoder_class, name="DistilBert"),
    prefix="distilbert.",
    ignored_tensors=("distilbert.embeddings.position_ids",),
    tied_copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    head_tensors=("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*"),
    old_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
