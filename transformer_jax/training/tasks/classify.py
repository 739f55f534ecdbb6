"""Text classification with the head of an encoder or with a generated token.

An encoder reads `<cls> text`, and its head predicts the class from the first token. A published
encoder uses its own special tokens. A generative model reads `text <cls>` and generates a token for
the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.arguments import gather_tokens
from transformer_jax.models.factory import build
from transformer_jax.programs import program
from transformer_jax.pytree import Array
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tokenizers.special import (
    encoder_frame,
    frame,
    special_ids,
    with_special_tokens,
)
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params, batch_logits
from transformer_jax.training.data import IGNORE, line_tokenizer
from transformer_jax.training.rows import Rows, bucketed, padded
from transformer_jax.training.tasks.metrics import confusion_matrix, macro_f1
from transformer_jax.training.tasks.pairs import SHOWN, Pair, read_pairs
from transformer_jax.training.tasks.task import (
    Report,
    RowsTask,
    Tokenizers,
    check_lengths,
    check_token_ids,
    encode_line,
    sha256_of,
    split_held_out,
    with_vocabulary,
)

_RULE = "must be a label, one tab and a text"


class Classes(RowsTask):
    """Classified texts, read from lines of the form "label TAB text"."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        train, content = read_pairs(config, "data", config.data, None, _RULE)
        if config.val_data is None:
            train, val = split_held_out(config, train, "pairs")
        else:
            val, more = read_pairs(config, "val_data", config.val_data, None, _RULE)
            content += more
        assert isinstance(config.task, ClassifyTask)
        labels = config.task.labels or tuple(sorted({pair.source for pair in train}))
        if len(labels) < 2:
            rule = f"its only label is {labels[0]!r}: must have at least two labels"
            raise DataError(f"data is {config.data!r}: {rule}")
        for pair in (*train, *val):
            if pair.source not in labels:
                listed = ", ".join(labels[:10])
                raise DataError(f"{pair.where}: label is {pair.source!r}: must be one of {listed}")
        # stored in the config so that a resumed run uses the same order
        config = replace(config, task=ClassifyTask(labels=labels))
        if tokenizers is None:
            texts = [[pair.target for pair in part] for part in ([*train, *val], train)]
            tokenizers = Tokenizers(line_tokenizer(config, *texts))
        names = label_names(config)
        # An encoder whose tokenizer already begins a text with a token, such as BERT's, needs no
        # <cls>.
        framed = not names and frame(tokenizers.tokenizer).first
        tokenizers = Tokenizers(
            with_special_tokens(tokenizers.tokenizer, names if framed else ["cls", *names])
        )
        changes = {} if names else {"num_classes": len(labels_of(config))}
        config = with_vocabulary(config, tokenizers, vocab_size, **changes)
        self.pairs = val

        def rows(pairs: Sequence[Pair]) -> Rows:
            padding = config.model.kind == "encoder"
            return bucketed([class_example(config, tokenizers, pair) for pair in pairs], padding)

        super().__init__(config, tokenizers, sha256_of(content), rows(train), rows(val))

    def sample(self, params: Params) -> str:
        """Return the first held-out texts with their predicted labels."""
        pairs = self.pairs[:SHOWN]
        predictions = label_texts(
            self.config, self.tokenizers, params, [pair.target for pair in pairs], self.model
        )
        lines = []
        for pair, (label, probability) in zip(pairs, predictions, strict=True):
            wanted = "" if label == pair.source else f" (wanted: {pair.source})"
            lines.append(f"{label} {probability:.2f}{wanted}: {pair.target}")
        return "\n".join(lines)

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return the accuracy, the macro F1, and the confused labels of the held-out texts."""
        labels = labels_of(self.config)
        texts = [pair.target for pair in self.pairs]
        predictions = label_texts(self.config, self.tokenizers, params, texts, self.model)
        confusion = confusion_matrix(
            np.array([labels.index(label) for label, _ in predictions]),
            np.array([labels.index(pair.source) for pair in self.pairs]),
            len(labels),
        )
        found = {"accuracy": float(np.trace(confusion) / confusion.sum())}
        found["macro_f1"] = macro_f1(confusion)
        for i, j in np.argwhere(confusion):
            if i != j:
                found[f"confusion {labels[i]} as {labels[j]}"] = float(confusion[i, j])
        return found


def labels_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the class names of a run."""
    assert isinstance(config.task, ClassifyTask) and config.task.labels is not None
    return config.task.labels


