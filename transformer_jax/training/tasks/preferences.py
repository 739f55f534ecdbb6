"""Preference data: prompts, each with a chosen and a rejected answer.

Each line of the file is an object {"prompt": ..., "chosen": ..., "rejected": ...}. The values are
either three strings or three lists of messages {"role": ..., "content": ...}, in which the answers
are the assistant's. Messages are encoded as in `chat`. A plain-text answer ends with <eos>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import special_ids, with_end, with_special_tokens
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params
from transformer_jax.training.data import IGNORE, line_tokenizer
from transformer_jax.training.rows import MULTIPLE, Rows
from transformer_jax.training.tasks.chat import SHOWN, answer_messages, check_messages, read_objects
from transformer_jax.training.tasks.task import (
    RowsTask,
    Tokenizers,
    check_lengths,
    check_token_ids,
    located,
    sha256_of,
    with_vocabulary,
)
from transformer_jax.training.tasks.turns import (
    ROLES,
    Messages,
    message_turn,
    text_turn,
    tokenizer_of_talks,
)
from transformer_jax.untrusted_files import Json
from transformer_jax.values import short_repr

FIELDS = "prompt", "chosen", "rejected"

PROMPT_HAS = "the prompt has"
"""Beginning of error messages about a prompt."""


@short_repr
class Pair(NamedTuple):
    """Prompt and two answers, which are all strings or all lists of messages."""

    where: str
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages

    @property
    def is_text(self) -> bool:
        """Whether the prompt and the answers are strings."""
        return isinstance(self.prompt, str)

    @property
    def texts(self) -> list[str]:
        """Return all texts of the pair."""
        parts = self.prompt, self.chosen, self.rejected
        parts_of = [[p] if isinstance(p, str) else [m["content"] for m in p] for p in parts]
        return [text for texts in parts_of for text in texts]


class Preferences(RowsTask):
    """Prompts, each with a chosen and a rejected answer."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        train, val, content = read_objects(config, "pairs", _pair)
        pairs, val_pairs = ([pair for _, pair in part] for part in (train, val))
        if tokenizers is None:
            texts = [
                [text for pair in part for text in pair.texts]
                for part in ([*pairs, *val_pairs], pairs)
            ]
            tokenizers = Tokenizers(line_tokenizer(config, *texts))
        tokenizer = tokenizers.tokenizer
        templates = isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_templates
        messages = not all(pair.is_text for pair in (*pairs, *val_pairs))
        assert isinstance(config.task, PreferenceTask)
        if config.task.messages not in (None, messages):
            rule = f"the data has {'messages' if messages else 'only texts'}"
            raise ConfigError(f"messages is {config.task.messages}, but {rule}")
        # a trained model must know the kind of its prompts without reading the data
        config = replace(config, task=replace(config.task, messages=messages))
        if messages and not templates:
            tokenizer = with_special_tokens(tokenizer, [*ROLES, "eos"])
        elif not (isinstance(tokenizer, PretrainedTokenizer) and tokenizer.stop_ids):
            tokenizer = with_special_tokens(tokenizer, ["eos"])
        self.end = None
        if (talk := next((p for p in pairs if not p.is_text), None)) is not None:
            tokenizer, self.end = tokenizer_of_talks(
                tokenizer, f"{talk.where}: chosen", [*talk.prompt, *talk.chosen]
            )
        if any(pair.is_text for pair in (*pairs, *val_pairs)):
            tokenizer = with_end(tokenizer, special_ids(tokenizer)["eos"])
        tokenizers = Tokenizers(tokenizer)
        config = with_vocabulary(config, tokenizers, vocab_size)
        self.pairs = val_pairs
        rows = [_rows(config, tokenizer, part) for part in (pairs, val_pairs)]
        super().__init__(config, tokenizers, sha256_of(content), *rows)

    def described(self) -> str:
        """Return a description of the rows and of the token that marks the end of an answer."""
        return "; ".join(filter(None, (super().described(), self.end)))

    def sample(self, params: Params) -> str:
        """Return the first held-out prompts with the model's answers."""
        lines = []
        for number, pair in enumerate(self.pairs[:SHOWN]):
            tokens = self.config.sample_tokens
            answer = answer_messages(
                self.config, self.tokenizers, params, pair.prompt, number, tokens, PROMPT_HAS
            )
            messages = [("prompt", pair.prompt)]
            if not isinstance(pair.prompt, str):
                messages = [(m["role"], m["content"]) for m in pair.prompt]
            lines += [*(f"{role}: {text}" for role, text in messages), f"answer: {answer}"]
        return "\n".join(lines)


