"""Turn tokens into text as it is decided: whole characters, and nothing of a stop string.

What is yielded is decided: a character that lacks bytes waits for them, and so does text that may
be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from transformer_jax.decoding.generation import NO_TOKEN
from transformer_jax.tokenizers.trained import Tokenizer


def pieces(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), stop_ids: Sequence[int] = ()
) -> Iterator[str]:
    """Yield text as soon as it is decided; what is no UTF-8 shows as U+FFFD.

    It ends before the stop string whose last character comes first, wherever tokens begin and
    end, or of a token of `stop_ids`; no id is taken from `ids` after that.
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
    """Turn tokens into text as `pieces` does, for a caller to whom they come one by one."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        # Tokens may end within a character: its bytes are kept until the rest comes.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.matcher = StopStrings(stop)
        self.length = 0
        """How many characters the tokens so far have given, those held back included."""
        self.start = 0
        """How many of them stand before the character in which the last token begins."""
        self.ended = False

    def feed(self, token: int) -> str:
        """Take a token; return what is decided now. ValueError for -1, which is none."""
        if token < 0:
            raise ValueError(NO_TOKEN)
        if token in self.stop_ids:
            return self.finish()
        piece, begun = self.tokenizer.to_bytes([token]), self.decoder.getstate()[0]
        # A byte that does not continue the character before it turns what is begun into a U+FFFD,
        # which this token's own character follows.
        broken = False
        try:
            (begun + piece[:1]).decode("utf-8")
        except UnicodeDecodeError as error:
            broken = 0 < error.end <= len(begun) and bool(piece)
        self.start = self.length + broken
        decoded = self.decoder.decode(piece)
        self.length += len(decoded)
        text, self.ended = self.matcher.feed(decoded)
        return text

    def finish(self) -> str:
        """Return the text that was held back, as no token follows."""
        text, found = self.matcher.feed(self.decoder.decode(b"", final=True))
        self.ended = True
        return text if found else text + self.matcher.held


class StopStrings:
    """Hold text back for as long as it may be part of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.held = ""
        """The longest end of the text so far with which a stop string begins."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what is decided now, and whether a stop string ended it."""
        out: list[str] = []
        for character in text:
            self.held += character
            # Characters are looked at one by one, so the result does not depend on where tokens
            # end.
            found = [stop for stop in self.stop if self.held.endswith(stop)]
            if found:
                return "".join(out) + self.held[: -max(map(len, found))], True
            keep = next(
                n
                for n in range(len(self.held), -1, -1)
                if n == 0 or any(stop.startswith(self.held[-n:]) for stop in self.stop)
            )
            cut = len(self.held) - keep
            out.append(self.held[:cut])
            self.held = self.held[cut:]
        return "".join(out), False


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the stop string whose last character comes first."""
    matcher = StopStrings(stop)
    kept, ended = matcher.feed(text)
    return kept if ended else kept + matcher.held


def check_stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one stop string or several as a tuple; ValueError for an empty one."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, list | tuple | set | frozenset):
        raise ValueError(f"stop is {stop!r:.80}: must be a text or several texts")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop has {text!r}: must be strings of at least one character")
    return tuple(strings)
