"""Map ALBERT (Lan et al. 2020): a BERT of narrow embeddings whose layers are one block.

`inner_group_num` blocks in turn and groups of layers with parameters of their own are refused. In
training transformers drops nothing after a feed-forward; here `dropout` is of both branches.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families.bert import (
    bert_sizes,
    embeddings_of,
    masked_head,
    pooling_layers,
    post_norm_encoder,
    write_bert_sizes,
)
from transformer_jax.pretrained.families.classes import Names, classes_of, labels, write_head
from transformer_jax.pretrained.families.table import (
    LINEAR_OUT,
    ConfigKeys,
    Family,
    TensorMapping,
    blocks,
    linear,
    norm,
)
from transformer_jax.untrusted_files import JsonObject

POOLER = "albert.pooler"
SECOND = "sop_classifier.classifier"
"""The classifier of whether two sentences stand in their order."""


def _table(config: ModelConfig) -> list[TensorMapping]:
    encoder = "albert.encoder"
    block = f"{encoder}.albert_layer_groups.0.albert_layers.0"
    return [
        *embeddings_of(config, "albert"),
        *linear("embed/projection", f"{encoder}.embedding_hidden_mapping_in"),
        *blocks(
            "encoder",
            1,
            [
                *linear("attention/query", f"{block}.attention.query"),
                *linear("attention/key", f"{block}.attention.key"),
                *linear("attention/value", f"{block}.attention.value"),
                *linear("attention/out", f"{block}.attention.dense", LINEAR_OUT),
                *norm("norm_attention", f"{block}.attention.LayerNorm"),
                *linear("feed_forward/up", f"{block}.ffn"),
                *linear("feed_forward/down", f"{block}.ffn_output"),
                *norm("norm_feed_forward", f"{block}.full_layer_layer_norm"),
            ],
        ),
        *masked_head(config, "predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        *pooling_layers(config, POOLER, SECOND if config.masked_token_head else "classifier"),
    ]


def _read(keys: ConfigKeys, names: Names) -> ModelConfig:
    masked, pooler = "predictions.dense.weight" in names, f"{POOLER}.weight"
    of: ClassesOf | None = "text" if masked and f"{SECOND}.weight" in names else None
    if not masked:
        of = classes_of(keys, "classifier.weight", pooler, names)
    sizes = bert_sizes(keys, width=4096, heads=64, hidden=16384, activation="gelu_new", rate=0.0)
    return post_norm_encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooler in names else None,
        num_classes=None if of is None else labels(keys),
        classes_of=of or "text",
        share_layers=True,
        embedding_dim=keys.integer("embedding_size", 128),
        vocab_size=keys.integer("vocab_size", 30000),
        max_len=keys.integer("max_position_embeddings", 512),
        **sizes,
    )


def _write(config: ModelConfig) -> JsonObject:
    content = write_bert_sizes(config) | {"embedding_size": config.embedding_width}
    content |= dict(num_hidden_groups=1, inner_group_num=1)
    if not config.masked_token_head and config.num_classes is not None:
        return content | write_head(config, "Albert")
    if config.num_classes is not None:
        content["num_labels"] = config.num_classes
    kind = "AlbertForPreTraining" if config.num_classes is not None else "AlbertForMaskedLM"
    return dict(architectures=[kind if config.masked_token_head else "AlbertModel"], **content)


ALBERT = Family(
    "albert",
    _read,
    _write,
    _table,
    prefix="albert.",
    ignored_tensors=("albert.embeddings.position_ids",),
    tied_copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    head_tensors=("predictions.*", "sop_classifier.*", "classifier.*", "qa_outputs.*"),
)
