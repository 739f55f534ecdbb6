"""Next-token training on prepared folders, which are read during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grain
import jax
import numpy as np

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.fields import fail
from transformer_jax.config.tasks import LanguageTask
from transformer_jax.corpus.folder import (
    Part,
    check_same_tokenizer,
    open_corpus,
    prepared_folders,
)
from transformer_jax.tokenizers.special import plain, with_special_tokens
from transformer_jax.tokenizers.trained import ByteTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import ShortText, random_starts
from transformer_jax.training.prepared import (
    DocumentRows,
    PartRows,
    Prefetcher,
    RowReader,
    WindowRows,
    row_order,
    rows_of_process,
    step_batches,
)
from transformer_jax.training.tasks.language import write_sample
from transformer_jax.training.tasks.task import (
    Tokenizers,
    TrainingTask,
    sha256_of,
    with_vocabulary,
)

_EVAL_STREAM = 2**62
"""Value of `step` that selects the rows of an evaluation. No training step has this number."""


class PreparedText(TrainingTask):
    """Task whose examples are windows or documents from prepared folders."""

    def __init__(
        self,
        config: TrainConfig,
        folders: Sequence[str],
        tokenizers: Tokenizers | None,
        vocab_size: int | None,
    ) -> None:
        task = config.task
        if not isinstance(task, LanguageTask):
            fail("task", task.kind, f"reads files, but data is the prepared folder {folders[0]}")
        if task.documents not in (None, "prepared"):
            fail(
                "documents",
                task.documents,
                "must be prepared or None, because data is a prepared folder",
            )
        if config.tokenizer not in (TrainConfig.tokenizer, "pretrained"):
            fail(
                "tokenizer",
                config.tokenizer,
                "data is a prepared folder, which has its own tokenizer",
            )
        train = [open_corpus(folder) for folder in folders]
        held_out = train
        if config.val_data is not None:
            val_folders = prepared_folders(config.val_data)
            if not val_folders:
                rule = "must be a prepared folder, like data"
                raise DataError(f"val_data is {config.val_data!r}: {rule}")
            held_out = [open_corpus(folder) for folder in val_folders]
        corpora = [*train, *(corpus for corpus in held_out if corpus not in train)]
        check_same_tokenizer(corpora)
        self.tokenizers = Tokenizers(corpora[0].tokenizer)
        if tokenizers is not None:  # from the initial model or a resumed run
            tokenizer = with_special_tokens(tokenizers.tokenizer, ["eos"])
            if tokenizer.to_json() != corpora[0].tokenizer.to_json():
                model = config.init_from or config.out
                rule = f"its tokenizer differs from {model}; prepare it with `tokenizer={model}`"
                raise ConfigError(f"data is {str(corpora[0].path)!r}: {rule}")
        self.config = with_vocabulary(config, self.tokenizers, vocab_size)
        for corpus in corpora:
            corpus.check(self.config.model.vocab_size)
        self.sha256 = sha256_of(*(corpus.sha256.encode() for corpus in corpora))
        self.parts = [corpus.train for corpus in train]
        self.val_parts = [corpus.val for corpus in held_out]
        self.rows = tuple(self._rows(part, whole=False) for part in self.parts)
        self.val_rows = tuple(self._rows(part, whole=True) for part in self.val_parts)
        self.tokens_per_step = config.accumulation * config.batch_size * config.sequence_len
        self.place = jax.device_put  # overlaps with computation
        self._ahead: Prefetcher | None = None

    def _rows(self, part: Part, whole: bool) -> PartRows:
        """Return the rows of a part. Raises DataError if there are none."""
        task, length = self.config.task, self.config.sequence_len
        assert isinstance(task, LanguageTask)
        rows: PartRows = WindowRows(part, length, whole)
        if task.documents is not None:
            rows = DocumentRows(part, length, task.packed)
        if len(rows) == 0:
            needed = f"a window of context {length} needs {length + 1}"
            message = f"{part.folder}: {part.name} has {part.tokens} tokens, but {needed}"
            raise ShortText(message, part.tokens)
        return rows

    def inputs(
        self, step: int, process_index: int | None = None, process_count: int | None = None
    ) -> Batch:  # leaves [A, B / P, T]
        """Return the rows of a step for a process, by default this process.

        The rows of this process are prefetched to its devices.
        """
        if process_index is not None and process_count is not None:
            found: Batch = self.steps((process_index, process_count))[step]
            return found
        if self._ahead is None:
            assert self.place is not None
            self._ahead = Prefetcher(self.steps(self._part()), self.place)
        return self._ahead(step)

    def _part(self) -> tuple[int, int]:
        return self.reader or (jax.process_index(), jax.process_count())

    def steps(self, process: tuple[int, int]) -> grain.MapDataset:
        """Return the inputs of each step for a `process`, given as (index, count)."""
        config = self.config
        order = row_order([len(rows) for rows in self.rows], config.seed, config.data_weights)
        size = config.accumulation, config.batch_size
        return step_batches(RowReader(self.rows), order, *size, process)

    def evaluation(
        self, process_index: int | None = None, process_count: int | None = None
    ) -> Iterator[Batch]:  # leaves [B / P, T]
        """Yield the held-out rows in order, or `eval_batches` random batches of them.

        Each batch contains the rows of one process, by default this process.
        """
        config, counts = self.config, [len(rows) for rows in self.val_rows]
        total, size = sum(counts), config.batch_size
        first = np.cumsum([0, *counts])
        if config.eval_batches is not None:
            shape = (config.eval_batches, size)
            batches = random_starts(config.seed, _EVAL_STREAM, shape, total)
        else:
            # empty rows, marked by -1, fill the last batch
            rows = np.arange(-(-total // size) * size)
            batches = np.where(rows < total, rows, -1).reshape(-1, size)
        process = self._part()
        if process_index is not None and process_count is not None:
            process = process_index, process_count
        here, read = rows_of_process(size, process), RowReader(self.val_rows)
        for batch in batches[:, here]:
            folder = np.searchsorted(first, batch, "right") - 1  # -1 for an empty row
            yield read(np.stack([folder, batch - first[folder]], axis=-1))

    def described(self) -> str:
        """Return a description of the amount of data in each folder."""
        parts = ", ".join(
            f"{part.folder}: {part.tokens:,} tokens in {len(rows):,} rows"
            for part, rows in zip(self.parts, self.rows, strict=True)
        )
        held_out = sum(part.tokens for part in self.val_parts)
        return f"{parts}; {held_out:,} tokens held out, {self.tokens_per_step:,} in a step"

    def per_character(self, loss: float) -> tuple[float, str]:
        """Return the loss per character or byte. The end of each document counts as one unit."""
        if isinstance(plain(self.tokenizers.tokenizer), ByteTokenizer):
            return loss, "byte"
        task, parts = self.config.task, self.val_parts
        labels = sum(part.tokens - 1 for part in parts)
        if isinstance(task, LanguageTask) and task.documents is not None:
            labels -= sum(
                part.documents for part in parts if part.begins
            )  # the first token of each document
        characters = sum(part.characters + part.documents for part in parts)
        return loss * labels / characters, "character"

    sample = write_sample

    def documents(self) -> list[np.ndarray]:
        """Return the training parts, in memory, for a model that counts tokens."""
        found = []
        for part in self.parts:
            tokens = np.empty(part.tokens, part.dtype)
            part.read(0, tokens)
            found.append(tokens)
        return found
