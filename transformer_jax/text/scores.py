"""Say how likely a model finds a text: its nats, bits per byte and perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.completion import longest_text
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.text.reading import Reader, checked_messages
from transformer_jax.tokenizers.pieces import token_texts
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, frame, plain
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError, utf8
from transformer_jax.training.batch import Batch, token_nats
from transformer_jax.training.data import IGNORE
from transformer_jax.training.tasks.chat import check_messages
from transformer_jax.training.tasks.pairs import Pair, pair_example
from transformer_jax.training.tasks.task import located
from transformer_jax.training.tasks.turns import Turn, message_turn, text_turn, tokenizer_of_talks

Scored: TypeAlias = str | tuple[str, str] | Sequence[Message]


@dataclass(frozen=True, repr=False)
class Score:
    """Hold the probability p of a text's n tokens, each after all before it.

    Attributes:
        num_bytes: bytes of their text, in UTF-8.
        tokens: the n tokens that are scored, as texts.
        token_nats: -log p of each of them, in nats.
    """

    num_bytes: int
    tokens: tuple[str, ...]
    token_nats: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Return n."""
        return len(self.tokens)

    @property
    def nats(self) -> float:
        """Return -log p, of all tokens together."""
        return math.fsum(self.token_nats)

    @property
    def perplexity(self) -> float:
        """Return exp(nats / n)."""
        # exp overflows above 709, and an untrained model may be that surprised.
        return math.exp(min(self.nats / self.num_tokens, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Return nats / (ln 2 · bytes), which does not depend on the tokenizer; nan of no bytes."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def __repr__(self) -> str:
        said = f"nats={self.nats:.4f}, num_tokens={self.num_tokens}, num_bytes={self.num_bytes}"
        rest = f"bits_per_byte={self.bits_per_byte:.4f}, perplexity={self.perplexity:.4f}"
        return f"Score({said}, {rest})"


class Windows(NamedTuple):
    """Say how a text that is longer than one window is read; None is as `LanguageModel.score` says.

    Attributes:
        size: tokens that are read at a time.
        stride: tokens between the beginnings of two windows.
        batch_size: windows of a batch.
    """

    size: int | None
    stride: int | None
    batch_size: int


def score_text(model: Reader, text: Scored, read: Windows) -> Score:
    """Return the score of what `LanguageModel.score` takes."""
    if model.kind == "targets":
        for name, value in (("window", read.size), ("stride", read.stride)):
            if value is not None:
                raise ConfigError(f"{name} is {value}: of pairs, a target is scored whole")
        if not is_pair(text):
            rule = "must be (source, target), of which it scores one"
            raise DataError(f"text is {text!r:.80}: {rule}")
        example = pair_example(model.run, model.tokenizers, Pair(*text, "text"))
        row = jax.tree.map(lambda leaf: np.asarray(leaf)[None], example)
        labels = np.asarray(example.labels)  # the target's tokens and its end
        tokens = token_texts(model.tokenizer, labels[labels != IGNORE])
        nats = _nats(model, row, model.module)
        return Score(len(utf8(text[1])), tuple(tokens), tuple(nats))
    if isinstance(text, str) and model.kind == "text":
        own, begin = encode_text(model.tokenizer, text), model.model.begin_id
        first = frame(model.tokenizer).first if begin is None else (begin,)
        ids = model.known(np.concatenate([first, own]).astype(np.int32), "the text")
        size = len(utf8(text))
        if not first and len(own):  # nothing is before its first token, which has no probability
            size -= _bytes_of_first(model, own, text)
        if len(own) < (1 if first else 2):
            least = "one token" if first else "two tokens, of which the second is scored"
            raise DataError(f"text is {text!r:.40}: must have at least {least}")
        return _score_ids(model, ids, len(first) or 1, size, read)
    turn, said = _turn(model, text)
    ids = model.known(np.append(turn.prompt, turn.answer), "the text")
    if not len(turn.prompt):  # nothing is before the first token of the answer
        size = len(utf8(said)) - _bytes_of_first(model, ids, said)
        return _score_ids(model, ids, 1, size, read)
    return _score_ids(model, ids, len(turn.prompt), len(utf8(said)), read)


def _turn(model: Reader, text: Scored) -> tuple[Turn, str]:
    """Return what is read and what is scored of a prompt with its answer, and the answer."""
    if is_pair(text):
        if isinstance(model.task, PreferenceTask) and model.kind == "text":
            return text_turn(model.tokenizer, *text), text[1]
    elif isinstance(text, list):
        own, messages = plain(model.tokenizer), checked_messages(text)
        if isinstance(messages[-1]["content"], list | None):
            raise DataError(
                f"messages[-1] has content {messages[-1]['content']!r:.60}: must be a text"
            )
        if messages[-1]["role"] != "assistant":
            raise DataError("messages do not end with the assistant's, which is what is scored")
        has_template = isinstance(own, PretrainedTokenizer) and bool(own.chat_templates)
        if has_template or model.kind == "chat":
            if not has_template:
                messages = [*check_messages("messages", messages)]
            # of a published folder, what ends a turn need not be among the ends of a text
            used = tokenizer_of_talks(own, "messages", messages)[0] if has_template else None
            turn = located("messages[-1]", message_turn, used or model.tokenizer, messages)
            return turn, str(messages[-1]["content"])
    rule = {"chat": "messages, the last of them the assistant's"}.get(model.kind, "a text")
    raise DataError(f"text is {text!r:.80}: must be {rule}")


def _bytes_of_first(model: Reader, ids: np.ndarray, text: str) -> int:
    """Return how many bytes of a text its first token stands for."""
    tokenizer = plain(model.tokenizer)
    if isinstance(tokenizer, WordTokenizer):  # its tokens do not tell which spaces stood there
        # Token 1 is the newline; words are told apart by blanks, which have no tokens.
        word = "\n" if ids[0] == 1 else text.split()[0]
        return len(utf8(text[: text.index(word) + len(word)]))
    first = tokenizer.to_bytes([int(ids[0])])
    return len(first if text[:1].isspace() else first.removeprefix(b" "))


def _score_ids(
    model: Reader,
    ids: np.ndarray,  # i32[n]
    first: int,  # how many are only read
    size: int,
    read: Windows,
) -> Score:
    most = longest_text(model.config)
    longest = most if read.size is None else read.size
    if longest > most:
        raise ValueError(f"window is {longest}: must be at most max_len {most}")
    # Half a window: each token but the first ones follows at least half a window of others.
    stride = max(1, longest // 2) if read.stride is None else read.stride
    if stride > longest:
        name = "max_len" if read.size is None else "window"
        raise ValueError(f"stride is {stride}: must be at most {name} {longest}")
    # A function that takes rows together would mix windows, and one that takes means, padding.
    edited = bool(model.module.edits)
    rows, nats, count = windows(ids, first, longest, stride, exactly=edited), list[float](), 0
    if edited:  # it sees one row, no padding, and how many tokens come before a window
        read_after = range(-(-max(0, len(ids) - 1 - longest) // stride), -1, -1)
        for before, row in zip(read_after, [*rows][::-1], strict=False):
            told = model.module
            if len(read_after) > 1:
                told = told.told(part=True, first=before * stride)
            nats = _nats(model, row, told) + nats
    while part := [*islice(rows, read.batch_size)]:
        # The last batch is filled up to the size of the first: one program serves all.
        count = count or len(part)
        nats += _nats(model, _stacked(part, count), model.module)
    return Score(size, tuple(token_texts(model.tokenizer, ids[first:])), tuple(nats))


def _stacked(rows: Sequence[Batch], count: int) -> Batch:
    """Return one batch of `count` rows; those that fill it up have no label that counts."""
    tokens, labels = (
        np.concatenate([getattr(row, name) for row in rows]) for name in ("tokens", "labels")
    )
    missing = (0, count - len(rows)), (0, 0)
    return Batch(np.pad(tokens, missing), np.pad(labels, missing, constant_values=IGNORE))


def _nats(model: Reader, batch: Batch, built: CheckedModule) -> list[float]:
    """Return -log p of each label that counts, row after row."""
    found = np.asarray(token_nats(built, model.params, batch), np.float64)
    values: list[float] = found[np.asarray(batch.labels) != IGNORE].tolist()
    return values


def windows(
    ids: np.ndarray,  # i32[n]
    first: int,
    longest: int,
    stride: int,
    *,
    exactly: bool = False,
) -> Iterator[Batch]:
    """Yield rows [1, T] of at most `longest` tokens in which each label from `first` on is once.

    They are padded to one length, unless they are to have `exactly` the tokens that are read.
    """
    tokens, labels = ids[:-1], ids[1:].copy()
    labels[: first - 1] = IGNORE
    # Rows of one length share a program, whatever the text's length is.
    length, done = min(longest, bucket(len(tokens))), 0
    for start in range(0, len(tokens), stride):
        end = min(start + longest, len(tokens))
        length = end - start if exactly else length
        row, here = np.zeros(length, np.int32), np.full(length, IGNORE, np.int32)
        row[: end - start], here[done - start : end - start] = tokens[start:end], labels[done:end]
        if (here != IGNORE).any():
            yield Batch(row[None], here[None])
        done = end
        if end == len(tokens):
            return


def is_pair(text: Scored) -> TypeGuard[tuple[str, str]]:
    """Say whether this is two texts."""
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(x, str) for x in text)
