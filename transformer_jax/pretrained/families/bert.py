"""Map BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), MPNet and DistilBERT.

They are post-norm encoders with learned positions. config.json is the same for all heads: the
tensors in the files say which heads a checkpoint has. The dropout before a classifier, and rates of
DistilBERT that differ from `dropout`, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from transformer_jax.config import Activation, Learned, ModelConfig, Pooler
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families.classes import (
    SPANS,
    Names,
    classes_of,
    labels,
    write_head,
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
    linear,
    norm,
)
from transformer_jax.untrusted_files import JsonObject

ATTENTION = "self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"
"""Names of an attention's matrices and of the norm after it."""


def embeddings_of(config: ModelConfig, prefix: str) -> list[TensorMapping]:
    """Map the tables of tokens, positions and types, and the norm of their sum."""
    embeddings = f"{prefix}.embeddings"
    types = TensorMapping("embed/types", f"{embeddings}.token_type_embeddings.weight")
    return [
        TensorMapping("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        TensorMapping("embed/positions", f"{embeddings}.position_embeddings.weight"),
        *([] if config.type_vocab_size is None else [types]),
        *norm("embed/norm", f"{embeddings}.LayerNorm"),
    ]


def bert_stack(
    config: ModelConfig, prefix: str, attention: tuple[str, str, str, str, str] = ATTENTION
) -> list[TensorMapping]:
    """Map embeddings and blocks, which BERT and RoBERTa name alike."""
    block = f"{prefix}.encoder.layer.{{i}}"
    query, key, value, out, after = (f"{block}.attention.{name}" for name in attention)
    return [
        *embeddings_of(config, prefix),
        *blocks(
            "encoder",
            config.num_layers,
            [
                *linear("attention/query", query),
                *linear("attention/key", key),
                *linear("attention/value", value),
                *linear("attention/out", out, LINEAR_OUT),
                *norm("norm_attention", after),
                *linear("feed_forward/up", f"{block}.intermediate.dense"),
                *linear("feed_forward/down", f"{block}.output.dense"),
                *norm("norm_feed_forward", f"{block}.output.LayerNorm"),
            ],
        ),
    ]


def masked_head(config: ModelConfig, dense: str, scale: str, bias: str) -> list[TensorMapping]:
    """Map the masked-token head, if there is one."""
    if not config.masked_token_head:
        return []
    return [
        *linear("head_dense", dense),
        *norm("head_norm", scale),
        TensorMapping("embed/bias", bias),
    ]


def pooling_layers(config: ModelConfig, pooler: str, classifier: str) -> list[TensorMapping]:
    """Map the pooler and the classifier, if there are any."""
    if config.classes_of != "text":
        classifier = "classifier" if config.classes_of == "token" else SPANS
    return [
        *(linear("pooler", pooler) if config.pooling is not None else []),
        *(linear("classifier", classifier) if config.num_classes is not None else []),
    ]


def post_norm_encoder(
    keys: ConfigKeys,
    *,
    masked: bool,
    pooler: Pooler | None,
    num_classes: int | None,
    classes_of: ClassesOf,
    activation: Activation,
    **sizes: FieldValue,
) -> ModelConfig:
    """Make a config from what all these families have and from the sizes of one."""
    if not keys.flag("tie_word_embeddings", True) and masked:
        keys.fail("tie_word_embeddings", False, "must be true beside a masked-token head")
    return ModelConfig(
        kind="encoder",
        norm_order="post",
        embedding_norm=True,
        masked_token_head=masked,
        logit_bias=masked,
        pooler=pooler,
        num_classes=num_classes,
        classes_of=classes_of,
        activation=activation,
        **sizes,
    )


def bert_sizes(
    keys: ConfigKeys,
    *,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    activation: str = "gelu",
    rate: float = 0.1,
    said: Callable[[str], str] = str,
) -> Fields:
    """Read sizes, activation, norm and dropout; the arguments are defaults.

    `said` gives the name that a key has in this config.json.
    """
    return dict(
        d_model=keys.integer(said("hidden_size"), width),
        num_layers=keys.integer(said("num_hidden_layers"), 12),
        num_heads=keys.integer(said("num_attention_heads"), heads),
        d_ff=keys.integer(said("intermediate_size"), hidden),
        activation=keys.choice("hidden_act", ACTIVATIONS, activation),
        type_vocab_size=keys.integer("type_vocab_size", 2),
        norm_eps=keys.positive(said("layer_norm_eps"), 1e-12),
        dropout=keys.rate(said("hidden_dropout_prob"), rate),
        attention_dropout=keys.rate(said("attention_probs_dropout_prob"), rate),
    )


def _offset(config: ModelConfig) -> int:
    """Return the rows of the table before that of position 0; none where there is no table."""
    return config.positions.offset if isinstance(config.positions, Learned) else 0


def write_bert_sizes(config: ModelConfig) -> JsonObject:
    """Write what `bert_sizes` reads, the vocabulary and the longest text."""
    return dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ff_dim,
        hidden_act=activation_key(config.activation),
        max_position_embeddings=config.max_len + _offset(config),
        type_vocab_size=config.type_vocab_size,
        layer_norm_eps=config.norm_eps,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        tie_word_embeddings=True,
    )


