"""N-gram models: the probabilities of Kneser and Ney, and the functions that decode any model."""

import itertools
from collections import Counter, defaultdict
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import NgramConfig
from transformer_jax.models.factory import build
from transformer_jax.models.ngram import count_ngrams

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ORDER, ROWS, TOKENS = 5, 3, 3, 11
CORPUS = [[0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1, 0, 1, 2], [1, 1, 0, 1, 2, 0], [3, 0, 1]]


@cache
def counted(order: int = ORDER):
    documents = [np.array(document, np.int32) for document in CORPUS]
    return count_ngrams(NgramConfig(vocab_size=VOCAB, order=order), documents)


@cache
def model_and_params(order: int = ORDER):
    config, params = counted(order)
    return build(config), jax.tree.map(jnp.asarray, params)


@partial(jax.jit, static_argnums=0)
def run(model, params, tokens, **arguments):
    """The model, compiled once for equal shapes."""
    return model.apply({"params": params}, tokens, **arguments)


def draw_tokens(rows: int = ROWS, columns: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (rows, columns), dtype=np.int32)


# The formula in float64, with dictionaries


class KneserNey:
    """Interpolated Kneser-Ney by dictionaries of tuples, where -1 stands before the beginning."""

    def __init__(self, order: int):
        grams = [
            tuple(line[end - order : end])
            for document in CORPUS
            for line in [[-1] * (order - 1) + document]
            for end in range(order, len(line) + 1)
        ]
        self.count = {order: Counter(grams)}
        for k in range(order - 1, 0, -1):
            longer = {gram[-k - 1 :] for gram in grams}
            self.count[k] = Counter(gram[1:] for gram in longer)
        self.followers = {k: defaultdict(list) for k in self.count}
        self.discount = {}
        for k, count in self.count.items():
            for gram, number in count.items():
                self.followers[k][gram[:-1]].append(number)
            once, twice = (sum(n == m for n in count.values()) for m in (1, 2))
            self.discount[k] = once / (once + 2 * twice) if once else 0.5

    def probability(self, context: tuple, word: int) -> float:
        k = len(context) + 1
        below = self.probability(context[1:], word) if context else 1 / VOCAB
        numbers = self.followers[k].get(context)
        if numbers is None:
            return below
        d, total = self.discount[k], sum(numbers)
        own = max(self.count[k][(*context, word)] - d, 0) / total
        return own + d * len(numbers) / total * below


def oracle_log_probs(order: int, row) -> np.ndarray:
    """Log probabilities [T, V] after each token of one row."""
    oracle, line = KneserNey(order), [-1] * (order - 1) + [int(token) for token in row]
    rows = [
        [oracle.probability(tuple(line[t + 1 : t + order]), word) for word in range(VOCAB)]
        for t in range(len(row))
    ]
    return np.log(rows)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_formula_after_every_context(order):
    """Also after contexts that were never counted, and at the beginning of a document."""
    model, params = model_and_params(order)
    every = np.array(list(itertools.product(range(VOCAB), repeat=max(order, 2))), np.int32)
    logits, _ = run(model, params, every)
    assert logits.dtype == jnp.float32 and np.isfinite(logits).all()
    assert_near(np.exp(logits).sum(axis=-1), np.ones(every.shape), 1e-5)
    for row in range(0, len(every), 1 if order < 4 else 7):
        assert_near(logits[row], oracle_log_probs(order, every[row]), 2 * FORWARD_F32)
