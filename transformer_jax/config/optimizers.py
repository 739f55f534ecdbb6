"""Configs of optimizers. The learning rate and gradient clipping are in the config of the run."""

from __future__ import annotations

from transformer_jax.config.fields import Fraction, NonNegative, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class


@config_class
class SGD:
    """Stochastic gradient descent, w - rate g, optionally with momentum (Polyak 1964).

    SGD needs a learning rate 10 to 100 times that of AdamW.
    """

    momentum: Fraction = 0.0
    """Decay rate of the sum of gradients. 0 uses only the current gradient."""

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
    """Weight decay per step, multiplied by the learning rate. Only matrices are decayed."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Adafactor:
    """Adam with second moments factored into rows and columns (Shazeer & Stern 2018).

    Steps are not scaled by the size of a parameter, so Adafactor uses the same learning rates as
    AdamW.
    """

    decay_rate: Fraction = 0.8
    """Exponent in the decay rate of the mean squared gradient, which is 1 - t^-decay_rate at step
    t."""
    smallest_factored: Size = 128
    """Minimum length of the shorter side of a matrix for factoring. Smaller matrices have a second
    moment for every element."""
    clipping: Positive = 1.0
    """Maximum root mean square of the step of each parameter, before it is multiplied by the
    learning rate."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Only matrices are decayed."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Lion:
    """Optimizer whose steps are the sign of a mean gradient (Chen et al. 2023).

    Lion needs a learning rate that is 3 to 10 times smaller than AdamW's, and a weight decay that
    is larger by the same factor.
    """

    beta1: Fraction = 0.9
    """Weight of the mean gradient in a step. The current gradient has the weight 1 - beta1."""
    beta2: Fraction = 0.99
    """Decay of the mean gradient."""
    weight_decay: NonNegative = 1.0
    """Weight decay per step, multiplied by the learning rate. Only matrices are decayed."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Muon:
    """Optimizer whose steps are the orthogonalized mean gradient of a matrix (Jordan et al. 2024).

    Muon updates the matrices in blocks, reshaped to [inputs, outputs]. AdamW updates all other
    parameters (embeddings, output matrices, heads, biases and norms). The steps of a matrix have a
    root mean square of 0.2, so that both optimizers use the learning rate of AdamW (Liu et al.
    2025).
    """

    momentum: Fraction = 0.95
    """Decay rate of the mean gradient of a matrix. Steps use Nesterov momentum."""
    iterations: Size = 5
    """Number of Newton-Schulz iterations that orthogonalize each step."""
    beta1: Fraction = 0.9
    """Decay rate of the mean gradient, for parameters that AdamW updates."""
    beta2: Fraction = 0.99
    """Decay rate of the mean squared gradient, for parameters that AdamW updates."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Only matrices are decayed."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class ScheduleFree:
    """AdamW with an average of its steps instead of a schedule (Defazio et al. 2024).

    This optimizer requires the schedule "constant", which may include a warm-up. The averaged
    parameters are evaluated and used.
    """

    beta1: Fraction = 0.9
    """Weight of the averaged parameters at the point where gradients are computed. The newest
    parameters have the weight 1 - beta1. Must be greater than 0."""
    beta2: Fraction = 0.99
    """Decay of the mean squared gradient."""
    eps: Positive = 1e-8
    """Epsilon added to the square root of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Weight decay per step, multiplied by the learning rate. Only matrices are decayed."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.beta1 == 0:
            fail("beta1", self.beta1, "must be above 0")


Optimizer = AdamW | SGD | Adafactor | Lion | Muon | ScheduleFree
