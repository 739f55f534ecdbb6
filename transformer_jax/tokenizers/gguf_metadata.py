"""Tokenizers built from the metadata of a GGUF file.

    tokenizer.ggml.model         "gpt2" (byte-level BPE) or "llama" (SentencePiece's BPE by score)
    tokenizer.ggml.pre           name of the model whose text splitting "gpt2" applies before BPE
    tokenizer.ggml.tokens        all tokens; also .token_type, and .scores or .merges
    tokenizer.ggml.*_token_id    roles: bos, eos, ...
    tokenizer.chat_template      Jinja template

The file has no tokenizer.json, so this module reconstructs the published one, with the same IDs.
llama.cpp's IDs differ for rare text, because llama.cpp does not compose Unicode for Qwen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from transformer_jax.tokenizers.hf_files import around
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer, canonical
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import MISSING, JsonObject, ObjectKeys, shown

_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _WORDS
QWEN2_SPLIT = _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _WORDS
_GPT4O = _CASED % (f"{_ENDS}?", f"{_ENDS}?", r"\p{N}{1,3}")
_TEKKEN = _CASED % ("", "", r"\p{N}")

_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), r"\p{N}"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
"""Pattern that splits text. None means GPT-2's pattern, and "\

{N}" isolates each digit first.
"""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "lfm2", "tekken"})
"""Tokenizers that look up whole words before merging and that add bos by default."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Tokenizers that compose Unicode (NFC)."""

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)

