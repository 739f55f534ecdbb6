"""Tokens in a string, and the BPE merges that create them."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterable

from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import BPETokenizer, Tokenizer, WordTokenizer


def pieces(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Return the ID and the string of each token in a text, including added tokens.

    Published tokenizers can add tokens such as <s> or [CLS] around the text. Special tokens that
    are spelled out in the text are treated as ordinary text.
    """
    base = plain(tokenizer)
    if isinstance(base, PretrainedTokenizer):
        ids = base.encode(text, special_tokens=True, written="text")
    else:
        ids = base.encode(text)
    return list(zip(ids.tolist(), token_texts(tokenizer, ids), strict=True))


def merge_steps(tokenizer: Tokenizer, text: str) -> list[list[list[int]]]:
    """Return the BPE merges that create each word (Sennrich et al. 2016, section 3.2).

    For each word, the first entry contains the IDs of its letters, or of its bytes in a byte-level
    BPE. Each further entry contains the IDs after one more merge. Each step merges the neighboring
    pair whose merge was learned first. Ties go to the leftmost pair. The result is empty for other
    tokenizers, and for BPE tokenizers that mark positions in a word with a prefix or suffix.
    """
    from tokenizers import Tokenizer as Library

    base = plain(tokenizer)
    if not isinstance(base, BPETokenizer | PretrainedTokenizer):
        return []
    model = json.loads(base.definition)["model"]
    marks = "continuing_subword_prefix", "end_of_word_suffix"
    if "merges" not in model or any(model.get(mark) for mark in marks):
        return []
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    merged = {"".join(pair) for pair in pairs}
    library = Library.from_str(base.definition)
    library.encode_special_tokens = True
    encoding = library.encode(text, add_special_tokens=False)
    ids, words = library.get_vocab(), dict[int | None, list[str]]()
    for number, token in zip(encoding.word_ids, encoding.tokens, strict=True):
        words.setdefault(number, []).append(token)
    found = []
    for tokens in words.values():
        # tokens that no merge creates, such as the byte <0xE2> or an unknown letter, are not split
        row = [part for token in tokens for part in (token if token in merged else [token])]
        if model.get("ignore_merges") and len(tokens) == 1:
            row = tokens
        steps = [[ids[part] for part in row]]
        while neighbours := [
            (ranks[pair], at) for at, pair in enumerate(itertools.pairwise(row)) if pair in ranks
        ]:
            at = min(neighbours)[1]
            row = [*row[:at], row[at] + row[at + 1], *row[at + 2 :]]
            steps.append([ids[part] for part in row])
        found.append(steps)
    return found


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    r"""Return each token as a string, with special tokens by name and partial characters as \\xNN.

    Words from a `WordTokenizer` and added tokens have no leading space.
    """
    base = plain(tokenizer)
    names = {i: f"<{name}>" for name, i in special_ids(tokenizer).items()}
    if isinstance(base, PretrainedTokenizer):
        # Published special tokens have text; IDs from `SpecialTokens` have only a name.
        names = {i: name for i, name in names.items() if i >= base.vocab_size}
    found = []
    for i in map(int, ids):
        text = names.get(i) or base.to_bytes([i]).decode("utf-8", "backslashreplace")
        word = isinstance(base, WordTokenizer)
        added = isinstance(base, PretrainedTokenizer) and base.is_added(i)
        found.append(text.removeprefix(" ") if word or added else text)
    return found


def marked(text: str) -> str:
    r"""Return a visible label for a token.

    Spaces are shown as ␣, and invisible characters as \n or \xa0.
    """

    def mark(at: int, letter: str) -> str:
        # an initial combining mark would be drawn over the previous label
        if letter.isprintable() and not (at == 0 and unicodedata.combining(letter)):
            return "␣" if letter == " " else letter
        return letter.encode("unicode_escape").decode()

    return "".join(mark(at, letter) for at, letter in enumerate(text)) or "''"