# BERT


def _bert_table(config: ModelConfig) -> list[TensorMapping]:
    predictions = "cls.predictions.transform"
    classifier = "cls.seq_relationship" if config.masked_token_head else "classifier"
    return [
        *bert_stack(config, "bert"),
        *masked_head(
            config, f"{predictions}.dense", f"{predictions}.LayerNorm", "cls.predictions.bias"
        ),
        *pooling_layers(config, "bert.pooler.dense", classifier),
    ]


def _read_bert(keys: ConfigKeys, names: Names) -> ModelConfig:
    masked, pooler = "cls.predictions.transform.dense.weight" in names, "bert.pooler.dense.weight"
    classes, of = None, None
    if masked and "cls.seq_relationship.weight" in names:
        classes, of = 2, classes_of(keys, "cls.seq_relationship.weight", pooler, names)
    elif not masked:
        of = classes_of(keys, "classifier.weight", pooler, names)
        classes = None if of is None else labels(keys)
    return post_norm_encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooler in names else None,
        num_classes=classes,
        classes_of=of or "text",
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512),
        **bert_sizes(keys),
    )


def _write_bert(config: ModelConfig) -> JsonObject:
    content = write_bert_sizes(config)
    if config.masked_token_head:
        kind = "BertForMaskedLM" if config.num_classes is None else "BertForPreTraining"
    elif config.num_classes is None:
        kind = "BertModel"
    else:
        return content | write_head(config, "Bert")
    return dict(architectures=[kind], **content)


BERT = Family(
    "bert",
    _read_bert,
    _write_bert,
    _bert_table,
    prefix="bert.",
    ignored_tensors=("bert.embeddings.position_ids",),
    tied_copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_tensors=("cls.*", "classifier.*", "qa_outputs.*"),
    old_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
"""A masked-token head with two classes is BertForPreTraining: they say whether the second sentence
follows the first."""


# RoBERTa


def _roberta_heads(config: ModelConfig, prefix: str) -> list[TensorMapping]:
    pooler = f"{prefix}.pooler.dense" if config.num_classes is None else "classifier.dense"
    return [
        *masked_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        *pooling_layers(config, pooler, "classifier.out_proj"),
    ]


def _roberta_table(config: ModelConfig) -> list[TensorMapping]:
    return [*bert_stack(config, "roberta"), *_roberta_heads(config, "roberta")]


def _read_roberta(
    keys: ConfigKeys, names: Names, *, vocab_size: int, prefix: str = "roberta"
) -> ModelConfig:
    masked, text = "lm_head.dense.weight" in names, "classifier.out_proj.weight" in names
    of: ClassesOf | None = "text" if text else None
    if not text:  # what reads all tokens has one matrix
        of = classes_of(keys, "classifier.weight", "classifier.dense.weight", names)
    pooled = text or (of is None and f"{prefix}.pooler.dense.weight" in names)
    sizes = bert_sizes(keys)
    if masked and sizes["activation"] != "gelu":
        rule = "must be 'gelu' beside a masked-token head, which always has it"
        keys.fail("hidden_act", keys.take("hidden_act"), rule)
    offset = keys.integer("pad_token_id", 1, least=0) + 1
    rows = keys.integer("max_position_embeddings", 512)
    if rows <= offset:
        keys.fail("max_position_embeddings", rows, f"must be above pad_token_id + 1, {offset}")
    return post_norm_encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooled else None,
        num_classes=None if of is None else labels(keys),
        classes_of=of or "text",
        vocab_size=keys.integer("vocab_size", vocab_size),
        max_len=rows - offset,
        positions=Learned(offset=offset),
        **sizes,
    )


