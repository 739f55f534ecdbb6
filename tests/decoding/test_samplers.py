"""Samplers against float64 NumPy: kept tokens, distributions of draws, and golden numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.devices import on_devices
from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax.attention.dropout import key_words
from transformer_jax.decoding.samplers import Greedy, MinP, Sample, Temperature, TopK, TopP, Typical
from transformer_jax.kernels.dropout import head_words, keep
from transformer_jax.models.functional import dropout

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, V = 300, 61
INFINITE = float("inf")


def probabilities(logits: np.ndarray) -> np.ndarray:
    x = np.exp(oracle.double(logits) - logits.max())
    return x / x.sum()


def best_first(logits: np.ndarray) -> list[int]:
    """Sort ids by logit, best first; ties go to the lower id."""
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


def top_k(logits: np.ndarray, k: int) -> set[int]:
    return {i for i in best_first(logits)[:k] if logits[i] > -INFINITE}


def top_p(logits: np.ndarray, p: float) -> set[int]:
    """Add tokens, best first, until their sum reaches p; the token that crosses p is included."""
    kept, total, chances = set(), 0.0, probabilities(logits)
    for i in best_first(logits):
        if kept and total >= p:
            break
        if chances[i] > 0:
            kept.add(i)
        total += chances[i]
    return kept


def min_p(logits: np.ndarray, p: float) -> set[int]:
    chances = probabilities(logits)
    return {i for i in range(len(logits)) if chances[i] >= p * chances.max() and chances[i] > 0}


def typical(logits: np.ndarray, p: float) -> set[int]:
    """Add tokens, nearest to the entropy first, until their sum reaches p."""
    chances = probabilities(logits)
    possible = [i for i in range(len(logits)) if chances[i] > 0]
    entropy = -sum(chances[i] * math.log(chances[i]) for i in possible)
    far = {i: abs(-math.log(chances[i]) - entropy) for i in possible}
    kept, total = set(), 0.0
    for i in sorted(possible, key=lambda i: (far[i], i)):
        if kept and total >= p:
            break
        kept.add(i)
        total += chances[i]
    return kept


def everything(logits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(logits > -INFINITE).tolist())


def kept(processor, logits) -> list[set[int]]:
    """Return the ids that a processor keeps in each row, and check that no logit is NaN or +inf."""
    out = np.asarray(jax.jit(processor)(np.asarray(logits, np.float32)))
    assert out.shape == np.shape(logits) and out.dtype == np.float32
    assert not np.isnan(out).any() and (out < INFINITE).all()
    return [set(np.flatnonzero(row > -INFINITE).tolist()) for row in out]


def distributions(rng) -> np.ndarray:
    """Return flat and peaked logits, some with ties and some with excluded tokens."""
    scale = np.exp(rng.uniform(-2, 2.5, (ROWS, 1)))
    logits = (scale * rng.normal(size=(ROWS, V))).astype(np.float32)
    logits[:60] = np.round(logits[:60])
    logits[40:90, ::3] = -INFINITE
    return logits


@pytest.mark.slow_except("Typical(p=0.11)-")
@pytest.mark.parametrize(
    ("processor", "rule"),
    [(TopK(k), lambda x, k=k: top_k(x, k)) for k in (1, 7, 50)]
    + [(TopP(p), lambda x, p=p: top_p(x, p)) for p in (0.1, 0.5, 0.9, 0.99)]
    + [(MinP(p), lambda x, p=p: min_p(x, p)) for p in (0.01, 0.1, 0.7)]
    + [(Typical(p), lambda x, p=p: typical(x, p)) for p in (0.11, 0.51, 0.9)],
    ids=lambda x: str(x) if not callable(x) or hasattr(x, "__dataclass_fields__") else "",
)
def test_sampler_keeps_same_tokens_as_python_reference(rng, processor, rule: Callable):
    logits = distributions(rng)
    actual = kept(processor, logits)
    expected = [rule(row) for row in logits]
    assert all(expected) and len(actual) == ROWS
    assert sum(a != b for a, b in zip(actual, expected, strict=True)) == 0


@pytest.mark.parametrize("t", [0.3, 1.0, 2.5])
def test_temperature_scales_the_distribution(rng, t):
    logits = distributions(rng)
    actual = jax.jit(lambda x: jax.nn.softmax(Temperature(t)(x), axis=-1))(logits)
    expected = [probabilities(oracle.double(row) / t) for row in logits]
    assert_near(actual, expected, 1e-5)


TIED = [1.0, 3.0, 3.0, -2.0, 3.0]  # ids 1, 2, 4 are equal
SPREAD = [0.0, 9.0, -9.0, 4.0, 8.5]
LONELY = [-INFINITE, -INFINITE, 7.0, -INFINITE, -INFINITE]
EDGES = [
    (Temperature(0), TIED, {1}), (Temperature(0.0), LONELY, {2}),
    (Temperature(1e-8), SPREAD, {0, 1, 2, 3, 4}), (Temperature(1e-300), TIED, {1, 2, 4}),
    (Temperature(1e300), LONELY, {2}), (TopP(0), SPREAD, {1}), (TopP(1e-8), TIED, {1}),
    (TopP(0.34), TIED, {1, 2}), (TopP(1), SPREAD, {0, 1, 2, 3, 4}), (TopP(0.5), LONELY, {2}),
    (TopK(1), TIED, {1}), (TopK(2), TIED, {1, 2}), (TopK(99), SPREAD, {0, 1, 2, 3, 4}),
    (TopK(3), LONELY, {2}), (MinP(1), TIED, {1, 2, 4}), (MinP(0), LONELY, {2}),
    (Typical(0), TIED, {1}), (Typical(0.19), [math.log(p) for p in (0.4, 0.2, 0.2, 0.1, 0.1)], {1}),
    (Typical(1), SPREAD, {0, 1, 2, 3, 4}), (Typical(0.5), LONELY, {2}),
]  # fmt: skip


def repeated(logits: list[float]) -> jax.Array:
    """Repeat the same logits in `ROWS` rows, with all other ids excluded."""
    row = np.full(V, -INFINITE, np.float32)
    row[: len(logits)] = logits
    return jnp.broadcast_to(jnp.asarray(row), (ROWS, V))


@pytest.mark.slow_except(
    "MinP(p=0)-[-inf, -inf, 7.0, -inf, -inf]-{2}",
    "Temperature(t=0)-[1.0, 3.0, 3.0, -2.0, 3.0]-{1}",
    "TopP(p=1)-[0.0, 9.0, -9.0, 4.0, 8.5]-{0, 1, 2, 3, 4}",
    "Typical(p=1)-[0.0, 9.0, -9.0, 4.0, 8.5]-{0, 1, 2, 3, 4}",
)
@pytest.mark.parametrize(("processor", "logits", "ids"), EDGES, ids=str)
def test_sampler_edge_cases_keep_correct_tokens(processor, logits, ids):
    if processor == Temperature(1e-300):
        out = np.asarray(processor(jnp.asarray(logits)[None]))[0]
        assert not np.isnan(out).any()
        assert set(np.flatnonzero(out == out.max()).tolist()) == ids
        assert out[0] < -1e30
        return
    assert kept(processor, [logits])[0] == ids


@pytest.mark.slow
def test_tiny_temperature_selects_most_likely_token():
    sampler = Sample(Temperature(1e-8))
    for logits, ids in ((SPREAD, {1}), (TIED, {1, 2, 4}), (LONELY, {2})):
        assert set(sampler(jax.random.key(0), repeated(logits)).tolist()) == ids


def test_top_p_of_one_keeps_underflowing_tokens():
    logits = np.zeros((1, 50_021), np.float32)
    logits[0, 1:] = -14.0
    assert kept(TopP(1.0), logits)[0] == everything(logits[0])
    assert kept(TopP(1), -logits)[0] == everything(logits[0])


NUMBERS = -1, -1e-9, math.nan, INFINITE, -INFINITE, "1", None


@pytest.mark.parametrize(("kinds", "bad", "rule"), [
    *(((Temperature, TopP, MinP, Typical), bad, "must be") for bad in NUMBERS),
    *(((TopK,), bad, "k is") for bad in (*NUMBERS, 0, -3, 2.0, True)),
    ((TopP, MinP, Typical), 1.5, r"p is 1\.5"), ((Sample,), TopK, "processor is"),
])  # fmt: skip
def test_invalid_sampler_settings_are_rejected(kinds, bad, rule):
    for kind in kinds:
        with pytest.raises(ValueError, match=rule):
            kind(bad)


@pytest.mark.slow_except("Greedy()", "MinP(p=0.1)", "TopK(k=2)")
@pytest.mark.parametrize(
    "function",
    [Greedy(), Sample(), Sample(Temperature(0), TopK(2), TopP(0.9)), MinP(0.1), TopK(2)],
    ids=str,
)
def test_rows_without_finite_maximum_are_rejected_or_yield_minus_one(function):
    bad = [[math.nan, 1.0, 2.0], [-INFINITE] * 3, [INFINITE, 0.0, 1.0]]
    good = [0.0, 1.0, 2.0]
    draws = isinstance(function, Greedy | Sample)
    for row in bad:
        logits = jnp.asarray([good, row])
        with pytest.raises(ValueError, match=r"row \(1,\)"):
            function(jax.random.key(0), logits) if draws else function(logits)
    if draws:
        tokens = jax.jit(function)(jax.random.key(0), jnp.asarray([good, *bad])).tolist()
        assert tokens[0] in (0, 1, 2) and tokens[1:] == [-1, -1, -1]


@pytest.mark.slow
@pytest.mark.long_except("50257", "64")
@pytest.mark.parametrize("vocab", [7, 64, 128, 1009, 50_257])
def test_row_with_a_nan_yields_minus_one_at_every_length(vocab):
    """XLA's maximum on a CPU loses a NaN at some of these lengths."""
    logits = np.zeros((3, vocab), np.float32)
    logits[1, 5] = np.nan
    samplers = (Greedy(), Sample(), Sample(TopP(0.9)), Sample(TopK(3)))
    draws = [*samplers, *(jax.vmap(sampler, in_axes=(None, 0)) for sampler in samplers)]

    @jax.jit
    def drawn(key, logits):
        keys = jax.random.split(key, len(draws))
        return [draw(keys[n], logits) for n, draw in enumerate(draws)]

    for tokens in drawn(jax.random.key(0), logits):
        assert tokens[1] == -1 and tokens[0] >= 0 and tokens[2] >= 0


