"""List the words whose vectors are nearest to that of a word."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError
from transformer_jax.models.quantized import QuantizedTable
from transformer_jax.text.prompts import token_id
from transformer_jax.text.reading import Reader
from transformer_jax.tokenizers.pieces import token_texts
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError


def nearest_words(
    model: Reader, word: str, minus: Sequence[str], plus: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """Return what `LanguageModel.nearest` does."""
    check_count("count", count, 1)
    tokenizer = model.tokenizers.of_source
    table = _input_embedding(model)[: tokenizer.vocab_size]
    lengths = np.linalg.norm(table, axis=1)
    unit = table / np.where(lengths > 0, lengths, 1.0)[:, None]
    named = [("word", word, 1.0)]
    named += [("minus", one, -1.0) for one in minus] + [("plus", one, 1.0) for one in plus]
    for name, one, _ in named:
        if not isinstance(one, str) or len(one.split()) != 1:
            raise DataError(f"{name} is {one!r:.60}: must be one word")
    ids = [token_id(tokenizer, name, one, len(table)) for name, one, _ in named]
    times = dict.fromkeys(ids, 0.0)  # a word that is added and taken away has no part, not even by
    for i, (_, _, sign) in zip(ids, named, strict=True):  # what rounding would leave of it
        times[i] += sign
    wanted = np.array(list(times.values())) @ unit[list(times)]
    length = np.linalg.norm(wanted)
    if length <= len(named) * np.finfo(np.float32).eps:
        raise DataError(f"word is {word!r}: the sum of the vectors is 0, which has no direction")
    cosines = unit @ wanted / length
    own = plain(tokenizer)
    left_out = {*ids, *special_ids(tokenizer).values(), *np.flatnonzero(lengths == 0)}
    if isinstance(own, WordTokenizer):
        left_out |= {0, 1}  # an unknown word, and the end of a line
    if isinstance(own, PretrainedTokenizer):
        left_out |= {i for i in range(len(table)) if own.is_added(i)}
    found = list[tuple[str, float]]()
    for i in np.argsort(-cosines, kind="stable"):
        if len(found) == count:
            break
        if i not in left_out and (text := token_texts(tokenizer, [i])[0]):  # a number may be unused
            found.append((text, float(cosines[i])))
    return found


def _input_embedding(model: Reader) -> np.ndarray:  # f64[V, D]
    """Return the vectors of tokens that a model reads: of two vocabularies, those of sources."""
    config, params = model.config, model.params
    if (table := config.word_vectors(params)) is None:
        kind = type(config).__name__
        raise ConfigError(f"nearest: a {kind} of {model.name!r} has no vectors of words")
    if isinstance(table, QuantizedTable):
        table = table.look_up(jnp.arange(table.shape[0]))
    return np.asarray(table, np.float64)
