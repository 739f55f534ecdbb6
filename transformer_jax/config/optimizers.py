"""Configure the optimizers: what each has beside the learning rate and the clipping of a run."""

from __future__ import annotations

from transformer_jax.config.fields import Fraction, NonNegative, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class


@config_class
class SGD:
    """Step against the gradient, w - rate g, or against its decayed sum (Polyak 1964).

    Its learning rate is 10 to 100 times that of AdamW.
    """

    momentum: Fraction = 0.0
    """Decay of the sum of gradients; 0 steps by each alone."""

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
    """Added to the root of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Share of a weight taken off in a step, times the learning rate; on matrices only."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Adafactor:
    """Second moments of a matrix as a row times a column (Shazeer & Stern 2018).

    Its step is not scaled by the size of a parameter: the learning rate is as for AdamW.
    """

    decay_rate: Fraction = 0.8
    """The squared gradients are averaged with the weight 1 - t^-decay_rate of the past."""
    smallest_factored: Size = 128
    """A matrix with a shorter side keeps a second moment for every element."""
    clipping: Positive = 1.0
    """Largest root mean square of the step of one parameter, before the learning rate."""
    weight_decay: NonNegative = 0.1
    """Share of a weight taken off in a step, times the learning rate; on matrices only."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Lion:
    """Step by the sign of a mean gradient (Chen et al. 2023).

    Its learning rate is 3 to 10 times smaller than that of AdamW, its weight decay as much larger.
    """

    beta1: Fraction = 0.9
    """Weight of the mean gradient against the present one, in a step."""
    beta2: Fraction = 0.99
    """Decay of the mean gradient."""
    weight_decay: NonNegative = 1.0
    """Share of a weight taken off in a step, times the learning rate; on matrices only."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class Muon:
    """Step by the orthogonalised mean gradient of a matrix (Jordan et al. 2024).

    The matrices of blocks take it, each as [inputs, outputs] that it multiplies with. All other
    parameters (embeddings, output matrices, heads, biases, norms) take AdamW. Steps of a matrix
    have the root mean square 0.2, so both learn at one learning rate, that of AdamW (Liu et al.
    2025).
    """

    momentum: Fraction = 0.95
    """Decay of the mean gradient of a matrix; its step looks ahead (Nesterov)."""
    iterations: Size = 5
    """Newton-Schulz iterations of the orthogonalisation."""
    beta1: Fraction = 0.9
    """AdamW's, of the other parameters."""
    beta2: Fraction = 0.99
    """AdamW's, of the other parameters."""
    weight_decay: NonNegative = 0.1
    """Share of a weight taken off in a step, times the learning rate; on matrices only."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class ScheduleFree:
    """AdamW whose average of steps takes the place of a schedule (Defazio et al. 2024).

    It needs the schedule "constant"; warm-up stays. The average is what is evaluated and used.
    """

    beta1: Fraction = 0.9
    """Share of the average in the point where gradients are taken; above 0."""
    beta2: Fraction = 0.99
    """Decay of the mean squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the mean squared gradient."""
    weight_decay: NonNegative = 0.1
    """Share of a weight taken off in a step, times the learning rate; on matrices only."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.beta1 == 0:
            fail("beta1", self.beta1, "must be above 0")


Optimizer = AdamW | SGD | Adafactor | Lion | Muon | ScheduleFree
