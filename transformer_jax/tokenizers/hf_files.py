"""Read a tokenizer from the folder of a published model.

tokenizer.json             the `tokenizers` library's own; or else
vocab.json, merges.txt     GPT-2's byte-level BPE (encoder.json, vocab.bpe); or else
vocab.txt                  BERT's WordPiece
tokenizer_config.json      roles of special tokens, added tokens, chat templates
special_tokens_map.json    roles that tokenizer_config.json does not name
added_tokens.json          ids of tokens that were added
generation_config.json     the tokens that end a text; or else
config.json                those that the model names; or else the <eos> of the roles
chat_template.jinja        instead of the config's (chat_template.json: if it has none)
additional_chat_templates  NAME.jinja, in addition to either

Only these names are opened, and none that leads out of the folder. Nothing in them is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.config.keywords import known_keywords
from transformer_jax.tokenizers.plain_text import split_lines
from transformer_jax.tokenizers.pretrained import ROLES, PretrainedTokenizer, canonical
from transformer_jax.tokenizers.utf8 import DataError, byte_letters
from transformer_jax.untrusted_files import Json, JsonObject, Untrusted, check_path, shown

LIMITS = {
    "tokenizer.json": 2**26,
    "vocab.json": 2**24,
    "encoder.json": 2**24,
    "merges.txt": 2**24,
    "vocab.bpe": 2**24,
    "vocab.txt": 2**24,
    "tokenizer_config.json": 2**22,
    "special_tokens_map.json": 2**20,
    "added_tokens.json": 2**20,
    "generation_config.json": 2**20,
    "config.json": 2**20,
    "chat_template.jinja": 2**20,
    "chat_template.json": 2**20,
}
"""Largest file that is read, in bytes."""
VALUES = 2**22
"""Most values in a JSON; a vocabulary of half a million tokens has two million."""

_FILES = Untrusted(DataError)

_WRAPPED = frozenset({"Roberta", "Bart", "Longformer", "LED"})
"""Models that put byte-level text between <s> and </s>."""
_BYTE_LEVEL = frozenset({"GPT2", "CodeGen"}) | _WRAPPED
_WORD_PIECE = frozenset({"Bert", "DistilBert", "Electra"})


@known_keywords
def load_tokenizer_folder(path: str | os.PathLike[str]) -> PretrainedTokenizer:
    """Load the tokenizer of a model's folder.

    Args:
        path: of the folder, with tokenizer.json, vocab.json and merges.txt, or vocab.txt.

    Raises:
        DataError: if a file is missing or wrong, by its name.
    """
    check_path("path", path)
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    config = _json(folder, "tokenizer_config.json") or {}
    if (code := config.get("auto_map")) is not None:
        rule = "it names Python code, which is never run; remove the key if the rest says it all"
        raise DataError(f"{folder / 'tokenizer_config.json'}: auto_map is {shown(code)}: {rule}")
    if _flag(folder, config, "split_special_tokens", False):
        rule = "encode(text, written='text') reads special tokens as text"
        where = f"{folder / 'tokenizer_config.json'}: split_special_tokens is true"
        raise DataError(f"{where}: must be false: {rule}")
    name, definition, usual = _definition(folder, config)
    roles, extra, named = _roles(folder, config, usual)
    sources = dict(_usual_templates(folder, config))
    for file in more_templates(folder):
        sources[Path(file).stem] = _read(folder, file, LIMITS["chat_template.jinja"]) or ""
    templates = tuple(sources.items())
    generation = _json(folder, "generation_config.json") or {}
    model = _json(folder, "config.json") or {}
    try:
        definition["added_tokens"] = _added(folder, config, definition, roles, extra)
        if name != "tokenizer.json" and definition.get("post_processor") is None:
            _set_ends(config, definition, roles)
        ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
        stop = generation.get("eos_token_id")
        if stop is None:
            stop = _known(model.get("eos_token_id"), definition)
        if stop is None:
            stop = ids.get(roles.get("eos", ""))
        return PretrainedTokenizer(
            canonical(definition | {"truncation": None, "padding": None}),
            tuple(roles.items()),
            tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
            templates,
            named_tokens=tuple(named.items()),
        )
    except DataError as error:
        name = "generation_config.json" if str(error).startswith("eos_token_id") else name
        raise DataError(f"{folder / name}: {error}") from None


def _definition(folder: Path, config: JsonObject) -> tuple[str, JsonObject, dict[str, str]]:
    """Return the file with the vocabulary, the library's JSON, and the roles' usual tokens."""
    found = _json(folder, "tokenizer.json")
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if found is not None:
        return "tokenizer.json", _overruled(folder, config, kind, found), {}
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        content, rules = _json(folder, vocabulary), _read(folder, merges)
        if content is not None and rules is not None:
            if kind and kind not in _BYTE_LEVEL:
                raise _other_class(folder, config, vocabulary)
            return vocabulary, *_byte_level_bpe(
                folder, vocabulary, content, merges, rules, config, kind
            )
    words = _read(folder, "vocab.txt")
    if words is not None:
        if kind and kind not in _WORD_PIECE:
            raise _other_class(folder, config, "vocab.txt")
        return "vocab.txt", *_word_piece(folder, words, config)
    rule = "must have tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
    raise DataError(f"{folder}: no tokenizer here: {rule}")


def _overruled(folder: Path, config: JsonObject, kind: str, definition: JsonObject) -> JsonObject:
    """Return the library's JSON, changed by the keys of tokenizer_config.json that overrule it.

    Which keys do depends on the tokenizer's class. `add_bos_token` and `add_eos_token` are never
    among them: what the JSON puts around a text stays, as in transformers 5.
    """
    normalizer, splitter = definition.get("normalizer"), definition.get("pre_tokenizer")
    if kind in _WORD_PIECE and isinstance(normalizer, dict):
        names = dict(
            do_lower_case="lowercase",
            strip_accents="strip_accents",
            tokenize_chinese_chars="handle_chinese_chars",
        )
        if normalizer.get("type") == "BertNormalizer":
            said = {
                theirs: _flag(folder, config, name, False)
                for name, theirs in names.items()
                if config.get(name) is not None
            }
            definition = definition | {"normalizer": normalizer | said}
    if kind in _BYTE_LEVEL | {"Qwen2"} and config.get("add_prefix_space") is not None:
        prefix = {"add_prefix_space": _flag(folder, config, "add_prefix_space", False)}

        def told(part: Json) -> Json:
            if not isinstance(part, dict):
                return part
            if isinstance(below := part.get("pretokenizers"), list):
                return part | {"pretokenizers": [told(item) for item in below]}
            return part | prefix if part.get("type") == "ByteLevel" else part

        definition = definition | {"pre_tokenizer": told(splitter)}
    return definition


def _other_class(folder: Path, config: JsonObject, file: str) -> DataError:
    name = shown(config["tokenizer_class"])
    rule = f"it does not say what {file} means, and there is no tokenizer.json"
    return DataError(f"{folder / 'tokenizer_config.json'}: tokenizer_class is {name}: {rule}")


def _byte_level_bpe(
    folder: Path,
    file: str,
    vocabulary: JsonObject,
    merges_file: str,
    merges: str,
    config: JsonObject,
    kind: str,
) -> tuple[JsonObject, dict[str, str]]:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    _check_dense(folder / file, vocabulary)
    if missing := [letter for letter in byte_letters() if letter not in vocabulary]:
        raise DataError(f"{folder / file}: byte 0x{byte_letters()[missing[0]]:02x} has no token")
    pairs = []
    for number, line in enumerate(split_lines(merges), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        where = f"{folder / merges_file}: line {number}"
        if len(parts) != 2:
            raise DataError(f"{where} is {shown(line)}: must be two tokens and a space")
        for token in (*parts, "".join(parts)):
            if token not in vocabulary:
                raise DataError(f"{where} names {shown(token)}: not in {file}")
        pairs.append((parts[0], parts[1]))
    library = Library(_made(folder / file, models.BPE, vocab=vocabulary, merges=pairs))
    prefix = _flag(folder, config, "add_prefix_space", False)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    definition = json.loads(library.to_str())
    if kind in _WRAPPED:
        roles = dict(
            bos="<s>", eos="</s>", unk="<unk>", sep="</s>", pad="<pad>", cls="<s>", mask="<mask>"
        )
        definition["post_processor"] = around(vocabulary, ("<s>",), ("</s>",))
    else:
        roles = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
    return definition, {role: token for role, token in roles.items() if token in vocabulary}


def _word_piece(folder: Path, words: str, config: JsonObject) -> tuple[JsonObject, dict[str, str]]:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocabulary: dict[str, int] = {}
    for i, word in enumerate(split_lines(words)):
        if vocabulary.setdefault(word, i) != i:
            first = vocabulary[word] + 1
            raise DataError(f"{folder / 'vocab.txt'}: line {i + 1} is that of line {first} again")
    roles = dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
    unknown = _token(config.get("unk_token")) or roles["unk"]
    if not isinstance(unknown, str) or unknown not in vocabulary:
        raise DataError(f"{folder / 'vocab.txt'}: must have {shown(unknown)}, the unk_token")
    library = Library(
        _made(folder / "vocab.txt", models.WordPiece, vocab=vocabulary, unk_token=unknown)
    )
    strip = config.get("strip_accents")
    library.normalizer = normalizers.BertNormalizer(
        lowercase=_flag(folder, config, "do_lower_case", True),
        strip_accents=None if strip is None else _flag(folder, config, "strip_accents", False),
        handle_chinese_chars=_flag(folder, config, "tokenize_chinese_chars", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    definition = json.loads(library.to_str())
    roles = {role: token for role, token in roles.items() if token in vocabulary}
    if {"cls", "sep"} <= roles.keys():
        definition["post_processor"] = around(vocabulary, (roles["cls"],), (roles["sep"],))
    return definition, roles


def _roles(
    folder: Path, config: JsonObject, usual: Mapping[str, str]
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return each role's token, more special tokens, and more names that templates have for them.

    special_tokens_map.json comes first if the config has no `added_tokens_decoder`, since such
    folders are older.
    """
    roles: dict[str, str] = {}
    extra: list[str] = []
    named: dict[str, str] = {}
    beside = _json(folder, "special_tokens_map.json") or {}
    files = [("tokenizer_config.json", config), ("special_tokens_map.json", beside)]
    if config.get("added_tokens_decoder") is None:
        files.reverse()
    for file, content in files:
        for name, value in content.items():
            token = _token(value)
            if name.endswith("_token") and isinstance(token, str) and token:
                named.setdefault(name, token)
        for role in ROLES:
            value = content.get(f"{role}_token")
            token = _token(value)
            if token is not None and not isinstance(token, str):
                raise DataError(f"{folder / file}: {role}_token is {shown(value)}: must be text")
            if token:
                roles.setdefault(role, token)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = content.get(key) or []
            items = list(value.values()) if isinstance(value, dict) else value
            if isinstance(value, dict):
                texts = {n: _token(item) for n, item in value.items()}
                named |= {n: text for n, text in texts.items() if isinstance(text, str)}
            if not isinstance(items, list):
                raise DataError(f"{folder / file}: {key} is {shown(value)}: must be a list")
            for item in items:
                token = _token(item)
                if not isinstance(token, str) or not token:
                    raise DataError(f"{folder / file}: {key} has {shown(item)}: must be text")
                extra.append(token)
    named = {
        name: token for name, token in named.items() if name.removesuffix("_token") not in ROLES
    }
    return {r: token for r in ROLES if (token := roles.get(r, usual.get(r)))}, extra, named


