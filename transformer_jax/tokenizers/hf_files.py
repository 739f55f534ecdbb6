"""Loading of tokenizers from the folders of published models.

tokenizer.json             the format of the `tokenizers` library; otherwise:
vocab.json, merges.txt     GPT-2's byte-level BPE (encoder.json, vocab.bpe); otherwise:
vocab.txt                  BERT's WordPiece
tokenizer_config.json      roles of special tokens, added tokens, chat templates
special_tokens_map.json    roles that are missing from tokenizer_config.json
added_tokens.json          IDs of added tokens
generation_config.json     tokens that end text; otherwise:
config.json                the model's end tokens; otherwise, the token with the role eos;
                           also `model_type`, which implies a tokenizer class (`classes`)
chat_template.jinja        overrides the config's template (chat_template.json: used if it has none)
additional_chat_templates  NAME.jinja, more templates

Only these files are opened. Links that leave the folder are not followed, and nothing is executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_jax.config.keywords import known_keywords
from transformer_jax.tokenizers import classes
from transformer_jax.tokenizers.definition import read_definition, step_kinds
from transformer_jax.tokenizers.plain_text import split_lines
from transformer_jax.tokenizers.pretrained import ROLES, PretrainedTokenizer, canonical
from transformer_jax.tokenizers.utf8 import DataError, byte_letters
from transformer_jax.untrusted_files import Json, JsonObject, Untrusted, check_path, shown

LIMITS = {
    "tokenizer.json": 2**26, "vocab.json": 2**24, "encoder.json": 2**24, "merges.txt": 2**24,
    "vocab.bpe": 2**24, "vocab.txt": 2**24, "tokenizer_config.json": 2**22,
    "special_tokens_map.json": 2**20, "added_tokens.json": 2**20, "generation_config.json": 2**20,
    "config.json": 2**23, "chat_template.jinja": 2**20, "chat_template.json": 2**20,
}  # fmt: skip
"""Maximum size of each file, in bytes."""
VALUES = 2**22
"""Maximum number of values in a JSON file. A vocabulary of 500,000 tokens takes about two
million."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_FILES = Untrusted(DataError)

_BARE = {"vocab.json": "GPT2", "encoder.json": "GPT2", "vocab.txt": "Bert"}
"""Tokenizer class implied by a vocabulary file if the folder names neither a class nor a model
type."""


