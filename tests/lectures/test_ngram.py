"""Tests of n-gram models: Kneser-Ney probabilities, packing, decoding and errors."""

import itertools
from collections import Counter, defaultdict
from functools import cache, partial

import jax
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import ConfigError, NgramConfig
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures.ngram import count_ngrams
from transformer_jax.lectures.recent_tokens import init_recent_tokens
from transformer_jax.models.factory import build, init_params, num_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ORDER, ROWS, TOKENS = 5, 3, 3, 11
CORPUS = [[0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1, 0, 1, 2], [1, 1, 0, 1, 2, 0], [3, 0, 1], [2, 3, 3]]
"""The context 3 3 has no follower, and 4 does not occur."""


@cache
def counted(order: int = ORDER):
    documents = [np.array(document, np.int32) for document in CORPUS]
    return count_ngrams(NgramConfig(vocab_size=VOCAB, order=order), documents)


@cache
def model_and_params(order: int = ORDER):
    config, params = counted(order)
    return build(config), params


@partial(jax.jit, static_argnums=0)
def run(model, params, tokens, **arguments):
    """Apply the model, compiled once per shape."""
    return model.apply({"params": params}, tokens, **arguments)


def draw_tokens(rows: int = ROWS, columns: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (rows, columns), dtype=np.int32)


# The formula in float64, with dictionaries


