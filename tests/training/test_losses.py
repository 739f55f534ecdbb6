"""Losses against float64 NumPy: masks, weights, smoothing, extremes, and chunks of the logits."""

from __future__ import annotations

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits
from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D, V = 3, 7, 5, 13
IGNORE = -100
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3},
]


def expected_loss(logits, labels, weights=None, *, label_smoothing=0.0, z_loss=0.0):
    """Return the mean, total weight, and gradients by logits and weights, one token at a time."""
    logits, labels = oracle.double(logits), np.asarray(labels)
    weights = np.ones(labels.shape) if weights is None else oracle.double(weights)
    vocab = logits.shape[-1]
    losses, slopes = np.zeros(labels.shape), np.zeros(logits.shape)
    counted = np.where(labels == IGNORE, 0.0, weights)
    for at in np.ndindex(*labels.shape):
        if counted[at] == 0:
            continue
        x = logits[at]
        lse = x.max() + math.log(np.exp(x - x.max()).sum())
        target = np.full(vocab, label_smoothing / vocab)
        target[labels[at]] += 1 - label_smoothing
        likely = target > 0
        losses[at] = lse - target[likely] @ x[likely] + z_loss * lse**2
        slopes[at] = np.exp(x - lse) * (1 + 2 * z_loss * lse) - target
    total = counted.sum()
    mean = (counted * losses).sum() / (total or 1.0)
    by_logits = counted[..., None] * slopes / (total or 1.0)
    by_weights = np.where(counted == 0, 0, (losses - mean) / (total or 1.0))
    return mean, total, by_logits, by_weights


def batch(rng, *, scale: float = 3.0):
    logits = jnp.asarray(scale * rng.normal(size=(B, T, V)), jnp.float32)
    labels = rng.integers(0, V, (B, T)).astype(np.int32)
    labels[0, 3:] = IGNORE
    labels[2, 0] = IGNORE
    weights = jnp.asarray(rng.uniform(0.1, 2.0, (B, T)), jnp.float32)
    return logits, jnp.asarray(labels), weights


compiled = jax.jit(cross_entropy, static_argnames=("ignore_label", "label_smoothing", "z_loss"))


@partial(jax.jit, static_argnames=("label_smoothing", "z_loss"))
def differentiate(logits, labels, weights, **options):
    def loss(logits, weights):
        return cross_entropy(logits, labels, weights=weights, **options)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(logits, weights)


def loss_and_gradient(logits, labels, weights=None, **options):
    weights = jnp.ones(labels.shape) if weights is None else weights
    (loss, weight), (gradient, _) = differentiate(logits, labels, weights, **options)
    assert loss.dtype == weight.dtype == jnp.float32 and loss.shape == weight.shape == ()
    assert gradient.dtype == logits.dtype
    return loss, weight, gradient


@pytest.mark.slow_except("False-{'label_smoothing': 0.1}", "False-{'z_loss': 0.01}")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_match_formula(rng, options, weighted):
    logits, labels, weights = batch(rng)
    mean, total, by_logits, by_weights = expected_loss(
        logits, labels, weights if weighted else None, **options
    )
    loss, weight, gradient = loss_and_gradient(
        logits, labels, weights if weighted else None, **options
    )
    assert_near(loss, mean, FORWARD_F32)
    assert_near(weight, total, FORWARD_F32)
    assert_near(gradient, by_logits, GRADIENT_F32)
    if weighted:
        _, (_, actual) = differentiate(logits, labels, weights, **options)
        assert_near(actual, by_weights, GRADIENT_F32)


@pytest.mark.slow_except("shape0", "shape2")
@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 3)])
def test_loss_supports_any_number_of_leading_axes(rng, shape):
    logits = jnp.asarray(rng.normal(size=(*shape, V)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, V, shape), jnp.int32)
    mean, total, *_ = expected_loss(logits, labels)
    loss, weight = compiled(logits, labels)
    assert_near(loss, mean, FORWARD_F32)
    assert weight == total


