"""Map ELECTRA (Clark et al. 2020): a BERT whose embeddings may be narrower than its blocks.

A generator fills masks. A discriminator says of every token whether it was replaced: one class of
each token, of which the logit above 0 means that it was.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig, Pooler
from transformer_jax.config.model import ClassesOf, PoolerReads
from transformer_jax.pretrained.families.bert import (
    bert_sizes,
    bert_stack,
    masked_head,
    pooling_layers,
    post_norm_encoder,
    write_bert_sizes,
)
from transformer_jax.pretrained.families.classes import Names, classes_of, labels, write_head
from transformer_jax.pretrained.families.table import ConfigKeys, Family, TensorMapping, linear
from transformer_jax.untrusted_files import JsonObject

DISCRIMINATOR = "discriminator_predictions"
GENERATOR = "generator_predictions"


def _table(config: ModelConfig) -> list[TensorMapping]:
    project = linear("embed/projection", "electra.embeddings_project")
    pooler, classifier = "classifier.dense", "classifier.out_proj"
    replaced = []
    if _says_replaced(config):
        pooler, classifier = f"{DISCRIMINATOR}.dense", f"{DISCRIMINATOR}.dense_prediction"
        replaced = [*linear("pooler", pooler), *linear("classifier", classifier)]
    return [
        *bert_stack(config, "electra"),
        *([] if config.embedding_dim is None else project),
        *masked_head(
            config, f"{GENERATOR}.dense", f"{GENERATOR}.LayerNorm", "generator_lm_head.bias"
        ),
        *(replaced or pooling_layers(config, pooler, classifier)),
    ]


def _says_replaced(config: ModelConfig) -> bool:
    return config.pooler_reads == "each" and config.num_classes == 1


def _read(keys: ConfigKeys, names: Names) -> ModelConfig:
    masked, replaced = (
        f"{GENERATOR}.dense.weight" in names,
        f"{DISCRIMINATOR}.dense.weight" in names,
    )
    sizes = bert_sizes(keys, width=256, heads=4, hidden=1024)
    if (masked or replaced) and sizes["activation"] != "gelu":
        rule = "must be 'gelu' beside a head of a generator or a discriminator"
        keys.fail("hidden_act", keys.take("hidden_act"), rule)
    of: ClassesOf | None = "token" if replaced else None
    pooler: Pooler | None = "gelu" if replaced else None
    reads: PoolerReads = "each" if replaced else "first"
    count = 1
    if "classifier.out_proj.weight" in names:
        of, pooler = "text", "gelu"
    elif not replaced:
        of = classes_of(keys, "classifier.weight", "classifier.dense.weight", names)
    if not replaced and of is not None:
        count = labels(keys)
    width = keys.integer("embedding_size", 128)
    return post_norm_encoder(
        keys,
        masked=masked,
        pooler=pooler,
        num_classes=None if of is None else count,
        classes_of=of or "text",
        pooler_reads=reads,
        embedding_dim=None if width == sizes["d_model"] else width,
        vocab_size=keys.integer("vocab_size", 30522),
        max_len=keys.integer("max_position_embeddings", 512),
        **sizes,
    )


def _write(config: ModelConfig) -> JsonObject:
    content = write_bert_sizes(config) | {"embedding_size": config.embedding_width}
    if config.num_classes is not None and not _says_replaced(config):
        return content | write_head(config, "Electra")
    kind = "ElectraForPreTraining" if config.num_classes is not None else "ElectraModel"
    kind = "ElectraForMaskedLM" if config.masked_token_head else kind
    return dict(architectures=[kind], **content)


ELECTRA = Family(
    "electra",
    _read,
    _write,
    _table,
    prefix="electra.",
    ignored_tensors=("electra.embeddings.position_ids",),
    tied_copies={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    head_tensors=(f"{DISCRIMINATOR}.*", "generator_*", "classifier.*", "qa_outputs.*"),
)