def _added(
    folder: Path,
    config: JsonObject,
    definition: JsonObject,
    roles: Mapping[str, str],
    extra: Sequence[str],
) -> list[JsonObject]:
    """Return the added tokens of the definition and of the other files, and all special ones."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = definition.get("added_tokens") or []
    if not isinstance(listed, list):
        raise DataError("added_tokens: must be a list")
    found: dict[str, JsonObject] = {}
    taken: dict[int, str] = {}

    def add(token: Json, i: Json, where: str) -> None:
        text = _token(token)
        if not isinstance(text, str) or not text or type(i) is not int or i < 0:
            raise DataError(f"{where}: {shown(token)} with id {shown(i)}: no token with its id")
        known = found.get(text)
        if taken.setdefault(i, text) != text or (known and known["id"] != i):
            other = f"id {known['id']}" if known else shown(taken[i])
            raise DataError(f"{where}: {shown(text)} has id {i}: but {other} is there already")
        said = {flag: token[flag] for flag in flags if isinstance(token, dict) and flag in token}
        if not all(isinstance(value, bool) for value in said.values()):
            raise DataError(f"{where}: {shown(token)}: {', '.join(flags)} must be true or false")
        special = said.get("special", text in special_tokens)
        base = dict.fromkeys(flags, False) | {"normalized": not special, "special": special}
        found[text] = {"id": i, "content": text} | (known or base) | said

    special_tokens = {*roles.values(), *extra}
    for token in listed:
        add(token, token.get("id") if isinstance(token, dict) else None, "added_tokens")
    decoder = config.get("added_tokens_decoder") or {}
    beside = _json(folder, "added_tokens.json") or {}
    if not isinstance(decoder, dict):
        raise DataError("added_tokens_decoder of tokenizer_config.json: must be an object")
    for key, token in decoder.items():
        i = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None
        add(token, i, "added_tokens_decoder of tokenizer_config.json")
    for token, i in beside.items():
        add(token, i, "added_tokens.json")
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pieces = [item[0] for item in vocabulary if isinstance(item, list) and item]
        vocabulary = {piece: i for i, piece in enumerate(pieces) if isinstance(piece, str)}
    for token in dict.fromkeys([*roles.values(), *extra]):
        if token in found:
            found[token]["special"] |= token in roles.values()
        elif isinstance(vocabulary, dict) and token in vocabulary:
            add(token, vocabulary[token], "vocabulary")
        elif token in extra:
            raise DataError(f"additional_special_tokens has {shown(token)}: not in the vocabulary")
    return sorted(found.values(), key=lambda token: token["id"])


def _known(value: Json, definition: JsonObject) -> list[int] | None:
    """Return what a model's config names as ends, without ids that the tokenizer has not."""
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [token["id"] for token in definition["added_tokens"]]
    if isinstance(vocabulary, dict):
        ids += [i for i in vocabulary.values() if isinstance(i, int)]
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    last, given = max(ids, default=-1), value if isinstance(value, list) else [value]
    return [i for i in given if type(i) is int and 0 <= i <= last] or None


