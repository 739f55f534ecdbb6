"""Write prompts and answers as ids, in one way for rows, samples, evaluation and generation.

What a model learns to answer is what it is prompted with afterwards: a row is the ids of the
prompt, as they are without an answer, and then those of the answer, all of which are learnt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

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
from transformer_jax.values import short_repr

ROLES = "system", "user", "assistant"

BESIDE_CONTENT = "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"
"""Fields of a message in which an assistant says more than its content."""

_REMEDY = "change the file, or the chat_template of the tokenizer"

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
    where that ends with no token that ends a text. Some templates cut an answer, as those that
    drop its reasoning: its content is learnt whole.

    Args:
        tokenizer: with a chat template, or with the special tokens of messages.
        messages: `{"role": ..., "content": ...}`, at least one.

    Raises:
        DataError: if the template does not write the answer after the others, or changes it or
            the messages that it answers.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        prompt, answer = _templated(tokenizer, messages)
        ended = _last(tokenizer, answer) in tokenizer.stop_ids
        return Turn(prompt, answer if ended else _ids(answer, [special_ids(tokenizer)["eos"]]))
    for field in BESIDE_CONTENT:
        if messages[-1].get(field):
            raise DataError(f"has {field}, which is not read without a chat template: remove it")
    own = encode_text(tokenizer, messages[-1]["content"], begins=False)
    return Turn(prompt_ids(tokenizer, messages[:-1]), _ids(own, [special_ids(tokenizer)["eos"]]))


def _templated(tokenizer: PretrainedTokenizer, messages: Messages) -> Turn:
    *before, last = messages
    if not before:
        raise DataError("is the assistant's: a chat template needs one before it, to be answered")
    prompt = tokenizer.chat(before, add_generation_prompt=True)
    write = partial(tokenizer.chat, add_generation_prompt=False)
    written = whole = write(messages)
    given: str = last["content"]
    # a letter that is nowhere else shows where the content goes, and what stands around it
    mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in prompt + written + given)
    marked = write([*before, {**last, "content": mark}])
    around = marked.split(mark)
    if len(around) > 2:
        rule = f"writes its content {shown(given)} {len(around) - 1} times"
        raise DataError(f"the chat template {rule}: {_REMEDY}")
    if len(around) == 1 or written != given.join(around):
        start = _shared(written, marked)
        end = len(written) - _shared(written[start:][::-1], marked[start:][::-1])
        places = (found.span() for found in _loosely(given).finditer(written))
        if not any(first <= start and end <= stop for first, stop in places):
            found, letters = written[len(around[0]) : len(written) - len(around[-1])], iter(given)
            is_cut = len(around) == 2 and written == found.join(around)
            if not is_cut or not all(letter in letters for letter in found):  # in this order
                rule = f"writes its content {shown(given)} as {shown(found)}"
                raise DataError(f"the chat template {rule}: {_REMEDY}")
            whole = given.join(around)
    for field in BESIDE_CONTENT:
        if not (value := last.get(field)):
            continue
        lost = write([*before, {k: v for k, v in last.items() if k != field}]) == written
        if lost or (isinstance(value, str) and not _loosely(value).search(written)):
            rule = f"does not write its {field} as the file has it"
            raise DataError(f"the chat template {rule}: {_REMEDY}")
    for number in range(len(before), 0, -1):
        role, content = before[number - 1]["role"], before[number - 1].get("content")
        if role == "assistant":
            break
        if role not in ("system", "user") or not isinstance(content, str):
            continue
        other = {**before[number - 1], "content": mark}  # another message may say the same
        others = [*before[: number - 1], other, *before[number:]]
        is_dropped = tokenizer.chat(others, add_generation_prompt=True) == prompt
        if is_dropped or not _loosely(content).search(prompt):
            rule = f"does not write message {number}, {shown(content)}, as the file has it"
            raise DataError(f"the chat template {rule}: {_REMEDY}")
    if not whole.startswith(prompt):
        at = _shared(prompt, whole)
        rule = f"the chat template asks for it with {shown(prompt[at:])}, and writes it after "
        rule += f"{shown(whole[at:])}: must write it after what it asks with"
        raise DataError(f"{rule} (let the content begin with that, or change the template)")
    encode = partial(tokenizer.encode, special_tokens=False)
    return Turn(*encode_answer(encode, prompt, whole))


def _shared(one: str, two: str) -> int:
    """Return how many letters two texts begin with alike."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(two)))


def _loosely(content: str) -> re.Pattern[str]:
    """Return a pattern of a content: templates set spaces around it, and around its reasoning."""
    parts = ["", *re.split("(</?think>)", content), ""]
    return re.compile(r"\s*".join(re.escape(part.strip()) for part in parts))


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
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    probe = [*messages[:last], {"role": "assistant", "content": "a"}]  # is no token of its own
    chat_ids = partial(tokenizer.chat_ids, add_generation_prompt=False, written="parse")
    whole = located(f"{where}: message {last + 1}", chat_ids, probe)
    learnt, end = _last(tokenizer, whole), special_ids(tokenizer).get("eos")
    lines = []
    if any("endgeneration" in text for _, text in tokenizer.chat_templates):
        rule = "are not read: all of an answer and its end is learnt"
        lines.append(f"the chat template's marks {{% generation %}} {rule}")
    if learnt is not None and tokenizer.is_added(learnt):
        return with_end(tokenizer, learnt), "; ".join(lines) or None
    if end is None:
        rule = "ends no turn of the assistant, and tokenizer_config.json has no eos_token"
        raise DataError(f"the chat template {rule}: nothing would end an answer")
    name = shown(tokenizer.decode([end]))
    lines.insert(0, f"the chat template ends no turn of the assistant: {name} is learnt after each")
    return with_end(tokenizer, end), "; ".join(lines)
