"""Tokenizers of published models, with their chat templates.

The `tokenizers` library encodes text. This module decodes IDs itself, based on the library's
definition, so that text can be streamed one token at a time. `hf_files` loads a tokenizer from a
folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np

from transformer_jax.tokenizers.definition import (
    MAX_IDS,
    check_added,
    check_growth,
    check_model,
    read_definition,
    strings,
)
from transformer_jax.tokenizers.spelling import Spelling, read_decoder
from transformer_jax.tokenizers.utf8 import DataError, byte_letters, utf8
from transformer_jax.untrusted_files import Json, JsonObject, shown
from transformer_jax.values import tokens_repr

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

P = ParamSpec("P")
R = TypeVar("R")

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TARGET_IDS = "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"
"""Keys in config.json for the decoder's first input and the forced first and last tokens."""

RESERVED = frozenset(
    """
    chat_template conversation continue_final_message max_length padding
    return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs truncation
    """.split()
)
"""Arguments of `apply_chat_template` in transformers that are not passed to templates."""

Message: TypeAlias = Mapping[str, Any]
"""Message, tool or document. The chat template determines its fields."""

Written = Literal["parse", "text", "refuse"]
"""How to treat special tokens that are spelled out in text: as their IDs, as plain text or as
errors."""

_LETTERS = byte_letters()
# these bytes never occur in UTF-8, so a vocabulary may lack them
_NEVER_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


