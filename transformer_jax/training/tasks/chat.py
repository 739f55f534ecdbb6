"""Training on conversations, with a loss on the assistant's turns only.

Each line of the file is an object {"messages": [{"role": ..., "content": ...}, ...]}. Published
tokenizers use their chat template. Other tokenizers use one special token per role:

    <user> text <assistant> text <eos> <user> ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import ChatTask
from transformer_jax.decoding.completion import TextGenerator
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import end_ids, with_special_tokens
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params
from transformer_jax.training.data import IGNORE, line_tokenizer
from transformer_jax.training.rows import Rows, laid_out
from transformer_jax.training.tasks.pairs import read_lines
from transformer_jax.training.tasks.task import (
    RowsTask,
    Tokenizers,
    check_lengths,
    check_token_ids,
    sha256_of,
    split_held_out,
    with_vocabulary,
)
from transformer_jax.training.tasks.turns import (
    ROLES,
    Messages,
    prompt_ids,
    talk_turns,
    tokenizer_of_talks,
)
from transformer_jax.untrusted_files import Json, Untrusted

SHOWN = 3
"""Number of held-out conversations in the sample of a run."""

T = TypeVar("T")


class Conversations(RowsTask):
    """Conversations whose assistant turns are learned."""

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
        tokenizer, self.end = tokenizer_of_talks(tokenizer, *train[0])
        tokenizers = Tokenizers(tokenizer)
        config = with_vocabulary(config, tokenizers, vocab_size)
        self.talks = [messages for _, messages in val]

        def rows(talks: Sequence[tuple[str, Messages]]) -> Rows:
            examples = [row for talk in talks for row in _examples(config, tokenizer, *talk)]
            return laid_out(examples, config.sequence_len if is_packed else None)

        super().__init__(config, tokenizers, sha256_of(content), rows(train), rows(val))

    def described(self) -> str:
        """Return a description of the rows and of the token that marks the end of an answer."""
        return "; ".join(filter(None, (super().described(), self.end)))

    def sample(self, params: Params) -> str:
        """Return the first held-out conversations with the model's answers."""
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


def answer_messages(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    messages: str | Messages,
    number: int,
    num_tokens: int,
    what: str = "the messages have",
) -> str:
    """Sample an answer to messages or text. `number` selects the random key."""
    tokenizer = tokenizers.tokenizer
    prompt = prompt_ids(tokenizer, messages)
    check_token_ids(config.model.vocab_size, tokenizer, what.rpartition(" ")[0], prompt)
    longest = config.model.max_len
    if longest is not None and len(prompt) >= longest:
        rule = f"must be below max_len, {longest}"
        raise DataError(f"{what} {len(prompt)} tokens: {rule}")
    key = jax.random.fold_in(jax.random.key(config.seed), 2 + number)
    generator = TextGenerator(
        config.model, params, tokenizer,
        sampler=Sample(Temperature(0.8)), key=key, stop_ids=end_ids(tokenizer),
    )  # fmt: skip
    return "".join(generator.complete(prompt, num_tokens)).strip()


def _examples(
    config: TrainConfig, tokenizer: Tokenizer, where: str, messages: Messages
) -> list[Batch]:
    """Encode a conversation as rows whose labels are only the assistant's tokens.

    A turn that does not continue the row starts a new one. This happens if a template shortens an
    answer when another message follows it.
    """
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for prompt, answer in talk_turns(tokenizer, where, messages):
        labels = np.full(len(prompt), IGNORE, np.int32)
        if rows and np.array_equal(prompt[: len(rows[-1][0])], rows[-1][0]):
            before = rows.pop()[1]
            labels[: len(before)] = before
        rows.append((np.append(prompt, answer), np.append(labels, answer)))
    for whole, _ in rows:
        check_token_ids(config.model.vocab_size, tokenizer, where, whole)
        check_lengths(config, {where: len(whole) - 1})
    return [Batch(whole[:-1], labels[1:]) for whole, labels in rows]


def read_objects(
    config: TrainConfig, unit: str, check: Callable[[str, Json], T]
) -> tuple[list[tuple[str, T]], list[tuple[str, T]], bytes]:
    """Return the JSON values of both parts with their locations, and the bytes that were read.

    `check(where, value)` converts a value or raises DataError.
    """
    train, content = _read_file(config, "data", config.data, check)
    if config.val_data is not None:
        val, more = _read_file(config, "val_data", config.val_data, check)
        return train, val, content + more
    return *split_held_out(config, train, unit), content


def _read_file(
    config: TrainConfig, name: str, data: str, check: Callable[[str, Json], T]
) -> tuple[list[tuple[str, T]], bytes]:
    lines, content = read_lines(config, name, data)
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{data}, line {number}"
        value = Untrusted(DataError).parse(line, where)
        if isinstance(value, dict) and value.get("tools"):
            raise DataError(f"{where} has tools, which are not supported")
        found.append((where, check(where, value)))
    return found, content


def _messages(where: str, read: Json) -> Messages:
    """Return the messages in a line. Raises DataError if the line is malformed."""
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: must be {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    found = check_messages(where, messages)
    if not any(message["role"] == "assistant" for message in found):
        raise DataError(f"{where}: no message is from the assistant, so there is nothing to learn")
    return found


def check_messages(where: str, messages: Sequence[object]) -> Messages:
    """Return the messages. Raises DataError if one lacks a role or content."""
    found = []
    for number, message in enumerate(messages, start=1):
        fields = message if isinstance(message, dict) else {}
        if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
            rule = f"must have a role ({', '.join(ROLES)}) and a string as content"
            raise DataError(f"{where}: message {number} is {message!r:.60}: {rule}")
        if fields.get("weight", 1) != 1:
            rule = "must be 1, since all answers are learned equally (remove the message or weight)"
            raise DataError(
                f"{where}: message {number} has weight {fields['weight']!r:.60}: {rule}"
            )
        found.append(fields)
    return found
