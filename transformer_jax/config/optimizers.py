"""Configs of optimizers. A run's config has the learning rate and gradient clipping."""

from __future__ import annotations

from transformer_jax.config.fields import Fraction, NonNegative, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class


@config_class
class SGD:
    """Gradient descent, w - rate g, optionally with momentum (Polyak 1964).

    Its learning rate is 10 to 100 times that of AdamW.
    """

    momentum: Fraction = 0.0
    """Decay of the sum of gradients. 0 uses only the current gradient."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    beta1: Fraction = 0.9
    """Decay of the mean gradient."""
    beta2: Fraction = 0.99
    """Decay of the mean squared gradient."""
    eps: Positive = 1e-8
    """Epsilon added to the square root of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Applies only to matrices."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Adafactor:
    """Adam with factored second moments: a row and a column per matrix (Shazeer & Stern 2018).

    Steps are not scaled by the size of a parameter, so the learning rate is that of AdamW.
    """

    decay_rate: Fraction = 0.8
    """Exponent in the decay of the mean squared gradient, which is 1 - t^-decay_rate at step t."""
    smallest_factored: Size = 128
    """Minimum length of a matrix's shorter side for factoring. Smaller matrices store a second
    moment for every element."""
    clipping: Positive = 1.0
    """Maximum root mean square of the step of one parameter, before the learning rate."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Applies only to matrices."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Lion:
    """Steps by the sign of a mean gradient (Chen et al. 2023).

    Its learning rate is 3 to 10 times smaller than AdamW's, and its weight decay larger by the same
    factor.
    """

    beta1: Fraction = 0.9
    """Weight of the mean gradient in a step; the current gradient has weight 1 - beta1."""
    beta2: Fraction = 0.99
    """Decay of the mean gradient."""
    weight_decay: NonNegative = 1.0
    """Weight decay per step, multiplied by the learning rate. Applies only to matrices."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Muon:
    """Steps by the orthogonalized mean gradient of a matrix (Jordan et al. 2024).

    Muon updates the matrices of blocks, reshaped to [inputs, outputs]. AdamW updates all other
    parameters (embeddings, output matrices, heads, biases, norms). Steps of a matrix have the root
    mean square 0.2, so that both use AdamW's learning rate (Liu et al. 2025).
    """

    momentum: Fraction = 0.95
    """Decay of the mean gradient of a matrix. Steps use Nesterov momentum."""
    iterations: Size = 5
    """Number of Newton-Schulz iterations that orthogonalize a step."""
    beta1: Fraction = 0.9
    """For parameters that AdamW updates: decay of the mean gradient."""
    beta2: Fraction = 0.99
    """For parameters that AdamW updates: decay of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Applies only to matrices."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class ScheduleFree:
    """AdamW with an average of its steps instead of a schedule (Defazio et al. 2024).

    It needs the schedule "constant", which may include a warm-up. The averaged parameters are
    evaluated and used.
    """

    beta1: Fraction = 0.9
    """Weight of the average in the parameters at which gradients are computed; the newest ones have
    weight 1 - beta1. Must be above 0."""
    beta2: Fraction = 0.99
    """Decay of the mean squared gradient."""
    eps: Positive = 1e-8
    """Epsilon added to the square root of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Applies only to matrices."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.beta1 == 0:
            fail("beta1", self.beta1, "must be above 0")


Optimizer = AdamW | SGD | Adafactor | Lion | Muon | ScheduleFree
