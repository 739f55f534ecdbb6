"""Probability of text under a model, in nats, bits per byte and perplexity."""

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
from transformer_jax.decoding.completion import max_text_tokens
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

ScoreInput: TypeAlias = str | tuple[str, str] | Sequence[Message]


@dataclass(frozen=True, repr=False)
class Score:
    """Probability p of the n tokens of a text, each given the preceding tokens.

    Attributes:
        num_bytes: number of UTF-8 bytes in the scored text.
        tokens: the n scored tokens, as strings.
        token_nats: -log p of each token, in nats.
    """

    num_bytes: int
    tokens: tuple[str, ...]
    token_nats: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens, n."""
        return len(self.tokens)

    @property
    def nats(self) -> float:
        """Negative log-probability of the text, -log p, in nats."""
        return math.fsum(self.token_nats)

    @property
    def perplexity(self) -> float:
        """exp(nats / n), at most exp(700)."""
        # exp overflows above 709, which an untrained model may reach.
        return math.exp(min(self.nats / self.num_tokens, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, nats / (ln 2 · num_bytes), or NaN if there are no bytes."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def __repr__(self) -> str:
        totals = f"nats={self.nats:.4f}, num_tokens={self.num_tokens}, num_bytes={self.num_bytes}"
        means = f"bits_per_byte={self.bits_per_byte:.4f}, perplexity={self.perplexity:.4f}"
        return f"Score({totals}, {means})"


class Windows(NamedTuple):
    """Window settings for a text that exceeds one window, as in `LanguageModel.score`."""

    size: int | None
    stride: int | None
    batch_size: int


def score_text(model: Reader, text: ScoreInput, read: Windows) -> Score:
    """Score text, a pair or messages, as described in `LanguageModel.score`."""
    if model.kind == "targets":
        for name, value in (("window", read.size), ("stride", read.stride)):
            if value is not None:
                raise ConfigError(f"{name} is {value}: the target of a pair is scored as a whole")
        if not is_pair(text):
            rule = "must be (source, target); the target is scored"
            raise DataError(f"text is {text!r:.80}: {rule}")
        example = pair_example(model.run, model.tokenizers, Pair(*text, "text"))
        row = jax.tree.map(lambda leaf: np.asarray(leaf)[None], example)
        labels = np.asarray(example.labels)  # the tokens of the target and its end token
        tokens = token_texts(model.tokenizer, labels[labels != IGNORE])
        nats = _nats(model, row, model.module)
        return Score(len(utf8(text[1])), tuple(tokens), tuple(nats))
    if isinstance(text, str) and model.kind == "text":
        encoded, begin = encode_text(model.tokenizer, text), model.model.begin_id
        first = frame(model.tokenizer).first if begin is None else (begin,)
        ids = model.known(np.concatenate([first, encoded]).astype(np.int32), "the text")
        size = len(utf8(text))
        if not first and len(encoded):  # the first token has no probability without a context
            size -= _bytes_of_first(model, encoded, text)
        if len(encoded) < (1 if first else 2):
            least = "one token" if first else "two tokens, because the first has no context"
            raise DataError(f"text is {text!r:.40}: must have at least {least}")
        return _score_ids(model, ids, len(first) or 1, size, read)
    turn: Turn | None = None
    if is_pair(text):
        if isinstance(model.task, PreferenceTask) and model.kind == "text":
            turn, answer = text_turn(model.tokenizer, *text), text[1]
    elif isinstance(text, list):
        base, messages = plain(model.tokenizer), checked_messages(text)
        content = messages[-1]["content"]
        if isinstance(content, list | None):
            raise DataError(f"messages[-1] has content {content!r:.60}: must be a string")
        if messages[-1]["role"] != "assistant":
            rule = "must be a message from the assistant, which is scored"
            raise DataError(f"the last message has role {messages[-1]['role']!r}: {rule}")
        has_template = isinstance(base, PretrainedTokenizer) and bool(base.chat_templates)
        if has_template or model.kind == "chat":
            if not has_template:
                messages = [*check_messages("messages", messages)]
            # In a published folder, the token that ends a turn may differ from the end-of-text
            # token.
            used = tokenizer_of_talks(base, "messages", messages)[0] if has_template else None
            turn = located("messages[-1]", message_turn, used or model.tokenizer, messages)
            answer = str(messages[-1]["content"])
    if turn is None:
        rules = {"chat": "messages that end with one from the assistant"}
        raise DataError(f"text is {text!r:.80}: must be {rules.get(model.kind, 'a string')}")
    ids = model.known(np.append(turn.prompt, turn.answer), "the text")
    size = len(utf8(answer))
    if not len(turn.prompt):  # the first token of the answer has no context
        size -= _bytes_of_first(model, ids, answer)
    return _score_ids(model, ids, len(turn.prompt) or 1, size, read)


def _bytes_of_first(model: Reader, ids: np.ndarray, text: str) -> int:
    """Return the number of bytes that the first token of the text covers."""
    tokenizer = plain(model.tokenizer)
    if isinstance(tokenizer, WordTokenizer):  # its tokens do not store spaces
        # Token 1 is the newline. Other blanks only separate words and have no tokens.
        word = "\n" if ids[0] == 1 else text.split()[0]
        return len(utf8(text[: text.index(word) + len(word)]))
    first = tokenizer.to_bytes([int(ids[0])])
    return len(first if text[:1].isspace() else first.removeprefix(b" "))


def _score_ids(
    model: Reader,
    ids: np.ndarray,  # i32[n]
    first: int,  # IDs before this one are read but not scored
    size: int,  # number of bytes in the scored text
    read: Windows,
) -> Score:
    most = max_text_tokens(model.config)
    longest = most if read.size is None else read.size
    if longest > most:
        raise ValueError(f"window is {longest}: must be at most max_len, {most}")
    # By default, each token after the first window has at least half a window of context.
    stride = max(1, longest // 2) if read.stride is None else read.stride
    if stride > longest:
        name = "max_len" if read.size is None else "window"
        raise ValueError(f"stride is {stride}: must be at most {name}, {longest}")
    # An edit that combines rows would mix windows, and an edit that averages over tokens would see
    # padding. Therefore, an edited model reads single rows without padding. Edits also receive the
    # offset of the window.
    edited = bool(model.module.edits)
    rows, nats, count = windows(ids, first, longest, stride, exactly=edited), list[float](), 0
    if edited:
        read_after = range(-(-max(0, len(ids) - 1 - longest) // stride), -1, -1)
        for before, row in zip(read_after, [*rows][::-1], strict=False):
            module = model.module
            if len(read_after) > 1:
                module = module.with_facts(part=True, first=before * stride)
            nats = _nats(model, row, module) + nats
    while part := [*islice(rows, read.batch_size)]:
        # Pad the last batch to the size of the first, so that one program serves all batches.
        count = count or len(part)
        tokens, labels = (
            np.concatenate([getattr(row, name) for row in part]) for name in ("tokens", "labels")
        )
        missing = (0, count - len(part)), (0, 0)
        batch = Batch(np.pad(tokens, missing), np.pad(labels, missing, constant_values=IGNORE))
        nats += _nats(model, batch, model.module)
    return Score(size, tuple(token_texts(model.tokenizer, ids[first:])), tuple(nats))


def _nats(model: Reader, batch: Batch, module: CheckedModule) -> list[float]:
    """Return -log p of each label that is not ignored, in row order."""
    nats = np.asarray(token_nats(module, model.params, batch), np.float64)
    values: list[float] = nats[np.asarray(batch.labels) != IGNORE].tolist()
    return values


def windows(
    ids: np.ndarray,  # i32[n]
    first: int,
    longest: int,
    stride: int,
    *,
    exactly: bool = False,
) -> Iterator[Batch]:
    """Yield rows [1, T] of at most `longest` tokens that score each label from `first` on once.

    Rows are padded to the same length. If `exactly` is true, they contain only the tokens of the
    text.
    """
    tokens, labels = ids[:-1], ids[1:].copy()
    labels[: first - 1] = IGNORE
    # Rows of the same length share a program. Texts also share programs, because lengths are
    # bucketed.
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


def is_pair(text: ScoreInput) -> TypeGuard[tuple[str, str]]:
    """Whether the input is a tuple of two strings."""
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(x, str) for x in text)
