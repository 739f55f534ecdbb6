"""Checks of the untrusted definitions of published tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import Json, JsonObject, shown

if TYPE_CHECKING:
    from tokenizers import AddedToken

MAX_IDS = 2**22
"""Upper bound for token IDs. The largest published vocabularies have 2**18 IDs."""

MAX_GROWTH = 1000
"""Maximum ratio of the length of normalized text to the original length."""


def read_definition(text: str) -> JsonObject:
    """Parse a JSON object; raise DataError if the string is not a JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the definition of a tokenizer is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise DataError("the definition of a tokenizer must be an object")
    return content


def check_model(content: JsonObject) -> None:
    """Raise DataError if the model has dropout or invalid IDs, or would drop bytes."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise DataError("model: must be an object")
    if model.get("dropout"):
        raise DataError(f"model.dropout is {shown(model['dropout'])}: must be null")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        unknown = model.get("unk_token")
        if unknown is not None and not (isinstance(unknown, str) and unknown in vocabulary):
            raise DataError(f"model.unk_token is {shown(unknown)}: must be in the vocabulary")
        for token, i in vocabulary.items():
            if type(i) is not int or not 0 <= i < MAX_IDS:
                rule = f"must be at least 0 and below {MAX_IDS}"
                raise DataError(f"vocabulary: {shown(token)} has ID {shown(i)}: {rule}")
        merges = model.get("merges")
        # the library silently drops bytes that have no token
        fallback = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        if isinstance(merges, list) and not model.get("unk_token"):
            if not (model.get("byte_fallback") and fallback) and "ByteLevel" not in step_kinds(
                content
            ):
                rule = "must be byte-level, use byte_fallback, or have an unk_token"
                raise DataError(f"model would drop unknown characters: {rule}")


def step_kinds(content: JsonObject) -> set[str]:
    """Return the types of the normalization and pre-tokenization steps."""
    parts = [content.get("pre_tokenizer"), content.get("normalizer")]
    found = set()
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            found.add(str(part.get("type")))
            below = [part.get("pretokenizers"), part.get("normalizers")]
            parts += [item for items in below if isinstance(items, list) for item in items]
    return found


def check_growth(normalizer: Json) -> None:
    """Raise DataError if replacements could lengthen text more than `MAX_GROWTH`-fold."""
    growth, parts = 1.0, [normalizer]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        below = part.get("normalizers")
        parts += below if isinstance(below, list) else []
        content = part.get("content", part.get("prepend", ""))
        if isinstance(content, str):
            pattern = part.get("pattern")
            old = str(pattern.get("String") or "") if isinstance(pattern, dict) else ""
            # Thirty replacements of one letter with two letters lengthen text 2^30-fold.
            growth *= max(1.0, len(content) / max(1, len(old)))
        if growth > MAX_GROWTH:
            raise DataError(f"normalizer lengthens text more than {MAX_GROWTH}-fold")


def check_added(content: JsonObject, added: Mapping[int, AddedToken]) -> None:
    """Raise DataError unless the library assigns each added token the ID in the file."""
    tokens = content.get("added_tokens") or []
    for token in tokens:
        i, text = token["id"], token["content"]
        if i not in added or added[i].content != text:
            ids = [n for n, other in added.items() if other.content == text]
            rule = f"must be {ids[0]}" if ids else "another token has it"
            raise DataError(f"added_tokens: {shown(text)} has ID {i}: {rule}")


def strings(value: object, path: str) -> Iterable[tuple[str, str]]:
    """Yield the path and the content of each string in a JSON value, including field names."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}.{key}"[:200], str(key)
            yield from strings(item, f"{path}.{key}"[:200])
    elif isinstance(value, list | tuple):
        for n, item in enumerate(value):
            yield from strings(item, f"{path}[{n}]")
