"""Token IDs of prompts and answers, as used in training, sampling, evaluation, and generation.

A training row consists of the prompt, encoded as if it had no answer, and the answer. All token IDs
of the answer are learned.
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
"""Additional fields in an assistant's message."""

_REMEDY = "change the file, or the chat_template of the tokenizer"

Messages: TypeAlias = Sequence[Message]


@short_repr
class Turn(NamedTuple):
    """Prompt, which the model only reads, and answer, which it learns."""

    prompt: np.ndarray  # i32[n]
    answer: np.ndarray  # i32[m]


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages) -> np.ndarray:  # i32[n]
    """Return the token IDs of text or messages up to the start of the answer."""
    if isinstance(prompt, str):
        return _ids(frame(tokenizer).first, encode_text(tokenizer, prompt))
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.chat_ids(prompt, add_generation_prompt=True, written="parse")
    ids, parts = special_ids(tokenizer), list[Sequence[int] | np.ndarray]()
    for message in prompt:
        # the text follows the token of a role, so no space is added before it
        text = encode_text(tokenizer, message["content"], begins=False)
        parts += [[ids[message["role"]]], text]
        parts += [[ids["eos"]]] if message["role"] == "assistant" else []
    return _ids(*parts, [ids["assistant"]])


def text_turn(tokenizer: Tokenizer, prompt: str, answer: str) -> Turn:
    """Encode text and its continuation, which ends with <eos>.

    Args:
        tokenizer: tokenizer with the special token "eos".
        prompt: text that the model only reads.
        answer: continuation that the model learns.
    """
    encode = partial(encode_text, tokenizer)
    before, after = encode_answer(encode, prompt, prompt + answer)
    end = special_ids(tokenizer)["eos"]
    return Turn(_ids(frame(tokenizer).first, before), _ids(after, [end]))


def source_ids(tokenizer: Tokenizer, source: str) -> np.ndarray:  # i32[n]
    """Return the token IDs of a source and the separator after it."""
    return _ids(prompt_ids(tokenizer, source), [special_ids(tokenizer)["sep"]])


def target_ids(tokenizer: Tokenizer, target: str) -> np.ndarray:  # i32[n]
    """Return the token IDs of a target that follows a separator, including <eos>."""
    ids = encode_text(tokenizer, target, begins=False)
    return _ids(ids, [special_ids(tokenizer)["eos"]])


def message_turn(tokenizer: Tokenizer, messages: Messages) -> Turn:
    """Encode messages. The last message, from the assistant, is the answer to the others.

    With a chat template, the answer is everything after the generation prompt. If it does not end
    with an end token, <eos> is appended. If a template shortens an answer, for example by dropping
    its reasoning, the full content is learned.

    Args:
        tokenizer: tokenizer with a chat template or special tokens for roles.
        messages: list of at least one message `{"role": ..., "content": ...}`.

    Raises:
        DataError: If the template does not write the answer after the other messages, or if it
            changes the answer or the other messages.
    """
    *before, last = messages
    if not isinstance(tokenizer, PretrainedTokenizer):
        for field in BESIDE_CONTENT:
            if last.get(field):
                raise DataError(f"has {field}, which needs a chat template: remove it")
        return Turn(prompt_ids(tokenizer, before), target_ids(tokenizer, last["content"]))
    if not before:
        raise DataError("is from the assistant: a chat template needs a message before it")
    prompt = tokenizer.chat(before, add_generation_prompt=True)
    write = partial(tokenizer.chat, add_generation_prompt=False)
    written = whole = write(messages)
    content: str = last["content"]
    # a unique character marks the place of the content in the template's output
    mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in prompt + written + content)
    marked = write([*before, {**last, "content": mark}])
    around = marked.split(mark)
    if len(around) > 2:
        rule = f"writes its content {shown(content)} {len(around) - 1} times"
        raise DataError(f"the chat template {rule}: {_REMEDY}")
    if len(around) == 1 or written != content.join(around):
        start = _common_prefix(written, marked)
        end = len(written) - _common_prefix(written[start:][::-1], marked[start:][::-1])
        places = (found.span() for found in _loose_pattern(content).finditer(written))
        if not any(first <= start and end <= stop for first, stop in places):
            found, letters = written[len(around[0]) : len(written) - len(around[-1])], iter(content)
            is_cut = len(around) == 2 and written == found.join(around)
            # check that `found` is a subsequence of the content
            if not is_cut or not all(letter in letters for letter in found):
                rule = f"writes its content {shown(content)} as {shown(found)}"
                raise DataError(f"the chat template {rule}: {_REMEDY}")
            whole = content.join(around)
    for field in BESIDE_CONTENT:
        if not (value := last.get(field)):
            continue
        lost = write([*before, {k: v for k, v in last.items() if k != field}]) == written
        if lost or (isinstance(value, str) and not _loose_pattern(value).search(written)):
            rule = f"does not write its {field} unchanged"
            raise DataError(f"the chat template {rule}: {_REMEDY}")
    for number in range(len(before), 0, -1):
        role, text = before[number - 1]["role"], before[number - 1].get("content")
        if role == "assistant":
            break
        if role not in ("system", "user") or not isinstance(text, str):
            continue
        other = {**before[number - 1], "content": mark}  # other messages may contain the same text
        others = [*before[: number - 1], other, *before[number:]]
        is_dropped = tokenizer.chat(others, add_generation_prompt=True) == prompt
        if is_dropped or not _loose_pattern(text).search(prompt):
            rule = f"does not write message {number}, {shown(text)}, unchanged"
            raise DataError(f"the chat template {rule}: {_REMEDY}")
    if not whole.startswith(prompt):
        at = _common_prefix(prompt, whole)
        rule = f"prompts for it with {shown(prompt[at:])}, but writes it after {shown(whole[at:])}"
        remedy = "begin the content with the prompt, or change the template"
        raise DataError(f"the chat template {rule}: {remedy}")
    encode = partial(tokenizer.encode, special_tokens=False)
    read, answer = encode_answer(encode, prompt, whole)
    ended = _last_visible_id(tokenizer, answer) in tokenizer.stop_ids
    return Turn(read, answer if ended else _ids(answer, [special_ids(tokenizer)["eos"]]))


