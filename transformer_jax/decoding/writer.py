"""Streaming detokenization that emits whole characters and never a part of a stop string.

Emitted text is final. An incomplete character is delayed until its remaining bytes arrive, and text
that may start a stop string is delayed until this is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from transformer_jax.decoding.generation import NO_TOKEN
from transformer_jax.tokenizers.trained import Tokenizer


def pieces(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), stop_ids: Sequence[int] = ()
) -> Iterator[str]:
    """Yield text as soon as it is final. Invalid UTF-8 becomes U+FFFD.

    The text ends before the stop string that is completed first, even inside a token, or before a
    token in `stop_ids`. After that, no more `ids` are consumed.
    """
    writer = TextWriter(tokenizer, check_stop_strings(stop), stop_ids)
    for token in ids:
        if text := writer.feed(token):
            yield text
        if writer.ended:
            return
    if text := writer.finish():
        yield text


class TextWriter:
    """Incremental version of `pieces`, for callers that receive tokens one by one."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        # A token may end inside a character. The decoder stores its bytes until the rest arrives.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.matcher = StopStrings(stop)
        self.length = 0
        """Number of characters decoded so far, including those that have not been emitted yet."""
        self.start = 0
        """Index of the character that contains the first byte of the last token."""
        self.ended = False

    def feed(self, token: int) -> str:
        """Append a token and return the text that is now final. Raise ValueError for token -1."""
        if token < 0:
            raise ValueError(NO_TOKEN)
        if token in self.stop_ids:
            return self.finish()
        piece, pending = self.tokenizer.to_bytes([token]), self.decoder.getstate()[0]
        # If the first byte does not continue the pending character, this character becomes U+FFFD,
        # and the token starts one character later.
        broken = False
        try:
            (pending + piece[:1]).decode("utf-8")
        except UnicodeDecodeError as error:
            broken = 0 < error.end <= len(pending) and bool(piece)
        self.start = self.length + broken
        decoded = self.decoder.decode(piece)
        self.length += len(decoded)
        text, self.ended = self.matcher.feed(decoded)
        return text

    def finish(self) -> str:
        """End the text and return the remaining text that was delayed."""
        text, stopped = self.matcher.feed(self.decoder.decode(b"", final=True))
        self.ended = True
        return text if stopped else text + self.matcher.pending


class StopStrings:
    """Matcher that delays text as long as it may be part of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.pending = ""
        """Longest suffix of the text that is a prefix of a stop string."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Append text and return the text that is now final and whether a stop string ended it."""
        out: list[str] = []
        # Match character by character, so that token boundaries do not affect the result.
        for character in text:
            self.pending += character
            matches = [stop for stop in self.stop if self.pending.endswith(stop)]
            if matches:
                return "".join(out) + self.pending[: -max(map(len, matches))], True
            keep = next(
                n
                for n in range(len(self.pending), -1, -1)
                if n == 0 or any(stop.startswith(self.pending[-n:]) for stop in self.stop)
            )
            cut = len(self.pending) - keep
            out.append(self.pending[:cut])
            self.pending = self.pending[cut:]
        return "".join(out), False


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the stop string that is completed first."""
    matcher = StopStrings(stop)
    kept, ended = matcher.feed(text)
    return kept if ended else kept + matcher.pending


def check_stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Convert one or more stop strings to a tuple. Raise ValueError if a string is empty."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, list | tuple | set | frozenset):
        raise ValueError(f"stop is {stop!r:.80}: must be a string or a sequence of strings")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"stop contains {text!r}: each must be a string of at least one character"
            )
    return tuple(strings)