@known_keywords
def load_tokenizer_folder(path: str | os.PathLike[str]) -> PretrainedTokenizer:
    """Load the tokenizer from a model's folder.

    Args:
        path: a folder with tokenizer.json, vocab.json and merges.txt, or vocab.txt.

    Raises:
        DataError: if a file is missing or invalid. The message names the file.
    """
    check_path("path", path)
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    config = _json(folder, "tokenizer_config.json") or {}
    if (code := config.get("auto_map")) is not None:
        rule = "it names Python code, which is never run; remove the key if the rest suffices"
        raise DataError(f"{folder / 'tokenizer_config.json'}: auto_map is {shown(code)}: {rule}")
    if (split := config.get("split_special_tokens", False)) is not False:
        rule = "must be false: encode(text, written='text') reads special tokens as text"
        found = f"split_special_tokens is {json.dumps(split):.80}"
        raise DataError(f"{folder / 'tokenizer_config.json'}: {found}: {rule}")
    model = _json(folder, "config.json") or {}
    name, definition, kind = _definition(folder, config, model)
    options = _options(folder, config, kind)
    definition = classes.apply_options(definition, options)
    where, written = folder / "tokenizer_config.json", _read(folder, "chat_template.jinja")
    # As in transformers, a separate file takes precedence.
    value: Json = config.get("chat_template") if written is None else written
    if value is None and (content := _json(folder, "chat_template.json")) is not None:
        where, value = folder / "chat_template.json", content.get("chat_template")
    sources: dict[str, str] = {}
    match value:
        case None:
            pass
        case str():
            sources["default"] = value
        case _:
            for one in value if isinstance(value, list) else ():
                match one:
                    case {"name": str(title), "template": str(template)}:
                        sources[title] = template
            if not isinstance(value, list) or len(sources) != len(value):
                rule = "must be a string, or a list of objects with a unique name and a template"
                raise DataError(f"{where}: chat_template: {rule}")
    for file in more_templates(folder):
        sources[Path(file).stem] = _read(folder, file, LIMITS["chat_template.jinja"]) or ""
    templates = tuple(sources.items())
    generation = _json(folder, "generation_config.json") or {}
    try:
        added, vocabulary = _read_added(folder, config, definition), _vocabulary(definition)
        roles, extra, named, flags = _roles(folder, config, kind, added, vocabulary)
        definition["added_tokens"] = _complete_added(added, vocabulary, roles, extra, flags)
        ids = vocabulary | {token["content"]: token["id"] for token in definition["added_tokens"]}
        # as in transformers 5, tokenizer.json overrides these keys
        if name != "tokenizer.json":
            ends = {role: config.get(f"add_{role}_token") for role in ("bos", "eos")}
            for role, adds in ends.items():
                if adds not in (None, True, False):
                    found = f"add_{role}_token of tokenizer_config.json is {shown(adds)}"
                    raise DataError(f"{found}: must be true or false")
            if set(ends.values()) != {None}:
                tokens = {r: (roles[r],) if ends[r] and roles.get(r) in ids else () for r in ends}
                definition["post_processor"] = around(ids, tokens["bos"], tokens["eos"])
        stop = generation.get("eos_token_id")
        if stop is None:  # the model's end tokens, without IDs outside the vocabulary
            last = max((i for i in ids.values() if isinstance(i, int)), default=-1)
            model_stop = model.get("eos_token_id")
            model_stop = model_stop if isinstance(model_stop, list) else [model_stop]
            stop = [i for i in model_stop if type(i) is int and 0 <= i <= last] or None
        if stop is None:
            stop = ids.get(roles.get("eos", ""))
        tokenizer = PretrainedTokenizer(
            # Encoding must return exactly the tokens of the text.
            canonical(definition | {"truncation": None, "padding": None}),
            tuple(roles.items()),
            tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
            templates,
            named_tokens=tuple(named.items()),
        )
        frame = _frame(kind, options, roles, ids, "src_lang" in config)
        # If the file already adds the same tokens, its post-processor is kept.
        if frame is None or tokenizer.frame == tuple(tuple(ids[t] for t in w) for w in frame):
            return tokenizer
        framed = read_definition(tokenizer.definition) | {"post_processor": around(ids, *frame)}
        return replace(tokenizer, definition=canonical(framed))
    except DataError as error:
        # The message already names the file.
        if str(error).startswith(str(folder)):
            raise
        name = "generation_config.json" if str(error).startswith("eos_token_id") else name
        raise DataError(f"{folder / name}: {error}") from None


def _definition(
    folder: Path, config: JsonObject, model: JsonObject
) -> tuple[str, JsonObject, classes.TokenizerClass]:
    """Return the name of the vocabulary file, the library's JSON, and the tokenizer's class."""
    name, source = classes.class_name(config, model)
    kind = classes.CLASSES.get(name, classes.FILE)
    found = _json(folder, "tokenizer.json")
    if found is not None:
        if name == "Llama" and "ByteLevel" in step_kinds(found):
            kind = classes.FILE  # Llama 3's files name the Llama 2 class
        return "tokenizer.json", found, kind

    def class_for(file: str) -> classes.TokenizerClass:
        """Return the class, after checking that it can be built from the file."""
        default = classes.CLASSES[_BARE[file]]
        if source and kind.built_from != default.built_from:
            rule = f"it does not define how to read {file}, and there is no tokenizer.json"
            raise DataError(f"{folder}: {source}: {rule}")
        return kind if source else default

    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        content, rules = _json(folder, vocabulary), _read(folder, merges)
        if content is not None and rules is not None:
            kind = class_for(vocabulary)
            return vocabulary, _byte_level_bpe(folder, vocabulary, content, merges, rules), kind
    words = _read(folder, "vocab.txt")
    if words is not None:
        kind = class_for("vocab.txt")
        return "vocab.txt", _word_piece(folder, words, config, kind), kind
    rule = "must have tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / name).exists():
            rule += f"; to convert {name}, use AutoTokenizer.from_pretrained(FOLDER)"
            rule += ".save_pretrained(FOLDER) of transformers"
            break
    raise DataError(f"{folder}: no tokenizer was found: {rule}")