@dataclass(frozen=True)
class PretrainedTokenizer:
    """`Tokenizer` of a published model, defined by the JSON of the `tokenizers` library.

    `encode(text)` adds special tokens only if `add_special_tokens` is set. By default, a special
    token that is spelled out in the text becomes its ID, as in Hugging Face's library.

    Attributes:
        definition: the JSON of the `tokenizers` library.
        roles: pairs of a role and its token, such as `("bos", "<s>")`, with names from ROLES.
        stop_ids: IDs of the tokens that end generation.
        chat_templates: pairs of a name and Jinja source. The main template is named "default".
        add_special_tokens: whether `encode` adds special tokens by default, such as <bos> before
            the text and </s> after it.
        named_tokens: additional token names for chat templates, as pairs such as
            `("image_token", "<img>")`.
        target_ids: pairs of a name from `TARGET_IDS` and the ID of the first or last token of
            targets.
        banned: token sequences that an encoder-decoder never generates.
        now: time for chat templates, such as "2026-11-26T13:10:00"; None uses the current time.
    """

    definition: str
    roles: tuple[tuple[str, str], ...] = ()
    stop_ids: tuple[int, ...] = ()
    chat_templates: tuple[tuple[str, str], ...] = ()
    add_special_tokens: bool = False
    named_tokens: tuple[tuple[str, str], ...] = ()
    target_ids: tuple[tuple[str, int], ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    now: str | None = None

    def __post_init__(self) -> None:
        content = read_definition(self.definition)
        for name in ("truncation", "padding"):
            if content.get(name) is not None:
                raise DataError(f"{name} of a tokenizer must be null")
        if self.now is not None:
            _time(self.now)
        check_model(content)
        check_growth(content.get("normalizer"))
        vocabulary, added = self._vocabulary, self._added
        check_added(content, added)
        vocabulary_ids = list(vocabulary.values())
        if len(set(vocabulary_ids)) != len(vocabulary_ids):
            twice = min(i for i, count in Counter(vocabulary_ids).items() if count > 1)
            tokens = sorted(token for token, i in vocabulary.items() if i == twice)
            raise DataError(f"vocabulary: ID {twice} is used by {shown(tokens)}")
        if not vocabulary_ids and not added:
            raise DataError("the vocabulary is empty")
        # An unsupported decoder must raise its error here rather than in the first call of
        # `decode`.
        _ = self._spelling
        for role, token in self.roles:
            if role not in ROLES:
                raise DataError(f"role is {role!r}: must be one of {', '.join(ROLES)}")
            if _rust(f"{role}_token", self._library.token_to_id, token) is None:
                raise DataError(f"{role}_token is {shown(token)}: must be in the vocabulary")
        for i in self.stop_ids:
            if type(i) is not int or not 0 <= i < self.vocab_size:
                rule = f"must be an ID below {self.vocab_size}"
                raise DataError(f"eos_token_id is {shown(i)}: {rule}")
        for name, i in self.target_ids:
            if name not in TARGET_IDS or type(i) is not int or not 0 <= i < MAX_IDS:
                rule = f"must be one of {', '.join(TARGET_IDS)} with an ID below {MAX_IDS}"
                raise DataError(f"target ID {shown(name)} is {shown(i)}: {rule}")
        for ids in self.banned:
            if not ids or not all(type(i) is int and 0 <= i < MAX_IDS for i in ids):
                raise DataError(f"banned contains {shown(ids)}: must be IDs below {MAX_IDS}")

    def __repr__(self) -> str:
        text = tokens_repr(self)
        return text.replace(")", ", chat template)") if self.chat_templates else text

    @cached_property
    def vocab_size(self) -> int:
        """Return the largest ID plus one. Unused IDs below it decode to an empty string."""
        return max([*self._vocabulary.values(), *self._added]) + 1

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Map each role to the ID of its token, as in {"bos": 1, "eos": 2}."""
        found = {role: self._library.token_to_id(token) for role, token in self.roles}
        return {role: i for role, i in found.items() if i is not None}

    @cached_property
    def languages(self) -> Mapping[str, int]:
        """Map the special tokens without a role, which may be language tokens, to their IDs.

        The result is empty if no token has a role, because any special token could then be the end
        token.
        """
        others = self.special.difference(self.special_ids.values(), self.stop_ids)
        return {self._added[i].content: i for i in sorted(others)} if self.roles else {}

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the IDs of the special tokens that are added before and after the text."""
        for text in ("a", *self._vocabulary):  # until a text has at least one ordinary token
            found = _rust("text", self._library.encode, text, add_special_tokens=True)
            added = found.special_tokens_mask
            if not all(added):
                break
        start = next((n for n, is_added in enumerate(added) if not is_added), len(added))
        end = next((n for n, is_added in enumerate(added[::-1]) if not is_added), 0)
        return tuple(found.ids[:start]), tuple(found.ids[len(added) - end :])

    def is_added(self, i: int) -> bool:
        """Whether an ID belongs to an added token, which may also be in the vocabulary."""
        return i in self._added

    def encode(
        self,
        text: str,
        *,
        special_tokens: bool | None = None,
        written: Written = "parse",
        begins: bool = True,
    ) -> np.ndarray:  # i32[n]
        """Encode text as token IDs.

        Args:
            text: the text to encode.
            special_tokens: whether to add the special tokens that the model expects around the
                text. None uses `add_special_tokens`.
            written: how to treat special tokens that are spelled out in the text: "parse" converts
                them to their IDs, "text" treats them as ordinary text, and "refuse" raises an
                error. Use "text" or "refuse" for untrusted text.
            begins: whether `text` starts a new text rather than continuing one. Some tokenizers add
                a space at the start.

        Raises:
            DataError: if the text contains a byte that has no token, or if it contains a special
                token and `written` is "refuse".
        """
        if written not in ("parse", "text", "refuse"):
            raise DataError(f"written is {written!r}: must be 'parse', 'text' or 'refuse'")
        utf8(text)
        # the library would silently drop such bytes
        if self._missing_bytes and (lost := self._missing_bytes & set(text.encode())):
            raise DataError(f"the text contains the byte 0x{min(lost):02x}, which has no token")
        if written == "refuse":
            self._refuse_tokens(text, self._control, "the text")
        add = self.add_special_tokens if special_tokens is None else special_tokens

        def read(begins: bool) -> list[int]:
            from tokenizers import Tokenizer as Library

            # parsing a definition is slow, so each combination of settings is parsed only once
            kind = written == "text", begins
            if (library := self._readers.get(kind)) is None:
                definition = self.definition
                if not begins:
                    spaceless = _without_space(read_definition(definition))
                    assert isinstance(spaceless, dict)
                    definition = canonical(spaceless)
                library = Library.from_str(definition)
                library.encode_special_tokens = written == "text"
                self._readers[kind] = library  # only now, because other threads may use it
            # the fast call skips token offsets, which are not used here
            (found,) = _rust("text", library.encode_batch_fast, [text], add_special_tokens=add)
            return list(found.ids)

        ids = read(begins)
        if not begins:  # `begins` affects only the text before the first added token
            whole = read(True)
            ids = ids[: self._first_added(ids)] + whole[self._first_added(whole) :]
        return np.array(ids, np.int32)

    def _first_added(self, ids: Sequence[int]) -> int:
        return next((n for n, i in enumerate(ids) if i in self._added), len(ids))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of IDs that continue a text.

        In SentencePiece and WordPiece, a word includes the space before it. `decode` drops a
        leading space.
        """
        pieces = self._pieces
        return b"".join(pieces[self._check_id(i)] for i in ids)

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = False, begins: bool = True
    ) -> str:
        """Decode IDs to a string. Bytes that are not valid UTF-8 become U+FFFD.

        In contrast, Hugging Face's library replaces a whole run of byte tokens if one of them is
        invalid.

        Args:
            ids: the IDs to decode, which are integers below `vocab_size`.
            skip_special_tokens: whether to omit special tokens.
            begins: whether `ids` are the beginning of a text. If so, a leading space is dropped.

        Raises:
            DataError: if an ID is not in the vocabulary.
        """
        skipped = self.special if skip_special_tokens else frozenset()
        kept = [i for i in map(self._check_id, ids) if i not in skipped]
        spelling, last = self._spelling, len(kept) - 1
        strips = begins or not spelling.marks_spaces
        pieces = [
            # Only the first and the last token are decoded differently because of their position.
            self._piece(i, n == 0 and strips, n == last) if n in (0, last) else self._pieces[i]
            for n, i in enumerate(kept)
        ]
        text = b"".join(pieces).decode("utf-8", "replace")
        return spelling.strip(text) if strips else text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        template: str | None = None,
        **variables: Any,  # passed to the template
    ) -> str:
        """Render messages in the format that the model was trained on.

        The result spells out special tokens. `chat_ids` returns IDs instead, and checks that no
        message contains special tokens.

        Args:
            messages: at least one message, `{"role": ..., "content": ...}`.
            add_generation_prompt: whether to end with the beginning of the assistant's answer.
            tools: tools that the model may call, in the format of the template.
            documents: documents that the model may read, in the format of the template.
            template: name of a template. None selects "tool_use" if there are tools and a template
                with this name, otherwise "default".
            **variables: additional variables for the template.

        Raises:
            DataError: if a message has neither content nor tool_calls, or if the template fails.
        """
        try:
            from transformer_jax.tokenizers.chat_template import render
        except ModuleNotFoundError:
            raise DataError("chat templates need jinja2: run pip install jinja2") from None
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise DataError("messages: must be a list of at least one object")
        # The template decides what null content means.
        empty = [n for n, message in enumerate(messages) if message.get("content") is None]
        for n in empty:
            if "content" not in messages[n] and not messages[n].get("tool_calls"):
                rule = "must have content or tool_calls"
                raise DataError(f"messages[{n}] has no content: {rule}")
        context = {
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
            "tools": None if tools is None else list(tools),
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        if reserved := sorted(RESERVED & variables.keys()):
            rule = "is an argument of transformers' apply_chat_template, not a template variable"
            raise DataError(f"{reserved[0]} {rule}")
        names = dict(self.named_tokens) | {f"{role}_token": token for role, token in self.roles}
        source = self._template(template, tools is not None)
        try:
            now = None if self.now is None else _time(self.now)
            return render(source, names | context | variables, now)
        except DataError as error:
            if not empty:
                raise
            raise DataError(f"messages[{empty[0]}] has no content: {error}") from None

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        template: str | None = None,
        written: Literal["parse", "refuse"] = "refuse",
        **variables: Any,  # passed to the template
    ) -> np.ndarray:  # i32[n]
        """Return the IDs for the result of `chat`, without adding any tokens.

        Args:
            messages: at least one message, `{"role": ..., "content": ...}`.
            tools: tools that the model may call, in the format of the template.
            documents: documents that the model may read, in the format of the template.
            template: name of a template. None selects "tool_use" if there are tools and a template
                with this name, otherwise "default".
            written: "refuse" rejects messages, tools and documents that spell out a special token,
                because it could end the turn and start another turn. It also rejects any added
                token that the template itself uses, except in the assistant's messages. "parse"
                accepts all text.
            **variables: additional variables for the template.

        Raises:
            DataError: if `chat` would raise it, or if `written` is "refuse" and a token is
                rejected.
        """
        if written not in ("parse", "refuse"):
            raise DataError(f"written is {written!r}: must be 'parse' or 'refuse'")
        text = self.chat(messages, tools=tools, documents=documents, template=template, **variables)
        if written == "refuse":
            from transformer_jax.tokenizers.chat_template import literals

            source = literals(self._template(template, tools is not None))
            marks = {i for i, token in self._added.items() if token.content in source}
            inputs = {f"messages[{n}]": message for n, message in enumerate(messages)}
            for name, value in (inputs | {"tools": tools, "documents": documents}).items():
                assistant = isinstance(value, Mapping) and value.get("role") == "assistant"
                control = self._control if assistant else self._control | marks
                for path, part in strings(value, name):
                    self._refuse_tokens(part, control, path)
        # The template has already written the special tokens around the text.
        return self.encode(text, special_tokens=False)

    def to_json(self) -> str:
        content = {
            "kind": "pretrained",
            "definition": json.loads(self.definition),
            "roles": dict(self.roles),
            "stop_ids": list(self.stop_ids),
            "chat_templates": dict(self.chat_templates),
            "add_special_tokens": self.add_special_tokens,
        }
        if self.named_tokens:
            content["named_tokens"] = dict(self.named_tokens)
        if self.target_ids:
            content["target_ids"] = dict(self.target_ids)
        if self.banned:
            content["banned"] = [list(ids) for ids in self.banned]
        if self.now is not None:
            content["now"] = self.now
        return json.dumps(content, ensure_ascii=False) + "\n"

    @cached_property
    def _library(self) -> Library:
        from tokenizers import Tokenizer as Library

        return _rust("the definition of a tokenizer", Library.from_str, self.definition)

    @cached_property
    def _readers(self) -> dict[tuple[bool, bool], Library]:
        return {(False, True): self._library}

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Return the vocabulary without added tokens."""
        return self._library.get_vocab(with_added_tokens=False)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self._library.get_added_tokens_decoder()

    @cached_property
    def special(self) -> frozenset[int]:
        """Return the IDs of special tokens."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def _control(self) -> frozenset[int]:
        """Return the IDs of special tokens, except the token for unknown characters."""
        others = {i for role, i in self.special_ids.items() if role != "unk"}
        return self.special - ({self.special_ids.get("unk", -1)} - others)

    @cached_property
    def _spelling(self) -> Spelling:
        return read_decoder(read_definition(self.definition).get("decoder"))

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self._piece(i, False, False) for i in range(self.vocab_size)]

    def _piece(self, i: int, first: bool, last: bool) -> bytes:
        token = self._library.id_to_token(i)
        if token is None:
            return b""
        if self._spelling.byte_level:
            # é in an added token means the character itself, not byte 0xE9 as in GPT-2's alphabet
            if i in self._added and token not in self._vocabulary:
                return token.encode()
            if all(letter in _LETTERS for letter in token):
                return bytes(_LETTERS[letter] for letter in token)
            return token.encode()
        return self._spelling.piece(token, first, last)

    def _check_id(self, i: int) -> int:
        if not 0 <= i < self.vocab_size:
            raise DataError(f"id is {i}: must be at least 0 and below {self.vocab_size}")
        return int(i)

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        """Return the UTF-8 bytes that a byte-level vocabulary would silently drop."""
        model = read_definition(self.definition).get("model", {})
        if not self._spelling.byte_level or not isinstance(model.get("merges"), list):
            return frozenset()
        missing = {b for letter, b in _LETTERS.items() if letter not in self._vocabulary}
        return frozenset() if model.get("unk_token") else frozenset(missing) - _NEVER_UTF8

    def _refuse_tokens(self, text: str, control: Iterable[int], path: str) -> None:
        """Raise DataError if encoding the text by itself results in one of these IDs."""
        control = frozenset(control)
        utf8(text)
        (found,) = _rust("text", self._library.encode_batch_fast, [text], add_special_tokens=False)
        for i in found.ids:
            if i in control:
                token = self._library.id_to_token(i)
                raise DataError(f"{path} contains {shown(token)}, which is a reserved token")

    def _template(self, name: str | None, tools: bool) -> str:
        """Return a template.

        If `name` is None, this is "tool_use" if it exists and there are tools, and otherwise
        "default".
        """
        templates = dict(self.chat_templates)
        for key in (name,) if name else ("tool_use", "default") if tools else ("default",):
            if key in templates:
                return templates[key]
        names = ", ".join(sorted(templates)) or "none"
        raise DataError(
            f"chat template {shown(name or 'default')} does not exist: the tokenizer has {names}"
        )


def pretrained_from_json(content: JsonObject) -> PretrainedTokenizer:
    """Create the tokenizer that `to_json` wrote."""
    match content:
        case {
            "kind": "pretrained",
            "definition": dict(definition),
            "roles": dict(roles),
            "stop_ids": list(stop_ids),
            "chat_templates": dict(templates),
            "add_special_tokens": bool(add),
            **rest,
        } if (
            isinstance(named := rest.pop("named_tokens", {}), dict)
            and isinstance(target := rest.pop("target_ids", {}), dict)
            and isinstance(banned := rest.pop("banned", []), list)
            and all(isinstance(ids, list) for ids in banned)
            and isinstance(now := rest.pop("now", None), str | None)
            and not rest
        ):
            texts = [*roles.values(), *templates.values(), *named.values()]
            if all(isinstance(text, str) for text in texts):
                return PretrainedTokenizer(
                    canonical(definition), tuple(roles.items()), tuple(stop_ids),
                    tuple(templates.items()), add, tuple(named.items()), tuple(target.items()),
                    tuple(map(tuple, banned)), now,
                )  # fmt: skip
    raise DataError(
        "tokenizer of kind 'pretrained': fields are missing, unknown or of the wrong type"
    )


def _time(now: str) -> datetime:
    try:
        return datetime.fromisoformat(now)
    except ValueError:
        raise DataError(f"now is {shown(now)}: must be like '2026-11-26T13:10:00'") from None


def _without_space(part: Json) -> Json:
    """Return a definition that neither adds nor strips a space at the start of the text."""
    if isinstance(part, list):
        return [_without_space(item) for item in part]
    if not isinstance(part, dict):
        return part
    match part.get("type"):
        case "Metaspace":
            other = {name: value for name, value in part.items() if name != "add_prefix_space"}
            return other | {"prepend_scheme": "never"}
        case "ByteLevel":
            return part | {"add_prefix_space": False}
        case "Prepend":
            return {"type": "Sequence", "normalizers": []}
        case "Strip":
            return part | {"strip_left": False}
    below = "normalizer", "pre_tokenizer", "normalizers", "pretokenizers"
    return part | {name: _without_space(part[name]) for name in below if name in part}


def canonical(definition: JsonObject) -> str:
    """Return a definition as JSON, so that equal definitions result in equal strings."""
    return json.dumps(definition, ensure_ascii=False)


def _rust(what: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the library and convert its exceptions and panics to DataError."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        # a Rust panic is a BaseException, but must not end the program
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {' '.join(str(error).split())[:300]}") from None
