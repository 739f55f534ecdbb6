"""The heads of an encoder: what its files tell of them, and the class of transformers."""

from __future__ import annotations

from transformer_jax.config import ModelConfig, Pooler
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families import keys as k
from transformer_jax.untrusted_files import JsonObject

SPANS = "qa_outputs"
"""The classifier of every token that says where an answer begins and ends."""
HEAD_NAMES: dict[ClassesOf, str] = {
    "text": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}


def labels(keys: k.ConfigKeys) -> int:
    """Count the classes of a classifier; the default is 2."""
    labels, count = keys.take("id2label", None), keys.integer("num_labels", None)
    keys.ignore("id2label")  # the names are kept by save_pretrained(like=...)
    if labels is None:
        return 2 if count is None else count
    if not isinstance(labels, dict) or not labels:
        keys.fail("id2label", labels, "must be an object of the names of classes")
    if count not in (None, len(labels)):
        keys.fail("num_labels", count, f"must be as many as in id2label, {len(labels)}")
    return len(labels)


def classes_of(keys: k.ConfigKeys, classifier: str, pooler: str) -> ClassesOf | None:
    """Return what the classes are of, or None where there are none.

    A head of a text reads the pooler. One of tokens has the same name, and an old file may hold a
    pooler beside it: `architectures` says so.
    """
    if f"{SPANS}.weight" in keys.names:
        return "span"
    if classifier not in keys.names:
        return None
    if named_head(keys) == "token":
        return "token"
    if pooler not in keys.names:
        rule = f"without {pooler} the classes are of single tokens: must be a class "
        keys.fail(
            "architectures", keys.take("architectures", None), f"{rule}...{HEAD_NAMES['token']}"
        )
    return "text"


def named_head(keys: k.ConfigKeys) -> ClassesOf | None:
    """Return what the classes are of as `architectures` names it, or None where it does not."""
    said = keys.take("architectures", None)
    named = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    for of, end in HEAD_NAMES.items():
        if any(name.endswith(end) for name in named):
            return of
    return None


def encoder_class(config: ModelConfig, name: str, *, pretraining: bool = False) -> str:
    """Return the class of transformers that has the heads of a config.

    With `pretraining`, a masked-token head with classes has a class of its own.
    """
    if config.masked_token_head and (pretraining or config.num_classes is None):
        return f"{name}ForMaskedLM" if config.num_classes is None else f"{name}ForPreTraining"
    return (
        f"{name}Model" if config.num_classes is None else f"{name}{HEAD_NAMES[config.classes_of]}"
    )


def write_labels(config: ModelConfig) -> JsonObject:
    """Return the key that counts the classes."""
    return {} if config.num_classes is None else dict(num_labels=config.num_classes)


def head_fields(
    keys: k.ConfigKeys,
    *,
    masked: bool,
    pooler: Pooler | None,
    num_classes: int | None,
    classes_of: ClassesOf | None,
) -> k.Fields:
    """Return the fields of the heads of an encoder, of which the tensors tell."""
    if not keys.flag("tie_word_embeddings", True) and masked:
        keys.fail("tie_word_embeddings", False, "must be true beside a masked-token head")
    return dict(
        masked_token_head=masked,
        logit_bias=masked,
        pooler=pooler,
        num_classes=num_classes,
        classes_of=classes_of or "text",
    )
