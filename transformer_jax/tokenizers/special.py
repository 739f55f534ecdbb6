"""Special tokens, which are IDs without text, such as the end of a target, a mask or a class."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.trained import Tokenizer, WordTokenizer, known_ids, tokenizer_of
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.values import short_repr, value_class

STAND_INS = {
    "bos": ("bos", "cls", "eos"), "eos": ("eos", "sep"), "sep": ("sep", "eos", "bos"),
    "cls": ("cls", "bos", "eos"), "mask": ("mask",),
}  # fmt: skip
"""Roles that can replace a missing role of a published tokenizer, in order of preference."""


@value_class
class SpecialTokens:
    """Tokenizer with additional IDs at the end that have a name but no text.

    Attributes:
        base: the tokenizer for text.
        names: one or more distinct names for the additional IDs.
    """

    base: Tokenizer
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise DataError(
                f"names of special tokens are {self.names!r}: must be distinct, and at least one"
            )
        if isinstance(self.base, SpecialTokens):
            raise DataError("base is a SpecialTokens: must be a plain tokenizer")

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size + len(self.names)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Map each name to its ID."""
        return {name: self.base.vocab_size + i for i, name in enumerate(self.names)}

    def encode(self, text: str) -> np.ndarray:  # i32[n]
        """Encode text as token IDs. Special tokens cannot be spelled out in the text."""
        return encode_text(self.base, text)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the IDs, and omit special tokens."""
        return self.base.to_bytes(i for i in ids if i < self.base.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode IDs and omit special tokens; raise DataError for an ID that has no token."""
        checked = known_ids(ids, self.vocab_size)
        return self.base.decode(i for i in checked if i < self.base.vocab_size)

    def to_json(self) -> str:
        base = json.loads(self.base.to_json())
        content = {"kind": "special", "names": list(self.names), "base": base}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def encode_text(tokenizer: Tokenizer, text: str, *, begins: bool = True) -> np.ndarray:  # i32[n]
    """Encode text without adding tokens, and treat special tokens in the text as plain text.

    If `begins` is false, the text continues other text, so no space is added before it.
    """
    tokenizer = plain(tokenizer)
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.encode(text, special_tokens=False, written="text", begins=begins)
    return tokenizer.encode(text)


def encode_answer(
    encode: Callable[..., np.ndarray], prompt: str, whole: str
) -> tuple[np.ndarray, np.ndarray]:  # i32[n], i32[m]
    """Return the IDs of the prompt and the IDs of the rest of `whole`.

    `whole` begins with the prompt.

    If a token would cross the boundary, the two parts are encoded separately, because the prompt
    also ends there at inference. `encode(text, begins=...)` returns IDs.
    """
    prompt_ids, ids = encode(prompt), encode(whole)
    if np.array_equal(ids[: len(prompt_ids)], prompt_ids):  # no token crosses the boundary
        return prompt_ids, ids[len(prompt_ids) :]
    return prompt_ids, encode(whole[len(prompt) :], begins=False)


def check_unpadded(tokenizer: object, ids: np.ndarray, what: str) -> None:
    """Raise DataError if `ids` begin or end with a padding token.

    A padding token that has another role, such as the end of the text, is accepted.
    """
    base = tokenizer.base if isinstance(tokenizer, SpecialTokens) else tokenizer
    if not isinstance(base, PretrainedTokenizer) or not len(ids):
        return
    roles = dict(base.special_ids)
    pad = roles.pop("pad", None)
    if pad in (*roles.values(), *base.stop_ids, *base.frame[0], *base.frame[1]):
        return
    for at, verb in ((0, "begins"), (-1, "ends")):
        if ids[at] == pad:
            rule = "which would be read as a token: remove the padding"
            raise DataError(f"{what} {verb} with the padding token {pad}, {rule}")


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the IDs of the tokens that end generation."""
    base, roles = plain(tokenizer), special_ids(tokenizer)
    stop = base.stop_ids if isinstance(base, PretrainedTokenizer) else ()
    if "eos" in roles and (base is not tokenizer or not stop):
        return tuple(dict.fromkeys([roles["eos"], *stop]))
    return stop


def with_end(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """Return a tokenizer that also stops generation at the token `end`."""
    if not isinstance(tokenizer, PretrainedTokenizer) or end in tokenizer.stop_ids:
        return tokenizer
    return replace(tokenizer, stop_ids=(*tokenizer.stop_ids, end))


@short_repr
class Frame(NamedTuple):
    """IDs to add before and after the text."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    def around(self, ids: np.ndarray) -> np.ndarray:  # i32[n] -> i32[m]
        """Return the IDs with the frame around them."""
        return np.concatenate([self.first, ids, self.last]).astype(np.int32)


def frame(tokenizer: Tokenizer) -> Frame:
    """Return the IDs that a published tokenizer adds around text.

    Other tokenizers have an empty frame.
    """
    base = plain(tokenizer)
    return Frame(*base.frame) if isinstance(base, PretrainedTokenizer) else Frame((), ())


