"""Detection of the heads of encoders from the files, and the matching classes in transformers."""

from __future__ import annotations

from transformer_jax.config import ModelConfig, Pooler
from transformer_jax.config.model import ClassesOf
from transformer_jax.pretrained.families import keys as k
from transformer_jax.untrusted_files import JsonObject

SPANS = "qa_outputs"
"""Token classifier that predicts the start and the end of an answer."""
HEAD_NAMES: dict[ClassesOf, str] = {
    "text": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}


def labels(keys: k.ConfigKeys) -> int:
    """Return the number of classes of a classifier, which is 2 by default."""
    labels, count = keys.take("id2label", None), keys.integer("num_labels", None)
    keys.ignore("id2label")  # save_pretrained(like=...) keeps the names
    if labels is None:
        return 2 if count is None else count
    if not isinstance(labels, dict) or not labels:
        keys.fail("id2label", labels, "must be an object of class names")
    if count not in (None, len(labels)):
        keys.fail(
            "num_labels", count, f"must equal the number of labels in id2label, {len(labels)}"
        )
    return len(labels)


def classes_of(keys: k.ConfigKeys, classifier: str, pooler: str) -> ClassesOf | None:
    """Return the unit that the model classifies, or None if there is no classifier.

    A text classifier reads the pooler. A token classifier has the same tensor name, and an old file
    may contain an unused pooler, so `architectures` decides which one it is.
    """
    if f"{SPANS}.weight" in keys.names:
        return "span"
    if classifier not in keys.names:
        return None
    if named_head(keys) == "token":
        return "token"
    if pooler not in keys.names:
        rule = f"must be, without {pooler}, a class for tokens, "
        keys.fail(
            "architectures", keys.take("architectures", None), f"{rule}...{HEAD_NAMES['token']}"
        )
    return "text"


def named_head(keys: k.ConfigKeys) -> ClassesOf | None:
    """Return the unit to classify according to `architectures`, or None if it is unknown."""
    listed = keys.take("architectures", None)
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    for of, end in HEAD_NAMES.items():
        if any(name.endswith(end) for name in named):
            return of
    return None


def encoder_class(config: ModelConfig, name: str, *, pretraining: bool = False) -> str:
    """Return the name of the class in transformers that has the heads of a config.

    `pretraining` selects the ForPreTraining class for a masked-token head with a classifier.
    """
    if config.masked_token_head and (pretraining or config.num_classes is None):
        return f"{name}ForMaskedLM" if config.num_classes is None else f"{name}ForPreTraining"
    return (
        f"{name}Model" if config.num_classes is None else f"{name}{HEAD_NAMES[config.classes_of]}"
    )


def write_labels(config: ModelConfig) -> JsonObject:
    """Return the key that stores the number of classes."""
    return {} if config.num_classes is None else dict(num_labels=config.num_classes)


def head_fields(
    keys: k.ConfigKeys,
    *,
    masked: bool,
    pooler: Pooler | None,
    classes_of: ClassesOf | None,
    num_classes: int | None = None,  # None counts the labels in config.json
) -> k.Fields:
    """Return the config fields of an encoder's heads, as detected from its tensors."""
    if not keys.flag("tie_word_embeddings", True) and masked:
        keys.fail("tie_word_embeddings", False, "must be true with a masked-token head")
    if num_classes is None and classes_of is not None:
        num_classes = labels(keys)
    return dict(
        masked_token_head=masked,
        logit_bias=masked,
        pooler=pooler,
        num_classes=num_classes,
        classes_of=classes_of or "text",
    )
