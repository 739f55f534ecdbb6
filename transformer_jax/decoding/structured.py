r"""Write texts of a given form: of a JSON schema, of a regular expression, of a Lark grammar.

A `Grammar` is compiled for the tokens of a model, and `start` begins a text: a `Matcher`, which is
the constraint of that text alone. A token is allowed where its bytes go on with the text so that
some text of the form begins so, whichever way its other tokens are cut; a token that ends texts is
allowed where the text may end. Special tokens are never text.

The parser is llguidance's (Earley's algorithm over a lexer of derivatives), which runs on the host
and is an extra: `pip install 'transformer_jax[structured]'`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.decoding.json_schema import checked_schema
from transformer_jax.decoding.posix_classes import with_unicode_classes
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import ByteTokenizer, Tokenizer
from transformer_jax.tokenizers.utf8 import utf8
from transformer_jax.untrusted_files import brief

Form = Literal["schema", "regex", "grammar"]
"""Names the kinds of description: a JSON schema, a regular expression, a Lark grammar."""

_BLANKS = r"[ ]|\n{1,2}[ \t]{0,20}"
"""Matches the blanks between the parts of JSON, as llama.cpp allows them: a model cannot write
blanks without end. A schema's own "x-guidance" may say otherwise."""

_JSON = json.JSONDecoder(parse_float=Decimal)

_ESCAPE = re.compile(rb"\\(?:u([0-9A-Fa-f]{0,4})|.|$)", re.DOTALL)
_CODES = {f"{code:04x}"[:n].encode() for code in (*range(32), 127) for n in range(5)}
_CODES -= {f"{ord(letter):04x}".encode() for letter in "\b\t\n\f\r"}
"""The codes of characters that need an escape and have no shorter one, and their beginnings."""

_HEAD = '%llguidance {"no_forcing": true}\nstart: @text'
"""Allows every way of cutting a text into tokens, not the tokenizer's own alone."""