EXTREME = [[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [-1e4, -1e4, -1e4]], [0, 0, 2]


@pytest.mark.parametrize("case", ["bfloat16", "all near 1e4", "all near -1e4", "apart", "excluded"])
def test_extreme_logits_match_formula(rng, case):
    """Low precision is summed in float32; excluded tokens are never labels."""
    logits, labels, _ = batch(rng)
    if case == "bfloat16":
        logits = logits.astype(jnp.bfloat16)
    elif case.startswith("all near"):
        # 1e4 + x is rounded to 2^-10, which is exact for multiples of it
        level = float(case.split()[-1])
        logits = jnp.asarray(level + np.round(oracle.double(logits) * 1024) / 1024, jnp.float32)
    elif case == "apart":
        logits, labels = map(jnp.asarray, EXTREME)
    else:
        token = jnp.arange(V)[None, None]
        off = (token != labels[..., None]) & (token % 3 == 0)
        logits = jnp.where(off, -jnp.inf, logits)
    mean, _, by_logits, _ = expected_loss(logits, labels)
    loss, _, gradient = loss_and_gradient(logits, labels)
    assert case != "apart" or mean > 6e3
    assert_near(loss, mean, FORWARD_F32)
    assert_near(gradient, by_logits, 2.0**-8 if case == "bfloat16" else GRADIENT_F32)


@pytest.mark.slow_except("{'label_smoothing': 0.3, 'z_loss': 0.001}")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fully_ignored_batch_has_zero_loss_and_gradient(rng, options):
    logits, _, _ = batch(rng)
    nothing = jnp.full((B, T), IGNORE)
    for labels, weights in ((nothing, None), (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T)))):
        loss, weight, gradient = loss_and_gradient(logits, labels, weights, **options)
        assert loss == 0 and weight == 0
        assert_same_bits(gradient, np.zeros((B, T, V), np.float32))


@pytest.mark.slow
def test_compiled_loss_matches_uncompiled(rng):
    logits, labels, weights = batch(rng)
    for got, want in zip(
        cross_entropy(logits, labels, weights=weights),
        compiled(logits, labels, weights=weights),
        strict=True,
    ):
        assert_near(got, want, FORWARD_F32)


@pytest.mark.slow
def test_empty_batch_has_zero_loss():
    assert cross_entropy(jnp.zeros((0, V)), jnp.zeros(0, jnp.int32)) == (0.0, 0.0)


@pytest.mark.slow_except("-inf", "inf")
@pytest.mark.parametrize("nonfinite", [np.nan, np.inf, -np.inf])
def test_ignored_logits_do_not_affect_loss(rng, nonfinite):
    logits, labels, weights = batch(rng)
    weights = weights.at[1, 2].set(0.0)
    idle = (labels == IGNORE) | (weights == 0)
    dirty = jnp.where(idle[..., None], nonfinite, logits)
    options = dict(weights=weights, label_smoothing=0.1, z_loss=1e-3)
    for clean, actual in zip(
        loss_and_gradient(logits, labels, **options),
        loss_and_gradient(dirty, labels, **options),
        strict=True,
    ):
        assert_same_bits(actual, clean)


def test_smoothing_over_excluded_token_is_infinite_but_never_nan():
    logits, labels = jnp.asarray([[1.0, -jnp.inf, 0.0]]), jnp.asarray([0])
    loss, _, gradient = loss_and_gradient(logits, labels, label_smoothing=0.1)
    assert loss == jnp.inf
    assert np.isfinite(gradient).all()
    loss, _, gradient = loss_and_gradient(logits, jnp.asarray([1]))
    assert loss == jnp.inf
    assert np.isfinite(gradient).all()


