"""Rows with their own temperature and top-p in one program, and their likeliest tokens."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.decoding import RowSampling, admit, advance_slots, init_slots
from transformer_jax.decoding.samplers import Sample, Temperature, TopP

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(
    vocab_size=97, d_model=8, num_layers=1, num_heads=2, max_len=29, init_std=0.9
)
STEP = tj.make_step(tj.build(CONFIG))
WAYS = (0.0, 1.0), (0.7, 0.9), (1.9, 0.3), (1.0, 1.0), (0.3, 0.0), (0.0, 0.4)
"""Temperature and top_p of each row."""


def each(ways=WAYS) -> RowSampling:
    return RowSampling(*np.array(ways, np.float32).T)


def test_each_row_uses_its_own_temperature_and_top_p(rng):
    logits = jnp.asarray(3 * rng.normal(size=(len(WAYS), 97)), jnp.float32)
    got = np.asarray(jax.jit(each().__call__)(logits))
    assert np.isfinite(got).any(axis=1).all()
    for row, (t, p) in enumerate(WAYS):
        # The definitions, in float64.
        x = np.asarray(logits[row], np.float64)
        order = np.argsort(-x, kind="stable")
        if t == 0:
            kept, want = order[:1], x
        else:
            want = (x - x.max()) / t
            q = np.exp(want) / np.exp(want).sum()
            before = np.concatenate([[0], np.cumsum(q[order])[:-1]])
            kept = order[: max(1, int((before < p).sum()))] if p < 1 else order
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(got[row])), np.sort(kept))
        if t:
            np.testing.assert_allclose(got[row][kept], want[kept], rtol=2e-6, atol=1e-6)


def test_top_p_keeps_exact_count_of_equally_likely_tokens():
    """p = k / n keeps k of n equal tokens, in `TopP` and `RowSampling`, with and without `rest`."""
    n, k = (x.ravel() for x in np.meshgrid(np.arange(1, 33), np.arange(1, 33)))
    n, k = n[k <= n], k[k <= n]
    logits = np.where(np.arange(32) < n[:, None], np.float32(1.7), -np.inf).astype(np.float32)
    p, ones = k / n, np.ones(len(n), np.float32)
    for rest in (None, (1 - p).astype(np.float32)):
        rows = RowSampling(ones, p.astype(np.float32), rest)
        got = np.isfinite(np.asarray(jax.jit(rows.__call__)(logits)))
        np.testing.assert_array_equal(got, np.arange(32) < k[:, None])
    for total, share in ((5, 0.6), (10, 0.8), (7, 3 / 7)):
        got = np.asarray(TopP(share)(logits[(n == total) & (k == 1)]))
        assert np.isfinite(got).sum() == round(total * share)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.3, 0.6, 0.95, 1 - 1e-6])
def test_top_p_and_row_sampling_keep_smallest_sufficient_set(rng, p):
    """The exact sum of the float32 weights reaches p, up to rounding, at the last kept token."""
    logits = np.round(rng.normal(0, rng.uniform(0.1, 4, (200, 1)), (200, 97)), 1).astype(np.float32)
    full = np.full(200, p)
    rows = RowSampling(*np.array([full**0, full, 1 - full], np.float32))
    value, each = (np.isfinite(np.asarray(f(logits))) for f in (TopP(p), rows))
    np.testing.assert_array_equal(value, each)
    for row, kept in zip(logits, value, strict=True):
        best_first = np.sort(row)[::-1]
        w = [Fraction(float(x)) for x in np.asarray(jnp.exp(best_first - best_first[0]))]
        count, total = int(kept.sum()), sum(w)
        slack = Fraction(1, 2**20)  # rounding of a sum of 97 terms
        near = min(p, 1 - p)
        assert sum(w[:count]) >= Fraction(p) * total - slack * Fraction(near) * total
        assert sum(w[: count - 1]) < Fraction(p) * total + slack * Fraction(near) * total
        assert set(np.flatnonzero(kept)) == set(np.argsort(-row, kind="stable")[:count])


@pytest.mark.slow
def test_row_sampling_matches_separate_calls():
    params = tj.init_params(CONFIG, jax.random.key(0))
    prompt = np.array([[3, 1, 4, 1, 5]] * len(WAYS))

    def keys():
        return jax.random.split(jax.random.key(11), len(WAYS))

    slots = init_slots(
        STEP, params, tj.init_cache(CONFIG, 1, 29), len(WAYS), 29, sampler=Sample(), sampling=True
    )
    slots, first = admit(
        slots, params, np.arange(len(WAYS)), prompt, tj.init_cache(CONFIG, len(WAYS), 29),
        limits=np.full(len(WAYS), 17), key=keys(), sampling=each(), top=3,
    )  # fmt: skip
    slots, rest = advance_slots(slots, params, 16, top=3)
    tokens = np.concatenate([[first.token], rest.token])
    for row in 0, 1:  # only two rows, because each needs its own program
        t, p = WAYS[row]
        alone = tj.generate(
            STEP, params, prompt[:1], tj.init_cache(CONFIG, 1, 29), num_tokens=17,
            sampler=Sample(Temperature(t), TopP(p)), key=keys()[row : row + 1],
        )  # fmt: skip
        np.testing.assert_array_equal(tokens[:, row], alone.tokens[0])
    assert len({tuple(row) for row in tokens.T[[0, 1, 2, 3]]}) == 4
    # The likeliest tokens match a full pass without a cache.
    whole = np.concatenate([prompt.T, tokens])[:, 2]
    logits = tj.build(CONFIG).apply({"params": params}, whole[None])[0]
    x = np.asarray(logits, np.float64)[0, 4:-1]
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    best = np.argsort(-log_p, axis=-1, kind="stable")[:, :3]
    likeliest = np.concatenate([[first.seen.tokens], rest.seen.tokens])[:, 2]
    values = np.concatenate([[first.seen.log_probs], rest.seen.log_probs])[:, 2]
    np.testing.assert_array_equal(likeliest, best)
    np.testing.assert_allclose(values, np.take_along_axis(log_p, best, 1), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("required", "sampling", "message"),
    [
        (True, None, "sampling is None: these slots were made with sampling=True"),
        (False, each(WAYS[:1]), r"the slots require init_slots\(sampling=True\)"),
        (True, each(WAYS[:2]), r"temperature is float32\[2\]: must be float32\[1\]"),
    ],
)
def test_slots_reject_missing_unexpected_or_misshapen_sampling(required, sampling, message):
    params, empty = tj.init_params(CONFIG, jax.random.key(0)), tj.init_cache(CONFIG, 1, 29)
    slots = init_slots(STEP, params, empty, 2, 29, sampling=required)
    with pytest.raises(ValueError, match=message):
        admit(slots, params, 0, [[3]], empty, limits=2, sampling=sampling)