def _token(value: Json) -> Json:
    """Return the text of a token, which files write alone or in an object with flags."""
    return value.get("content") if isinstance(value, dict) else value


def _set_ends(config: JsonObject, definition: JsonObject, roles: Mapping[str, str]) -> None:
    """Put around a text what `add_bos_token` and `add_eos_token` say, if they are given."""
    wanted = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    for name, value in zip(("add_bos_token", "add_eos_token"), wanted, strict=True):
        if value not in (None, True, False):
            raise DataError(f"{name} of tokenizer_config.json is {shown(value)}: true or false")
    if wanted == [None, None]:
        return
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    first, last = (
        (roles[role],) if value and roles.get(role) in ids else ()
        for role, value in zip(("bos", "eos"), wanted, strict=True)
    )
    definition["post_processor"] = around(ids, first, last)


def around(ids: Mapping[str, int], first: Sequence[str], last: Sequence[str]) -> JsonObject:
    """Return the library's template that puts a text between the tokens `first` and `last`."""

    def text(name: str, kind: int) -> list[JsonObject]:
        before, after = (
            [{"SpecialToken": {"id": token, "type_id": kind}} for token in tokens]
            for tokens in (first, last)
        )
        return [*before, {"Sequence": {"id": name, "type_id": kind}}, *after]

    used = {token: ids[token] for token in (*first, *last)}
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": text("A", 0) + text("B", 1),
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in used.items()},
    }