def test_label_smoothing_matches_closed_form_and_excludes_ignored_tokens(rng):
    logits, labels, _ = batch(rng)
    counted = np.asarray(labels) != IGNORE
    x = oracle.double(logits)[counted]
    log_p = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    plain = -log_p[np.arange(len(x)), np.asarray(labels)[counted]].mean()
    uniform = -log_p.mean()
    loss, weight = compiled(logits, labels, label_smoothing=0.2)
    assert weight == counted.sum()
    assert_near(loss, 0.8 * plain + 0.2 * uniform, FORWARD_F32)


def test_single_token_and_uniform_logits_have_expected_loss():
    assert_near(compiled(jnp.zeros((1, V)), jnp.asarray([4]))[0], math.log(V), FORWARD_F32)
    assert compiled(jnp.full((3, 1), 7.0), jnp.zeros(3, jnp.int32))[0] == 0  # V = 1


def test_losses_of_weighted_parts_sum_to_whole(rng):
    logits, labels, weights = batch(rng)
    whole, total = compiled(logits, labels, weights=weights)
    parts = [compiled(logits[b], labels[b], weights=weights[b]) for b in range(B)]
    assert_near(sum(float(loss * weight) for loss, weight in parts) / total, whole, FORWARD_F32)
    assert_near(sum(float(weight) for _, weight in parts), total, FORWARD_F32)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_only_relative_loss_weights_matter(rng, unit):
    logits, labels, weights = batch(rng)
    loss, total = compiled(logits, labels, weights=weights)
    scaled, scaled_total = compiled(logits, labels, weights=unit * weights)
    assert_near(scaled, loss, FORWARD_F32)
    assert_near(scaled_total, unit * float(total), FORWARD_F32)


def test_ignored_label_may_be_valid_token(rng):
    logits = jnp.asarray(rng.normal(size=(5, V)), jnp.float32)
    labels = jnp.asarray([0, 3, 0, 1, 2])
    mean, total, *_ = expected_loss(logits, np.where(labels == 0, IGNORE, labels))
    loss, weight = compiled(logits, labels, ignore_label=0)
    assert_near(loss, mean, FORWARD_F32)
    assert weight == total == 3


def test_loss_hessian_matches_softmax_formula(rng):
    x = rng.normal(size=(1, V))
    p = np.exp(x[0]) / np.exp(x[0]).sum()
    hessian = jax.jit(jax.hessian(lambda x: cross_entropy(x, jnp.asarray([3]))[0]))(
        jnp.asarray(x, jnp.float32)
    )
    assert_near(hessian[0, :, 0], np.diag(p) - np.outer(p, p), GRADIENT_F32)


WRONG = {
    "vocabulary": np.array([[0, V], [1, 2]], np.int32),
    "negative": np.array([[0, -1], [1, 2]], np.int32),
    "beyond int32": np.array([[0, 2**32 + 1], [1, 2]], np.int64),
}


@pytest.mark.parametrize("name", WRONG)
def test_label_outside_vocabulary_raises_error(name):
    labels = WRONG[name]
    message = rf"label {labels[0, 1]} at \(0, 1\) is outside the vocabulary of {V}"
    with pytest.raises(ValueError, match=message):
        cross_entropy(jnp.zeros((2, 2, V)), labels)
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(jnp.zeros((2, 2, D)), jnp.zeros((V, D)), labels, chunk_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("label", [V, -1, 2**31 - 1])
def test_traced_label_outside_vocabulary_makes_loss_nan(label):
    logits, labels = jnp.zeros((3, V)), jnp.asarray([0, label, 2])
    (loss, _), gradient = jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))(logits, labels)
    assert np.isnan(loss)
    assert np.isnan(gradient[1]).all()
    assert np.isfinite(gradient[jnp.asarray([0, 2])]).all()
    idle = compiled(logits, labels, weights=jnp.asarray([1.0, 0.0, 1.0]))
    assert_near(idle[0], math.log(V), FORWARD_F32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=np.zeros((2, 4), np.int32)), r"\(2, 3, 13\) and labels \(2, 4\)"),
        (dict(labels=np.zeros((2, 3), np.float32)), "labels are float32"),
        (dict(weights=np.ones(3, np.float32)), r"weights have shape \(3,\)"),
        (dict(label_smoothing=1.0), "label_smoothing is 1.0"),
        (dict(label_smoothing=math.nan), "label_smoothing is nan"),
        (dict(z_loss=-1e-4), "z_loss is -0.0001"),
    ],
)
def test_invalid_arguments_raise_error(change, message):
    arguments = dict(logits=jnp.zeros((2, 3, V)), labels=jnp.zeros((2, 3), jnp.int32)) | change
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments)