class KneserNey:
    """Interpolated Kneser-Ney smoothing with dictionaries of tuples; -1 is the start symbol."""

    def __init__(self, order: int, corpus=CORPUS, vocab_size: int = VOCAB):
        self.vocab_size = vocab_size
        grams = [
            tuple(line[end - order : end])
            for document in corpus
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
            self.discount[k] = once / (once + 2 * twice) if once and twice else 0.5

    def probability(self, context: tuple, word: int) -> float:
        k = len(context) + 1
        below = self.probability(context[1:], word) if context else 1 / self.vocab_size
        numbers = self.followers[k].get(context)
        if numbers is None:
            return below
        d, total = self.discount[k], sum(numbers)
        discounted = max(self.count[k][(*context, word)] - d, 0) / total
        return discounted + d * len(numbers) / total * below


def oracle_log_probs(order: int, row) -> np.ndarray:
    """Return the log-probabilities [T, V] after each token of one row."""
    oracle, line = KneserNey(order), [-1] * (order - 1) + [int(token) for token in row]
    rows = [
        [oracle.probability(tuple(line[t + 1 : t + order]), word) for word in range(VOCAB)]
        for t in range(len(row))
    ]
    return np.log(rows)


@pytest.mark.slow_except("3")
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ngram_probabilities_match_formula_for_every_context(order):
    """Includes uncounted contexts and the start of a document."""
    model, params = model_and_params(order)
    every = np.array(list(itertools.product(range(VOCAB), repeat=max(order, 2))), np.int32)
    logits, _ = run(model, params, every)
    logits = np.asarray(logits)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    assert_near(np.exp(logits).sum(axis=-1), np.ones(every.shape), 1e-5)
    for row in range(0, len(every), 1 if order < 4 else 7):
        assert_near(logits[row], oracle_log_probs(order, every[row]), 2 * FORWARD_F32)


def test_discounted_mass_is_assigned_to_shorter_context():
    """Compare d N(h .) / c(h .) of each context, at the highest and at the lower order."""
    (_, params), oracle = counted(2), KneserNey(2)
    assert len(set(oracle.discount.values())) == 2
    for k, context in ((1, ()), *((2, (word,)) for word in range(4))):
        numbers = oracle.followers[k][context]
        node = np.searchsorted(params["words_1"], context[0]) if context else 0
        want = oracle.discount[k] * len(numbers) / sum(numbers)
        assert_near(params[f"backoff_{k - 1}"][node], want, FORWARD_F32)


@pytest.mark.slow
def test_unseen_token_has_nonzero_probability():
    model, params = model_and_params()
    assert all(4 not in document for document in CORPUS)
    logits, _ = run(model, params, draw_tokens())
    assert np.isfinite(logits[:, :, 4]).all() and (logits[:, :, 4] < logits[:, :, 1]).all()


@pytest.mark.slow_except("7")
@pytest.mark.parametrize("vocab_size", [7, 8, 256])
def test_ngram_search_covers_full_vocabulary(vocab_size):
    """Binary search is tested around a power of two, including the start symbol."""
    corpus = [np.random.default_rng(vocab_size).permutation(vocab_size) for _ in range(3)]
    config, params = count_ngrams(NgramConfig(vocab_size=vocab_size, order=2), corpus)
    every = np.arange(vocab_size)[:, None]
    logits, _ = run(build(config), params, every)
    oracle = KneserNey(2, [document.tolist() for document in corpus], vocab_size)
    wanted = [[oracle.probability((c,), w) for w in range(vocab_size)] for c in range(vocab_size)]
    assert_near(np.exp(np.asarray(logits)[:, 0]), wanted, FORWARD_F32)


def test_ngrams_do_not_cross_documents():
    """Documents are rows of an array or arrays of any length."""
    config = NgramConfig(vocab_size=VOCAB, order=2)
    rows = np.array([[0, 1, 2], [3, 0, 1]], np.int32)
    both, params = count_ngrams(config, rows)
    again, same = count_ngrams(config, [rows[0], np.zeros(0, np.int32), rows[1]])
    joined, _ = count_ngrams(config, rows.ravel())
    assert both == again and both.nodes == (5, 5)  # 0 1 2 3 and the beginning; . 0, . 3, 01, 12, 30
    assert joined.nodes == (5, 5)  # . 0, 01, 12, 23, 30
    for name, values in params.items():
        np.testing.assert_array_equal(values, same[name])
    np.testing.assert_array_equal(params["words_2"], [1, 2, 0, 0, 3])


@pytest.mark.slow
def test_ngram_context_excludes_other_documents_and_padding():
    model, params = model_and_params()
    tokens = draw_tokens()
    segments = np.array([[3] * 4 + [7] * 2 + [3] * 5, [1] * 11, [0] * 3 + [5] * 8], np.int32)
    valid = np.ones(tokens.shape, bool)
    valid[0, [2, 4]] = valid[2, [4, 10]] = False
    logits, state = run(model, params, tokens, segments=segments, valid=valid)
    for row, columns in (
        (0, [0, 1, 3]), (0, [5]), (0, [6, 7, 8, 9, 10]), (1, list(range(TOKENS))), (2, [0, 1, 2]),
        (2, [3, 5, 6, 7, 8, 9]),
    ):  # fmt: skip
        want = oracle_log_probs(ORDER, tokens[row, columns])
        assert_near(logits[row, columns], want, 2 * FORWARD_F32)
    np.testing.assert_array_equal(state.length, [5, TOKENS, 6])
    np.testing.assert_array_equal(state.tokens[2], tokens[2, [8, 9]])


@pytest.mark.slow
def test_greedy_decode_matches_full_forward():
    """Compare each token with the argmax of the formula; the prompts are ragged."""
    model, params = model_and_params()
    prompt, lengths, state = (
        draw_tokens(),
        np.array([11, 3, 7]),
        init_recent_tokens(counted()[0], 3),
    )
    out = generate(make_step(model), params, prompt, state, num_tokens=7, lengths=lengths)
    for row, length in enumerate(lengths):
        text = np.asarray(out.tokens)[row]
        whole = np.concatenate([prompt[row, :length], text])
        log_p = oracle_log_probs(ORDER, whole[:-1])[length - 1 :]
        np.testing.assert_array_equal(text, log_p.argmax(axis=-1))
        assert_near(out.log_probs[row], log_p.max(axis=-1), 3 * FORWARD_F32)


@pytest.mark.slow
def test_exhaustive_beam_search_finds_most_probable_text():
    """With V^2 beams, a search of three tokens is exhaustive."""
    model, params = model_and_params()
    prompt, state = np.array([[2, 0], [1, 1]], np.int32), init_recent_tokens(counted()[0], 2)
    beams = beam_search(
        make_step(model), params, prompt, state, num_tokens=3, num_beams=VOCAB**2
    )  # fmt: skip
    for row in range(2):
        every = {
            text: oracle_log_probs(ORDER, [*prompt[row], *text[:-1]])[np.arange(1, 4), text].sum()
            for text in itertools.product(range(VOCAB), repeat=3)
        }
        best = max(every, key=every.__getitem__)
        assert tuple(np.asarray(beams.tokens)[row, 0].tolist()) == best
        assert_near(beams.log_probs[row, 0], every[best], 3 * FORWARD_F32)


def test_ngram_parameter_shapes_depend_on_node_counts():
    """A checkpoint template needs only `nodes`, without counting."""
    config, params = counted()
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for wanted, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
        assert (wanted.shape, wanted.dtype) == (leaf.shape, leaf.dtype)
    first, second, third = config.nodes
    starts = (1 + 1) + (first + 1) + (second + 1)
    assert num_params(config) == 2 * (first + second + third) + starts + 1 + first + second
    assert config.nodes[0] == 5  # four distinct tokens and the start symbol


@pytest.mark.slow
def test_large_ngram_vocabularies_do_not_overflow():
    """The node ids times the vocabulary size exceed 2**31."""
    config = NgramConfig(vocab_size=2**17, order=3)
    tokens = np.random.default_rng(3).permutation(2**17)[: 2**16].astype(np.int32)
    config, params = count_ngrams(config, tokens)
    assert config.nodes == (2**16 + 1, 2**16 + 1, 2**16)
    place = np.searchsorted(params["words_1"], tokens[7])
    assert params["words_2"][params["start_1"][place]] == tokens[8]
    logits, _ = jax.jit(build(config).apply)({"params": params}, tokens[None, 7:9])
    assert logits[0, 1].argmax() == tokens[9]


@pytest.mark.slow_except(
    "arguments0-order is 0: must be positive",
    "arguments1-vocab_size is 2147483648: must be below",
    "arguments2-nodes is \\\\(3*",
    "arguments3-nodes is \\\\(3, 0\\\\): must be positive",
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(order=0), "order is 0: must be positive"),
        (dict(vocab_size=2**31), "vocab_size is 2147483648: must be below"),
        (dict(order=2, nodes=(3,)), r"nodes is \(3,\): must have one entry for each order up to 2"),
        (dict(order=2, nodes=(3, 0)), r"nodes is \(3, 0\): must be positive"),
        (dict(nodes=3), "nodes is 3: must be"),
    ],
)
def test_invalid_config_is_rejected(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        NgramConfig(**arguments)


@pytest.mark.slow
def test_invalid_arguments_are_rejected():
    config = NgramConfig(vocab_size=VOCAB, order=3)
    with pytest.raises(ConfigError, match="nodes is None: count first"):
        init_params(config, jax.random.key(0))
    for documents, message in (
        (np.zeros(0, np.int32), "documents have no tokens"),
        (np.array([1, 5]), r"token 5 at \[0, 1\]: must be from 0 to 4"),
        (np.array([0.5]), "tokens are float64"),
        (np.zeros((2, 3, 2), np.int32), r"a document has shape \(3, 2\): must be \[T\]"),
    ):
        with pytest.raises(ValueError, match=message):
            count_ngrams(config, documents)
    model, params = model_and_params()
    with pytest.raises(
        ValueError, match=r"state\.tokens have width 4, but the model's context is 2"
    ):
        wide = init_recent_tokens(NgramConfig(vocab_size=VOCAB), ROWS)
        model.apply({"params": params}, draw_tokens(), state=wide)


@pytest.mark.slow
def test_traced_unknown_token_makes_affected_contexts_nan():
    model, params = model_and_params()
    tokens = draw_tokens()
    tokens[1, 2] = VOCAB
    logits, _ = run(model, params, tokens)
    np.testing.assert_array_equal(np.argwhere(np.isnan(logits).all(axis=-1)), [[1, 2], [1, 3]])