def test_processor_that_excludes_all_tokens_is_rejected():
    sampler = Sample(lambda logits: jnp.full_like(logits, -jnp.inf))
    with pytest.raises(ValueError, match="must be finite"):
        sampler(jax.random.key(0), jnp.zeros((2, 3)))
    assert jax.jit(sampler)(jax.random.key(0), jnp.zeros((2, 3))).tolist() == [-1, -1]


def test_greedy_and_zero_temperature_match_argmax(rng):
    logits = distributions(rng)
    expected = np.array([best_first(row)[0] for row in logits], np.int32)
    assert_same_bits(jax.jit(Greedy())(None, logits), expected)
    sampler = Sample(Temperature(0))
    assert_same_bits(jax.jit(sampler)(jax.random.key(1), logits), expected)


DRAWS = 20_000
SAMPLERS = {
    "plain": Sample(), "warm": Sample(Temperature(1.7)), "top-k": Sample(TopK(5)),
    "top-p": Sample(Temperature(0.8), TopP(0.9)), "min-p": Sample(MinP(0.1)),
    "typical": Sample(Typical(0.6)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_follow_the_distribution(rng, name):
    logits = rng.normal(size=11).astype(np.float32)
    x = oracle.double(logits)
    for processor in SAMPLERS[name].processors:
        if isinstance(processor, Temperature):
            x = x / processor.t
            continue
        rule = {TopK: top_k, TopP: top_p, MinP: min_p, Typical: typical}[type(processor)]
        ids = rule(x, processor.k if isinstance(processor, TopK) else processor.p)
        x = np.where([i in ids for i in range(len(x))], x, -INFINITE)
    expected = probabilities(x)
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, 11))
    tokens = np.asarray(jax.jit(SAMPLERS[name])(jax.random.key(3), rows))
    assert tokens.shape == (DRAWS,) and tokens.dtype == np.int32
    count = np.bincount(tokens, minlength=11)
    assert (count[expected == 0] == 0).all()
    possible = expected > 0
    statistic = ((count - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible])).sum()
    assert oracle.chi_squared_level(statistic, possible.sum() - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.long_except("-16.0-0.0")
@pytest.mark.parametrize(("rare", "deviation"), [(-16.0, 0.0), (-17.0, 0.2)])
def test_rare_tokens_are_sampled_at_correct_frequency(rng, rare, deviation):
    """One token is almost certain, 262,143 are rare; a correct sampler fails 1 time in 15,000."""
    vocab, draws = 262_144, 6_000
    logits = rng.normal(rare, deviation, vocab).astype(np.float32)
    logits[7] = 0.0
    draw = jax.jit(jax.vmap(Sample(), (0, None)))
    keys, drawn = jax.random.split(jax.random.key(17), (6, draws // 6)), 0
    drawn = sum(int((draw(some, jnp.asarray(logits)) != 7).sum()) for some in keys)
    share = 1 - probabilities(logits)[7]
    assert abs(drawn - draws * share) < 4 * math.sqrt(draws * share * (1 - share))


@pytest.mark.long_except("1", "67")
@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2, 9, 67])
def test_exactly_the_allowed_tokens_are_sampled(vocab):
    rows = jnp.zeros((20 * vocab, vocab)).at[:, vocab // 2].set(-jnp.inf if vocab > 1 else 0.0)
    drawn = set(np.asarray(Sample()(jax.random.key(2), rows)).tolist())
    allowed = set(range(vocab)) - ({vocab // 2} if vocab > 1 else set())
    assert drawn <= allowed and len(drawn) >= 0.99 * len(allowed)


IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_samples_under_vmap_depend_only_on_their_own_key(rng, implementation, raw):
    """In a vmap over keys of each implementation; different keys give different draws."""
    logits = jnp.asarray(rng.normal(size=(5, V)), jnp.float32)

    def keys() -> jax.Array:
        keys = jax.random.split(jax.random.key(3, impl=implementation), 5)
        return jax.random.key_data(keys) if raw else keys

    draw = jax.jit(jax.vmap(Sample(TopK(40))))
    drawn = draw(keys(), logits).tolist()
    alone = [int(draw(keys()[i : i + 1], logits[i : i + 1])[0]) for i in range(5)]
    assert drawn == alone
    same = jnp.broadcast_to(logits[0], logits.shape)
    assert len(set(draw(keys(), same).tolist())) > 1


TINY = [1e-39, 3e-39, -1e-39, -INFINITE]
FAR = [3e38, -3e38, 2.9e38, -INFINITE]
NEAR = [1.0, 2.0, 2.0, -1e30]


@pytest.mark.slow_except(
    "1.7e+308-[3e+38, -3e+38, 2.9e+38, -inf]", "1e+300-[3e+38, -3e+38, 2.9e+38, -inf]",
    "1e+38-[3e+38, -3e+38, 2.9e+38, -inf]", "1e+39-[3e+38, -3e+38, 2.9e+38, -inf]",
)  # fmt: skip
@pytest.mark.parametrize(
    ("t", "logits"),
    [(t, FAR) for t in (1e36, 1e38, 3e38, 1e39, 1e300, 1.7e308)]
    + [(t, TINY) for t in (1e-37, 1e-38, 1e-39, 5e-324, 1.0)]
    + [(t, NEAR) for t in (1e-13, 1e-38, 1e-300, 1e20, 1e300)]
    + [(1e-38, [3e-38, 2e-38, 0.0, -3e38]), (1e-40, [1e-40, -1.0, 2e-40, 0.0])]
    + [(1e-13, [1e-13, 2e-13, -1e-12, 0.0]), (2e-12, [1e-12, 0.9, -1.0, 0.5])],
    ids=str,
)
def test_sampling_with_extreme_temperatures_and_logits_matches_float64(t, logits):
    x = np.asarray(logits, np.float32)
    with np.errstate(over="ignore"):
        expected = np.exp((oracle.double(x) - oracle.double(x).max()) / t)
    expected /= expected.sum()
    for call in (Temperature(t), jax.jit(Temperature(t))):
        assert_near(jax.nn.softmax(call(jnp.asarray(x))), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1e-30, 1e-6, 0.3, 0.999, 1 - 1e-5, 1 - 1e-7, 1 - 1e-12])
@pytest.mark.parametrize("kind", [TopP, Typical])
def test_top_p_and_typical_sampling_are_exact_near_zero_and_one(rng, p, kind):
    """5,003 tokens have probabilities from almost 1 down to 1e-20; the reference is float64."""
    logits = np.sort(rng.normal(0, 9, 5003).astype(np.float32))[::-1].copy()
    log_q = oracle.double(logits) - oracle.double(logits).max()
    q = np.exp(log_q) / np.exp(log_q).sum()
    order = np.arange(5003)
    if kind is Typical:
        entropy = -(q * np.log(q)).sum()
        order = np.argsort(np.abs(-np.log(q) - entropy), kind="stable")
    suffix = np.cumsum(q[order][::-1])[::-1]  # sums from each token to the last one
    count = len(kept(kind(p), logits[None])[0])
    assert count == 1 or suffix[count - 1] > (1 - p) * (1 - 1e-4) - 1e-13 * (kind is Typical)
    assert count == 5003 or suffix[count] <= (1 - p) * (1 + 1e-4) + (p < 0.5) * 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 9.0])
def test_typical_sampling_matches_entropy_for_large_vocabulary(rng, scale):
    """No excluded token is nearer than a kept one, even if all are almost equally near."""
    logits = rng.normal(0, scale, 50_021).astype(np.float16)
    below = oracle.double(logits) - oracle.double(logits).max()
    log_q = below - np.log(np.exp(below).sum())
    far = np.abs(-log_q + (np.exp(log_q) * log_q).sum())
    for p in (1e-9, 0.1, 0.7):
        stays = np.isfinite(np.asarray(Typical(p)(jnp.asarray(logits))))
        assert 0 < stays.sum() < len(logits)
        assert far[stays].max() <= far[~stays].min() + 1e-7 * -below.min()


def test_min_p_compares_tiny_probabilities_correctly():
    logits = np.asarray([[0.0, -90.0, -95.0, -200.0, 3e38 * -1]], np.float32)
    for p, count in ((1e-40, 2), (1e-42, 3), (1e-300, 4), (1.0, 1), (0.0, 5)):
        assert len(kept(MinP(p), logits)[0]) == count


@pytest.mark.slow
def test_processors_apply_from_left_to_right():
    logits = repeated([math.log(p) for p in (0.5, 0.3, 0.2)])
    # Flattened first, the two best are needed to reach 0.55.
    drawn = Sample(Temperature(4.0), TopP(0.55))(jax.random.key(0), logits)
    assert set(drawn.tolist()) == {0, 1}
    drawn = Sample(TopP(0.45), Temperature(4.0))(jax.random.key(0), logits)
    assert set(drawn.tolist()) == {0}


@pytest.mark.slow
def test_compiled_samples_match_eager_samples(rng):
    logits = jnp.asarray(distributions(rng)).astype(jnp.bfloat16)
    sampler = Sample(Temperature(0.8), TopK(19), TopP(0.9), MinP(0.01))
    drawn = sampler(jax.random.key(5), logits)
    assert_same_bits(jax.jit(sampler)(jax.random.key(5), logits), drawn)


def test_low_precision_logits_are_processed_in_float32(rng):
    low = distributions(rng).astype(jnp.bfloat16)
    processors = Temperature(0.8), TopK(19), TopP(0.9), MinP(0.01), Typical(0.7)

    @jax.jit
    def made_from(logits):
        return [
            (processor(logits), Sample(processor)(jax.random.key(n), logits))
            for n, processor in enumerate(processors)
        ]

    for of_low, of_float32 in zip(made_from(low), made_from(low.astype(np.float32)), strict=True):
        assert of_low[0].dtype == np.float32
        jax.tree.map(assert_same_bits, of_low, of_float32)


def test_sampled_row_does_not_depend_on_other_rows(rng):
    logits = distributions(rng)
    sampler = jax.jit(Sample(Temperature(0.9)))
    drawn = sampler(jax.random.key(5), logits)
    flipped = logits[::-1].copy()
    flipped[150] = logits[150]
    others = sampler(jax.random.key(5), flipped)
    assert others[150] == drawn[150]
    assert others.tolist() != drawn.tolist()


def test_equal_samplers_share_a_trace():
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def draw(sampler, logits):
        return sampler(jax.random.key(0), logits)

    compiled = jax.jit(draw, static_argnums=0)
    for _ in range(2):
        compiled(Sample(TopK(3), TopP(0.9)), jnp.zeros((5,)))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        compiled(Sample(TopK(3), TopP(0.8)), jnp.zeros((5,)))
    assert Greedy() == Greedy() and hash(TopP(0.5)) == hash(TopP(0.5))
    assert Sample(TopK(3)) != Sample(TopK(2)) != Sample()


# Reproducibility of random numbers

SEED = 20_261_120


def pinned() -> jax.Array:
    return jax.random.key(SEED, impl="threefry2x32")


def made_from(key: jax.Array, logits: jax.Array) -> dict[str, jax.Array]:
    """Draw as training and decoding do, with rows first, which may be sharded over devices."""
    keys = jax.random.split(key, 3)
    return {
        "init": jax.random.normal(keys[0], (len(logits), 17)),
        "dropout": dropout(logits, 0.3, keys[1]),
        "sampling": Sample(Temperature(0.7), TopP(0.9))(keys[2], logits),
    }


def attention_keeps(key: jax.Array, heads: int) -> jax.Array:  # bool[heads, 2, 4]
    a, b = (words[0, :, None, None] for words in head_words(key_words(key), 1, heads))
    q, k = jnp.arange(2, dtype=jnp.uint32), jnp.arange(4, dtype=jnp.uint32)
    return keep(a, b, q[None, :, None], k[None, None], 0.4)


def all_made_from(key: jax.Array, logits: jax.Array) -> dict[str, jax.Array]:
    attention = attention_keeps(jax.random.fold_in(key, 3), len(logits))
    return {**made_from(key, logits), "attention dropout": attention}


@cache
def compiled_here() -> dict[str, jax.Array]:
    return jax.jit(all_made_from)(pinned(), LOGITS)


def as_bits(results: dict[str, jax.Array]) -> dict[str, list]:
    return {
        name: np.ascontiguousarray(x).view(np.uint8).ravel().tolist() for name, x in results.items()
    }


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
def test_compiled_random_numbers_match_eager_random_numbers():
    for name, value in made_from(pinned(), jnp.asarray(LOGITS)).items():
        assert_same_bits(compiled_here()[name], value, name)


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
def test_sampling_on_eight_devices_matches_one():
    code = """
import json
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.decoding.test_samplers import LOGITS, all_made_from, as_bits, pinned
assert len(jax.devices()) == 8
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
placed = jax.device_put(LOGITS, rows)
sharded = jax.jit(all_made_from, out_shardings=rows)(pinned(), placed)
assert all(x.addressable_shards[3].data.shape[0] == 1 for x in sharded.values())
print(json.dumps(as_bits(sharded)))
"""
    sharded, here = on_devices(8, "-c", code), as_bits(compiled_here())
    assert all(here.values()) and sharded.keys() == here.keys()
    for name, value in here.items():
        assert sharded[name] == value, name


LOGITS = np.linspace(-1.0, 1.0, 11, dtype=np.float32)[None].repeat(8, 0)
GOLDEN: dict[str, tuple[Callable[[jax.Array], jax.Array], list]] = {
    "split": (lambda key: jax.random.key_data(jax.random.split(key)).ravel(),
              [348355675, 2451874181, 2577628044, 910253177]),
    "fold_in": (lambda key: jax.random.key_data(jax.random.fold_in(key, 7)),
                [2318640504, 38374397]),
    "bits": (lambda key: jax.random.bits(key, (3,)), [2263342558, 2950834165, 4173774322]),
    "uniform": (lambda key: jax.random.uniform(key, (3,)), [0.5269754, 0.6870445, 0.97178245]),
    "normal": (lambda key: jax.random.normal(key, (3,)), [0.06766896, 0.48749033, 1.9076607]),
    "bernoulli": (lambda key: jax.random.bernoulli(key, 0.3, (8,)),
                  [False, False, False, False, True, True, False, False]),
    "randint": (lambda key: jax.random.randint(key, (6,), 0, 1000), [417, 135, 315, 24, 595, 6]),
    "permutation": (lambda key: jax.random.permutation(key, 7), [6, 4, 1, 2, 5, 3, 0]),
    "sample": (lambda key: Sample()(key, jnp.asarray(LOGITS)), [3, 7, 10, 9, 3, 6, 9, 10]),
    "filtered sample": (lambda key: Sample(Temperature(0.7), TopP(0.8))(key, jnp.asarray(LOGITS)),
                        [10, 7, 10, 9, 9, 6, 9, 10]),
    "dropout": (lambda key: dropout(jnp.ones(8), 0.5, key), [0, 0, 0, 0, 2, 2, 2, 0]),
    "attention dropout": (lambda key: attention_keeps(key, 2).ravel().astype(int),
                          [1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0]),
}  # fmt: skip


@cache
def golden() -> dict[str, jax.Array]:
    with jax.threefry_partitionable(True):
        keys = {name: pinned() for name in GOLDEN}
        return jax.jit(lambda keys: {name: GOLDEN[name][0](keys[name]) for name in GOLDEN})(keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_fixed_key_produces_golden_numbers(name):
    _, expected = GOLDEN[name]
    actual = np.asarray(golden()[name])
    if actual.dtype == np.float32:
        assert_near(actual, expected, FORWARD_F32)
    else:
        assert actual.tolist() == expected


def test_distribution_matches_softmax_of_processed_logits(rng):
    """`Sample` applies its processors in order; `Greedy` keeps only the best token."""
    logits = distributions(rng)
    sampler = Sample(TopK(7), Temperature(0.5))
    actual = jax.jit(lambda x: jax.nn.softmax(sampler.distribution(x), axis=-1))(logits)
    expected = np.zeros_like(logits)
    for row, chances in zip(logits, expected, strict=True):
        ids = sorted(top_k(row, 7))
        chances[ids] = probabilities(oracle.double(row[ids]) / 0.5)
    assert_near(actual, expected, 1e-5)
    assert kept(Greedy().distribution, logits) == [{best_first(row)[0]} for row in logits]


@pytest.mark.slow_except("sampler0", "sampler1")
@pytest.mark.parametrize("sampler", [Greedy(), Sample(), Sample(lambda x: jnp.nan_to_num(x))])
def test_distribution_without_a_finite_maximum_is_nan(sampler):
    rows = jnp.asarray([[1.0, math.nan], [1.0, INFINITE], [-INFINITE, -INFINITE], [1.0, 2.0]])
    chances = jax.nn.softmax(jax.jit(sampler.distribution)(rows), axis=-1)
    assert np.isnan(chances).any(axis=1).tolist() == [True, True, True, False]


@pytest.mark.slow
def test_greedy_decoding_works_on_mesh_with_explicit_axes():
    """Rows or the vocabulary are sharded; called eagerly, outside any compiled program."""
    code = """
import json, jax, numpy as np
from transformer_jax.decoding.samplers import Greedy
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
logits = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
def best(*split):
    placed = jax.device_put(logits, jax.sharding.NamedSharding(mesh, jax.P(*split)))
    return np.array_equal(Greedy()(None, placed), logits.argmax(-1))
print(json.dumps([best("data"), best(None, "data")]))
"""
    assert on_devices(2, "-c", code) == [True, True]


@pytest.mark.slow
def test_greedy_ties_select_first_token(rng):
    logits = rng.integers(0, 5, size=(50, 300)).astype(np.float32)
    np.testing.assert_array_equal(Greedy()(None, logits), logits.argmax(-1))
    np.testing.assert_array_equal(jax.jit(lambda x: Greedy()(None, x))(logits), logits.argmax(-1))