def more_templates(folder: Path) -> list[str]:
    """List the files of `additional_chat_templates`."""
    below = folder / "additional_chat_templates"
    if below.is_symlink() or not below.is_dir():
        return []
    return sorted(f"{below.name}/{path.name}" for path in below.glob("*.jinja"))


def _usual_templates(folder: Path, config: JsonObject) -> tuple[tuple[str, str], ...]:
    where = folder / "tokenizer_config.json"
    file = _read(folder, "chat_template.jinja")
    value: Json = config.get("chat_template") if file is None else file
    if value is None and (beside := _json(folder, "chat_template.json")) is not None:
        where, value = folder / "chat_template.json", beside.get("chat_template")
    match value:
        case None:
            return ()
        case str():
            return (("default", value),)
        case list():
            found: dict[str, str] = {}
            for one in value:
                match one:
                    case {"name": str(name), "template": str(template)}:
                        found[name] = template
            if len(found) == len(value):
                return tuple(found.items())
    rule = "must be text, or a list of objects with a name of its own and a template"
    raise DataError(f"{where}: chat_template: {rule}")


def _check_dense(path: Path, vocabulary: JsonObject) -> None:
    """Check that the vocabulary has every id from 0 on, each once."""
    holders: dict[int, str] = {}
    for token, i in vocabulary.items():
        if type(i) is not int or i < 0:
            raise DataError(f"{path}: {shown(token)} has id {shown(i)}: must be at least 0")
        if holders.setdefault(i, token) != token:
            raise DataError(f"{path}: {shown(token)} and {shown(holders[i])} have id {i}")
    if not vocabulary:
        raise DataError(f"{path}: it is empty")
    largest = max(holders)
    if largest >= len(holders):
        hole = next(i for i in range(len(holders)) if i not in holders)
        raise DataError(f"{path}: no token has id {hole}, but {shown(holders[largest])} {largest}")


def _made(path: Path, model: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return model(**arguments)
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def _flag(folder: Path, config: JsonObject, name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        rule = "must be true or false"
        raise DataError(f"{folder / 'tokenizer_config.json'}: {name} is {shown(value)}: {rule}")
    return value


def _json(folder: Path, name: str) -> JsonObject | None:
    """Read the object in a file, which has no key twice; None if there is no such file."""
    if not _FILES.there(folder, name):
        return None
    return _FILES.json_object(_FILES.inside(folder, name), LIMITS[name], VALUES)


def _read(folder: Path, name: str, limit: int | None = None) -> str | None:
    """Read a file's text; None if there is no such file."""
    if not _FILES.there(folder, name):
        return None
    content = _FILES.content(_FILES.inside(folder, name), limit or LIMITS[name])
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{folder / name}: byte {error.start} is not UTF-8") from None