# Chunks


compiled_chunks = jax.jit(chunked_cross_entropy, static_argnames="chunk_size")


def head(rng):
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=V), jnp.float32)
    return hidden, table, bias


def expected_head(hidden, table, bias, labels, weights, softcap, **options):
    """Return the mean, total, and gradients by hidden states, table, bias and weights."""
    hidden, table = oracle.double(hidden), oracle.double(table)
    raw = hidden @ table.T + (0 if bias is None else oracle.double(bias))
    logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
    mean, total, slope, by_weights = expected_loss(logits, labels, weights, **options)
    if softcap is not None:
        slope = slope * (1 - np.tanh(raw / softcap) ** 2)
    by_table = np.einsum("btv,btd->vd", slope, hidden)
    return mean, total, (slope @ table, by_table, slope.sum(axis=(0, 1)), by_weights)


@partial(jax.jit, static_argnames=("chunk_size", "softcap", "label_smoothing", "z_loss"))
def differentiate_chunks(hidden, table, bias, weights, labels, **options):
    def loss(hidden, table, bias, weights):
        return chunked_cross_entropy(
            hidden, table, labels, logit_bias=bias, weights=weights, **options
        )

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(
        hidden, table, bias, weights
    )


@pytest.mark.slow_except("100")
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunked_loss_and_gradients_match_full_loss(rng, chunk_size):
    hidden, table, bias = head(rng)
    _, labels, weights = batch(rng)
    options = dict(softcap=3.0, label_smoothing=0.1, z_loss=1e-2)
    mean, total, gradients = expected_head(hidden, table, bias, labels, weights, **options)
    (loss, weight), actual = differentiate_chunks(
        hidden, table, bias, weights, labels, chunk_size=chunk_size, **options
    )
    assert_near(loss, mean, FORWARD_F32)
    assert_near(weight, total, FORWARD_F32)
    for got, want, name in zip(actual, gradients, ("hidden", "table", "bias", "w"), strict=True):
        assert_near(got, want, GRADIENT_F32, name)


def test_chunked_loss_is_same_without_gradient(rng):
    hidden, table, _ = head(rng)
    _, labels, _ = batch(rng)
    mean, total, _ = expected_head(hidden, table, None, labels, None, None)
    loss, weight = compiled_chunks(hidden, table, labels, chunk_size=3)
    assert_near(loss, mean, FORWARD_F32)
    assert weight == total


def test_chunked_loss_gradients_scale_with_cotangent(rng):
    hidden, table, _ = head(rng)
    _, labels, _ = batch(rng)

    def loss(hidden, table):
        return 3.0 * chunked_cross_entropy(hidden, table, labels, chunk_size=2)[0]

    _, _, gradients = expected_head(hidden, table, None, labels, None, None)
    actual = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, table)
    for got, want in zip(actual, gradients[:2], strict=True):
        assert_near(got, 3.0 * want, GRADIENT_F32)


def test_low_precision_chunks_keep_argument_dtypes(rng):
    hidden, table, bias = head(rng)
    _, labels, weights = batch(rng)
    low = hidden.astype(jnp.bfloat16)
    mean, _, gradients = expected_head(low, table.astype(jnp.bfloat16), bias, labels, weights, None)
    (loss, _), actual = differentiate_chunks(low, table, bias, weights, labels, chunk_size=2)
    assert [x.dtype for x in actual] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]
    assert_near(loss, mean, FORWARD_F32)
    for got, want in zip(actual[:2], gradients[:2], strict=True):
        assert_near(got, want, 2.0**-7)


