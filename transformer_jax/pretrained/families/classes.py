"""Read which classes an encoder's files have: how many there are, and what they are of."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families.table import ConfigKeys
from transformer_jax.untrusted_files import JsonObject

Names = frozenset[str]
SPANS = "qa_outputs"
"""The classifier of every token that says where an answer begins and ends."""
HEAD_NAMES: dict[ClassesOf, str] = {
    "text": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}


def labels(keys: ConfigKeys) -> int:
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


def classes_of(keys: ConfigKeys, classifier: str, pooler: str, names: Names) -> ClassesOf | None:
    """Return what the classes are of, or None where there are none.

    A head of a text reads the pooler. One of tokens has the same name, and an old file may hold a
    pooler beside it: `architectures` says so.
    """
    if f"{SPANS}.weight" in names:
        return "span"
    if classifier not in names:
        return None
    if named_head(keys) == "token":
        return "token"
    if pooler not in names:
        rule = f"without {pooler} the classes are of single tokens: must be a class "
        keys.fail(
            "architectures", keys.take("architectures", None), f"{rule}...{HEAD_NAMES['token']}"
        )
    return "text"


def named_head(keys: ConfigKeys) -> ClassesOf | None:
    """Return what the classes are of as `architectures` names it, or None where it does not."""
    said = keys.take("architectures", None)
    named = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    for of, end in HEAD_NAMES.items():
        if any(name.endswith(end) for name in named):
            return of
    return None


def write_head(config: ModelConfig, name: str) -> JsonObject:
    """Return the class of transformers that has the config's classes, and how many there are."""
    kind = f"{name}{HEAD_NAMES[config.classes_of]}"
    return dict(architectures=[kind], num_labels=config.num_classes)