_ROLES = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding",
    "mask": "mask",
}  # fmt: skip
"""Name of each role in the metadata keys. The spelling "seperator" is part of the format."""
_END_TOKENS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <|end_of_text|> </s> <eos>
    <EOT> _<EOT> <end_of_utterance>
    """.split()
)
"""Names of special tokens that end text, as in llama.cpp. Few files list more than one of them."""
_IGNORED = ("add_sep_token", "token_type_count")
_FILLED = (
    "prefix",
    "suffix",
    "middle",
    *(f"fim_{n}" for n in ("pre", "suf", "mid", "pad", "rep", "sep")),
)
"""Roles of tokens that mark a gap in text, which are not used here."""


def tokenizer_of_metadata(metadata: Mapping[str, Any], where: str) -> PretrainedTokenizer:
    """Return the tokenizer that the metadata of the GGUF file `where` describes.

    Raises DataError, which names the key, if a key is missing, invalid, or unknown.
    """
    keys = _Keys(metadata, where, "tokenizer.ggml.")
    model, pre, tokens = keys.take("model"), keys.take("pre"), keys.take("tokens")
    if not isinstance(model, str):
        keys.fail("model", model, "must be a string")
    if not isinstance(tokens, list) or not tokens:
        keys.fail("tokens", tokens, "must be a list of strings")
    kinds = keys.numbers("token_type", len(tokens), np.full(len(tokens), _NORMAL))
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if kinds[i] == _UNUSED:  # pads the vocabulary to the size of the embedding table
            continue
        # llama.cpp uses the same name for an empty token
        token = tokens[i] = token or f"[EMPTY_{i}]"
        if ids.setdefault(token, i) != i:
            keys.fail("tokens", tokens, f"{shown(token)} has IDs {ids[token]} and {i}")
    match model:
        case "gpt2":
            definition, adds_bos = _byte_level(keys, pre, ids), pre in _WHOLE_WORDS
        case "llama":
            definition, adds_bos = _sentence_piece(keys, ids, kinds), True
        case _:
            keys.fail("model", model, "must be 'gpt2' or 'llama'")
    role_ids = {role: keys.id(name, len(tokens)) for role, name in _ROLES.items()}
    roles = {role: tokens[i] for role, i in role_ids.items() if i is not None and tokens[i] in ids}
    special = {ids[token] for role, token in roles.items() if role != "unk"}
    special |= {i for i in ids.values() if kinds[i] in (_CONTROL, _UNKNOWN)}
    phi3 = (
        metadata.get("general.architecture") == "phi3"
    )  # these special tokens strip the space after them
    definition["added_tokens"] = [
        dict(
            id=i, content=token, single_word=False, lstrip=False,
            rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>", "<|endofprompt|>"),
            normalized=i not in special and "▁" in token, special=i in special,
        )
        for token, i in ids.items()
        if i in special or kinds[i] == _USER
    ]  # fmt: skip
    first, last = (
        (roles[role],) if keys.flag(f"add_{role}_token", default) and role in roles else ()
        for role, default in (("bos", adds_bos), ("eos", False))
    )
    if first or last:
        definition["post_processor"] = around(ids, first, last)
    named = [keys.id(name, len(tokens)) for name in ("eos", "eot", "eom")]
    stop = {i for i in named if i is not None}
    # most end tokens have no key, so recognize them by name, as llama.cpp does
    stop |= {i for token, i in ids.items() if token in _END_TOKENS and i in special}
    templates = {}
    for key, value in metadata.items():
        name = key.removeprefix("tokenizer.chat_template")
        if name != key and (not name or name.startswith(".")):
            if not isinstance(value, str):
                raise DataError(f"{where}: {shown(key)} is {shown(value)}: must be a string")
            templates[name.removeprefix(".") or "default"] = value
    # read these keys, so that they are not reported as unknown
    for name in _FILLED:
        keys.id(name, len(tokens))
    for name in keys.unread():
        if name not in _IGNORED:
            raise DataError(f"{where}: {shown(keys.prefix + name)}: unknown key")
    try:
        return PretrainedTokenizer(
            canonical(definition),
            tuple(roles.items()),
            tuple(sorted(stop)),
            tuple(templates.items()),
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _byte_level(keys: _Keys, pre: Any, ids: Mapping[str, int]) -> JsonObject:
    """Return the definition of a byte-level BPE with a list of merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if not isinstance(pre, str) or pre not in _SPLITS:
        keys.fail(
            "pre", pre, f"must be one of {', '.join(_SPLITS)}, which define how text is split"
        )
    merges, lines = list[tuple[str, str]](), keys.take("merges")
    if not isinstance(lines, list):
        keys.fail("merges", lines, "must be a list of strings")
    for n, line in enumerate(lines):
        # A token may begin with a space, so the separator is never the first character.
        one, _, two = line[1:].partition(" ")
        one = line[:1] + one
        if not all(token in ids for token in (one, two, one + two)):
            keys.fail("merges", lines, f"entry {n}, {shown(line)}, must be two known tokens")
        merges.append((one, two))
    library = Tokenizer(
        models.BPE(vocab=dict(ids), merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    )
    split = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split == r"\p{N}":
        steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
    elif split is not None:
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [pre_tokenizers.Split(Regex(split), "isolated"), letters]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in _COMPOSED:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    if keys.flag("add_space_prefix", False):
        keys.fail("add_space_prefix", True, "must be false for 'gpt2'")
    definition: JsonObject = json.loads(library.to_str())
    return definition


def _sentence_piece(keys: _Keys, ids: Mapping[str, int], kinds: np.ndarray) -> JsonObject:
    """Return the definition of SentencePiece's BPE.

    SentencePiece first merges the neighboring tokens whose joint token has the highest score. The
    library merges pairs in the order of a list. As in the converter of transformers, the list is
    sorted by score, and then by the lengths of the left and right parts.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = keys.numbers("scores", len(kinds), None)
    pairs = list[tuple[float, int, int, str, str]]()
    for token, i in ids.items():
        if kinds[i] == _NORMAL:
            for cut in range(1, len(token)):
                one, two = token[:cut], token[cut:]
                if one in ids and two in ids:
                    pairs.append((float(scores[i]), len(one), len(two), one, two))
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    unknown = keys.id("unknown", len(kinds), 0)
    unknown_token = next((token for token, i in ids.items() if i == unknown), None)
    library = Tokenizer(
        models.BPE(
            vocab=dict(ids), merges=[pair[3:] for pair in pairs], unk_token=unknown_token,
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    marks: list[Any] = [normalizers.Replace(" ", "▁")]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix", True):
        # decoding removes the space that encoding adds
        marks, steps = [normalizers.Prepend("▁"), *marks], [*steps, decoders.Strip(" ", 1, 0)]
    library.normalizer = normalizers.Sequence(marks)
    library.decoder = decoders.Sequence(steps)
    if keys.flag("remove_extra_whitespaces", False):
        keys.fail("remove_extra_whitespaces", True, "must be false")
    definition: JsonObject = json.loads(library.to_str())
    return definition


class _Keys(ObjectKeys):
    """Metadata keys that describe a tokenizer."""

    error = DataError

    def fail(self, name: str, value: object, rule: str) -> NoReturn:
        if isinstance(value, list | np.ndarray):
            raise DataError(f"{self.where}: {self.prefix}{name} of {len(value)}: {rule}")
        super().fail(name, MISSING if value is None else value, rule)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if isinstance(value, np.ndarray | list) or value not in (None, True, False):
            self.fail(name, value, "must be true or false")
        return default if value is None else bool(value)

    def id(self, name: str, count: int, default: int | None = None) -> int | None:
        value = self.take(f"{name}_token_id")
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < count:
            self.fail(f"{name}_token_id", value, f"must be an ID of the {count} tokens")
        return value

    def numbers(self, name: str, count: int, default: np.ndarray | None) -> np.ndarray:
        value = self.take(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray) or len(value) != count:
            self.fail(name, value, f"must be a list of {count} numbers, one for each token")
        if not np.isfinite(value).all():
            self.fail(name, value, "must be finite numbers")
        return value
