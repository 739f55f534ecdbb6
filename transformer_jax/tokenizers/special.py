"""Give a tokenizer ids that stand for no text: the end of a target, a mask, a class."""

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
"""Roles of a published tokenizer that may serve for one that it has not, the first there is."""


@value_class
class SpecialTokens:
    """Add ids after those of another tokenizer, each with a name and no text.

    Attributes:
        base: the other tokenizer.
        names: of the ids, distinct, at least one.
    """

    base: Tokenizer
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise DataError(f"names of special tokens are {self.names!r}: must be distinct")
        if isinstance(self.base, SpecialTokens):
            raise DataError("base of special tokens has special tokens: must be a plain tokenizer")

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size + len(self.names)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Map each name to its id."""
        return {name: self.base.vocab_size + i for i, name in enumerate(self.names)}

    def encode(self, text: str) -> np.ndarray:  # i32[n]
        """Return the ids of a text, in which no special token can be written."""
        return encode_text(self.base, text)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the ids that stand for text."""
        return self.base.to_bytes(i for i in ids if i < self.base.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids that stand for text as a whole text; DataError names an unknown one."""
        known = known_ids(ids, self.vocab_size)
        return self.base.decode(i for i in known if i < self.base.vocab_size)

    def to_json(self) -> str:
        base = json.loads(self.base.to_json())
        content = {"kind": "special", "names": list(self.names), "base": base}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def encode_text(tokenizer: Tokenizer, text: str, *, begins: bool = True) -> np.ndarray:  # i32[n]
    """Return the ids of a text alone: none is added, and a special token spelled out is text.

    With `begins=False` it goes on with what stands before it: no space is put between the two.
    """
    tokenizer = plain(tokenizer)
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.encode(text, special_tokens=False, written="text", begins=begins)
    return tokenizer.encode(text)


def encode_answer(
    encode: Callable[..., np.ndarray], prompt: str, whole: str
) -> tuple[np.ndarray, np.ndarray]:  # i32[n], i32[m]
    """Return the ids of a prompt, and those of what `whole`, which begins with it, has after it.

    They are those of the whole where these begin with the prompt's. Where a token would stretch
    over the border, both are encoded apart, since a prompt that is to be answered ends there too.
    `encode(text, begins=...)` returns ids.
    """
    before, ids = encode(prompt), encode(whole)
    # The usual case: no token stretches over the border.
    if np.array_equal(ids[: len(before)], before):
        return before, ids[len(before) :]
    return before, encode(whole[len(prompt) :], begins=False)


def check_unpadded(tokenizer: object, ids: np.ndarray, what: str) -> None:
    """Raise DataError if the ids that a caller passes begin or end with a padding token.

    A padding token with another role, such as the end of a text, is accepted.
    """
    own = tokenizer.base if isinstance(tokenizer, SpecialTokens) else tokenizer
    if not isinstance(own, PretrainedTokenizer) or not len(ids):
        return
    roles = dict(own.special_ids)
    pad = roles.pop("pad", None)
    if pad in (*roles.values(), *own.stop_ids, *own.frame[0], *own.frame[1]):
        return
    for at, where in ((0, "begins"), (-1, "ends")):
        if ids[at] == pad:
            rule = "which would be read as a token: leave padding out"
            raise DataError(f"{what} {where} with the padding token {pad}, {rule}")


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text that a model writes."""
    base, own = plain(tokenizer), special_ids(tokenizer)
    stop = base.stop_ids if isinstance(base, PretrainedTokenizer) else ()
    if "eos" in own and (base is not tokenizer or not stop):
        return tuple(dict.fromkeys([own["eos"], *stop]))
    return stop


def with_end(tokenizer: Tokenizer, learnt: int) -> Tokenizer:
    """Return the tokenizer, of whose texts a token is one of the ends."""
    if not isinstance(tokenizer, PretrainedTokenizer) or learnt in tokenizer.stop_ids:
        return tokenizer
    return replace(tokenizer, stop_ids=(*tokenizer.stop_ids, learnt))


@short_repr
class Frame(NamedTuple):
    """Hold the ids that stand before a text and after it."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    def around(self, ids: np.ndarray) -> np.ndarray:  # i32[n] -> i32[m]
        """Return the ids between those of the frame."""
        return np.concatenate([self.first, ids, self.last]).astype(np.int32)


def frame(tokenizer: Tokenizer) -> Frame:
    """Return what a published tokenizer puts around a text; of another one, nothing."""
    own = plain(tokenizer)
    return Frame(*own.frame) if isinstance(own, PretrainedTokenizer) else Frame((), ())


@short_repr
class Target(NamedTuple):
    """Say how the targets of an encoder-decoder begin and end."""

    start: int
    """What the decoder reads before the first label."""
    labels: Frame
    """The labels before those of the text and after them."""
    stop: tuple[int, ...]
    """What ends a target that is written."""
    forced_bos: int | None = None
    """The first token of every target that is written."""
    forced_eos: int | None = None
    """The last token of one that has not ended by itself."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are never written."""


def target_of(tokenizer: Tokenizer) -> Target:
    """Return how targets begin and end: as in a published model's config, or <bos> and <eos>.

    KeyError where the tokenizer has no such token.
    """
    own, ids = plain(tokenizer), special_ids(tokenizer)
    if not isinstance(own, PretrainedTokenizer) or not own.target_ids:
        return Target(ids["bos"], Frame((), (ids["eos"],)), (ids["eos"],))
    given, (first, last), stop = dict(own.target_ids), frame(own), own.stop_ids
    # mBART begins a target with its language, mBART-50 and NLLB force it after another token.
    start, forced_bos = given["decoder_start_token_id"], given.get("forced_bos_token_id")
    named = set(own.languages.values())
    language = next((i for i in (forced_bos, start) if i in named), None)
    if language is not None:  # around a target stands its own language, and not the source's
        first, last = (tuple(language if i in named else i for i in ids) for ids in (first, last))
    end = [i for i in last if i != language][-1:]
    if "eos" in ids and (not end or end[0] not in {*stop, ids["eos"]}):
        last, end = (*last, ids["eos"]), [ids["eos"]]
    return Target(
        start, Frame(first, last), tuple(sorted({*stop, *end})), forced_bos,
        given.get("forced_eos_token_id"), own.banned,
    )  # fmt: skip


def source_frame(tokenizer: Tokenizer) -> Frame:
    """Return what stands around a source: as in a published encoder-decoder, or nothing."""
    own = plain(tokenizer)
    published = isinstance(own, PretrainedTokenizer) and bool(own.target_ids)
    return frame(own) if published else Frame((), ())


def encoder_frame(tokenizer: Tokenizer) -> Frame:
    """Return what stands around a text that an encoder classifies: its tokenizer's, or <cls>."""
    found = frame(tokenizer)
    return found if found.first else Frame((special_ids(tokenizer)["cls"],), found.last)


def with_special_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """Return the tokenizer with those of the named tokens, "mask", that it lacks at its end."""
    own = special_ids(tokenizer)
    missing = tuple(name for name in names if name not in own)
    if not missing:
        return tokenizer
    if isinstance(tokenizer, SpecialTokens):
        return SpecialTokens(tokenizer.base, tokenizer.names + missing)
    return SpecialTokens(tokenizer, missing)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Map the names of a tokenizer's special tokens to their ids.

    A published tokenizer's roles may stand in for one another, as `STAND_INS` says; where none is
    an <eos>, the first token that ends a text of its model is.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        own, stop = dict(tokenizer.special_ids), tokenizer.stop_ids
        if stop and not own.keys() & {"eos", "sep"}:
            own["eos"] = stop[0]
        found = {role: [r for r in others if r in own] for role, others in STAND_INS.items()}
        return {role: own[roles[0]] for role, roles in found.items() if roles}
    if isinstance(tokenizer, SpecialTokens):
        return {**special_ids(tokenizer.base), **tokenizer.special_ids}
    return {}


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer under the special tokens, or the tokenizer itself."""
    return tokenizer.base if isinstance(tokenizer, SpecialTokens) else tokenizer


def unknown_words(
    tokenizer: Tokenizer, texts: Iterable[str], masks: Iterable[str] = ()
) -> str | None:
    """Return a line on the words of texts, but for masks, that a tokenizer of words does not know.

    None where there are none, and of every other tokenizer.
    """
    words, text = plain(tokenizer), " ".join(texts)
    for mask in masks:
        text = text.replace(mask, " ")
    if not isinstance(words, WordTokenizer) or not (unknown := words.unknown(text)):
        return None
    named = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
    rule = "not among the words of the training text, read as <unk>"
    return f"unknown words: {len(unknown)} ({named}): {rule}"


def tokenizer_from_json(text: str) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote; DataError if the text is anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer: not JSON ({error})") from None
    match content:
        case {"kind": "special", "names": list(names), "base": dict(base), **rest} if not rest:
            if not all(isinstance(name, str) for name in names):
                raise DataError(f"names of special tokens are {names!r:.80}: must be texts")
            return SpecialTokens(tokenizer_of(base), tuple(names))
    return tokenizer_of(content)
