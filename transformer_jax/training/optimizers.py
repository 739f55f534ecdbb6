"""Optimizers, composed of optax transformations.

Each optimizer clips the gradient's global norm (Pascanu et al. 2013) and follows the run's
learning-rate schedule. Weight decay applies only to matrices and tables.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from optax.contrib import MuonDimensionNumbers, ScheduleFreeState, muon, schedule_free

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.optimizers import SGD, Adafactor, AdamW, Lion, Muon, ScheduleFree
from transformer_jax.pytree import kernel_axes, path_name, stacked_axes
from transformer_jax.training.batch import Batch, Loss, Params


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Return the learning-rate schedule: a linear warm-up, then `config.schedule`.

    With W warm-up steps out of N, peak rate p, final rate m, and n = (count - W) / (N - W):
        p (count + 1) / (W + 1)                  count < W
        m + (p - m) (1 + cos(pi n)) / 2          cosine (Loshchilov & Hutter 2017)
        p + (m - p) n                            linear
        p sqrt((W + 1) / (count + 1)), >= m      inverse_sqrt (Vaswani et al. 2017, 5.3)
        p, then linear to m in the last D steps  wsd (Hu et al. 2024), D = decay_steps
        p                                        constant
    After N steps, the rate is constant. If N <= W, the schedule consists only of the warm-up.
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
        after = [  # the schedule after the warm-up
            lambda count: jnp.maximum(peak * jnp.sqrt((warmup + 1) / (count + warmup + 1)), end)
        ]
    elif config.schedule == "wsd":
        decay = min(config.decay_steps or max(config.steps // 10, 1), left)
        after = [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)]
        more = [warmup, config.steps - decay]
    else:
        after = [optax.constant_schedule(peak)]
    return optax.join_schedules([rising, *after], more)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer that `config.optimizer` specifies, with clipping and the schedule.

    Frozen parameters are not updated and are not part of the clipped norm. The `init` of the
    optimizer raises ConfigError if a frozen name does not match any parameter.
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
        case Adafactor() as settings:
            steps = optax.chain(
                scale_by_adafactor(settings),
                optax.add_decayed_weights(settings.weight_decay, decays),
                optax.scale_by_learning_rate(rate),
            )
        case Muon() as settings:
            matrices = muon(
                rate,
                ns_steps=settings.iterations,
                beta=settings.momentum,
                weight_decay=settings.weight_decay,
                muon_weight_dimension_numbers=matrix_dimensions,
                # AdamW's updates have a root mean square of about 0.2, so with this value both
                # groups can share one learning rate (Liu et al. 2025, 2.2).
                consistent_rms=0.2,
            )
            others = optax.adamw(
                rate,
                settings.beta1,
                settings.beta2,
                weight_decay=settings.weight_decay,
                mask=decays,
            )
            is_leaf = lambda leaf: leaf is None or isinstance(leaf, MuonDimensionNumbers)  # noqa: E731
            labels = lambda params: jax.tree.map(  # noqa: E731
                lambda leaf: "other" if leaf is None else "matrix",
                matrix_dimensions(params),
                is_leaf=is_leaf,
            )
            steps = optax.partition({"matrix": matrices, "other": others}, labels)
        case ScheduleFree(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay):
            # The interpolation with beta1 replaces the momentum (Defazio et al. 2024).
            adamw = optax.adamw(rate, 0.0, beta2, eps, weight_decay=decay, mask=decays)
            steps = schedule_free(optax.chain(adamw, *last), rate, beta1)
    # `last` runs twice: here, so that frozen gradients do not count in the norm, and after the
    # optimizer, because weight decay would change frozen parameters.
    clipped = optax.chain(*last, optax.clip_by_global_norm(config.clip_norm))
    return optax.chain(clipped, steps, *last)


def scale_by_adafactor(settings: Adafactor) -> optax.GradientTransformation:
    """Scale by the factored root mean square, then clip (Shazeer & Stern 2018, algorithm 4).

    Each layer of a scanned stack and each expert is clipped separately, whereas optax clips whole
    arrays. The state has the same type as in `optax.scale_by_factored_rms`.
    """

    def axes(path: KeyPath, leaf: jax.Array) -> tuple[int, tuple[int, int] | None]:
        """Return the number of leading axes, and the two longest of the other axes.

        The longest axis comes second. The two axes are replaced by None if each element has its own
        second moment.
        """
        first = stacked_axes(path_name(path).split("/"), leaf.ndim)
        longest = [first + int(axis) for axis in np.argsort(leaf.shape[first:], kind="stable")[-2:]]
        if len(longest) < 2 or leaf.shape[longest[0]] < settings.smallest_factored:
            return first, None
        return first, (longest[0], longest[1])

    def zeros(path: KeyPath, leaf: jax.Array) -> tuple[jax.Array, ...]:
        factored, none = axes(path, leaf)[1], jnp.zeros(1, leaf.dtype)
        if factored is None:
            return none, none, jnp.zeros_like(leaf)
        shorter, longer = factored
        return jnp.zeros_like(leaf.sum(longer)), jnp.zeros_like(leaf.sum(shorter)), none

    def init(params: Params) -> optax.FactoredState:
        found = jax.tree_util.tree_map_with_path(zeros, params)
        parts = (jax.tree.map(lambda _, leaf, i=i: leaf[i], params, found) for i in range(3))
        return optax.FactoredState(jnp.zeros((), jnp.int32), *parts)

    def update(
        grads: Params, state: optax.FactoredState, params: Params | None = None
    ) -> tuple[Params, optax.FactoredState]:
        # This is 0 in the first step, so the moments need no bias correction.
        past = 1 - jnp.float32(state.count + 1) ** -settings.decay_rate

        def one(
            path: KeyPath, grad: jax.Array, row: jax.Array, column: jax.Array, moment: jax.Array
        ) -> tuple[jax.Array, ...]:
            first, factored = axes(path, grad)
            # This is the paper's epsilon_1. It keeps the root mean square of a zero gradient above
            # 0.
            square = jnp.square(grad) + 1e-30
            if factored is None:
                moment = past * moment + (1 - past) * square
                step = grad * moment**-0.5
            else:
                shorter, longer = factored
                row = past * row + (1 - past) * square.mean(longer)
                column = past * column + (1 - past) * square.mean(shorter)
                row_rms = jnp.expand_dims(row, longer)
                row_rms = row_rms / row_rms.mean(shorter, keepdims=True)
                step = grad * row_rms**-0.5 * jnp.expand_dims(column**-0.5, shorter)
            of_one = tuple(range(first, grad.ndim))
            size = jnp.sqrt(jnp.mean(jnp.square(step), axis=of_one, keepdims=True))
            return step / jnp.maximum(1.0, size / settings.clipping), row, column, moment

        found = jax.tree_util.tree_map_with_path(one, grads, state.v_row, state.v_col, state.v)
        parts = [jax.tree.map(lambda _, leaf, i=i: leaf[i], grads, found) for i in range(4)]
        return parts[0], optax.FactoredState(state.count + 1, *parts[1:])

    return optax.GradientTransformation(init, update)


def without_frozen(loss: Loss, names: tuple[str, ...]) -> Loss:
    """Return a loss with zero gradient for parameters whose names begin with one of `names`.

    The backward pass skips the products for these gradients.
    """

    def partly_frozen(
        params: Params, batch: Batch, key: jax.Array | None, *others: Params
    ) -> tuple[jax.Array, jax.Array]:
        marked = is_frozen(names, params)
        params = jax.tree.map(lambda p, m: jax.lax.stop_gradient(p) if m else p, params, marked)
        return loss(params, batch, key, *others)

    return partly_frozen


def is_frozen(names: tuple[str, ...], params: Params) -> Params:
    """Return a tree that marks the parameters whose names begin with one of `names`.

    A name is, for example, `decoder/block_0`. Raises ConfigError if a name matches no parameter.
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
        rule = f"no parameter name begins with it (they begin with {parts})"
        raise ConfigError(f"frozen contains {unused[0]!r}: {rule}")
    return marked


