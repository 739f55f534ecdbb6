"""Training on pairs of a source and a target, in one row or two.

An encoder-decoder reads the source and generates `<bos> target <eos>`. If it starts from a
published model, it uses the row format of that model (see `target_of`). A decoder reads `source
<sep> target <eos>` in one row and learns only the target. With a prefix, source tokens attend in
both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask
from transformer_jax.tokenizers.plain_text import split_lines
from transformer_jax.tokenizers.special import (
    source_frame,
    special_ids,
    target_of,
    with_end,
    with_special_tokens,
)
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params
from transformer_jax.training.data import IGNORE, line_tokenizer, read
from transformer_jax.training.rows import Rows, laid_out
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.metrics import compare_texts
from transformer_jax.training.tasks.task import (
    Report,
    RowsTask,
    Tokenizers,
    check_lengths,
    check_token_ids,
    encode_line,
    known_sources,
    located,
    sha256_of,
    split_held_out,
    with_vocabulary,
)
from transformer_jax.training.tasks.turns import source_ids, target_ids
from transformer_jax.values import short_repr

SHOWN = 5
"""Number of held-out pairs in the sample of a run."""


@short_repr
class Pair(NamedTuple):
    """Source, target, and their location in the data."""

    source: str
    target: str
    where: str


class Pairs(RowsTask):
    """Pairs of texts, read from files or passed as `made`."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizers: Tokenizers | None,
        vocab_size: int | None,
        made: Sequence[tuple[str, str]] | None = None,  # used instead of files
    ) -> None:
        if made is None:
            train, val, content = _read(config)
        else:
            pairs = [Pair(*pair, f"example {number}") for number, pair in enumerate(made)]
            content = "\n".join(f"{p.source}\t{p.target}" for p in pairs).encode()
            train, val = split_held_out(config, pairs, "pairs")
        self.made = made is not None
        two_rows = config.model.kind == "encoder-decoder"
        separate = isinstance(config.task, Seq2SeqTask) and config.task.vocabulary == "separate"

        def trained(*columns: int) -> Tokenizers:
            both = [pair[c] for pair in (*train, *val) for c in columns]
            training = [pair[c] for pair in train for c in columns]
            return Tokenizers(line_tokenizer(config, both, training))

        if tokenizers is None and separate:
            tokenizers = Tokenizers(trained(1).tokenizer, trained(0).tokenizer)
        elif tokenizers is None:
            tokenizers = trained(0, 1)
        if two_rows and separate != (tokenizers.source is not None):
            count = "one vocabulary" if separate else "two vocabularies"
            rule = f"init_from {config.init_from!r} has {count}"
            raise DataError(f"vocabulary is {'separate' if separate else 'shared'!r}, but {rule}")
        names = ["bos", "eos"] if two_rows else ["sep", "eos"]
        tokenizer = with_special_tokens(tokenizers.tokenizer, names)
        if not two_rows:
            tokenizer = with_end(tokenizer, special_ids(tokenizer)["eos"])
        tokenizers = Tokenizers(tokenizer, tokenizers.source)
        config = with_vocabulary(config, tokenizers, vocab_size)
        self.pairs = val

        def rows(pairs: Sequence[Pair]) -> Rows:
            examples = [pair_example(config, tokenizers, pair) for pair in pairs]
            packs = isinstance(config.task, PrefixTask) and config.task.packed
            return laid_out(examples, config.sequence_len if packs and not two_rows else None)

        super().__init__(config, tokenizers, sha256_of(content), rows(train), rows(val))

    def sample(self, params: Params) -> str:
        """Return the first held-out sources with the generated targets."""
        pairs = self.pairs[:SHOWN]
        written = answer_sources(self.config, self.tokenizers, params, [p.source for p in pairs])
        lines = []
        for pair, text in zip(pairs, written, strict=True):
            wanted = "" if text == pair.target else f"   (wanted: {pair.target})"
            lines.append(f"{pair.source} -> {text}{wanted}")
        return "\n".join(lines)

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Compare generated targets with held-out targets."""
        task: Any = self.config.task  # a task on pairs
        pairs = self.pairs[: task.judged]
        if not pairs:
            return {}
        sources = [pair.source for pair in pairs]
        arguments = self.config, self.tokenizers, params, sources
        written = answer_sources(*arguments, report=report, model=self.model)
        return compare_texts(written, [p.target for p in pairs], translations=not self.made)


def pair_example(config: TrainConfig, tokenizers: Tokenizers, pair: Pair) -> Batch:
    """Encode a pair for the model of the config. Raises DataError if the pair is too long."""
    source = encode_line(tokenizers.of_source, pair.source, pair.where)
    if not len(source):
        raise DataError(f"{pair.where}: the source has no tokens")
    if config.model.kind == "encoder-decoder":
        target = encode_line(tokenizers.tokenizer, pair.target, pair.where)
        kind = target_of(tokenizers.tokenizer)
        source = source_frame(tokenizers.of_source).around(source)
        labels = kind.labels.around(target)
        check_token_ids(
            known_sources(config), tokenizers.of_source, f"{pair.where}: source", source
        )
        size = config.model.vocab_size
        check_token_ids(size, tokenizers.tokenizer, f"{pair.where}: target", labels)
        check_lengths(
            config, {f"{pair.where}: source": len(source), f"{pair.where}: target": len(labels)}
        )
        return Batch(np.append(kind.start, labels[:-1]).astype(np.int32), labels, source=source)
    source = source_ids(tokenizers.tokenizer, pair.source)
    target = located(pair.where, target_ids, tokenizers.tokenizer, pair.target)
    whole = np.append(source, target)
    check_token_ids(config.model.vocab_size, tokenizers.tokenizer, pair.where, whole)
    check_lengths(config, {f"{pair.where}: source and target": len(whole) - 1})
    labels = whole[1:].copy()
    # label t is token t + 1, so the last source token has the first target token as its label
    labels[: len(source) - 1] = IGNORE
    prefix = None
    # a model without masks reads the source from left to right
    wanted = isinstance(config.task, PrefixTask) and config.task.bidirectional
    if wanted and config.model.supports("masks"):
        prefix = np.arange(len(labels)) < len(source)
    return Batch(whole[:-1], labels, prefix=prefix)


def _read(config: TrainConfig) -> tuple[list[Pair], list[Pair], bytes]:
    """Return the training pairs, the held-out pairs, and the bytes that were read."""
    task = config.task
    assert isinstance(task, Seq2SeqTask | PrefixTask)
    train, content = read_pairs(config, "data", config.data, task.targets)
    if config.val_data is None:
        if task.val_targets is not None:
            raise DataError(f"val_targets is {task.val_targets!r}: needs val_data")
        return *split_held_out(config, train, "pairs"), content
    if (task.targets is None) != (task.val_targets is None):
        rule = f"must be set with val_data if and only if targets is, which is {task.targets!r}"
        raise DataError(f"val_targets is {task.val_targets!r}: {rule}")
    val, more = read_pairs(config, "val_data", config.val_data, task.val_targets)
    return train, val, content + more


def read_lines(config: TrainConfig, name: str, data: str) -> tuple[list[str], bytes]:
    """Return the lines of a file, including blank ones, and its bytes."""
    if not Path(data).is_file():
        rule = f"must be a file, which task {config.task.kind!r} reads line by line"
        raise DataError(f"{name} is {data!r}: {rule}")
    (source,) = read(data)
    found = split_lines(source.text(config.text_errors))
    if not any(line.strip() for line in found):
        raise DataError(f"{name} is {data!r}: it is empty")
    return found, source.content


def _check_none_blank(found: Sequence[str], data: str) -> None:
    """Raise DataError for a blank line, because dropping it would misalign parallel files."""
    for number, line in enumerate(found, start=1):
        if not line.strip():
            raise DataError(f"{data}, line {number}: it is empty")


def read_pairs(
    config: TrainConfig,
    name: str,
    data: str,
    targets: str | None,
    rule: str = "must be a source, one tab and a target",
) -> tuple[list[Pair], bytes]:
    """Return the pairs in a file with lines "source TAB target" or in two parallel files.

    Raises DataError if a line is malformed or if the files have different lengths.
    """
    sources, content = read_lines(config, name, data)
    _check_none_blank(sources, data)
    if targets is not None:
        others, more = read_lines(config, name.replace("data", "targets"), targets)
        _check_none_blank(others, targets)
        if len(sources) != len(others):
            rule = "parallel files must have the same number of lines"
            raise DataError(
                f"{data} has {len(sources)} lines and {targets} has {len(others)}: {rule}"
            )
        places = (f"{data}, line {number}" for number in range(1, len(sources) + 1))
        found = zip(sources, others, places, strict=True)
        return [Pair(*three) for three in found], content + more
    pairs = []
    for number, line in enumerate(sources, start=1):
        parts = line.split("\t")
        if len(parts) != 2 or not all(part.strip() for part in parts):
            raise DataError(f"{data}, line {number}: {line!r:.60}: {rule}")
        pairs.append(Pair(parts[0], parts[1], f"{data}, line {number}"))
    return pairs, content
