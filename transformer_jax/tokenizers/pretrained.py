"""Turn text into ids and back with the tokenizer of a published model, and render its chats.

The `tokenizers` library splits the text. The bytes of an id are read from the definition here, so
that text can be put together one token at a time. `hf_files` makes a tokenizer from a folder.
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
"""Keys of config.json: what a decoder reads before a target, and the first and the last token that
are forced upon it."""

RESERVED = frozenset(
    """
    chat_template conversation continue_final_message max_length padding
    return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs truncation
    """.split()
)
"""Arguments of transformers' `apply_chat_template` that a template does not see."""

Message: TypeAlias = Mapping[str, Any]
"""A message, a tool or a document: a chat template asks for the fields that it knows."""

Written = Literal["parse", "text", "refuse"]
"""How to read a special token that a text spells out: as the token, as text, or as an error."""

_LETTERS = byte_letters()
# No UTF-8 has these bytes, so a vocabulary may lack them.
_NEVER_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


@dataclass(frozen=True)
class PretrainedTokenizer:
    """Hold a `Tokenizer`: the JSON of the `tokenizers` library and what the other files add.

    Plain `encode(text)` adds nothing unless `add_special_tokens` is set; a special token written
    out in the text becomes its id, as in Hugging Face's library, unless told otherwise.

    Attributes:
        definition: the JSON of the library.
        roles: pairs such as `("bos", "<s>")`; names are those of ROLES.
        stop_ids: tokens that end a generated text.
        chat_templates: pairs of name and Jinja source; the usual template is called "default".
        add_special_tokens: whether `encode` adds special tokens by default, such as <bos> before a
            text and </s> after it.
        named_tokens: pairs such as `("image_token", "<img>")`, more names that chat templates use
            for tokens.
        target_ids: how an encoder-decoder's targets begin and end, by the names of `TARGET_IDS`.
        banned: sequences of tokens that an encoder-decoder never writes.
        now: what chat templates take for the present time, such as "2026-11-26T13:10:00"; None is
            the present.
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
                raise DataError(f"{name} of a tokenizer: must be null")
        if self.now is not None:
            _time(self.now)
        check_model(content)
        check_growth(content.get("normalizer"))
        vocabulary, added = self._vocabulary, self._added
        check_added(content, added)
        ids = list(vocabulary.values())
        if len(set(ids)) != len(ids):
            twice = min(i for i, count in Counter(ids).items() if count > 1)
            tokens = sorted(token for token, i in vocabulary.items() if i == twice)
            raise DataError(f"vocabulary: id {twice} is that of {shown(tokens)}")
        if not ids and not added:
            raise DataError("vocabulary: it is empty")
        _ = self._spelling
        for role, token in self.roles:
            if role not in ROLES:
                raise DataError(f"role is {role!r}: must be one of {', '.join(ROLES)}")
            if _rust(f"{role}_token", self._library.token_to_id, token) is None:
                raise DataError(f"{role}_token is {shown(token)}: not in the vocabulary")
        for i in self.stop_ids:
            if type(i) is not int or not 0 <= i < self.vocab_size:
                rule = f"must be a number below {self.vocab_size}"
                raise DataError(f"eos_token_id is {shown(i)}: {rule}")
        for name, i in self.target_ids:
            if name not in TARGET_IDS or type(i) is not int or not 0 <= i < MAX_IDS:
                rule = f"must be a number below {MAX_IDS} of {', '.join(TARGET_IDS)}"
                raise DataError(f"target id {shown(name)} is {shown(i)}: {rule}")
        for never in self.banned:
            if not never or not all(type(i) is int and 0 <= i < MAX_IDS for i in never):
                raise DataError(f"banned has {shown(never)}: must be numbers below {MAX_IDS}")

    def __repr__(self) -> str:
        said = tokens_repr(self)
        return said.replace(")", ", chat template)") if self.chat_templates else said

    @cached_property
    def vocab_size(self) -> int:
        """Return the largest id plus one; an id below it without a token is an empty piece."""
        return max([*self._vocabulary.values(), *self._added]) + 1

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Map each role to its id: {"bos": 1, "eos": 2}."""
        found = {role: self._library.token_to_id(token) for role, token in self.roles}
        return {role: i for role, i in found.items() if i is not None}

    @cached_property
    def languages(self) -> Mapping[str, int]:
        """Map the tokens that may name a language to their ids: special ones without a role.

        There are none where no token has a role, since each of them could be the end of a text.
        """
        others = self.special.difference(self.special_ids.values(), self.stop_ids)
        return {self._added[i].content: i for i in sorted(others)} if self.roles else {}

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that are put before a text and after it where special tokens are added."""
        for text in ("a", *self._vocabulary):  # the first one that has a token of its own
            found = _rust("text", self._library.encode, text, add_special_tokens=True)
            added = found.special_tokens_mask
            if not all(added):
                break
        start = next((n for n, is_added in enumerate(added) if not is_added), len(added))
        end = next((n for n, is_added in enumerate(added[::-1]) if not is_added), 0)
        return tuple(found.ids[:start]), tuple(found.ids[len(added) - end :])

    def is_added(self, i: int) -> bool:
        """Say whether an id is of a token that was added to the vocabulary, or marked in it."""
        return i in self._added

    def encode(
        self,
        text: str,
        *,
        special_tokens: bool | None = None,
        written: Written = "parse",
        begins: bool = True,
    ) -> np.ndarray:  # i32[n]
        """Return the ids of a text.

        Args:
            text: to read.
            special_tokens: add those that the model was trained with around a text; None is
                `add_special_tokens`.
            written: how to read a special token that the text spells out: "parse" gives its id,
                with "text" it is ordinary text, with "refuse" an error. Use one of the last two for
                text you do not trust.
            begins: False where the text goes on with another: some tokenizers put a space before
                one that begins.

        Raises:
            DataError: if the text holds what has no token, or what `written` refuses.
        """
        if written not in ("parse", "text", "refuse"):
            raise DataError(f"written is {written!r}: must be 'parse', 'text' or 'refuse'")
        utf8(text)
        # The library would leave them out and say nothing.
        if self._missing_bytes and (lost := self._missing_bytes & set(text.encode())):
            raise DataError(f"the text has the byte 0x{min(lost):02x}, for which there is no token")
        if written == "refuse":
            self._check_unspecial(text, self._control, "the text")
        add = self.add_special_tokens if special_tokens is None else special_tokens

        def read(begins: bool) -> list[int]:
            library = self._reader(written == "text", begins)
            # The fast call does not track where in the text each token was, which nobody asks for.
            (found,) = _rust("text", library.encode_batch_fast, [text], add_special_tokens=add)
            return list(found.ids)

        ids = read(begins)
        if not begins:  # what stands after an added token is read as ever
            usual = read(True)
            ids = ids[: self._first_added(ids)] + usual[self._first_added(usual) :]
        return np.array(ids, np.int32)

    def _first_added(self, ids: Sequence[int]) -> int:
        return next((n for n, i in enumerate(ids) if i in self._added), len(ids))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the ids, as they continue a text.

        A SentencePiece or WordPiece word brings its space with it, also at the start of a text;
        `decode` drops that space.
        """
        pieces = self._pieces
        return b"".join(pieces[self._checked(i)] for i in ids)

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = False, begins: bool = True
    ) -> str:
        """Return ids as a text; bytes that are not UTF-8 become U+FFFD.

        Hugging Face's library replaces a whole run of byte tokens if one of them is wrong.

        Args:
            ids: integers below `vocab_size`.
            skip_special_tokens: leave special tokens out.
            begins: False where the text goes on with another, and keeps the space of its first
                word.

        Raises:
            DataError: if an id is outside the vocabulary.
        """
        skipped = self.special if skip_special_tokens else frozenset()
        kept = [i for i in map(self._checked, ids) if i not in skipped]
        spell, last = self._spelling, len(kept) - 1
        drops = begins or not spell.marks_spaces
        pieces = [
            # Only the first and the last token of a text may be spelled in another way.
            self._piece(i, n == 0 and drops, n == last) if n in (0, last) else self._pieces[i]
            for n, i in enumerate(kept)
        ]
        text = b"".join(pieces).decode("utf-8", "replace")
        return spell.strip(text) if drops else text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        template: str | None = None,
        **variables: Any,  # whatever a template asks for
    ) -> str:
        """Render messages as the model was trained to read them.

        Special tokens are spelled out in the text; `chat_ids` gives the ids and checks that no
        message holds special tokens.

        Args:
            messages: `{"role": ..., "content": ...}`, at least one.
            add_generation_prompt: begin the assistant's answer at the end.
            tools: that the model may call, as the template wants them.
            documents: that the model may read, as the template wants them.
            template: the name of one of several templates; None is the one for tools, or the usual
                one.
            **variables: more that the template reads.

        Raises:
            DataError: if a message has neither content nor tool_calls, or a template fails, with
                the reason.
        """
        try:
            from transformer_jax.tokenizers.chat_template import render
        except ModuleNotFoundError:
            rule = "pip install jinja2"
            raise DataError(
                f"a chat template needs jinja2, which is not installed: {rule}"
            ) from None
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise DataError("messages: must be a list of at least one object")
        # A content of null is for the template to judge.
        empty = [n for n, message in enumerate(messages) if message.get("content") is None]
        for n in empty:
            if "content" not in messages[n] and not messages[n].get("tool_calls"):
                rule = "must have content or tool_calls"
                raise DataError(f"messages[{n}] has no content: {rule}")
        given = {
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
            "tools": None if tools is None else list(tools),
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        if reserved := sorted(RESERVED & variables.keys()):
            rule = "transformers takes it for itself, and a template is not to see it"
            raise DataError(f"{reserved[0]}: {rule}")
        names = dict(self.named_tokens) | {f"{role}_token": token for role, token in self.roles}
        source = self._template(template, tools is not None)
        try:
            now = None if self.now is None else _time(self.now)
            return render(source, names | given | variables, now)
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
        **variables: Any,  # whatever a template asks for
    ) -> np.ndarray:  # i32[n]
        """Return the ids of `chat`; nothing is added to what the template wrote.

        Args:
            messages: `{"role": ..., "content": ...}`, at least one.
            tools: that the model may call, as the template wants them.
            documents: that the model may read, as the template wants them.
            template: the name of one of several templates; None is the one for tools, or the usual
                one.
            written: "refuse" refuses a message, tool or document that spells out a special token,
                which could end its turn and begin another's, and any added token that the template
                itself uses, except in messages of the assistant; "parse" accepts every text.
            **variables: more that the template reads.

        Raises:
            DataError: as `chat`, and for what `written` refuses.
        """
        if written not in ("parse", "refuse"):
            raise DataError(f"written is {written!r}: must be 'parse' or 'refuse'")
        text = self.chat(messages, tools=tools, documents=documents, template=template, **variables)
        if written == "refuse":
            from transformer_jax.tokenizers.chat_template import literals

            source = literals(self._template(template, tools is not None))
            marks = {i for i, token in self._added.items() if token.content in source}
            given = {f"messages[{n}]": message for n, message in enumerate(messages)}
            for name, value in (given | {"tools": tools, "documents": documents}).items():
                said = isinstance(value, Mapping) and value.get("role") == "assistant"
                control = self._control if said else self._control | marks
                for path, part in strings(value, name):
                    self._check_unspecial(part, control, path)
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

        return _rust("definition of a tokenizer", Library.from_str, self.definition)

    @cached_property
    def _readers(self) -> dict[tuple[bool, bool], Library]:
        return {(False, True): self._library}

    def _reader(self, verbatim: bool, begins: bool) -> Library:
        """Return the library's tokenizer, which may read special tokens as text, or a rest."""
        from tokenizers import Tokenizer as Library

        if (found := self._readers.get((verbatim, begins))) is None:
            definition = self.definition
            if not begins:
                rest = _without_space(read_definition(definition))
                assert isinstance(rest, dict)
                definition = canonical(rest)
            found = Library.from_str(definition)
            found.encode_special_tokens = verbatim
            self._readers[verbatim, begins] = found
        return found

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Return the vocabulary without added tokens."""
        return self._library.get_vocab(with_added_tokens=False)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self._library.get_added_tokens_decoder()

    @cached_property
    def special(self) -> frozenset[int]:
        """Return the ids of special tokens, which are no text."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def _control(self) -> frozenset[int]:
        """Return the special tokens, without the one that unknown characters become."""
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
            # An added token is its own text: its é is no letter that spells a byte.
            if i in self._added and token not in self._vocabulary:
                return token.encode()
            known = all(letter in _LETTERS for letter in token)
            return bytes(_LETTERS[letter] for letter in token) if known else token.encode()
        return self._spelling.piece(token, first, last)

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.vocab_size:
            raise DataError(f"id is {i}: must be at least 0 and below {self.vocab_size}")
        return int(i)

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        """Return bytes of UTF-8 that a byte-level vocabulary would drop silently."""
        model = read_definition(self.definition).get("model", {})
        if not self._spelling.byte_level or not isinstance(model.get("merges"), list):
            return frozenset()
        missing = {b for letter, b in _LETTERS.items() if letter not in self._vocabulary}
        return frozenset() if model.get("unk_token") else frozenset(missing) - _NEVER_UTF8

    def _check_unspecial(self, text: str, control: Iterable[int], path: str) -> None:
        """Raise DataError if the text on its own has one of these ids."""
        control = frozenset(control)
        utf8(text)
        (found,) = _rust("text", self._library.encode_batch_fast, [text], add_special_tokens=False)
        for i in found.ids:
            if i in control:
                token = self._library.id_to_token(i)
                raise DataError(f"{path}: holds {shown(token)}, which is a token of its own")

    def _template(self, name: str | None, tools: bool) -> str:
        """Return the template of that name; without a name, the one for tools or the usual one."""
        found = dict(self.chat_templates)
        wanted = (name,) if name else ("tool_use", "default") if tools else ("default",)
        for key in wanted:
            if key in found:
                return found[key]
        have = ", ".join(sorted(found)) or "none"
        raise DataError(f"chat template {shown(name or 'default')}: the tokenizer has {have}")