def _common_prefix(one: str, two: str) -> int:
    """Return the length of the common prefix of two strings."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(two)))


def _loose_pattern(content: str) -> re.Pattern[str]:
    """Return a pattern that allows spaces around the content and around its reasoning."""
    parts = ["", *re.split("(</?think>)", content), ""]
    return re.compile(r"\s*".join(re.escape(part.strip()) for part in parts))


def _last_visible_id(tokenizer: PretrainedTokenizer, answer: np.ndarray) -> int | None:
    """Return the ID of the last token whose text is not whitespace."""
    return next((int(i) for i in answer[::-1] if tokenizer.to_bytes([i]).strip()), None)


def _ids(*parts: Sequence[int] | np.ndarray) -> np.ndarray:  # i32[n]
    return np.concatenate(parts).astype(np.int32)


def talk_turns(tokenizer: Tokenizer, where: str, messages: Messages) -> list[Turn]:
    """Return each assistant turn, with all previous messages as its prompt."""
    found = []
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            here = f"{where}: message {number}"
            found.append(located(here, message_turn, tokenizer, messages[:number]))
    return found


def tokenizer_of_talks(
    tokenizer: Tokenizer, where: str, messages: Messages
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer for a run on conversations, and a line about the end of answers.

    The token that the chat template puts at the end of answers becomes an end token. If the
    template inserts the current time, that time stays the same for the whole run. Raises DataError
    if no token marks the end of an answer.
    """
    if not (isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_templates):
        return tokenizer, None
    if tokenizer.now is None and any(
        "strftime_now" in text for _, text in tokenizer.chat_templates
    ):
        tokenizer = replace(tokenizer, now=time_of_first())
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    probe = [*messages[:last], {"role": "assistant", "content": "a"}]  # "a" is not a special token
    chat_ids = partial(tokenizer.chat_ids, add_generation_prompt=False, written="parse")
    whole = located(f"{where}: message {last + 1}", chat_ids, probe)
    last_id, end = _last_visible_id(tokenizer, whole), special_ids(tokenizer).get("eos")
    lines = []
    if any("endgeneration" in text for _, text in tokenizer.chat_templates):
        rule = "are ignored: every answer is learned in full, with its end"
        lines.append(f"the chat template's marks {{% generation %}} {rule}")
    if last_id is not None and tokenizer.is_added(last_id):
        return with_end(tokenizer, last_id), "; ".join(lines) or None
    if end is None:
        rule = "does not end assistant turns, and tokenizer_config.json has no eos_token"
        raise DataError(f"the chat template {rule}: nothing would end an answer")
    name = shown(tokenizer.decode([end]))
    lines.insert(0, f"the chat template does not end assistant turns: {name} is learned after each")
    return with_end(tokenizer, end), "; ".join(lines)
