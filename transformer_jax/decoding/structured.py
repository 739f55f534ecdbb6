r"""Structured output: text that follows a JSON schema, a regular expression or a Lark grammar.

A `Grammar` is compiled for the tokens of a model. Its `start` method returns a `Matcher`, which is
the constraint on a single text. A token is allowed if the text followed by the bytes of the token
is a prefix of a matching text, regardless of tokenization. A stop token is allowed if the text may
end. Special tokens are not text.

The parser is llguidance, which runs Earley's algorithm with a lexer based on derivatives. It runs
on the host and is an optional dependency: `pip install 'transformer_jax[structured]'`.
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
from transformer_jax.decoding.json_schema import check_schema
from transformer_jax.decoding.posix_classes import with_unicode_classes
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import ByteTokenizer, Tokenizer
from transformer_jax.tokenizers.utf8 import utf8
from transformer_jax.untrusted_files import brief

Form = Literal["schema", "regex", "grammar"]
"""Kind of grammar: a JSON schema, a regular expression, or a Lark grammar."""

_BLANKS = r"[ ]|\n{1,2}[ \t]{0,20}"
"""Whitespace allowed between JSON elements, as in llama.cpp. It is limited so that a model cannot
generate whitespace forever. The "x-guidance" key of a schema can override it."""

_JSON = json.JSONDecoder(parse_float=Decimal)

_ESCAPE = re.compile(rb"\\(?:u([0-9A-Fa-f]{0,4})|.|$)", re.DOTALL)
_CODES = {f"{code:04x}"[:n].encode() for code in (*range(32), 127) for n in range(5)}
_CODES -= {f"{ord(letter):04x}".encode() for letter in "\b\t\n\f\r"}
"""Codes of control characters that have no short JSON escape, with all prefixes of these codes."""

_HEAD = '%llguidance {"no_forcing": true}\nstart: @text'
"""Header that allows every tokenization of the text, not only that of the tokenizer."""


class Grammar:
    """Grammar compiled for the tokens of a model.

    Args:
        form: "schema" for a JSON schema, "regex" for a regular expression in Rust syntax that must
            match the whole text, or "grammar" for a grammar in llguidance's variant of Lark syntax,
            whose `start` rule must match the whole text.
        content: a string, or a schema as a mapping whose numbers may be `Decimal`.
        tokenizer: the tokenizer of the model.
        vocab_size: V, the vocabulary size of the model.
        stop_ids: IDs of the tokens that end the text.
        name: the name of the grammar in error messages; None means `form`.

    Raises:
        ConfigError: If llguidance is not installed.
        ValueError: If the grammar is invalid, or if the tokens cannot produce any matching text.
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
        kind, description = (Mapping, "an object") if form == "schema" else (str, "a string")
        if not isinstance(content, kind):
            raise ValueError(f"{self.name} is {content!r:.80}: must be {description}")
        if isinstance(content, str):
            utf8(content)
        from llguidance import LLMatcher

        grammars = [{"name": "main", "lark_grammar": _HEAD}, self._definition(content)]
        try:
            definition = json.dumps({"grammars": grammars})
        except TypeError as error:
            raise ValueError(f"{self.name} is not JSON: {error}") from None
        hashable_tokenizer: Any = tokenizer
        tokens, self.texts = _tokens(hashable_tokenizer, vocab_size, stop_ids)
        # Tokens that contain a character as \uXXXX although JSON has a shorter form (see
        # `_update`).
        self.respelled = [
            i for i, text in enumerate(self.texts) if b"\\u" in text and _respells(text)
        ]
        self._parser = LLMatcher(tokens, definition, log_level=0)
        if self._parser.is_error():
            raise ValueError(f"{self.name}: {_one_line(self._parser.get_error())}")
        try:
            self.start()
        except ValueError:
            # Try single bytes to determine whether the grammar or the model's tokens cause the
            # error.
            byte_tokens, _ = _tokens(ByteTokenizer(), 256, ())
            byte_parser = LLMatcher(byte_tokens, definition, log_level=0)
            byte_parser.compute_bitmask()
            if byte_parser.is_error():
                raise ValueError(f"{self.name}: no text matches it") from None
            raise

    def __repr__(self) -> str:
        return f"Grammar({self.name!r}, {self.vocab_size} tokens)"

    def _definition(self, content: Any) -> dict[str, Any]:
        """Return llguidance's definition of the grammar, named `text`."""
        if self.form == "schema":
            schema = check_schema(content, self.name)
            options = {"whitespace_pattern": _BLANKS, **schema.get("x-guidance", {})}
            return {"name": "text", "json_schema": {**schema, "x-guidance": options}}
        if self.form == "grammar":
            for match in re.finditer(r"%json\s*(?={)", content):
                try:
                    schema, _ = _JSON.raw_decode(content, match.end())
                except json.JSONDecodeError:  # llguidance reports the error
                    continue
                except (ArithmeticError, RecursionError) as error:
                    raise ValueError(f"{self.name}: %json: {brief(error)}") from None
                check_schema(schema, f"{self.name}: %json")
            return {"name": "text", "lark_grammar": content}
        from llguidance import LLMatcher

        # llguidance compiles a regular expression to a grammar that can be combined with _HEAD.
        regex = with_unicode_classes(content, self.name)
        (compiled,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
        return {"name": "text", "lark_grammar": compiled["lark_grammar"]}

    def start(self) -> Matcher:
        """Return a matcher for a new, empty text."""
        return Matcher(self)


class Matcher:
    """Constraint that makes a single text follow a grammar.

    Args:
        grammar: the grammar that the text must follow.

    Attributes:
        allowed: bool[V], a mask of the tokens that may come next.
        ended: whether the text is complete, so that only a stop token can follow.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        # The grammar is compiled once, and each text starts from a copy of the parser's state.
        self._parser = grammar._parser.deep_copy()
        self._escape = b""  # an unfinished escape at the end of the text
        self._update()

    def __repr__(self) -> str:
        return f"Matcher({self.grammar!r})"

    def read(self, token: int) -> None:
        """Append a token; raise ValueError if it is not allowed or the grammar is too complex."""
        self._parser.consume_token(int(token))
        tail = self._escape + self.grammar.texts[int(token)]
        self._escape = next(
            (
                e[0]
                for e in _ESCAPE.finditer(tail)
                # A complete escape consists of 2 bytes, or of 6 bytes with a code.
                if e.end() == len(tail) and len(e[0]) != (2 if e[1] is None else 6)
            ),
            b"",
        )
        self._update()

    def _update(self) -> None:
        """Set `allowed` and `ended` from the parser's state."""
        bits = np.frombuffer(self._parser.compute_bitmask(), np.uint8)
        stuck = f"{self.grammar.name}: the text cannot continue: "
        no_token = "the tokenizer has no token for what must come next"
        if self._parser.is_error():
            reason = _one_line(self._parser.get_error())
            raise ValueError(stuck + (no_token if reason.startswith("NoExtension") else reason))
        vocab_size, stop = self.grammar.vocab_size, self.grammar.stop_ids
        # The table contains an extra token that the model does not have and that ends texts (see
        # `_tokens`).
        mask = np.unpackbits(bits, count=vocab_size + 1, bitorder="little").astype(bool)
        self.allowed, may_end = mask[:-1], mask[-1]
        self.ended = bool(may_end and not self.allowed.any())
        if self.grammar.form == "schema":
            # llguidance does not treat the name "\\u0061" as equal to "a".
            excluded = self.grammar.respelled
            if escape := self._escape:
                texts = self.grammar.texts
                candidates = self.allowed.nonzero()[0].tolist()
                excluded = [i for i in candidates if _respells(escape + texts[i])]
            self.allowed[excluded] = False
            if not (self.allowed.any() or may_end):
                raise ValueError(stuck + no_token)
        self.allowed[stop] = may_end


def check_installed(name: str) -> None:
    """Raise ConfigError if llguidance, which the option `name` requires, is not installed."""
    if find_spec("llguidance") is None:
        rule = "run pip install 'transformer_jax[structured]'"
        raise ConfigError(f"{name} needs llguidance, which is not installed: {rule}")


@lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocab_size: int, stop_ids: tuple[int, ...]) -> tuple[Any, list[bytes]]:
    """Return llguidance's token table, and the bytes of each token.

    The table contains the model's tokens, and an extra token that ends texts. Tokens without bytes
    are never allowed. These are special tokens, and tokens that the tokenizer does not have.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    inner = plain(tokenizer)
    # A special token must not be generated as text, even if its letters match the grammar.
    special = {*stop_ids, *special_ids(tokenizer).values()}
    if isinstance(inner, PretrainedTokenizer):
        special |= inner.special
    texts = [
        tokenizer.to_bytes([i]) if i < tokenizer.vocab_size and i not in special else b""
        for i in range(vocab_size)
    ]

    class Table:
        tokens, eos_token_id, bos_token_id = [*texts, b""], vocab_size, None

        def __call__(self, text: str | bytes) -> list[int]:
            return []  # llguidance never tokenizes text (see _HEAD)

    return LLTokenizer(TokenizerWrapper(Table())), texts


def _respells(text: bytes) -> bool:
    """Whether the text contains a Unicode escape for a character with a shorter JSON form."""
    codes = [escape[1] for escape in _ESCAPE.finditer(text)]
    return any(code is not None and code not in _CODES for code in codes)


def _one_line(error: str) -> str:
    message = re.split(r"\n<state>|\n +\d+ \| ", error)[0]
    reason = re.search(r"error: (.*)", message)
    return " ".join((reason[1] if reason else message).split())[:300]