def label_names(config: TrainConfig) -> list[str]:
    """Return the names of the class tokens, or an empty list if a head predicts the class."""
    if config.model.kind == "encoder":
        return []
    return [f"label:{label}" for label in labels_of(config)]


def class_example(config: TrainConfig, tokenizers: Tokenizers, pair: Pair) -> Batch:
    """Encode a text and its class for the model in the config."""
    text = encode_line(tokenizers.tokenizer, pair.target, pair.where)
    names = label_names(config)
    number = labels_of(config).index(pair.source)
    if not names:
        tokens = encoder_frame(tokenizers.tokenizer).around(text)
        check_token_ids(config.model.vocab_size, tokenizers.tokenizer, pair.where, tokens)
        check_lengths(config, {pair.where: len(tokens)})
        return Batch(tokens, np.array(number, np.int32))
    ids = special_ids(tokenizers.tokenizer)
    check_lengths(config, {pair.where: len(text) + 1})
    tokens = np.append(text, ids["cls"]).astype(np.int32)
    check_token_ids(config.model.vocab_size, tokenizers.tokenizer, pair.where, tokens)
    labels = np.full(len(tokens), IGNORE, np.int32)
    labels[-1] = ids[names[number]]
    return Batch(tokens, labels)


def label_texts(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    texts: Sequence[str],
    model: AnyModel | None = None,
) -> list[tuple[str, float]]:
    """Return the most likely label of each text and its probability among the labels.

    `model` is the model of the config, which may have edits.
    """
    model = build(config.model) if model is None else model
    labels, names = labels_of(config), label_names(config)
    ids = special_ids(tokenizers.tokenizer)
    columns = np.array([ids[name] for name in names], np.int32)
    pairs = [Pair(labels[0], text, f"text {n + 1}") for n, text in enumerate(texts)]
    examples = [class_example(config, tokenizers, pair) for pair in pairs]
    found: list[tuple[str, float]] = []
    size = 1 if model.edits else config.batch_size
    longest = max(len(example.tokens) for example in examples)
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        # Filler rows give all batches the same shape, so that one program serves all of them.
        filler = Batch(np.zeros(longest, np.int32), part[0].labels * 0 + IGNORE)
        if names:
            filler = Batch(filler.tokens, np.full(longest, IGNORE, np.int32))
        batch = padded([*part, *[filler] * (size - len(part) + 1)], not names)
        if model.edits:  # edits must not see padding or filler rows
            batch = Batch(part[0].tokens[None], part[0].labels[None])
        logits = _class_logits(model, params, batch, columns if names else None)
        for row in np.asarray(jax.nn.softmax(logits, axis=-1))[: len(part)]:
            if not np.isfinite(row).all():
                raise DataError(f"the logits of text {len(found) + 1} are not finite")
            best = int(row.argmax())
            found.append((labels[best], float(row[best])))
    return found


@program(static=("model",))
def _class_logits(
    model: AnyModel, params: Params, batch: Batch, columns: Array | None
) -> jax.Array:  # f32[B, C]
    """Return the class logits from a head, or the logits of the class tokens after <cls>."""
    logits = batch_logits(model)(params, batch, None)
    if columns is None:
        return logits
    # The only label of a row is at <cls>, because it follows the text.
    at = jax.numpy.asarray((batch.labels != IGNORE).argmax(axis=1))
    found = gather_tokens(logits, at[:, None])[:, 0]
    # a mesh may split the vocabulary
    choose = partial(jax.numpy.take, indices=columns, axis=1)
    return by_compiler(choose, [found], PartitionSpec(split(found)[0], None))
