"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and DistilBERT (Sanh et al. 2019).

Post-norm encoders with learned positions. The tensors that are there say which heads a checkpoint
has: config.json is the same for all of them. Dropout in front of a classifier is not modelled, nor
is it, in DistilBERT, of any other rate than the stream's.
"""

from __future__ import annotations

from typing import Any

from transformer_jax.config import Activation, ModelConfig, Pooler
from transformer_jax.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    WRITTEN,
    Family,
    Keys,
    Line,
    blocks,
    linear,
    norm,
)

Names = frozenset[str]


def _stack(config: ModelConfig, prefix: str) -> list[Line]:
    """Embeddings and blocks, which BERT and RoBERTa name alike."""
    embeddings, block = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{i}}"
    return [
        Line("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        Line("embed/positions", f"{embeddings}.position_embeddings.weight"),
        Line("embed/types", f"{embeddings}.token_type_embeddings.weight"),
        *norm("embed/norm", f"{embeddings}.LayerNorm"),
        *blocks(
            "encoder",
            config.num_layers,
            [
                *linear("attention/query", f"{block}.attention.self.query"),
                *linear("attention/key", f"{block}.attention.self.key"),
                *linear("attention/value", f"{block}.attention.self.value"),
                *linear("attention/out", f"{block}.attention.output.dense", LINEAR_OUT),
                *norm("norm_attention", f"{block}.attention.output.LayerNorm"),
                *linear("feed_forward/up", f"{block}.intermediate.dense"),
                *linear("feed_forward/down", f"{block}.output.dense"),
                *norm("norm_feed_forward", f"{block}.output.LayerNorm"),
            ],
        ),
    ]


def _heads(config: ModelConfig, dense: str, scale: str, bias: str) -> list[Line]:
    """The masked-token head, where there is one."""
    if not config.masked_token_head:
        return []
    return [
        *linear("head_dense", dense),
        *norm("head_norm", scale),
        Line("embed/bias", bias),
    ]


def _pooling(config: ModelConfig, pooler: str, classifier: str) -> list[Line]:
    """The pooler and the classifier, where there are such."""
    return [
        *(linear("pooler", pooler) if config.pooling is not None else []),
        *(linear("classifier", classifier) if config.num_classes is not None else []),
    ]


def _encoder(
    keys: Keys,
    *,
    masked: bool,
    pooler: Pooler | None,
    num_classes: int | None,
    activation: Activation,
    **sizes: Any,
) -> ModelConfig:
    """What the three have in common."""
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
        activation=activation,
        **sizes,
    )


def _labels(keys: Keys) -> int:
    """How many classes a classifier has: 2 where nothing is said."""
    labels, count = keys.take("id2label", None), keys.integer("num_labels", None)
    keys.unread("id2label")  # the names of classes, which a folder like this one keeps
    if labels is None:
        return 2 if count is None else count
    if not isinstance(labels, dict) or not labels:
        keys.fail("id2label", labels, "must be an object, of the names of classes")
    if count not in (None, len(labels)):
        keys.fail("num_labels", count, f"must be as many as in id2label, {len(labels)}")
    return len(labels)


def _check_pooled(keys: Keys, pooler: str, names: Names) -> None:
    if pooler not in names:
        rule = f"without {pooler} its classes are of tokens, and not of a text"
        keys.fail("architectures", keys.take("architectures", None), rule)


def _bert_sizes(keys: Keys) -> dict[str, Any]:
    keys.only("position_embedding_type", "absolute")
    keys.unread("classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_fc_layers")
    keys.unread("pooler_num_attention_heads", "pooler_size_per_head", "pooler_type")
    return dict(
        d_model=keys.integer("hidden_size", 768),
        num_layers=keys.integer("num_hidden_layers", 12),
        num_heads=keys.integer("num_attention_heads", 12),
        d_ff=keys.integer("intermediate_size", 3072),
        activation=keys.text("hidden_act", ACTIVATIONS, "gelu"),
        type_vocab_size=keys.integer("type_vocab_size", 2),
        norm_eps=keys.positive("layer_norm_eps", 1e-12),
        dropout=keys.rate("hidden_dropout_prob", 0.1),
        attention_dropout=keys.rate("attention_probs_dropout_prob", 0.1),
    )


def _write_bert_sizes(config: ModelConfig) -> dict[str, Any]:
    return dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ff_dim,
        hidden_act=WRITTEN[config.activation],
        max_position_embeddings=config.max_len + config.position_offset,
        type_vocab_size=config.type_vocab_size,
        layer_norm_eps=config.norm_eps,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        tie_word_embeddings=True,
    )


# BERT


def _bert_table(config: ModelConfig) -> list[Line]:
    predictions = "cls.predictions.transform"
    classifier = "cls.seq_relationship" if config.masked_token_head else "classifier"
    return [
        *_stack(config, "bert"),
        *_heads(config, f"{predictions}.dense", f"{predictions}.LayerNorm", "cls.predictions.bias"),
        *_pooling(config, "bert.pooler.dense", classifier),
    ]


def _read_bert(keys: Keys, names: Names) -> ModelConfig:
    masked, pooler = "cls.predictions.transform.dense.weight" in names, "bert.pooler.dense.weight"
    classes = None
    if masked and "cls.seq_relationship.weight" in names:
        classes = 2
    elif not masked and "classifier.weight" in names:
        classes = _labels(keys)
    if classes is not None:
        _check_pooled(keys, pooler, names)
    return _encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooler in names else None,
        num_classes=classes,
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512),
        **_bert_sizes(keys),
    )


def _write_bert(config: ModelConfig) -> dict[str, Any]:
    content = _write_bert_sizes(config)
    if config.masked_token_head:
        kind = "BertForMaskedLM" if config.num_classes is None else "BertForPreTraining"
    elif config.num_classes is None:
        kind = "BertModel"
    else:
        kind = "BertForSequenceClassification"
        content["num_labels"] = config.num_classes
    return dict(architectures=[kind], **content)


BERT = Family(
    "bert",
    _read_bert,
    _write_bert,
    _bert_table,
    prefix="bert.",
    unused=("bert.embeddings.position_ids",),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    heads=("cls.*", "classifier.*"),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
"""Two classes beside a masked-token head are whether the second sentence followed the first."""


# RoBERTa


def _roberta_table(config: ModelConfig) -> list[Line]:
    pooler = "roberta.pooler.dense" if config.num_classes is None else "classifier.dense"
    return [
        *_stack(config, "roberta"),
        *_heads(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        *_pooling(config, pooler, "classifier.out_proj"),
    ]


def _read_roberta(keys: Keys, names: Names) -> ModelConfig:
    masked, classifies = "lm_head.dense.weight" in names, "classifier.out_proj.weight" in names
    pooled = classifies or "roberta.pooler.dense.weight" in names
    sizes = _bert_sizes(keys)
    if masked and sizes["activation"] != "gelu":
        rule = "must be 'gelu' beside a masked-token head, which always has it"
        keys.fail("hidden_act", keys.take("hidden_act"), rule)
    offset = keys.integer("pad_token_id", 1, least=0) + 1
    rows = keys.integer("max_position_embeddings", 512)
    if rows <= offset:
        keys.fail("max_position_embeddings", rows, f"must be above pad_token_id + 1, {offset}")
    return _encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooled else None,
        num_classes=_labels(keys) if classifies else None,
        vocab_size=keys.integer("vocab_size", 50265),
        max_len=rows - offset,
        position_offset=offset,
        **sizes,
    )


def _write_roberta(config: ModelConfig) -> dict[str, Any]:
    content = _write_bert_sizes(config) | {"pad_token_id": config.position_offset - 1}
    kind = "RobertaModel"
    if config.num_classes is not None:
        kind, content["num_labels"] = "RobertaForSequenceClassification", config.num_classes
    elif config.masked_token_head:
        kind = "RobertaForMaskedLM"
    return dict(architectures=[kind], **content)


ROBERTA = Family(
    "roberta",
    _read_roberta,
    _write_roberta,
    _roberta_table,
    prefix="roberta.",
    unused=("roberta.embeddings.position_ids", "roberta.pooler.dense.*"),
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    heads=("lm_head.*", "classifier.*"),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
"""A classifier has a dense layer of its own; a pooler beside it, left from pre-training, is not
read. Position 0 has row `pad_token_id` + 1 of the table."""


# DistilBERT


def _distilbert_table(config: ModelConfig) -> list[Line]:
    embeddings, block = "distilbert.embeddings", "distilbert.transformer.layer.{i}"
    return [
        Line("embed/tokens", f"{embeddings}.word_embeddings.weight"),
        Line("embed/positions", f"{embeddings}.position_embeddings.weight"),
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
        *_heads(config, "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        *_pooling(config, "pre_classifier", "classifier"),
    ]


def _read_distilbert(keys: Keys, names: Names) -> ModelConfig:
    keys.only("tie_weights_", True)
    keys.unread("sinusoidal_pos_embds")  # how the table began, which is in the file
    keys.unread("qa_dropout", "seq_classif_dropout")
    classes = None
    if "classifier.weight" in names:
        _check_pooled(keys, "pre_classifier.weight", names)
        classes = _labels(keys)
    return _encoder(
        keys,
        masked="vocab_transform.weight" in names,
        pooler=None if classes is None else "relu",
        num_classes=classes,
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512),
        d_model=keys.integer("dim", 768),
        num_layers=keys.integer("n_layers", 6),
        num_heads=keys.integer("n_heads", 12),
        d_ff=keys.integer("hidden_dim", 3072),
        activation=keys.text("activation", ACTIVATIONS, "gelu"),
        norm_eps=1e-12,
        dropout=keys.rate("dropout", 0.1),
        attention_dropout=keys.rate("attention_dropout", 0.1),
    )


def _write_distilbert(config: ModelConfig) -> dict[str, Any]:
    content: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        dim=config.d_model,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        hidden_dim=config.ff_dim,
        activation=WRITTEN[config.activation],
        max_position_embeddings=config.max_len,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        tie_word_embeddings=True,
    )
    kind = "DistilBertModel"
    if config.num_classes is not None:
        kind, content["num_labels"] = "DistilBertForSequenceClassification", config.num_classes
    elif config.masked_token_head:
        kind = "DistilBertForMaskedLM"
    return dict(architectures=[kind], **content)


DISTILBERT = Family(
    "distilbert",
    _read_distilbert,
    _write_distilbert,
    _distilbert_table,
    prefix="distilbert.",
    unused=("distilbert.embeddings.position_ids",),
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    heads=("vocab_*", "pre_classifier.*", "classifier.*"),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
