"""Make the optimizer that a run's config names, of optax's parts.

Every one steps by the run's schedule after its clipping of the gradient's global norm (Pascanu et
al. 2013), and shrinks matrices and tables only, where it shrinks at all.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from optax.contrib import MuonDimensionNumbers, ScheduleFreeState, muon, schedule_free

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.optimizers import SGD, Adafactor, AdamW, Lion, Muon, ScheduleFree
from transformer_jax.pytree import kernel_axes
from transformer_jax.training.batch import Batch, Loss, Params


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Return the rate of update 0, 1, ...: a linear warm-up, then what `config.schedule` names.

    With W warm-up steps of N, peak p, end m, and n = (count - W) / (N - W):
        p (count + 1) / (W + 1)                  count < W
        m + (p - m) (1 + cos(pi n)) / 2          cosine (Loshchilov & Hutter 2017)
        p + (m - p) n                            linear
        p sqrt((W + 1) / (count + 1)), >= m      inverse_sqrt (Vaswani et al. 2017, 5.3)
        p, and linear to m in the last D steps   wsd (Hu et al. 2024), D = decay_steps
        p                                        constant
    and the rate of N from N on: m, but for inverse_sqrt and constant. A run that ends within its
    warm-up has no more.
    """
    peak, end = config.learning_rate, config.min_learning_rate
    warmup, first = config.warmup, config.learning_rate / (config.warmup + 1)
    left = config.steps - warmup
    if left > 0 and config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, config.steps, end)
    rising, more = optax.linear_schedule(first, peak, warmup), [warmup]
    after: list[optax.Schedule]
    if left <= 0:
        after = [optax.constant_schedule(end)]
    elif config.schedule == "linear":
        after = [optax.linear_schedule(peak, end, left)]
    elif config.schedule == "inverse_sqrt":
        after = [partial(_inverse_sqrt, peak, end, warmup)]
    elif config.schedule == "wsd":
        decay = min(config.decay_steps or max(config.steps // 10, 1), left)
        after = [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)]
        more = [warmup, config.steps - decay]
    else:
        after = [optax.constant_schedule(peak)]
    return optax.join_schedules([rising, *after], more)


def _inverse_sqrt(peak: float, end: float, warmup: int, count: jax.Array) -> jax.Array:
    """Return the rate `count` updates after the warm-up."""
    return jnp.maximum(peak * jnp.sqrt((warmup + 1) / (count + warmup + 1)), end)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return what `config.optimizer` names, on the schedule, after clipping.

    Frozen parameters get no update, and their gradients do not count in the clipped norm.
    ConfigError, once it meets the parameters, for a frozen name with which none begins.
    """
    rate, last = learning_rate_schedule(config), []
    if config.frozen is not None:
        last = [optax.masked(optax.set_to_zero(), partial(is_frozen, config.frozen))]
    match config.optimizer:
        case AdamW(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            steps = optax.adamw(rate, beta1, beta2, eps, weight_decay=decay, mask=decays)
        case SGD(momentum=momentum):
            steps = optax.sgd(rate, momentum or None)
        case Lion(beta1=beta1, beta2=beta2, weight_decay=decay):
            steps = optax.lion(rate, beta1, beta2, weight_decay=decay, mask=decays)
        case Adafactor() as own:
            steps = optax.chain(
                optax.scale_by_factored_rms(
                    decay_rate=own.decay_rate, min_dim_size_to_factor=own.smallest_factored
                ),
                optax.clip_by_block_rms(own.clipping),
                optax.add_decayed_weights(own.weight_decay, decays),
                optax.scale_by_learning_rate(rate),
            )
        case Muon() as own:
            matrices = muon(
                rate,
                ns_steps=own.iterations,
                beta=own.momentum,
                weight_decay=own.weight_decay,
                muon_weight_dimension_numbers=matrix_dimensions,
                consistent_rms=0.2,
            )
            others = optax.adamw(
                rate, own.beta1, own.beta2, weight_decay=own.weight_decay, mask=decays
            )
            steps = optax.partition({"matrix": matrices, "other": others}, _muon_labels)
        case ScheduleFree(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            adamw = optax.adamw(rate, 0.0, beta2, eps, weight_decay=decay, mask=decays)
            steps = schedule_free(optax.chain(adamw, *last), rate, beta1)
    clipped = optax.chain(*last, optax.clip_by_global_norm(config.clip_norm))
    return optax.chain(clipped, steps, *last)


def without_frozen(loss: Loss, names: tuple[str, ...]) -> Loss:
    """Return the loss without gradients of the parameters whose names begin with one of `names`.

    Their products of the backward pass are then not computed, nor do they count in a norm.
    """

    def held(
        params: Params, batch: Batch, key: jax.Array | None, *others: Params
    ) -> tuple[jax.Array, jax.Array]:
        marked = is_frozen(names, params)
        params = jax.tree.map(lambda p, m: jax.lax.stop_gradient(p) if m else p, params, marked)
        return loss(params, batch, key, *others)

    return held


def is_frozen(names: tuple[str, ...], params: Params) -> Params:
    """Mark the parameters whose names begin with one of `names`, such as decoder/block_0.

    ConfigError for a name with which no parameter begins.
    """
    used = set[str]()

    def within(path: KeyPath, leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = {part for part in names if f"{name}/".startswith(f"{part.strip('/')}/")}
        used.update(found)
        return bool(found)

    marked = jax.tree_util.tree_map_with_path(within, params)
    if unused := [name for name in names if name not in used]:
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        heads = [jax.tree_util.keystr(path[:2], simple=True, separator="/") for path in paths]
        parts = ", ".join(dict.fromkeys(heads))
        raise ConfigError(f"frozen has {unused[0]!r}: no parameter begins so (there are {parts})")
    return marked


def decays(params: Params) -> Params:
    """Mark the parameters that weight decay shrinks: all but biases, norm scales and sinks.

    By name, not by rank: a bias of heads has two axes, and stacked layers add one to everything.
    """

    def decay(path: KeyPath, leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim >= 2 and not name.endswith(("bias", "scale", "sinks"))

    return jax.tree_util.tree_map_with_path(decay, params)


def matrix_dimensions(params: Params) -> Params:
    """Return which axes of a parameter a block's matrix multiplies with, None for other parameters.

    A kernel is [inputs, outputs]: query [D, (N H)], an attention's out [(N Hv), D]. Stacked layers
    lead with L and experts with E: each is a matrix of its own.
    """

    def dimensions(path: KeyPath, leaf: jax.Array) -> MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if names[-1] != "kernel" or not any(name.startswith("block") for name in names):
            return None
        first, reads = kernel_axes(names, leaf.ndim)
        inputs = tuple(range(first, first + reads))
        return MuonDimensionNumbers(inputs, tuple(range(first + reads, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _muon_labels(params: Params) -> Params:
    found = matrix_dimensions(params)
    is_leaf = lambda leaf: leaf is None or isinstance(leaf, MuonDimensionNumbers)  # noqa: E731
    return jax.tree.map(lambda leaf: "other" if leaf is None else "matrix", found, is_leaf=is_leaf)


def averaged_params(opt_state: optax.OptState, params: Params) -> Params:
    """Return what is to be evaluated and used: the average of ScheduleFree, or the parameters."""
    found = [part for part in opt_state if isinstance(part, ScheduleFreeState)]
    if not found:
        return params
    (state,) = found
    return jax.tree.map(lambda y, z: (y - (1 - state.b1) * z) / state.b1, params, state.z)


def round_stochastically(
    x: jax.Array,  # f32[...]
    key: jax.Array,
) -> jax.Array:  # bf16[...]
    """Round to one of the two nearest bfloat16, so that the mean is x (Zamirai et al. 2020).

    A step smaller than half the spacing of bfloat16, 2^-8 of a weight, would never move it if it
    were rounded to the nearest.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    moved = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)
