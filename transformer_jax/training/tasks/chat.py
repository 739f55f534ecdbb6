"""Train on conversations: every turn of the assistant is learnt, all else is only read.

A line of the file is an object {"messages": [{"role": ..., "content": ...}, ...]}. A published
tokenizer writes them by its chat template; another one with a special token for each role:
<user> text <assistant> text <eos> <user> ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.tasks import ChatTask
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.text.completion import complete
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Params
from transformer_jax.training.data import IGNORE, line_tokenizer
from transformer_jax.training.rows import Example, Rows, bucketed, packed, packs
from transformer_jax.training.tasks.pairs import read_lines
from transformer_jax.training.tasks.task import (
    Report,
    RowsTask,
    Tokenizers,
    check_lengths,
    located,
    sha256_of,
    with_vocabulary,
)

ROLES = "system", "user", "assistant"
SHOWN = 3
"""Held-out conversations in the sample of a run."""

Messages = Sequence[Mapping[str, Any]]

T = TypeVar("T")


class Conversations(RowsTask):
    """Train on the assistant's turns of conversations."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        assert isinstance(config.task, ChatTask)
        is_packed = config.task.packed
        train, val, content = read_objects(config, "conversations", _messages)
        if tokenizers is None:
            texts = [
                [message["content"] for _, messages in part for message in messages]
                for part in ([*train, *val], train)
            ]
            tokenizers = Tokenizers(line_tokenizer(config, *texts))
        tokenizer = tokenizers.tokenizer
        if not isinstance(tokenizer, PretrainedTokenizer) or not tokenizer.chat_templates:
            tokenizer = with_special_tokens(tokenizer, [*ROLES, "eos"])
        tokenizers = Tokenizers(tokenizer)
        config = with_vocabulary(config, tokenizers, vocab_size)
        self.talks = [messages for _, messages in val]

        def rows(talks: Sequence[tuple[str, Messages]]) -> Rows:
            examples = [located(talk[0], _example, config, tokenizer, *talk) for talk in talks]
            if is_packed and packs(examples, config.sequence_len):
                return packed(examples, config.sequence_len)
            return bucketed(examples)

        super().__init__(config, tokenizers, sha256_of(content), rows(train), rows(val))

    def sample(self, params: Params) -> str:
        """Return the first held-out questions and what the model answers."""
        lines = []
        for number, messages in enumerate(self.talks[:SHOWN]):
            first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
            answer = answer_messages(
                self.config, self.tokenizers, params, messages[:first], number,
                self.config.sample_tokens,
            )  # fmt: skip
            lines += [*(f"{m['role']}: {m['content']}" for m in messages[:first])]
            lines.append(f"assistant: {answer}")
        return "\n".join(lines)

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return nothing: answers are judged by their loss."""
        return {}


def answer_messages(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    messages: Messages,
    number: int,
    num_tokens: int,
) -> str:
    """Draw an answer to messages; `number` makes it another one of the same seed."""
    tokenizer = tokenizers.tokenizer
    prompt = message_ids(tokenizer, messages, answer=True)
    if isinstance(config.model, ModelConfig) and len(prompt) >= config.model.max_len:
        rule = f"must be less than max_len {config.model.max_len}"
        raise DataError(f"the messages have {len(prompt)} tokens: {rule}")
    stop = tokenizer.stop_ids if isinstance(tokenizer, PretrainedTokenizer) else ()
    stop = stop or (special_ids(tokenizer)["eos"],)
    key = jax.random.fold_in(jax.random.key(config.seed), 2 + number)
    pieces = complete(
        config.model, params, tokenizer, prompt, num_tokens,
        sampler=Sample(Temperature(0.8)), key=key, stop_ids=stop,
    )  # fmt: skip
    return "".join(pieces).strip()


def message_ids(
    tokenizer: Tokenizer, messages: Messages, *, answer: bool = False
) -> np.ndarray:  # i32[n]
    """Return the ids of messages; with `answer`, up to where the assistant begins to write."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.chat_ids(messages, add_generation_prompt=answer, written="parse")
    ids = special_ids(tokenizer)
    parts: list[Any] = []
    for message in messages:
        parts += [[ids[message["role"]]], encode_text(tokenizer, message["content"])]
        parts += [[ids["eos"]]] if message["role"] == "assistant" else []
    parts += [[ids["assistant"]]] if answer else []
    return np.concatenate(parts).astype(np.int32)


def _example(config: TrainConfig, tokenizer: Tokenizer, where: str, messages: Messages) -> Example:
    """Return a conversation, with labels where the assistant speaks."""
    whole = message_ids(tokenizer, messages)
    spoken = np.zeros(len(whole), bool)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = message_ids(tokenizer, messages[:number], answer=True)
        after = message_ids(tokenizer, messages[: number + 1])
        if not np.array_equal(whole[: len(after)], after) or len(before) > len(after):
            rule = "the chat template does not write a turn after what was said before it"
            raise DataError(f"{where}: message {number + 1}: {rule}")
        spoken[len(before) : len(after)] = True
    check_lengths(config, {where: len(whole) - 1})
    return Example(whole[:-1], np.where(spoken[1:], whole[1:], IGNORE).astype(np.int32))


def read_objects(
    config: TrainConfig, what: str, check: Callable[[str, Any], T]
) -> tuple[list[tuple[str, T]], list[tuple[str, T]], bytes]:
    """Return the JSON values of lines with where they stand, of both parts, and all bytes.

    `check(where, value)` returns what a value is, or raises DataError.
    """
    train, content = _read_file(config, "data", config.data, check)
    if config.val_data is not None:
        val, more = _read_file(config, "val_data", config.val_data, check)
        return train, val, content + more
    cut = int(len(train) * (1 - config.val_fraction))
    if not 0 < cut < len(train):
        rule = "must have one for training and one held out at least"
        raise DataError(f"data is {config.data!r}: {len(train)} {what}: {rule}")
    return train[:cut], train[cut:], content


def _read_file(
    config: TrainConfig, name: str, data: str, check: Callable[[str, Any], T]
) -> tuple[list[tuple[str, T]], bytes]:
    lines, content = read_lines(config, name, data)
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{data}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        found.append((where, check(where, value)))
    return found, content


def _messages(where: str, read: Any) -> Messages:
    """Return the messages of a line; DataError says what is wrong with them."""
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: must be {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    check_messages(where, messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message is the assistant's: there is nothing to learn")
    return messages


def check_messages(where: str, messages: Sequence[Any]) -> None:
    """Raise DataError for a message without a role and a content."""
    for number, message in enumerate(messages, start=1):
        given = message if isinstance(message, dict) else {}
        if given.get("role") not in ROLES or not isinstance(given.get("content"), str):
            rule = f"must have a role, {', '.join(ROLES)}, and a content"
            raise DataError(f"{where}: message {number} is {message!r:.60}: {rule}")