def decays(params: Params) -> Params:
    """Return a tree that marks the parameters with weight decay.

    All parameters except biases, norm scales, and sinks have weight decay.

    Biases are recognized by name because a bias with one row per head has two axes. The axis of
    stacked layers does not count toward the rank.
    """

    def decay(path: KeyPath, leaf: jax.Array) -> bool:
        names = path_name(path).split("/")
        layers = 1 if "blocks" in names else 0
        return leaf.ndim - layers >= 2 and not names[-1].endswith(("bias", "scale", "sinks"))

    return jax.tree_util.tree_map_with_path(decay, params)


def matrix_dimensions(params: Params) -> Params:
    """Return the input and output axes of each matrix in a block, and None for other parameters.

    A kernel is [inputs, outputs], such as [D, (N H)] for the query and [(N Hv), D] for the
    attention output. Each stacked layer (leading axis L) and each expert (E) is a separate matrix.
    """

    def dimensions(path: KeyPath, leaf: jax.Array) -> MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if names[-1] != "kernel" or not any(name.startswith("block") for name in names):
            return None
        first, reads = kernel_axes(names, leaf.ndim)
        inputs = tuple(range(first, first + reads))
        return MuonDimensionNumbers(inputs, tuple(range(first + reads, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(dimensions, params)


def averaged_params(opt_state: optax.OptState, params: Params) -> Params:
    """Return the parameters for evaluation and inference, which are averages for ScheduleFree."""
    found = [part for part in opt_state if isinstance(part, ScheduleFreeState)]
    if not found:
        return params
    (state,) = found
    # Gradients are computed at y = (1 - b1) z + b1 x. This solves for the average x.
    return jax.tree.map(lambda y, z: (y - (1 - state.b1) * z) / state.b1, params, state.z)


def round_stochastically(
    x: jax.Array,  # f32[...]
    key: jax.Array,
) -> jax.Array:  # bf16[...]
    """Round at random to one of the two nearest bfloat16 values, such that the mean is x.

    Rounding to the nearest value would lose updates that are smaller than half the bfloat16
    spacing, which is 2^-8 of a weight (Zamirai et al. 2020).
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # The sum carries into the upper half with a probability equal to the fraction that is cut off.
    moved = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)
