"""ALBERT (Lan et al. 2020), a BERT model with narrow embeddings whose layers share one block.

Configs with `inner_group_num` above 1 or separate groups of layers are rejected. transformers
applies no dropout after the feed-forward network. In this library, `dropout` applies to both
branches.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import ModelConfig
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families import bert as b
from transformer_jax.pretrained.families import classes as c
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t

POOLER = "albert.pooler"
SECOND = "sop_classifier.classifier"
"""Classifier that predicts whether two sentences are in their original order."""


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    encoder = "albert.encoder"
    block = f"{encoder}.albert_layer_groups.0.albert_layers.0"
    names = {
        **t.attention_names("attention", "dense", "query key value"),
        "norm_attention": "attention.LayerNorm", "feed_forward/up": "ffn",
        "feed_forward/down": "ffn_output", "norm_feed_forward": "full_layer_layer_norm",
    }  # fmt: skip
    return [
        *b.embeddings_of(config, "albert"),
        *t.linear("embed/projection", f"{encoder}.embedding_hidden_mapping_in"),
        # There is one block for any num_layers, because all layers share it.
        *t.blocks("encoder", 1, t.named(config, block, names)),
        *b.masked_head(config, "predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        *b.pooling_layers(config, POOLER, SECOND if config.masked_token_head else "classifier"),
    ]


def _read_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    masked, pooler = "predictions.dense.weight" in keys.names, f"{POOLER}.weight"
    of: ClassesOf | None = "text" if masked and f"{SECOND}.weight" in keys.names else None
    if not masked:
        of = c.classes_of(keys, "classifier.weight", pooler)
    return c.head_fields(
        keys,
        masked=masked,
        pooler="tanh" if pooler in keys.names else None,
        classes_of=of,
    )


ALBERT = t.Family(
    "albert",
    [
        *b.POST_NORM,
        *b.vocabulary(30000),
        *b.bert_sizes(width=4096, heads=64, hidden=16384, activation="gelu_new", rate=0.0),
        b.TYPES,
        k.Fixed(share_layers=True),
        k.FixedKeys(num_hidden_groups=1, inner_group_num=1),
        k.Code(
            lambda keys, fields: dict(embedding_dim=keys.integer("embedding_size", 128)),
            lambda config: dict(embedding_size=config.embedding_width),
        ),
        k.Code(_read_heads, c.write_labels),
    ],
    _table,
    partial(c.encoder_class, name="Albert", pretraining=True),
    prefix="albert.",
    ignored_tensors=("albert.embeddings.position_ids",),
    tied_copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    head_tensors=("predictions.*", "sop_classifier.*", "classifier.*", "qa_outputs.*"),
)
