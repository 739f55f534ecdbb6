"""Write prompts and answers as ids, in one way for rows, samples, evaluation and generation.

What a model learns to answer is what it is prompted with afterwards: a row is the ids of the
prompt, as they are without an answer, and then those of the answer, all of which are learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from transformer_jax.shown import short_repr
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import (
    encode_answer,
    encode_text,
    frame,
    special_ids,
    with_end,
)
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.processes import time_of_first
from transformer_jax.training.tasks.task import located
from transformer_jax.untrusted_files import shown

ROLES = "system", "user", "assistant"

Messages: TypeAlias = Sequence[Message]


@short_repr
class Turn(NamedTuple):
    """Hold what is read, and what is learnt after it."""

    prompt: np.ndarray  # i32[n]
    answer: np.ndarray  # i32[m]


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages) -> np.ndarray:  # i32[n]
    """Return the ids of a text or of messages, up to where the answer begins."""
    if isinstance(prompt, str):
        return _ids(frame(tokenizer).first, encode_text(tokenizer, prompt))
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.chat_ids(prompt, add_generation_prompt=True, written="parse")
    ids, parts = special_ids(tokenizer), list[Sequence[int] | np.ndarray]()
    for message in prompt:
        text = encode_text(tokenizer, message["content"], begins=False)
        parts += [[ids[message["role"]]], text]
        parts += [[ids["eos"]]] if message["role"] == "assistant" else []
    return _ids(*parts, [ids["assistant"]])


def text_turn(tokenizer: Tokenizer, prompt: str, answer: str) -> Turn:
    """Return a text and the one that goes on with it, up to the token of its end.

    Args:
        tokenizer: with an "eos" among its special tokens.
        prompt: the text that is read.
        answer: the one that goes on with it, and is learnt.
    """
    encode = partial(encode_text, tokenizer)
    before, after = encode_answer(encode, prompt, prompt + answer)
    end = special_ids(tokenizer)["eos"]
    return Turn(_ids(frame(tokenizer).first, before), _ids(after, [end]))


def source_ids(tokenizer: Tokenizer, source: str) -> np.ndarray:  # i32[n]
    """Return the ids of a source and of the separator, after which its target is learnt."""
    return _ids(prompt_ids(tokenizer, source), [special_ids(tokenizer)["sep"]])


def target_ids(tokenizer: Tokenizer, target: str) -> np.ndarray:  # i32[n]
    """Return the ids of a target after its separator, and of its end."""
    own = encode_text(tokenizer, target, begins=False)
    return _ids(own, [special_ids(tokenizer)["eos"]])


def message_turn(tokenizer: Tokenizer, messages: Messages) -> Turn:
    """Return messages, and the last of them, the assistant's, as the answer to the others.

    By a chat template, the answer is all that it writes after what it asks for one with, and <eos>
    where that ends with no token that ends a text.

    Args:
        tokenizer: with a chat template, or with the special tokens of messages.
        messages: `{"role": ..., "content": ...}`, at least one.

    Raises:
        DataError: if the template does not write the answer after the others.
    """
    if not isinstance(tokenizer, PretrainedTokenizer):
        own = encode_text(tokenizer, messages[-1]["content"], begins=False)
        return Turn(
            prompt_ids(tokenizer, messages[:-1]), _ids(own, [special_ids(tokenizer)["eos"]])
        )
    prompt, answer = _templated(tokenizer, messages)
    ended = _last(tokenizer, answer) in tokenizer.stop_ids
    return Turn(prompt, answer if ended else _ids(answer, [special_ids(tokenizer)["eos"]]))


def _templated(tokenizer: PretrainedTokenizer, messages: Messages) -> Turn:
    if len(messages) == 1:
        raise DataError("is the assistant's: a chat template needs one before it, to be answered")
    prompt = tokenizer.chat(messages[:-1], add_generation_prompt=True)
    whole = tokenizer.chat(messages, add_generation_prompt=False)
    if not whole.startswith(prompt):
        pairs = enumerate(zip(prompt, whole, strict=False))
        at = next((n for n, (one, two) in pairs if one != two), len(whole))
        rule = f"the chat template asks for it with {shown(prompt[at:])}, and writes it after "
        raise DataError(f"{rule}{shown(whole[at:])}: must write it after what it asks with")
    encode = partial(tokenizer.encode, special_tokens=False)
    return Turn(*encode_answer(encode, prompt, whole))


def _last(tokenizer: PretrainedTokenizer, answer: np.ndarray) -> int | None:
    """Return the last id that is more than space."""
    return next((int(i) for i in answer[::-1] if tokenizer.to_bytes([i]).strip()), None)


def _ids(*parts: Sequence[int] | np.ndarray) -> np.ndarray:  # i32[n]
    return np.concatenate(parts).astype(np.int32)


def talk_turns(tokenizer: Tokenizer, where: str, messages: Messages) -> list[Turn]:
    """Return each turn of the assistant after all that is before it; a DataError names it."""
    found = []
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            here = f"{where}: message {number}"
            found.append(located(here, message_turn, tokenizer, messages[:number]))
    return found


def tokenizer_of_talks(
    tokenizer: Tokenizer, where: str, messages: Messages
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a run on messages such as these, and a line about what is learnt.

    The token that its chat template ends an answer with ends a text from now on, and the time that
    the template may write is the run's start. DataError where nothing ends an answer.
    """
    if not (isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_templates):
        return tokenizer, None
    if tokenizer.now is None and any(
        "strftime_now" in text for _, text in tokenizer.chat_templates
    ):
        tokenizer = replace(tokenizer, now=time_of_first())
    first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
    probe = [*messages[:first], {"role": "assistant", "content": "a"}]  # is no token of its own
    chat_ids = partial(tokenizer.chat_ids, add_generation_prompt=False, written="parse")
    whole = located(f"{where}: message {first + 1}", chat_ids, probe)
    last, end = _last(tokenizer, whole), special_ids(tokenizer).get("eos")
    lines = []
    if any("endgeneration" in text for _, text in tokenizer.chat_templates):
        rule = "are not read: all of an answer and its end is learnt"
        lines.append(f"the chat template's marks {{% generation %}} {rule}")
    if last is not None and tokenizer.is_added(last):
        return with_end(tokenizer, last), "; ".join(lines) or None
    if end is None:
        rule = "ends no turn of the assistant, and tokenizer_config.json has no eos_token"
        raise DataError(f"the chat template {rule}: nothing would end an answer")
    name = shown(tokenizer.decode([end]))
    lines.insert(0, f"the chat template ends no turn of the assistant: {name} is learnt after each")
    return with_end(tokenizer, end), "; ".join(lines)