def test_ignored_hidden_states_do_not_affect_loss(rng):
    hidden, table, bias = head(rng)
    _, labels, weights = batch(rng)
    weights = weights.at[1, 2].set(0.0)
    idle = (labels == IGNORE) | (weights == 0)
    dirty = jnp.where(idle[..., None], jnp.nan, hidden)
    results = [
        differentiate_chunks(x, table, bias, weights, labels, chunk_size=3, softcap=3.0)
        for x in (hidden, dirty)
    ]
    chex.assert_tree_all_finite(results[0])
    chex.assert_trees_all_equal(*results, strict=True)


@pytest.mark.slow
def test_fully_ignored_chunks_have_zero_loss(rng):
    hidden, table, bias = head(rng)
    _, _, weights = batch(rng)
    labels = jnp.full((B, T), IGNORE)
    (loss, weight), gradients = differentiate_chunks(
        hidden, table, bias, weights, labels, chunk_size=3, softcap=3.0
    )
    assert loss == 0 and weight == 0
    for gradient in gradients:
        assert_same_bits(gradient, np.zeros(gradient.shape, np.float32))
    assert chunked_cross_entropy(hidden[:, :0], table, labels[:, :0], chunk_size=2) == (0.0, 0.0)


def test_traced_label_outside_vocabulary_makes_chunked_loss_nan():
    loss, _ = compiled_chunks(
        jnp.ones((B, T, D)), jnp.ones((V, D)), jnp.zeros((B, T), int).at[1, 2].set(V), chunk_size=3
    )
    assert np.isnan(loss)


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("differentiated", [False, True])
def test_chunks_never_materialize_all_logits(differentiated):
    rows, length, width, vocab, chunk_size = 2, 127, 8, 2003, 8
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((rows, length, width), jnp.float32),
            ((vocab, width), jnp.float32),
            ((rows, length), jnp.int32),
        )
    ]

    def whole(hidden, table, labels):
        return cross_entropy(jnp.einsum("BTD,VD->BTV", hidden, table), labels)[0]

    def chunks(hidden, table, labels):
        return chunked_cross_entropy(hidden, table, labels, chunk_size=chunk_size)[0]

    def memory(loss) -> int:
        function = jax.value_and_grad(loss, argnums=(0, 1)) if differentiated else loss
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = rows * length * vocab * 4
    assert memory(whole) >= logits
    assert 0 < memory(chunks) < logits / 2


@pytest.mark.slow_except(
    "change1-D is 4 in hidden but 5 in output_weights",
    "change2-hidden has shape \\\\(3, 5\\\\)",
    "change4-softcap is 0.0: must be finite and above 0",
    "change5-logit_bias has shape \\\\(1,\\\\): must be \\\\(13,\\\\)",
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk_size=0), "chunk_size is 0"),
        (dict(hidden=np.zeros((2, 3, 4), np.float32)), "D is 4 in hidden but 5 in output_weights"),
        (dict(hidden=np.zeros((3, D), np.float32)), r"hidden has shape \(3, 5\)"),
        (dict(label_smoothing=-0.1), "label_smoothing is -0.1"),
        (dict(softcap=0.0), "softcap is 0.0: must be finite and above 0"),
        (
            dict(logit_bias=np.zeros(1, np.float32)),
            rf"logit_bias has shape \(1,\): must be \({V},\)",
        ),
        (dict(logit_bias=np.zeros((2, V), np.float32)), "logit_bias has shape"),
    ],
)
def test_invalid_chunk_arguments_raise_error(change, message):
    arguments = dict(
        hidden=jnp.zeros((2, 3, D)),
        output_weights=jnp.zeros((V, D)),
        labels=jnp.zeros((2, 3), jnp.int32),
        chunk_size=2,
    )
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**arguments | change)
