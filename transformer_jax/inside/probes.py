"""Ask what a linear map can read out of captured values: probes.

A probe that scores well says that a property can be read there, not that the model does so
(`patch` and `add` ask that). It is to be compared with the most frequent class, and with a probe of
the embedding or of shuffled labels.

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
    """Hold a linear map that was fitted, and how well it does on rows that it has not seen."""

    kernel: jax.Array
    """f32[D, C], of C classes or C numbers."""
    bias: jax.Array
    """f32[C]."""
    score: jax.Array
    """f32[]: share of the held-out labels that are right; of numbers R^2 = 1 - sum (y - y')^2 / sum
    (y - m)^2, m the mean of those that were fitted."""
    baseline: jax.Array
    """f32[]: the score of always saying the class that is most frequent among those that were
    fitted; of numbers that of m, 0."""

    def __call__(self, values: jax.Array) -> jax.Array:  # [..., D] -> f32[..., C]
        """Return the logits of each class, or the numbers."""
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
    """Return a linear probe of values, with its score on held-out rows.

    Of classes y it minimises sum_i -log softmax(x_i W + b)_y_i + penalty / 2 |W|^2, by L-BFGS; of
    numbers sum_i |x_i W + b - y_i|^2 / 2 + penalty / 2 |W|^2, in closed form. Both may be mapped,
    as over the layers: `jax.vmap(probe, (0, None))(streams, labels)`.

    Args:
        values: [B, ..., D], such as a residual [B, T, D].
        labels: integers are classes, a negative one does not count; floats are numbers, one or C
            for each vector.
        held_out: share of the rows B, the last ones, that is held out.
        penalty: of the squares of W, positive; b is free.
        num_classes: C; None is the largest label + 1, which must be known for it.
        steps: of L-BFGS at most 100 are needed where values are of one scale.
        key: a single key, which shuffles the rows first; None takes them in order, so that the last
            are other texts.

    Returns:
        The map, its score, and the score of the most frequent class.

    Raises:
        ValueError: if shapes do not fit, a row is missing on either side, or a number is out of its
            range. Of a traced label that is no class, or of values that are not finite, the scores
            are NaN.
    """
    values, labels = jnp.asarray(values), jnp.asarray(labels)
    are_classes = jnp.issubdtype(labels.dtype, jnp.integer)
    leads = values.shape[:-1]
    if values.ndim < 2 or (
        labels.shape != leads and (are_classes or labels.shape[:-1] != leads)
    ):  # fmt: skip
        rule = f"must be {list(leads)}, those of values without the last axis"
        raise ValueError(f"labels has shape {list(labels.shape)}: {rule}")
    if penalty <= 0:
        raise ValueError(f"penalty is {penalty}: must be positive")
    rows = len(values)
    cut = rows - round(rows * held_out)
    if not 0 < cut < rows:
        rule = f"of {rows} rows it must leave one on either side"
        raise ValueError(f"held_out is {held_out}: {rule}")
    if are_classes:
        largest = None if isinstance(labels, jax.core.Tracer) else int(np.asarray(labels).max())
        if num_classes is None and largest is None:
            raise ValueError("num_classes is None: must be given where labels are traced")
        num_classes = (largest or 0) + 1 if num_classes is None else num_classes
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}: must be at least 2")
        if largest is not None and largest >= num_classes:
            raise ValueError(f"labels hold {largest}: must be below num_classes, {num_classes}")
    return _probe(
        values, labels, key, penalty, cut=cut, num_classes=num_classes if are_classes else None,
        steps=steps,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("cut", "num_classes", "steps"))
def _probe(*given: jax.Array | float | None, **static: Any) -> Probe:
    """Fit a probe; the compiler splits it, and its map is whole on each device."""
    return by_compiler(partial(_fit, **static), given, PartitionSpec())


def _fit(
    values: jax.Array,  # [B, ..., D]
    labels: jax.Array,  # [B, ...], or f32[B, ..., C]
    key: jax.Array | None,
    penalty: float,
    *,
    cut: int,
    num_classes: int | None,
    steps: int,
) -> Probe:
    """Fit a probe of rows before `cut`, and score it on the others; num_classes None: numbers."""
    if key is not None:
        order = jax.random.permutation(key, len(values))
        values, labels = values[order], labels[order]
    leads, width = values.shape[:-1], values.shape[-1]
    x = values.astype(jnp.float32)
    x, unseen = x[:cut].reshape(-1, width), x[cut:].reshape(-1, width)
    if num_classes is not None:
        y, wanted = labels[:cut].reshape(-1), labels[cut:].reshape(-1)
        kernel, bias = _logistic(x, y, num_classes, penalty, steps)
        counts = (y[:, None] == jnp.arange(num_classes)[None]).sum(axis=0)
        counted = wanted >= 0
        known = (labels < num_classes).all() & jnp.isfinite(kernel).all()

        def right(guess: jax.Array) -> jax.Array:
            share = ((guess == wanted) & counted).sum() / jnp.maximum(counted.sum(), 1)
            return jnp.where(known, share, jnp.nan)

        score = right(jnp.argmax(_linear(unseen, kernel, bias), axis=-1))
        return Probe(kernel, bias, score, right(jnp.argmax(counts)))
    numbers = labels.astype(jnp.float32).reshape(*leads, -1)
    y, wanted = (part.reshape(-1, part.shape[-1]) for part in (numbers[:cut], numbers[cut:]))
    kernel, bias, mean = _ridge(x, y, penalty)
    missed, spread = (((wanted - z) ** 2).sum() for z in (_linear(unseen, kernel, bias), mean))
    return Probe(kernel, bias, 1 - missed / spread, jnp.zeros(()))


def _linear(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def _ridge(
    x: jax.Array,  # f32[n, D]
    y: jax.Array,  # f32[n, C]
    penalty: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return W = (X^T X + penalty)^-1 X^T Y of centred X and Y, b, and the mean of y."""
    centre, mean = (part.mean(axis=0, keepdims=True) for part in (x, y))
    x, y = x - centre, y - mean
    gram = jnp.einsum("nD,nE->DE", x, x, precision="highest")
    moment = jnp.einsum("nD,nC->DC", x, y, precision="highest")
    kernel = jax.scipy.linalg.solve(gram + penalty * jnp.eye(len(gram)), moment, assume_a="pos")
    return kernel, (mean - centre @ kernel)[0], mean


def _logistic(
    x: jax.Array,  # f32[n, D]
    y: jax.Array,  # i32[n]; negative does not count
    num_classes: int,
    penalty: float,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Return W and b of the smallest loss, found on values that are centred and of unit size."""
    counts = (y >= 0).astype(jnp.float32)
    total = jnp.maximum(counts.sum(), 1)
    centre = (x * counts[:, None]).sum(axis=0, keepdims=True) / total
    size = jnp.sqrt(((x - centre) ** 2 * counts[:, None]).sum(axis=0, keepdims=True) / total)
    size = jnp.where(size > 0, size, 1)
    z, target = (x - centre) / size, jnp.maximum(y, 0)

    def loss(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = _linear(z, *own)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]
        shrunk = ((own[0] / size.T) ** 2).sum()
        return (penalty / 2 * shrunk - (picked * counts).sum()) / total

    import optax  # not before it is asked for: it takes a while

    solver = optax.lbfgs()  # the loss is convex, so where it is smallest is found from anywhere
    slopes = optax.value_and_grad_from_state(loss)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        at, state = carry
        value, slope = slopes(at, state=state)
        moved, state = solver.update(slope, state, at, value=value, grad=slope, value_fn=loss)
        return (optax.apply_updates(at, moved), state), None

    start = jnp.zeros((x.shape[1], num_classes)), jnp.zeros(num_classes)
    ((kernel, bias), _), _ = jax.lax.scan(step, (start, solver.init(start)), None, length=steps)
    kernel = kernel / size.T
    return kernel, bias - (centre @ kernel)[0]