def _options(folder: Path, config: JsonObject, kind: classes.TokenizerClass) -> dict[str, Json]:
    """Return the value of each option that the class supports, where null means the default."""
    found = dict[str, Json]()
    for name, default in kind.options.items():
        value = config.get(name)
        is_text = name == "src_lang"
        if value is not None and not isinstance(value, str if is_text else bool):
            rule = "must be a string" if is_text else "must be true or false"
            where = folder / "tokenizer_config.json"
            raise DataError(f"{where}: {name} is {shown(value)}: {rule}")
        found[name] = default if value is None else value
    return found


def _frame(
    kind: classes.TokenizerClass,
    options: Mapping[str, Json],
    roles: Mapping[str, str],
    ids: Mapping[str, int],
    requires_language: bool,
) -> tuple[list[str], list[str]] | None:
    """Return the tokens that the class adds before and after a text, or None if it adds none."""
    if kind.frame is None:
        return None
    frame, tokens = kind.frame, {**kind.roles, **roles}
    if options.get("legacy_behaviour"):  # NLLB's old order, which its tokenizer.json still uses
        frame = classes.CLASSES["MBart"].frame or frame
    if isinstance(language := options.get("src_lang"), str):
        names = [name for name in (language, f"__{language}__") if name in ids]
        if not names and requires_language:
            raise DataError(f"src_lang is {shown(language)}: must be a language token")
        tokens |= {"lang": names[0]} if names else {}
    if any(tokens.get(role) not in ids for part in frame for role in part):
        return None
    first, last = ([tokens[role] for role in part] for part in frame)
    return first, last