@short_repr
class Target(NamedTuple):
    """Tokens around the targets of an encoder-decoder."""

    start: int
    """First input of the decoder, before the first label."""
    labels: Frame
    """Labels before and after the labels of the text."""
    stop: tuple[int, ...]
    """Tokens that end a generated target."""
    forced_bos: int | None = None
    """First token of every generated target."""
    forced_eos: int | None = None
    """Last token of a generated target that reaches the maximum length."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated."""


def target_of(tokenizer: Tokenizer) -> Target:
    """Return the tokens around targets.

    The config of a published model determines these tokens. Otherwise, they are <bos> and <eos>.

    Raises KeyError if the tokenizer lacks one of these tokens.
    """
    base, ids = plain(tokenizer), special_ids(tokenizer)
    if not isinstance(base, PretrainedTokenizer) or not base.target_ids:
        return Target(ids["bos"], Frame((), (ids["eos"],)), (ids["eos"],))
    config, (first, last), stop = dict(base.target_ids), frame(base), base.stop_ids
    # mBART starts a target with its language token; mBART-50 and NLLB force the language token
    # after another token
    start, forced_bos = config["decoder_start_token_id"], config.get("forced_bos_token_id")
    named = set(base.languages.values())
    language = next((i for i in (forced_bos, start) if i in named), None)
    if language is not None:  # labels have the target language, not the source language
        first, last = (tuple(language if i in named else i for i in ids) for ids in (first, last))
    # In mBART, the language follows the end token.
    end = [i for i in last if i != language][-1:]
    if "eos" in ids and (not end or end[0] not in {*stop, ids["eos"]}):
        last, end = (*last, ids["eos"]), [ids["eos"]]
    return Target(
        start, Frame(first, last), tuple(sorted({*stop, *end})), forced_bos,
        config.get("forced_eos_token_id"), base.banned,
    )  # fmt: skip


def source_frame(tokenizer: Tokenizer) -> Frame:
    """Return the IDs around a source for a published encoder-decoder.

    Other models have an empty frame.
    """
    base = plain(tokenizer)
    published = isinstance(base, PretrainedTokenizer) and bool(base.target_ids)
    return frame(base) if published else Frame((), ())


def encoder_frame(tokenizer: Tokenizer) -> Frame:
    """Return the IDs around the text of an encoder.

    These are the frame of the tokenizer, or <cls> at the start.
    """
    found = frame(tokenizer)
    return found if found.first else Frame((special_ids(tokenizer)["cls"],), found.last)


def with_special_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """Append any missing special tokens to a tokenizer."""
    present = special_ids(tokenizer)
    missing = tuple(name for name in names if name not in present)
    if not missing:
        return tokenizer
    if isinstance(tokenizer, SpecialTokens):
        return SpecialTokens(tokenizer.base, tokenizer.names + missing)
    return SpecialTokens(tokenizer, missing)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Map the names of a tokenizer's special tokens to their IDs.

    In a published tokenizer, missing roles are replaced by other roles (`STAND_INS`). If <eos> and
    <sep> are both missing, the first token that ends generation is <eos>.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        ids, stop = dict(tokenizer.special_ids), tokenizer.stop_ids
        if stop and not ids.keys() & {"eos", "sep"}:
            ids["eos"] = stop[0]
        found = {role: [r for r in others if r in ids] for role, others in STAND_INS.items()}
        return {role: ids[roles[0]] for role, roles in found.items() if roles}
    if isinstance(tokenizer, SpecialTokens):
        return {**special_ids(tokenizer.base), **tokenizer.special_ids}
    return {}


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return the base of a `SpecialTokens`, or the tokenizer itself."""
    return tokenizer.base if isinstance(tokenizer, SpecialTokens) else tokenizer


def unknown_words(
    tokenizer: Tokenizer, texts: Iterable[str], masks: Iterable[str] = ()
) -> str | None:
    """Return a warning about words, except masks, that a `WordTokenizer` does not know.

    Returns None if there are no such words, or if the tokenizer is of another class.
    """
    words, text = plain(tokenizer), " ".join(texts)
    for mask in masks:
        text = text.replace(mask, " ")
    if not isinstance(words, WordTokenizer) or not (unknown := words.unknown(text)):
        return None
    named = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
    rule = "they are not among the words of the training text and are read as <unk>"
    return f"unknown words: {len(unknown)} ({named}): {rule}"


def tokenizer_from_json(text: str) -> Tokenizer:
    """Create the tokenizer that `to_json` wrote; raise DataError for any other content."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer: not JSON ({error})") from None
    match content:
        case {"kind": "special", "names": list(names), "base": dict(base), **rest} if not rest:
            if not all(isinstance(name, str) for name in names):
                raise DataError(f"names of special tokens are {names!r:.80}: must be strings")
            return SpecialTokens(tokenizer_of(base), tuple(names))
    return tokenizer_of(content)
