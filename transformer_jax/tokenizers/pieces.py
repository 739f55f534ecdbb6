"""Show the pieces that a tokenizer cuts a text into, and how a BPE puts them together."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterable

from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import BPETokenizer, Tokenizer, WordTokenizer


def pieces(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Return the id and the text of each token of a text, and of what is put around it.

    Only the tokenizer of a published model puts tokens around a text, such as <s> or [CLS]. A
    special token that the text spells out is text.
    """
    own = plain(tokenizer)
    if isinstance(own, PretrainedTokenizer):
        ids = own.encode(text, special_tokens=True, written="text")
    else:
        ids = own.encode(text)
    return list(zip(ids.tolist(), token_texts(tokenizer, ids), strict=True))


def merge_steps(tokenizer: Tokenizer, text: str) -> list[list[list[int]]]:
    """Return how a BPE puts the words of a text together (Sennrich et al. 2016, section 3.2).

    For each word there are the ids of its letters (of bytes, in a byte-level BPE), and its ids
    after each merge: of all neighbours, those that were learnt first become one token, the left
    ones where it has several such. Of other tokenizers, and of a BPE whose pieces have a prefix or
    a suffix for their place in a word, there is nothing.
    """
    from tokenizers import Tokenizer as Library

    own = plain(tokenizer)
    if not isinstance(own, BPETokenizer | PretrainedTokenizer):
        return []
    model = json.loads(own.definition)["model"]
    marks = "continuing_subword_prefix", "end_of_word_suffix"
    if "merges" not in model or any(model.get(mark) for mark in marks):
        return []
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    made = {"".join(pair) for pair in pairs}
    library = Library.from_str(own.definition)
    library.encode_special_tokens = True
    read = library.encode(text, add_special_tokens=False)
    ids, words = library.get_vocab(), dict[int | None, list[str]]()
    for number, token in zip(read.word_ids, read.tokens, strict=True):
        words.setdefault(number, []).append(token)
    found = []
    for tokens in words.values():
        # what no merge has made, such as a byte <0xE2> or an unknown letter, stays as it is
        row = [part for token in tokens for part in (token if token in made else [token])]
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
    r"""Return the text of each token; of a special one its name, of a part of a character \\xNN.

    Words of a `WordTokenizer` are without the space between them, and so are added tokens.
    """
    own = plain(tokenizer)
    names = {i: f"<{name}>" for name, i in special_ids(tokenizer).items()}
    if isinstance(own, PretrainedTokenizer):
        # Its own special tokens have texts; only added ids have names and no text.
        names = {i: name for i, name in names.items() if i >= own.vocab_size}
    found = []
    for i in map(int, ids):
        text = names.get(i) or own.to_bytes([i]).decode("utf-8", "backslashreplace")
        word = isinstance(own, WordTokenizer)
        added = isinstance(own, PretrainedTokenizer) and own.is_added(i)
        found.append(text.removeprefix(" ") if word or added else text)
    return found


def marked(text: str) -> str:
    r"""Return a token's text as a label: spaces as ␣, what has no shape of its own as \n, \xa0."""

    def mark(at: int, letter: str) -> str:
        alone = not at and unicodedata.combining(letter)  # it would stand over another label
        if letter.isprintable() and not alone:
            return "␣" if letter == " " else letter
        return letter.encode("unicode_escape").decode()

    return "".join(mark(at, letter) for at, letter in enumerate(text)) or "''"