class Grammar:
    """Hold the form that texts are to have, compiled for the tokens of a model.

    Args:
        form: "schema", of JSON; "regex", in Rust's syntax, which is to match a whole text;
            "grammar", in llguidance's variant of Lark's syntax, whose rule `start` is the text.
        content: the schema as a mapping, whose numbers may be `Decimal`; else a text.
        tokenizer: of the model's texts.
        vocab_size: V of the model.
        stop_ids: tokens that end a text.
        name: what errors call it; None is the form.

    Raises:
        ConfigError: if llguidance is not installed.
        ValueError: if the description is wrong, or no text of the form can be written.
    """

    def __init__(
        self,
        form: Form,
        content: Mapping[str, Any] | str,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: tuple[int, ...] = (),
        name: str | None = None,
    ) -> None:
        self.form, self.vocab_size = form, vocab_size
        self.stop_ids, self.name = np.array(stop_ids, np.intp), name or form
        check_installed(self.name)
        wanted, what = (Mapping, "an object") if form == "schema" else (str, "a text")
        if not isinstance(content, wanted):
            raise ValueError(f"{self.name} is {content!r:.80}: must be {what}")
        if isinstance(content, str):
            utf8(content)
        from llguidance import LLMatcher

        given = {"grammars": [{"name": "main", "lark_grammar": _HEAD}, self._described(content)]}
        try:
            definition = json.dumps(given)
        except TypeError as error:
            raise ValueError(f"{self.name}: is no JSON: {error}") from None
        known: Any = tokenizer
        tokens, self.texts = _tokens(known, vocab_size, stop_ids)
        # Tokens that spell a character as \uXXXX although JSON has a shorter way: see `_look`.
        self.respelled = [
            i for i, text in enumerate(self.texts) if b"\\u" in text and _respells(text)
        ]
        self._own = LLMatcher(tokens, definition, log_level=0)
        if self._own.is_error():
            raise ValueError(f"{self.name}: {_in_a_line(self._own.get_error())}")
        try:
            self.start()
        except ValueError:
            # A form that bytes can write, but these tokens cannot, is an error of another kind.
            of_bytes, _ = _tokens(ByteTokenizer(), 256, ())
            with_bytes = LLMatcher(of_bytes, definition, log_level=0)
            with_bytes.compute_bitmask()
            if with_bytes.is_error():  # so the model's tokens are not to blame
                raise ValueError(f"{self.name}: no text has this form") from None
            raise

    def __repr__(self) -> str:
        return f"Grammar({self.name!r}, {self.vocab_size} tokens)"

    def _described(self, content: Any) -> dict[str, Any]:
        """Return the description as llguidance has it, by the name `text`."""
        if self.form == "schema":
            schema = checked_schema(content, self.name)
            own = {"whitespace_pattern": _BLANKS, **schema.get("x-guidance", {})}
            return {"name": "text", "json_schema": {**schema, "x-guidance": own}}
        if self.form == "grammar":
            for match in re.finditer(r"%json\s*(?={)", content):
                try:
                    schema, _ = _JSON.raw_decode(content, match.end())
                except json.JSONDecodeError:  # the parser says what is wrong
                    continue
                except (ArithmeticError, RecursionError) as error:
                    raise ValueError(f"{self.name}: %json: {brief(error)}") from None
                checked_schema(schema, f"{self.name}: %json")
            return {"name": "text", "lark_grammar": content}
        from llguidance import LLMatcher

        # llguidance compiles a regular expression to a grammar, which can be joined with the head.
        regex = with_unicode_classes(content, self.name)
        (only,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
        return {"name": "text", "lark_grammar": only["lark_grammar"]}

    def start(self) -> Matcher:
        """Begin a text."""
        return Matcher(self)


class Matcher:
    """Say which tokens may come next in one text of a grammar: a `Constraint` of decoding.

    Args:
        grammar: of the text.

    Attributes:
        allowed: bool[V], which tokens may come next.
        ended: whether the text is whole, and nothing but its end can follow.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        # Compiled once: each text starts from a copy of the parser's state.
        self._own = grammar._own.deep_copy()
        self._escape = b""  # an unfinished escape at the end of the text
        self._look()

    def __repr__(self) -> str:
        return f"Matcher({self.grammar!r})"

    def read(self, token: int) -> None:
        """Go on with a token; ValueError where it is not allowed, or the grammar too complex."""
        self._own.consume_token(int(token))
        begun = self._escape + self.grammar.texts[int(token)]
        self._escape = next(
            (
                e[0]
                for e in _ESCAPE.finditer(begun)
                # a whole escape has 2 bytes, or 6 with a code
                if e.end() == len(begun) and len(e[0]) != (2 if e[1] is None else 6)
            ),
            b"",
        )
        self._look()

    def _look(self) -> None:
        bits = np.frombuffer(self._own.compute_bitmask(), np.uint8)
        stuck = f"{self.grammar.name}: the text cannot go on: "
        no_token = "the tokenizer has no token for what must come next"
        if self._own.is_error():
            reason = _in_a_line(self._own.get_error())
            raise ValueError(stuck + (no_token if reason.startswith("NoExtension") else reason))
        vocab_size, stop = self.grammar.vocab_size, self.grammar.stop_ids
        # The table has one token more than the model, which ends texts: see `_tokens`.
        found = np.unpackbits(bits, count=vocab_size + 1, bitorder="little").astype(bool)
        self.allowed, may_end = found[:-1], found[-1]
        self.ended = bool(may_end and not self.allowed.any())
        if self.grammar.form == "schema":
            # to llguidance, the name "\\u0061" is not "a"
            barred = self.grammar.respelled
            if begun := self._escape:
                texts = self.grammar.texts
                left = self.allowed.nonzero()[0].tolist()
                barred = [i for i in left if _respells(begun + texts[i])]
            self.allowed[barred] = False
            if not (self.allowed.any() or may_end):
                raise ValueError(stuck + no_token)
        self.allowed[stop] = may_end


def check_installed(name: str) -> None:
    """Raise ConfigError where llguidance is not installed; `name` is what asks for it."""
    if find_spec("llguidance") is None:
        rule = "pip install 'transformer_jax[structured]'"
        raise ConfigError(f"{name} needs llguidance, which is not installed: {rule}")


@lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocab_size: int, stop_ids: tuple[int, ...]) -> tuple[Any, list[bytes]]:
    """Return llguidance's table of a model's tokens and one more, which ends texts; their bytes.

    A token without bytes is never allowed: so are special ones, and those that the tokenizer or the
    model has not.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    own = plain(tokenizer)
    # A special token must not be written as text, even if its letters fit the form.
    special = {*stop_ids, *special_ids(tokenizer).values()}
    if isinstance(own, PretrainedTokenizer):
        special |= own.special
    texts = [
        tokenizer.to_bytes([i]) if i < tokenizer.vocab_size and i not in special else b""
        for i in range(vocab_size)
    ]

    class Table:
        tokens, eos_token_id, bos_token_id = [*texts, b""], vocab_size, None

        def __call__(self, text: str | bytes) -> list[int]:
            return []  # it cuts no text: see _HEAD

    return LLTokenizer(TokenizerWrapper(Table())), texts


def _respells(text: bytes) -> bool:
    """Whether a text contains the code of a character that has a shorter spelling in JSON."""
    codes = [escape[1] for escape in _ESCAPE.finditer(text)]
    return any(code is not None and code not in _CODES for code in codes)


def _in_a_line(error: str) -> str:
    """Return what llguidance says is wrong, without its picture of the place."""
    found = re.split(r"\n<state>|\n +\d+ \| ", error)[0]
    reason = re.search(r"error: (.*)", found)
    return " ".join((reason[1] if reason else found).split())[:300]