def reads_messages(task: PreferenceTask, tokenizer: Tokenizer) -> bool:
    """Whether a run's prompts are messages, which is the default if the tokenizer supports them."""
    if task.messages is not None:
        return task.messages
    if isinstance(tokenizer, PretrainedTokenizer):
        return bool(tokenizer.chat_templates)
    return "assistant" in special_ids(tokenizer)


def _rows(config: TrainConfig, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> Rows:
    """Lay out one pair per row: the prompt with the chosen answer, then with the rejected one."""
    both = []
    for pair in pairs:
        found = list[tuple[np.ndarray, int]]()
        for name in FIELDS[1:]:
            answer, where = getattr(pair, name), f"{pair.where}: {name}"
            if isinstance(pair.prompt, str):
                turn = located(where, text_turn, tokenizer, pair.prompt, answer)
            else:
                turn = located(where, message_turn, tokenizer, [*pair.prompt, *answer])
            ids = np.concatenate(turn)
            if not len(turn.prompt):
                raise DataError(f"{pair.where}: prompt has no tokens: must have at least one")
            check_token_ids(config.model.vocab_size, tokenizer, where, ids)
            check_lengths(config, {f"{pair.where}, {name}": len(ids) - 1})
            found.append((ids, len(turn.prompt)))
        both.append(found)
    # different texts may have equal tokens if a template trims them
    for pair, ((chosen, _), (rejected, _)) in zip(pairs, both, strict=True):
        if np.array_equal(chosen, rejected):
            rule = "there is nothing to learn"
            raise DataError(f"{pair.where}: chosen and rejected have the same tokens: {rule}")
    longest = max(len(ids) - 1 for row in both for ids, _ in row)
    length = min(-(-longest // MULTIPLE) * MULTIPLE, config.sequence_len)
    tokens = np.zeros((len(pairs), 2, length), np.int32)
    labels = np.full(tokens.shape, IGNORE, np.int32)
    for number, row in enumerate(both):
        for half, (ids, start) in enumerate(row):
            here = number, half, slice(len(ids) - 1)
            tokens[here] = ids[:-1]
            # only the answer is scored
            labels[here] = np.where(np.arange(1, len(ids)) >= start, ids[1:], IGNORE)
    flat = len(pairs), 2 * length
    return Rows((Batch(tokens.reshape(flat), labels.reshape(flat)),))


def _pair(where: str, read: Json) -> Pair:
    """Return the pair in a line. Raises DataError if the line is malformed."""
    if not isinstance(read, dict) or any(name not in read for name in FIELDS):
        lacks = [name for name in FIELDS if not isinstance(read, dict) or name not in read]
        rule = 'must be {"prompt": ..., "chosen": ..., "rejected": ...}'
        raise DataError(f"{where} lacks {', '.join(lacks)}: {rule}")
    fields = [read[name] for name in FIELDS]
    values: list[str | Messages] = [value for value in fields if isinstance(value, str)]
    if len(values) < len(fields):
        values = []
        for name, value in zip(FIELDS, fields, strict=True):
            if not isinstance(value, list) or not value:
                rule = "all three must be strings, or all lists of messages"
                raise DataError(f"{where}: {name} is {value!r:.60}: {rule}")
            messages = check_messages(f"{where}, {name}", value)
            if name != "prompt" and [message["role"] for message in messages] != ["assistant"]:
                raise DataError(f"{where}: {name}: must be one message from the assistant")
            values.append(messages)
    if read["chosen"] == read["rejected"]:
        raise DataError(f"{where}: chosen and rejected are equal, so there is nothing to learn")
    return Pair(where, *values)
