"""ELECTRA (Clark et al. 2020), a BERT model whose embeddings may be narrower than its blocks.

A generator predicts masked tokens. A discriminator has one class per token. A logit above 0 means
that the token was replaced.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig, Pooler
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families import bert as b
from transformer_jax.pretrained.families import classes as c
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families.table import Family, TensorMapping, linear
from transformer_jax.untrusted_files import JsonObject

DISCRIMINATOR = "discriminator_predictions"
GENERATOR = "generator_predictions"


def _table(config: ModelConfig) -> list[TensorMapping]:
    project = linear("embed/projection", "electra.embeddings_project")
    pooler, classifier = "classifier.dense", "classifier.out_proj"
    replaced = []
    if _detects_replacements(config):
        pooler, classifier = f"{DISCRIMINATOR}.dense", f"{DISCRIMINATOR}.dense_prediction"
        replaced = [*linear("pooler", pooler), *linear("classifier", classifier)]
    return [
        *b.bert_stack(config, "electra"),
        *([] if config.embedding_dim is None else project),
        *b.masked_head(
            config, f"{GENERATOR}.dense", f"{GENERATOR}.LayerNorm", "generator_lm_head.bias"
        ),
        *(replaced or b.pooling_layers(config, pooler, classifier)),
    ]


def _detects_replacements(config: ModelConfig) -> bool:
    return config.pooler_reads == "each" and config.num_classes == 1


def _read_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    masked = f"{GENERATOR}.dense.weight" in keys.names
    replaced = f"{DISCRIMINATOR}.dense.weight" in keys.names
    if (masked or replaced) and fields["activation"] != "gelu":
        rule = "must be 'gelu' with the head of a generator or a discriminator"
        keys.fail("hidden_act", keys.take("hidden_act"), rule)
    of: ClassesOf | None = "token" if replaced else None
    pooler: Pooler | None = "gelu" if replaced else None
    if "classifier.out_proj.weight" in keys.names:
        of, pooler = "text", "gelu"
    elif not replaced:
        of = c.classes_of(keys, "classifier.weight", "classifier.dense.weight")
    count = 1 if replaced else None
    heads = c.head_fields(keys, masked=masked, pooler=pooler, classes_of=of, num_classes=count)
    return dict(heads, pooler_reads="each" if replaced else "first")


def _write_heads(config: ModelConfig) -> JsonObject:
    return {} if _detects_replacements(config) else c.write_labels(config)


def _architecture(config: ModelConfig) -> str:
    if not _detects_replacements(config):
        return c.encoder_class(config, "Electra")
    return "ElectraForMaskedLM" if config.masked_token_head else "ElectraForPreTraining"


ELECTRA = Family(
    "electra",
    [
        *b.POST_NORM,
        *b.vocabulary(30522),
        *b.bert_sizes(width=256, heads=4, hidden=1024),
        b.TYPES,
        k.Code(
            lambda keys, fields: dict(
                embedding_dim=None
                if (width := keys.integer("embedding_size", 128)) == fields["d_model"]
                else width
            ),
            lambda config: dict(embedding_size=config.embedding_width),
        ),
        k.Code(_read_heads, _write_heads),
    ],
    _table,
    _architecture,
    prefix="electra.",
    ignored_tensors=("electra.embeddings.position_ids",),
    tied_copies={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    head_tensors=(f"{DISCRIMINATOR}.*", "generator_*", "classifier.*", "qa_outputs.*"),
)