def pretrained_from_json(content: JsonObject) -> PretrainedTokenizer:
    """Return the tokenizer whose `to_json` wrote this content."""
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
    raise DataError("tokenizer of kind 'pretrained': must have what belongs to it, and no more")


def _time(now: str) -> datetime:
    try:
        return datetime.fromisoformat(now)
    except ValueError:
        rule = "must be a time such as '2026-11-26T13:10:00'"
        raise DataError(f"now is {shown(now)}: {rule}") from None


def _without_space(part: Json) -> Json:
    """Return a definition whose steps put no space before a text and take none from it."""
    if isinstance(part, list):
        return [_without_space(item) for item in part]
    if not isinstance(part, dict):
        return part
    match part.get("type"):
        case "Metaspace":
            kept = {name: value for name, value in part.items() if name != "add_prefix_space"}
            return kept | {"prepend_scheme": "never"}
        case "ByteLevel":
            return part | {"add_prefix_space": False}
        case "Prepend":
            return {"type": "Sequence", "normalizers": []}
        case "Strip":
            return part | {"strip_left": False}
    below = "normalizer", "pre_tokenizer", "normalizers", "pretokenizers"
    return part | {name: _without_space(part[name]) for name in below if name in part}


def canonical(definition: JsonObject) -> str:
    """Return a definition as the text that equal definitions share."""
    return json.dumps(definition, ensure_ascii=False)


def _rust(what: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the library, and turn its plain Exceptions and its panics into DataErrors."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        # A panic of the Rust library is a BaseException, and no reason to end the program.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {' '.join(str(error).split())[:300]}") from None