def _byte_level_bpe(
    folder: Path,
    file: str,
    vocabulary: JsonObject,
    merges_file: str,
    merges: str,
) -> JsonObject:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    path, tokens = folder / file, dict[int, str]()
    for token, i in vocabulary.items():  # IDs must be 0, 1, 2, ..., each used once
        if type(i) is not int or i < 0:
            raise DataError(f"{path}: {shown(token)} has ID {shown(i)}: must be at least 0")
        if tokens.setdefault(i, token) != token:
            raise DataError(f"{path}: {shown(token)} and {shown(tokens[i])} have ID {i}")
    if not vocabulary:
        raise DataError(f"{path} is empty")
    if (largest := max(tokens)) >= len(tokens):
        gap = next(i for i in range(len(tokens)) if i not in tokens)
        raise DataError(
            f"{path}: no token has ID {gap}, but {shown(tokens[largest])} has {largest}"
        )
    if missing := [letter for letter in byte_letters() if letter not in vocabulary]:
        raise DataError(f"{path}: byte 0x{byte_letters()[missing[0]]:02x} has no token")
    pairs = []
    for number, line in enumerate(split_lines(merges), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        where = f"{folder / merges_file}: line {number}"
        if len(parts) != 2:
            raise DataError(f"{where} is {shown(line)}: must be two tokens separated by a space")
        for token in (*parts, "".join(parts)):
            if token not in vocabulary:
                raise DataError(f"{where} names {shown(token)}, which is not in {file}")
        pairs.append((parts[0], parts[1]))
    library = Library(_create(path, models.BPE, vocab=vocabulary, merges=pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    definition: JsonObject = json.loads(library.to_str())
    return definition


def _word_piece(
    folder: Path, words: str, config: JsonObject, kind: classes.TokenizerClass
) -> JsonObject:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocabulary: dict[str, int] = {}
    for i, word in enumerate(split_lines(words)):
        if vocabulary.setdefault(word, i) != i:
            first = vocabulary[word] + 1
            raise DataError(f"{folder / 'vocab.txt'}: line {i + 1} repeats line {first}")
    unknown = _token(config.get("unk_token")) or kind.roles["unk"]
    if not isinstance(unknown, str) or unknown not in vocabulary:
        raise DataError(f"{folder / 'vocab.txt'}: must contain the unk_token {shown(unknown)}")
    library = Library(
        _create(folder / "vocab.txt", models.WordPiece, vocab=vocabulary, unk_token=unknown)
    )
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    definition: JsonObject = json.loads(library.to_str())
    return definition


def _roles(
    folder: Path,
    config: JsonObject,
    kind: classes.TokenizerClass,
    added: Mapping[str, JsonObject],
    vocabulary: Mapping[str, int],
) -> tuple[dict[str, str], list[str], dict[str, str], dict[str, JsonObject]]:
    """Return the token for each role, other special tokens, tokens in templates, and all flags.

    In older folders, whose config has no `added_tokens_decoder`, special_tokens_map.json has
    priority. A role that is null has no token. A role that is missing has the default token of the
    class.
    """
    extra: list[str] = []
    named: dict[str, str] = {}
    token_map = _json(folder, "special_tokens_map.json") or {}
    defaults = {
        f"{role}_token": token
        for role, token in kind.roles.items()
        if token in added or token in vocabulary
    }
    # Some classes, such as ModernBERT's, do not define a mask, so look for its usual names.
    mask = next((token for token in ("[MASK]", "<mask>") if token in added), None)
    files = [
        ("tokenizer_config.json", config),
        ("", defaults),
        ("special_tokens_map.json", token_map),
    ]
    if config.get("added_tokens_decoder") is None:
        files = [files[2], files[0], files[1]]
    files.append(("", {} if mask is None else {"mask_token": mask}))
    found: dict[str, str] = {}
    flags: dict[str, JsonObject] = {}
    for file, content in files:
        for name, value in content.items():
            token = _token(value)
            if name.endswith("_token") and isinstance(token, str) and token:
                named.setdefault(name, token)
        for role in ROLES:
            if role in found or f"{role}_token" not in content:
                continue
            value = content[f"{role}_token"]
            token = _token(value)
            if token is not None and not isinstance(token, str):
                raise DataError(
                    f"{folder / file}: {role}_token is {shown(value)}: must be a string"
                )
            found[role] = token or ""
            flags.setdefault(found[role], _flags(value, folder / file))
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
                    raise DataError(
                        f"{folder / file}: {key} contains {shown(item)}: must be a string"
                    )
                extra.append(token)
                flags.setdefault(token, _flags(item, folder / file))
    if kind.mask_strips:
        flags[found.get("mask", "")] = {"lstrip": True} | flags.get(found.get("mask", ""), {})
    if kind.special:
        extra += [t for t in (*added, *vocabulary) if re.fullmatch(kind.special, t)]
    named = {
        name: token for name, token in named.items() if name.removesuffix("_token") not in ROLES
    }
    return {role: found[role] for role in ROLES if found.get(role)}, extra, named, flags


def _read_added(folder: Path, config: JsonObject, definition: JsonObject) -> dict[str, JsonObject]:
    """Return the added tokens in the definition and in other files, with their flags.

    Tokens from added_tokens.json have no flags.
    """
    listed = definition.get("added_tokens") or []
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, list):
        raise DataError("added_tokens: must be a list")
    if not isinstance(decoder, dict):
        raise DataError("added_tokens_decoder of tokenizer_config.json: must be an object")
    tokens: list[tuple[str, Json, Json]] = []
    for token in listed:
        tokens.append(("added_tokens", token, token.get("id") if isinstance(token, dict) else None))
    for key, token in decoder.items():
        # `isdigit` accepts "²", but int() rejects it.
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None
        tokens.append(("added_tokens_decoder of tokenizer_config.json", token, number))
    more = _json(folder, "added_tokens.json") or {}
    tokens += [("added_tokens.json", token, i) for token, i in more.items()]
    found: dict[str, JsonObject] = {}
    taken: dict[int, str] = {}
    for where, token, i in tokens:
        text = _token(token)
        if not isinstance(text, str) or not text or type(i) is not int or i < 0:
            rule = "must be a token with a nonnegative ID"
            raise DataError(f"{where}: {shown(token)} with ID {shown(i)}: {rule}")
        first = found.get(text)
        if taken.setdefault(i, text) != text or (first and first["id"] != i):
            rule = f"it already has ID {first['id']}" if first else f"{shown(taken[i])} has this ID"
            raise DataError(f"{where}: {shown(text)} has ID {i}: {rule}")
        found[text] = {"id": i, "content": text} | (first or {}) | _flags(token, where)
    return found


def _flags(token: Json, where: str | Path) -> JsonObject:
    """Return the flags in the JSON of a token that determine how the token is matched in text."""
    flags = {flag: token[flag] for flag in _FLAGS if isinstance(token, dict) and flag in token}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise DataError(f"{where}: {shown(token)}: {', '.join(_FLAGS)} must be true or false")
    return flags


def _vocabulary(definition: JsonObject) -> dict[str, int]:
    """Return the model's vocabulary (IDs, keyed by token), without added tokens."""
    model = definition.get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(found, list):
        # A Unigram model lists pairs of a token and its score.
        pieces = [item[0] for item in found if isinstance(item, list) and item]
        found = {piece: i for i, piece in enumerate(pieces) if isinstance(piece, str)}
    return found if isinstance(found, dict) else {}


def _complete_added(
    added: Mapping[str, JsonObject],
    vocabulary: Mapping[str, int],
    roles: Mapping[str, str],
    extra: Sequence[str],
    flags: Mapping[str, JsonObject],
) -> list[JsonObject]:
    """Return the added tokens, including all special tokens, with complete flags.

    `flags` contains the flags of tokens that are not in `added`.
    """
    special = {*roles.values(), *extra}
    found: dict[str, JsonObject] = {}
    taken = {token["id"]: text for text, token in added.items()}
    for text in [*added, *(t for t in dict.fromkeys([*roles.values(), *extra]) if t not in added)]:
        if text not in added and text not in vocabulary:
            if text in extra:
                rule = "must be in the vocabulary"
                raise DataError(f"additional_special_tokens contains {shown(text)}: {rule}")
            continue  # `PretrainedTokenizer` rejects a role without a token
        new = {"id": vocabulary.get(text), "content": text} | flags.get(text, {})
        token = added.get(text, new | {"special": True})
        if taken.setdefault(token["id"], text) != text or type(token["id"]) is not int:
            other = shown(taken[token["id"]])
            raise DataError(f"vocabulary: {shown(text)} has ID {token['id']}: {other} has this ID")
        # By default, the library searches for special tokens before it normalizes the text.
        is_special = token.get("special", text in special)
        base = dict.fromkeys(_FLAGS, False) | {"normalized": not is_special}
        found[text] = base | token | {"special": is_special or text in roles.values()}
    return sorted(found.values(), key=lambda token: token["id"])


def _token(value: Json) -> Json:
    """Return the text of a token, which is a string or an object with its text and flags."""
    return value.get("content") if isinstance(value, dict) else value


def around(ids: Mapping[str, int], first: Sequence[str], last: Sequence[str]) -> JsonObject:
    """Return a post-processor for the library that adds the tokens `first` and `last` to text."""

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
    """List the files in `additional_chat_templates`."""
    below = folder / "additional_chat_templates"
    if below.is_symlink() or not below.is_dir():
        return []
    return sorted(f"{below.name}/{path.name}" for path in below.glob("*.jinja"))


def _create(path: Path, model: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return model(**arguments)
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def _json(folder: Path, name: str) -> JsonObject | None:
    """Read a JSON object without duplicate keys; return None if the file does not exist."""
    if not _FILES.there(folder, name):
        return None
    return _FILES.json_object(_FILES.inside(folder, name), LIMITS[name], VALUES)


def _read(folder: Path, name: str, limit: int | None = None) -> str | None:
    """Read a text file; return None if it does not exist."""
    if not _FILES.there(folder, name):
        return None
    content = _FILES.content(_FILES.inside(folder, name), limit or LIMITS[name])
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{folder / name}: byte {error.start} is not UTF-8") from None
