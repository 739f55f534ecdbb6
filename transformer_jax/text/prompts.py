"""Read a text as the tokens that a model reads, with what it reads beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.pytree import Array
from transformer_jax.shown import short_repr
from transformer_jax.text.reading import Reader
from transformer_jax.text.scores import pair_batch
from transformer_jax.tokenizers.pieces import token_texts
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, encoder_frame, plain, special_ids
from transformer_jax.tokenizers.trained import BPETokenizer, Tokenizer, WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.masked import masked_ids


@short_repr
@dataclass(frozen=True)
class Prompt:
    """Hold a text as a model reads it whole."""

    ids: np.ndarray  # i32[T]
    source: np.ndarray | None = None  # i32[S], of an encoder-decoder
    prefix: np.ndarray | None = None  # bool[T], tokens that all others see, of a run on prefixes
    labels: np.ndarray | None = None  # i32[T], the target's token that follows each, of pairs

    def given(self) -> dict[str, Array]:
        """Return what is read beside the tokens, as a batch of one row."""
        named = {"source": self.source, "prefix": self.prefix}
        return {name: row[None] for name, row in named.items() if row is not None}


def arguments(given: dict[str, Array]) -> dict[str, Any]:
    """Return what `Prompt.given` holds as arguments of `model.apply`."""
    found: dict[str, Any] = {}
    if "source" in given:
        found["source"] = given["source"]
    if "prefix" in given:
        found["mask"] = Causal() | Padding(jnp.asarray(given["prefix"]))
    return found


def read_prompt(model: Reader, text: Any) -> Prompt:
    """Return a text, or (source, target) of a model of pairs; DataError for another or too long."""
    config = model.config
    pairs = model.kind == "targets"
    if pairs != (isinstance(text, tuple) and len(text) == 2) or not all(
        isinstance(one, str) for one in (text if pairs else (text,))
    ):
        rule = "(source, target)" if pairs else "a text"
        raise DataError(f"text is {text!r:.80}: must be {rule}")
    source = prefix = labels = None
    tokenizer = model.tokenizer
    if not pairs:
        model.check_tokens(text)
    model.warn_of_unknown([text[0] if pairs else text], [text[1]] if pairs else [])
    if pairs:
        example = pair_batch(model, *text)
        ids, source, prefix, labels = (
            None if row is None else np.asarray(row)
            for row in (example.tokens, example.source, example.prefix, example.labels)
        )
    elif config.kind == "encoder":
        if model.kind == "labels":
            ids = encoder_frame(tokenizer).around(encode_text(tokenizer, text))
        else:
            ids = masked_ids(tokenizer, text)
    elif model.kind == "chat":
        ids = model.read_messages(text)
    elif model.kind == "labels":
        ids = np.append(encode_text(tokenizer, text), special_ids(tokenizer)["cls"])
    else:
        ids = model.read(text)
    assert ids is not None
    ids = model.known(ids.astype(np.int32), "the text")
    if (most := config.longest_row) is not None and len(ids) > most:
        raise DataError(f"the text has {len(ids)} tokens: must be at most max_len {most}")
    return Prompt(ids, source, prefix, labels)


def token_id(tokenizer: Tokenizer, name: str, word: str, known: int) -> int:
    """Return the one token of a word; DataError where it has several, or was never seen.

    It is looked up as it stands after another word, with its space, if that is one token.
    """
    if not isinstance(word, str) or not word:
        raise DataError(f"{name} is {word!r:.60}: must be a text of one token")
    own = plain(tokenizer)
    within_text = isinstance(own, BPETokenizer | PretrainedTokenizer) and not word[0].isspace()
    for text in (f" {word}", word) if within_text else (word,):
        ids = encode_text(tokenizer, text)
        if len(ids) == 1:
            break
    unknown = 0 if isinstance(own, WordTokenizer) else None
    if isinstance(own, PretrainedTokenizer):
        unknown = own.special_ids.get("unk")
    if unknown in ids:
        raise DataError(f"{name} is {word!r:.60}: not among the words of the tokenizer")
    if len(ids) != 1:
        parts = ", ".join(map(repr, token_texts(tokenizer, ids[:8]))) + ", ..." * (len(ids) > 8)
        rule = "must be one token"
        raise DataError(f"{name} is {word!r:.60}: {len(ids)} tokens ({parts}): {rule}")
    if ids[0] >= known:
        raise DataError(f"{name} is {word!r:.60}: has id {ids[0]}, the model has {known} tokens")
    return int(ids[0])
