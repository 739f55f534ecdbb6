"""Linear probes of captured values.

A high score means that a property can be read from the values, not that the model uses it. To test
whether the model uses it, use `patch` and `add`. Compare the score with the baseline, with a probe
of the embedding, and with a probe trained on shuffled labels.

Sources: Alain & Bengio 2016 (arXiv:1610.01644); Hewitt & Liang 2019 (arXiv:1909.03368).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.sharding import by_compiler
from transformer_jax.values import short_repr


@short_repr
class Probe(NamedTuple):
    """Fitted linear map and its score on held-out rows."""

    kernel: jax.Array
    """f32[D, C]: weights for C classes or C numbers."""
    bias: jax.Array
    """f32[C]: biases."""
    score: jax.Array
    """f32[]: accuracy on the held-out labels. For numbers, R^2 = 1 - sum (y - y')^2 / sum (y -
    m)^2, where m is the mean of the training labels."""
    baseline: jax.Array
    """f32[]: accuracy of always predicting the most frequent training label. For numbers, 0, which
    is the score of always predicting m."""

    def __call__(self, values: jax.Array) -> jax.Array:  # [..., D] -> f32[..., C]
        """Return the logits of the classes, or the predicted numbers."""
        return _linear(values.astype(jnp.float32), self.kernel, self.bias)


def probe(
    values: jax.Array,  # [B, ..., D]
    labels: jax.Array,  # i32[B, ...], or f32[B, ...] or f32[B, ..., C]
    *,
    held_out: float = 0.25,
    penalty: float = 1.0,
    num_classes: int | None = None,
    steps: int = 100,
    key: jax.Array | None = None,
) -> Probe:
    """Fit a linear probe to values and score it on held-out rows.

    If the labels y are classes, L-BFGS minimizes sum_i -log softmax(x_i W + b)_y_i + penalty / 2
    |W|^2. If they are numbers, the minimum of sum_i |x_i W + b - y_i|^2 / 2 + penalty / 2 |W|^2 is
    computed in closed form. To probe several layers, call
    `jax.vmap(probe, (0, None))(streams, labels)`.

    Args:
        values: [B, ..., D], such as a residual [B, T, D].
        labels: integers are classes, and negative ones are ignored. Floats are numbers, one or C
            for each vector.
        held_out: the fraction of the rows to hold out, taken from the end.
        penalty: the positive weight of |W|^2; b is not penalized.
        num_classes: C; None uses the largest label + 1, which requires labels that are not traced.
        steps: the number of L-BFGS steps; 100 are enough if the values have similar scales.
        key: a single random key, used to shuffle the rows first; None keeps their order.

    Returns:
        The map, its score and the baseline.

    Raises:
        ValueError: if the shapes do not match, if no row remains for training or for scoring, or if
            a number is out of range. If values are not finite, or invalid labels are traced, the
            score is NaN.
    """
    values, labels = jnp.asarray(values), jnp.asarray(labels)
    are_classes = jnp.issubdtype(labels.dtype, jnp.integer)
    leads = values.shape[:-1]
    if values.ndim < 2 or (
        labels.shape != leads and (are_classes or labels.shape[:-1] != leads)
    ):  # fmt: skip
        rule = f"must be {list(leads)}, the shape of values without the last axis"
        raise ValueError(f"labels has shape {list(labels.shape)}: {rule}")
    if penalty <= 0:
        raise ValueError(f"penalty is {penalty}: must be positive")
    rows = len(values)
    cut = rows - round(rows * held_out)
    if not 0 < cut < rows:
        rule = f"must leave at least one of {rows} rows for training and one for scoring"
        raise ValueError(f"held_out is {held_out}: {rule}")
    if are_classes:
        largest = None if isinstance(labels, jax.core.Tracer) else int(np.asarray(labels).max())
        if num_classes is None and largest is None:
            raise ValueError("num_classes is None: must be an integer if labels are traced")
        num_classes = (largest or 0) + 1 if num_classes is None else num_classes
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}: must be at least 2")
        if largest is not None and largest >= num_classes:
            raise ValueError(f"labels contain {largest}: must be below num_classes, {num_classes}")
    return _probe(
        values, labels, key, penalty, cut=cut, num_classes=num_classes if are_classes else None,
        steps=steps,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("cut", "num_classes", "steps"))
def _probe(*arrays: jax.Array | float | None, **static: Any) -> Probe:
    """Fit a probe; the compiler shards the work and replicates the map on each device."""
    return by_compiler(partial(_fit, **static), arrays, PartitionSpec())


def _fit(
    values: jax.Array,  # [B, ..., D]
    labels: jax.Array,  # [B, ...], or f32[B, ..., C]
    key: jax.Array | None,
    penalty: float,
    *,
    cut: int,
    num_classes: int | None,  # None if the labels are numbers
    steps: int,
) -> Probe:
    """Fit a probe to the rows before `cut` and score it on the others."""
    if key is not None:
        order = jax.random.permutation(key, len(values))
        values, labels = values[order], labels[order]
    leads, width = values.shape[:-1], values.shape[-1]
    x = values.astype(jnp.float32)
    x, test_x = x[:cut].reshape(-1, width), x[cut:].reshape(-1, width)
    if num_classes is not None:
        y, test_y = labels[:cut].reshape(-1), labels[cut:].reshape(-1)
        kernel, bias = _logistic(x, y, num_classes, penalty, steps)
        counts = (y[:, None] == jnp.arange(num_classes)[None]).sum(axis=0)
        valid = test_y >= 0
        # traced labels cannot raise an error
        defined = (labels < num_classes).all() & jnp.isfinite(kernel).all()

        def accuracy(guess: jax.Array) -> jax.Array:
            share = ((guess == test_y) & valid).sum() / jnp.maximum(valid.sum(), 1)
            return jnp.where(defined, share, jnp.nan)

        score = accuracy(jnp.argmax(_linear(test_x, kernel, bias), axis=-1))
        return Probe(kernel, bias, score, accuracy(jnp.argmax(counts)))
    numbers = labels.astype(jnp.float32).reshape(*leads, -1)
    y, test_y = (part.reshape(-1, part.shape[-1]) for part in (numbers[:cut], numbers[cut:]))
    # W = (X^T X + penalty)^-1 X^T Y with centered X and Y, so that b is not penalized
    centre, mean = (part.mean(axis=0, keepdims=True) for part in (x, y))
    x, y = x - centre, y - mean
    gram = jnp.einsum("nD,nE->DE", x, x, precision="highest")
    moment = jnp.einsum("nD,nC->DC", x, y, precision="highest")
    kernel = jax.scipy.linalg.solve(gram + penalty * jnp.eye(len(gram)), moment, assume_a="pos")
    bias = (mean - centre @ kernel)[0]
    error, spread = (((test_y - z) ** 2).sum() for z in (_linear(test_x, kernel, bias), mean))
    return Probe(kernel, bias, 1 - error / spread, jnp.zeros(()))


def _linear(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def _logistic(
    x: jax.Array,  # f32[n, D]
    y: jax.Array,  # i32[n]; negative labels are ignored
    num_classes: int,
    penalty: float,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the W and b that minimize the loss; L-BFGS runs on standardized values."""
    counts = (y >= 0).astype(jnp.float32)
    total = jnp.maximum(counts.sum(), 1)
    centre = (x * counts[:, None]).sum(axis=0, keepdims=True) / total
    size = jnp.sqrt(((x - centre) ** 2 * counts[:, None]).sum(axis=0, keepdims=True) / total)
    # a coordinate with the same value in all rows has a deviation of 0
    size = jnp.where(size > 0, size, 1)
    z, target = (x - centre) / size, jnp.maximum(y, 0)

    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        log_p = jax.nn.log_softmax(_linear(z, *weights))
        log_p = jnp.take_along_axis(log_p, target[:, None], axis=1)[:, 0]
        squares = ((weights[0] / size.T) ** 2).sum()  # W in the units of x
        return (penalty / 2 * squares - (log_p * counts).sum()) / total

    import optax  # imported here, because the import is slow

    solver = optax.lbfgs()  # the loss is convex, so any starting point reaches the minimum
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        weights, state = carry
        value, grad = value_and_grad(weights, state=state)
        update, state = solver.update(grad, state, weights, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(weights, update), state), None

    start = jnp.zeros((x.shape[1], num_classes)), jnp.zeros(num_classes)
    ((kernel, bias), _), _ = jax.lax.scan(step, (start, solver.init(start)), None, length=steps)
    # convert the map of standardized values to a map of the original values
    kernel = kernel / size.T
    return kernel, bias - (centre @ kernel)[0]
