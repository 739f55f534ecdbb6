"""Probes against SciPy's minimum in float64 and the normal equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from transformer_jax.interpret import probe

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, T, D, C = 24, 5, 7, 3
MINIMUM = 1e-3
"""Tolerance of weights that minimize a float32 loss, which is flat near its minimum."""


def drawn(seed=3, spread=1.0):
    """Return values [B, T, D] of different scales, and noisy classes computed from them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ROWS, T, D)) * [5, 1, 1, 0.3, 1, 1, 2] + 3
    logits = (values - 3) @ rng.standard_normal((D, C)) + spread * rng.standard_normal((ROWS, T, C))
    return values.astype(np.float32), logits.argmax(-1).astype(np.int32)


def minimum(x, y, penalty):
    """Return the W and b that minimize the loss, by SciPy in float64."""
    import scipy.optimize
    import scipy.special

    def loss(flat):
        kernel, bias = flat[: D * C].reshape(D, C), flat[D * C :]
        logits = x @ kernel + bias
        p = scipy.special.softmax(logits, axis=1)
        value = -scipy.special.log_softmax(logits, axis=1)[np.arange(len(y)), y].sum()
        p[np.arange(len(y)), y] -= 1
        slope = np.concatenate([(x.T @ p + penalty * kernel).ravel(), p.sum(0)])
        return value + penalty / 2 * (kernel**2).sum(), slope

    found = scipy.optimize.minimize(
        loss, np.zeros((D + 1) * C), jac=True, method="BFGS", options={"gtol": 1e-9}
    ).x
    return found[: D * C].reshape(D, C), found[D * C :]


def test_class_probe_minimizes_loss_and_scores_held_out_rows():
    values, labels = drawn()
    labels[2, 1:] = -1  # padding
    labels[-1, 0] = -1
    found = jax.jit(lambda x, y: probe(x, y, penalty=2.0, num_classes=C))(values, labels)
    cut = 18
    x, y = values[:cut].reshape(-1, D).astype(np.float64), labels[:cut].reshape(-1)
    kernel, bias = minimum(x[y >= 0], y[y >= 0], 2.0)
    assert_near(found.kernel, kernel, MINIMUM)
    assert_near(found.bias, bias, MINIMUM)
    unseen, wanted = values[cut:].reshape(-1, D), labels[cut:].reshape(-1)
    guess = (unseen @ kernel + bias).argmax(-1)
    counted = wanted >= 0
    np.testing.assert_allclose(found.score, (guess == wanted)[counted].mean(), rtol=1e-6)
    most = np.bincount(y[y >= 0]).argmax()
    np.testing.assert_allclose(found.baseline, (wanted == most)[counted].mean(), rtol=1e-6)
    assert found.score > found.baseline + 0.2
    np.testing.assert_array_equal(np.argmax(found(unseen), -1), guess)


@pytest.mark.parametrize("several", [False, True])
def test_regression_probe_satisfies_normal_equations(several):
    values, _ = drawn()
    rng = np.random.default_rng(5)
    numbers = values[..., :2] @ rng.standard_normal((2, 2)) + rng.standard_normal((ROWS, T, 2))
    numbers = (numbers if several else numbers[..., 0]).astype(np.float32)
    found = jax.jit(lambda x, y: probe(x, y, penalty=3.0, held_out=1 / 3))(values, numbers)
    x, y = values.astype(np.float64), numbers.astype(np.float64).reshape(ROWS, T, -1)
    (x, unseen), (y, wanted) = (np.split(z, [16]) for z in (x, y))
    x, unseen, y, wanted = (z.reshape(-1, z.shape[-1]) for z in (x, unseen, y, wanted))
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    penalty = np.diag([3.0] * D + [0.0])
    whole = np.linalg.solve(ones.T @ ones + penalty, ones.T @ y)
    assert_near(found.kernel, whole[:D], 1e-4)
    assert_near(found.bias, whole[D], 1e-4)
    guess = unseen @ whole[:D] + whole[D]
    score = 1 - ((wanted - guess) ** 2).sum() / ((wanted - y.mean(0)) ** 2).sum()
    np.testing.assert_allclose(found.score, score, rtol=1e-4)
    assert 0.3 < score < 1 and found.baseline == 0


@pytest.mark.slow
def test_vmapped_probes_match_single_probes_and_noise_scores_baseline():
    values, labels = drawn(spread=0.1)
    noise = np.random.default_rng(7).standard_normal(values.shape).astype(np.float32)
    mapped = jax.vmap(lambda x: probe(x, labels))(np.stack([values, noise]))
    alone = probe(values, labels)
    assert_near(mapped.kernel[0], alone.kernel, MINIMUM)
    assert mapped.score[0] > 0.85
    assert abs(mapped.score[1] - mapped.baseline[1]) < 0.25
    np.testing.assert_array_equal(mapped.baseline, alone.baseline)


@pytest.mark.slow
def test_shuffling_probe_data_keeps_rows_intact():
    """Each row has a single class, and the last rows share a class that no other row has."""
    values = jnp.repeat(jnp.eye(4)[jnp.arange(20) // 5][:, None], 3, axis=1)
    labels = jnp.repeat((jnp.arange(20) // 5)[:, None], 3, axis=1)
    in_order, shuffled = (probe(values, labels, key=k, num_classes=4) for k in
                          (None, jax.random.key(3)))  # fmt: skip
    assert in_order.score == 0 and in_order.baseline == 0  # class 3 is not in the training rows
    assert shuffled.score == 1


@pytest.mark.slow
def test_probe_score_is_nan_for_invalid_traced_labels():
    values, labels = drawn()
    of = jax.jit(lambda x, y: probe(x, y, num_classes=C, steps=2))
    assert np.isfinite(of(values, labels).score)
    assert np.isnan(of(values, np.where(labels == 2, C, labels)).score)
    values[0, 0, 0] = np.inf
    assert np.isnan(of(values, labels).score)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(labels=np.zeros((ROWS, 2), np.int32)), r"labels has shape \[24, 2\]: must be \[24"),
        (dict(labels=np.zeros((ROWS, T, 2), np.int32)), r"labels has shape \[24, 5, 2\]: must be"),
        (dict(penalty=0.0), "penalty is 0.0: must be positive"),
        (dict(held_out=0.0), "held_out is 0.0: must leave at least one of 24 rows for training"),
        (dict(held_out=1.0), "held_out is 1.0: must leave at least one of 24 rows"),
        (dict(labels=np.zeros((ROWS, T), np.int32)), "num_classes is 1: must be at least 2"),
        (dict(num_classes=2), "labels contain 2: must be below num_classes, 2"),
    ],
)
def test_invalid_probe_arguments_are_rejected(arguments, message):
    values, labels = drawn()
    with pytest.raises(ValueError, match=message):
        probe(**dict(values=values, labels=labels) | arguments)
    with pytest.raises(ValueError, match="num_classes is None: must be an integer"):
        jax.eval_shape(probe, values, labels)