def _write_roberta(config: ModelConfig, *, name: str) -> JsonObject:
    content = write_bert_sizes(config) | {"pad_token_id": _offset(config) - 1}
    if config.num_classes is not None:
        return content | write_head(config, name)
    kind = f"{name}ForMaskedLM" if config.masked_token_head else f"{name}Model"
    return dict(architectures=[kind], **content)


ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    Family(
        model_type,
        partial(_read_roberta, vocab_size=vocab_size),
        partial(_write_roberta, name=name),
        _roberta_table,
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
"""XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al. 2020) are RoBERTas of other texts.
A classifier has a dense layer of its own; a pooler left from pre-training is ignored. Position 0 is
row `pad_token_id` + 1 of the table."""


# MPNet

MPNET_ATTENTION = "attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm"
BUCKETS = 32


def _mpnet_table(config: ModelConfig) -> list[TensorMapping]:
    bias = "mpnet.encoder.relative_attention_bias.weight"
    return [
        *bert_stack(config, "mpnet", MPNET_ATTENTION),
        TensorMapping("encoder/relative_bias", bias),
        *_roberta_heads(config, "mpnet"),
    ]


def _read_mpnet(keys: ConfigKeys, names: Names) -> ModelConfig:
    config = _read_roberta(keys, names, vocab_size=30527, prefix="mpnet")
    positions = Learned(offset=_offset(config), buckets=BUCKETS)
    return replace(config, type_vocab_size=None, positions=positions)


def _write_mpnet(config: ModelConfig) -> JsonObject:
    content = _write_roberta(config, name="MPNet") | {"relative_attention_num_buckets": BUCKETS}
    return {name: value for name, value in content.items() if name != "type_vocab_size"}


MPNET = Family(
    "mpnet",
    _read_mpnet,
    _write_mpnet,
    _mpnet_table,
    prefix="mpnet.",
    ignored_tensors=("mpnet.embeddings.position_ids", "mpnet.pooler.dense.*"),
    tied_copies={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    head_tensors=("lm_head.*", "classifier.*", "qa_outputs.*"),
)
"""MPNet (Song et al. 2020) is a RoBERTa without token types, and with T5's biases in attention."""


# DistilBERT (Sanh et al. 2019)


def _distilbert_table(config: ModelConfig) -> list[TensorMapping]:
    embeddings, block = "distilbert.embeddings", "distilbert.transformer.layer.{i}"
    return [
        TensorMapping("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        TensorMapping("embed/positions", f"{embeddings}.position_embeddings.weight"),
        *norm("embed/norm", f"{embeddings}.LayerNorm"),
        *blocks(
            "encoder",
            config.num_layers,
            [
                *linear("attention/query", f"{block}.attention.q_lin"),
                *linear("attention/key", f"{block}.attention.k_lin"),
                *linear("attention/value", f"{block}.attention.v_lin"),
                *linear("attention/out", f"{block}.attention.out_lin", LINEAR_OUT),
                *norm("norm_attention", f"{block}.sa_layer_norm"),
                *linear("feed_forward/up", f"{block}.ffn.lin1"),
                *linear("feed_forward/down", f"{block}.ffn.lin2"),
                *norm("norm_feed_forward", f"{block}.output_layer_norm"),
            ],
        ),
        *masked_head(config, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        *pooling_layers(config, "pre_classifier", "classifier"),
    ]


def _read_distilbert(keys: ConfigKeys, names: Names) -> ModelConfig:
    of = classes_of(keys, "classifier.weight", "pre_classifier.weight", names)
    return post_norm_encoder(
        keys,
        masked="vocab_transform.weight" in names,
        pooler="relu" if of == "text" else None,
        num_classes=None if of is None else labels(keys),
        classes_of=of or "text",
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512),
        d_model=keys.integer("dim", 768),
        num_layers=keys.integer("n_layers", 6),
        num_heads=keys.integer("n_heads", 12),
        d_ff=keys.integer("hidden_dim", 3072),
        activation=keys.choice("activation", ACTIVATIONS, "gelu"),
        norm_eps=1e-12,
        dropout=keys.rate("dropout", 0.1),
        attention_dropout=keys.rate("attention_dropout", 0.1),
    )


def _write_distilbert(config: ModelConfig) -> JsonObject:
    content: JsonObject = dict(
        vocab_size=config.vocab_size,
        dim=config.d_model,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        hidden_dim=config.ff_dim,
        activation=activation_key(config.activation),
        max_position_embeddings=config.max_len,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        tie_word_embeddings=True,
    )
    if config.num_classes is not None:
        return content | write_head(config, "DistilBert")
    kind = "DistilBertForMaskedLM" if config.masked_token_head else "DistilBertModel"
    return dict(architectures=[kind], **content)


DISTILBERT = Family(
    "distilbert",
    _read_distilbert,
    _write_distilbert,
    _distilbert_table,
    prefix="distilbert.",
    ignored_tensors=("distilbert.embeddings.position_ids",),
    tied_copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    head_tensors=("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*"),
    old_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
