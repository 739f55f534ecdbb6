"""Next-token training on windows of one long text or on separate documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import LanguageTask
from transformer_jax.decoding.completion import TextGenerator, read_prompt
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.tokenizers.plain_text import split_documents
from transformer_jax.tokenizers.special import (
    encode_text,
    frame,
    special_ids,
    with_end,
    with_special_tokens,
)
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params
from transformer_jax.training.data import (
    Dataset,
    consecutive_starts,
    line_tokenizer,
    load_dataset,
    random_starts,
    read,
)
from transformer_jax.training.rows import Rows, laid_out
from transformer_jax.training.step import windows
from transformer_jax.training.tasks.task import (
    RowsTask,
    Tokenizers,
    TrainingTask,
    sha256_of,
    with_vocabulary,
)

_EVAL_STREAM = 2**62
"""Value of `step` that selects the windows of an evaluation. No training step has this number."""


@dataclass(frozen=True)
class Windows:
    """Function that cuts windows from a text on the device."""

    length: int

    def __call__(self, corpus: jax.Array, starts: jax.Array) -> Batch:
        return windows(corpus, starts, self.length)


def write_sample(self: TrainingTask, params: Params) -> str:
    """Generate `sample_tokens` tokens without a prompt and return the text."""
    config, model = self.config, self.config.model
    if config.init_from is not None:
        model = model.with_max_len(config.sequence_len)  # limits the cache
    tokenizer = self.tokenizers.tokenizer
    prompt, stop = read_prompt(tokenizer, ""), tuple[int, ...]()
    if isinstance(config.task, LanguageTask) and config.task.documents is not None:
        end = special_ids(tokenizer)["eos"]
        begin = None if frame(tokenizer).first else end
        prompt, stop = read_prompt(tokenizer, "", begin), (end,)
    generator = TextGenerator(
        model,
        params,
        tokenizer,
        sampler=Sample(Temperature(0.8)),
        key=jax.random.fold_in(jax.random.key(config.seed), 2),  # 0 and 1 are already in use
        stop_ids=stop,
    )
    return "".join(generator.complete(prompt, config.sample_tokens))


class LanguageWindows(TrainingTask):
    """Task whose windows start at random positions in one long text."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        tokenizer = None if tokenizers is None else tokenizers.tokenizer
        self.data: Dataset = load_dataset(config, tokenizer)
        self.tokenizers, self.sha256 = Tokenizers(self.data.tokenizer), self.data.sha256
        self.config = with_vocabulary(config, self.tokenizers, vocab_size)
        self.prepare = Windows(config.sequence_len)
        self.resident, self.held_out = (self.data.train,), (self.data.val,)
        self.tokens_per_step = config.accumulation * config.batch_size * config.sequence_len

    def inputs(self, step: int) -> np.ndarray:  # i32[A, B]
        """Return the window starts of a step."""
        config = self.config
        shape = (config.accumulation, config.batch_size)
        count = len(self.data.train) - config.sequence_len
        return random_starts(config.seed, step, shape, count)

    def evaluation(self) -> Iterator[np.ndarray]:  # i32[B] each
        """Yield the window starts of `eval_batches` random batches, or of all of `data.val`."""
        config, length, size = self.config, self.config.sequence_len, self.config.batch_size
        if config.eval_batches is not None:
            shape, count = (config.eval_batches, size), len(self.data.val) - length
            yield from random_starts(config.seed, _EVAL_STREAM, shape, count)
            return
        starts = consecutive_starts(len(self.data.val), length)
        # batches of equal shape share one compiled program
        padding = np.full(-len(starts) % size, len(self.data.val), np.int32)  # without labels
        yield from np.concatenate([starts, padding]).reshape(-1, size)

    def described(self) -> str:
        """Return a description of the length of the text."""
        train, held_out = len(self.data.train), len(self.data.val)
        return (
            f"text: {train:,} tokens and {held_out:,} held out, {self.tokens_per_step:,} in a step"
        )

    def per_character(self, loss: float) -> tuple[float, str] | None:
        """Return the loss per character, or the loss per byte for the byte tokenizer."""
        if self.config.tokenizer == "byte":
            return loss, "byte"
        return loss * len(self.data.val) / self.data.val_characters, "character"

    sample = write_sample

    def documents(self) -> list[np.ndarray]:
        """Return the training part as one sequence."""
        return [self.data.train]


class LanguageDocuments(RowsTask):
    """Task whose rows contain documents that end with <eos>.

    A document begins with the tokens that its tokenizer prepends. If there are none, it begins with
    <eos>.
    """

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        task = config.task
        assert isinstance(task, LanguageTask) and task.documents is not None
        kind, parts, contents = task.documents, list[list[str]](), list[bytes]()
        assert kind != "prepared"  # read by `PreparedText`
        for data in filter(None, (config.data, config.val_data)):
            sources = read(data, config.out)
            contents += [source.content for source in sources]
            texts = [source.text(config.text_errors) for source in sources]
            parts.append([document for text in texts for document in split_documents(text, kind)])
        if len(parts) == 1:
            cut = int(len(parts[0]) * (1 - config.val_fraction))
            parts = [parts[0][:cut], parts[0][cut:]]
        train, val = parts
        if not (train and val):
            rule = "must be at least one for training and one held out"
            raise DataError(
                f"data is {config.data!r}: the number of {kind} is {len(train + val)}: {rule}"
            )
        if tokenizers is None:
            tokenizers = Tokenizers(line_tokenizer(config, [*train, *val], train))
        tokenizer = with_special_tokens(tokenizers.tokenizer, ["eos"])
        end = special_ids(tokenizer)["eos"]
        first = frame(tokenizer).first or (end,)
        tokenizers = Tokenizers(with_end(tokenizer, end))
        config = with_vocabulary(config, tokenizers, vocab_size)
        # The end of a document is a label too, so it counts as a character.
        self.characters = sum(len(text) + 1 for text in val)

        def rows(texts: list[str]) -> Rows:
            examples = []
            for text in texts:
                ids = np.concatenate([first, encode_text(tokenizer, text), [end]]).astype(np.int32)
                size = config.sequence_len
                # Pieces overlap by one token, the last label of one and the first input of the
                # next, so every token except the first is a label once.
                pieces = (ids[at : at + size + 1] for at in range(0, len(ids) - 1, size))
                examples += [Batch(piece[:-1], piece[1:]) for piece in pieces]
            return laid_out(examples, config.sequence_len if task.packed else None)

        super().__init__(config, tokenizers, sha256_of(*contents), rows(train), rows(val))

    def per_character(self, loss: float) -> tuple[float, str] | None:
        """Return the loss per character. The end of each document counts as one character."""
        return loss * self.val.labels / self.characters, "character"

    sample = write_sample
