"""Training on images and sound, where the encoder reads numbers instead of tokens.

An encoder-decoder reads an image or frames and writes `<bos> target <eos>` letter by letter. An
encoder reads an image and predicts its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.config.inputs import Frames, Patches
from transformer_jax.config.model import as_transformer
from transformer_jax.config.positions import Learned
from transformer_jax.lectures.signals import DIGITS, Signal, make_signals
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.factory import build
from transformer_jax.programs import program
from transformer_jax.pytree import Array
from transformer_jax.tokenizers.special import special_ids, with_special_tokens
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params, batch_logits
from transformer_jax.training.data import line_tokenizer
from transformer_jax.training.rows import Rows, bucketed
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.metrics import confusion_matrix, edit_distance, macro_f1
from transformer_jax.training.tasks.task import (
    Report,
    RowsTask,
    Tokenizers,
    check_lengths,
    sha256_of,
    with_vocabulary,
)

SAMPLES = 5
"""Number of held-out examples in the sample of a run."""

CLASSIFY_ROWS = 128
"""Number of images per classification batch."""


class Signals(RowsTask):
    """Task on generated images or sounds. `held_out` signals replace generated ones."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizers: Tokenizers | None,
        vocab_size: int | None,
        held_out: Sequence[Signal] | None = None,
    ) -> None:
        self.task: Any = config.task  # a `DigitsTask` or a `TonesTask`
        self.classes = config.model.kind == "encoder"
        if held_out is None:
            made = make_signals(self.task, config.seed)
            cut = int(len(made) * (1 - config.val_fraction))
        else:  # placeholder for the training part, which is never read
            made, cut = [held_out[0], *held_out], 1
        if not 0 < cut < len(made):
            rule = "must leave at least one example for training and one held out"
            raise DataError(f"examples is {len(made)}: {rule}")
        if tokenizers is None:
            targets = [signal.target for signal in made]
            tokenizers = Tokenizers(line_tokenizer(config, targets, targets[:cut]))
        # a classifier does not write text
        names = [] if self.classes else ["bos", "eos"]
        tokenizers = Tokenizers(with_special_tokens(tokenizers.tokenizer, names))
        changes = {"num_classes": len(DIGITS)} if self.classes else {}
        config = with_vocabulary(config, tokenizers, vocab_size, **changes)
        self.signals = made[cut:]

        def rows(first: int, signals: Sequence[Signal]) -> Rows:
            return bucketed(
                [
                    signal_example(config, tokenizers, signal, f"example {first + number}")
                    for number, signal in enumerate(signals)
                ]
            )

        # a run can resume only with its original examples
        content = [np.ascontiguousarray(signal.values).tobytes() for signal in made]
        sha256 = sha256_of("\n".join(signal.target for signal in made).encode(), *content)
        super().__init__(config, tokenizers, sha256, rows(0, made[:cut]), rows(cut, self.signals))
        if self.classes:
            assert config.model.inputs is not None
            self.tokens_per_step = config.accumulation * config.batch_size
            self.tokens_per_step *= config.model.inputs.num_tokens(1)

    def described(self) -> str:
        """Return a description of the number and kind of the examples."""
        kind = "pictures" if isinstance(self.task.inputs, Patches) else "sounds"
        return f"{sum(self.train.counts):,} {kind}; {sum(self.val.counts):,} held out"

    def sample(self, params: Params) -> str:
        """Return the model's answers for the first held-out images or sounds."""
        signals = self.signals[:SAMPLES]
        lines = []
        for signal, text in zip(signals, self.answers(params, signals), strict=True):
            wanted = "" if text == signal.target else f"   (wanted: {signal.target})"
            name = f"picture of {'an' if signal.target == 'eight' else 'a'} {signal.target}"
            if isinstance(self.task.inputs, Frames):
                name = f"tones of {signal.target}"
            lines.append(f"{name} -> {text}{wanted}")
        return "\n".join(lines)

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Compare the answers with the held-out targets.

        Text is scored by exact_match and letter_error_rate, and classes by accuracy and macro_f1.
        The letter_error_rate is the number of letters to insert, delete, or replace, divided by the
        number of target letters.
        """
        signals = self.signals[: self.task.judged]
        if not signals:
            return {}
        answers = self.answers(params, signals, report)
        wanted = [signal.target for signal in signals]
        if self.classes:
            one, two = (np.array([DIGITS.index(name) for name in row]) for row in (answers, wanted))
            confusion = confusion_matrix(one, two, len(DIGITS))
            accuracy = float(np.trace(confusion) / confusion.sum())
            return {"accuracy": accuracy, "macro_f1": macro_f1(confusion)}
        pairs = list(zip(answers, wanted, strict=True))
        errors = sum(edit_distance(one, two) for one, two in pairs)
        return {
            "exact_match": float(np.mean([one == two for one, two in pairs])),
            "letter_error_rate": errors / sum(map(len, wanted)),
        }

    def answers(
        self,
        params: Params,
        signals: Sequence[Signal],
        report: Report | None = None,
    ) -> list[str]:
        """Return the text or class name that the model predicts for each signal."""
        longest = max(len(self.tokenizers.tokenizer.encode(signal.target)) for signal in signals)
        return answer_signals(
            self.config, self.tokenizers, params, signals, longest + 1, report, self.model
        )  # includes <eos>; longer text is wrong anyway


def answer_signals(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    signals: Sequence[Signal],
    num_tokens: int | None = None,
    report: Report | None = None,
    model: AnyModel | None = None,
) -> list[str]:
    """Return the text or class name that a model predicts for each signal.

    Each text has at most `num_tokens` tokens. `model` is the model of the config, which may have
    edits.
    """
    model = build(config.model) if model is None else model
    if config.model.kind == "encoder":
        starts = range(0, len(signals), CLASSIFY_ROWS)
        parts = [signals[i : i + CLASSIFY_ROWS] for i in starts]
        pictures = (np.stack([signal.values for signal in part]) for part in parts)
        found = [np.asarray(_classes(model, params, part)) for part in pictures]
        return [DIGITS[i] for i in np.concatenate(found)]
    sources = [signal.values for signal in signals]
    return answer_sources(
        config, tokenizers, params, sources, num_tokens=num_tokens, model=model, report=report
    )


def signal_example(
    config: TrainConfig, tokenizers: Tokenizers, signal: Signal, where: str
) -> Batch:
    """Convert a signal to an example for the model. Raise DataError if it is too long."""
    model = as_transformer(config.model)
    assert model.inputs is not None
    if model.kind == "encoder":
        return Batch(signal.values, np.array(DIGITS.index(signal.target), np.int32))
    ids, target = special_ids(tokenizers.tokenizer), tokenizers.tokenizer.encode(signal.target)
    sizes = {f"{where}: target": len(target) + 1}
    # only a table of positions limits the length of the source
    if isinstance(model.positions, Learned):
        sizes[f"{where}: source"] = model.inputs.num_tokens(len(signal.values))
    check_lengths(config, sizes)
    whole = np.concatenate([[ids["bos"]], target, [ids["eos"]]]).astype(np.int32)
    return Batch(whole[:-1], whole[1:], source=signal.values)


@program(static=("model",))
def _classes(
    model: AnyModel,
    params: Params,
    pictures: Array,  # f32[B, H, W, C]
) -> jax.Array:  # i32[B]
    """Return the most likely class of each image."""
    labels = np.zeros(len(pictures), np.int32)
    return batch_logits(model)(params, Batch(pictures, labels), None).argmax(axis=-1)
