"""Take one optimizer step as a pure function of its state, and measure the loss on held-out text.

AdamW (Loshchilov & Hutter 2019), warm-up and a schedule, clipping of the
global norm (Pascanu et al. 2013). Step n draws from `fold_in(key, n)`, its micro-batch i from
`fold_in` of that and i, so a restored state continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.models.factory import init_params
from transformer_jax.training.batch import Batch, Loss, Params
from transformer_jax.training.data import IGNORE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Hold all that a step changes, and the key that all its randomness comes from."""

    step: jax.Array  # i32[]; steps taken, rejected ones included
    params: Params
    opt_state: Any
    key: jax.Array  # key[]
    rejected: jax.Array  # i32[]; steps whose loss or gradient was not finite
    rejected_in_a_row: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Hold what a step measured, before its update."""

    loss: jax.Array  # f32[]; mean over the step's tokens, in nats
    weight: jax.Array  # f32[]; tokens that counted
    grad_norm: jax.Array  # f32[]; before clipping
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]


Prepare = Callable[..., Batch]
"""What makes micro-batches, leaves [A, B, T], of a step's inputs."""


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
    warmup, first = config.warmup_steps, config.learning_rate / (config.warmup_steps + 1)
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
    """Return AdamW on the schedule after clipping; it decays matrices and tables only."""
    steps = [
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    ]
    if config.frozen is not None:
        steps.append(optax.masked(optax.set_to_zero(), partial(is_frozen, config.frozen)))
    return optax.chain(*steps)


def is_frozen(names: tuple[str, ...], params: Params) -> Params:
    """Mark the parameters whose names begin with one of `names`, such as decoder/block_0.

    ConfigError for a name with which no parameter begins.
    """
    used = set[str]()

    def within(path: tuple[Any, ...], leaf: jax.Array) -> bool:
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

    def decay(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim >= 2 and not name.endswith(("bias", "scale", "sinks"))

    return jax.tree_util.tree_map_with_path(decay, params)


def init_state(
    config: AnyModelConfig,
    optimizer: optax.GradientTransformation,
    seed: jax.typing.ArrayLike,  # u32[]
) -> TrainState:
    """Return the state of step 0, with fresh parameters."""
    init_key, key = split_seed(seed)
    return start_state(init_params(config, init_key), optimizer, key)


def start_state(
    params: Params, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Return the state of step 0 with these parameters, which the first step then donates."""
    return _start(optimizer, params, key)


@jax.jit
def split_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
    """Return the key of the parameters, and that of the steps."""
    return tuple(jax.random.split(jax.random.key(seed)))


@partial(jax.jit, static_argnums=0)
def _start(optimizer: optax.GradientTransformation, params: Params, key: jax.Array) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        rejected=jnp.zeros((), jnp.int32),
        rejected_in_a_row=jnp.zeros((), jnp.int32),
    )


def windows(
    corpus: jax.Array,  # uint or i32[n]
    starts: jax.Array,  # i32[..., B]
    length: int,
) -> Batch:
    """Return `length` tokens from each start, labelled with the next; past the end, ignored."""
    index = starts[..., None] + jnp.arange(length, dtype=jnp.int32).reshape(
        *(1,) * starts.ndim, length
    )
    last = corpus.shape[0] - 1
    tokens = corpus[jnp.minimum(index, last)].astype(jnp.int32)
    labels = corpus[jnp.minimum(index + 1, last)].astype(jnp.int32)
    return Batch(tokens, jnp.where(index < last, labels, IGNORE))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    prepare: Prepare = lambda batches: batches,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the jitted `step(state, *inputs, frozen=()) -> (state, metrics)`.

    The state is donated. `prepare(*inputs)` gives micro-batches, leaves [A, B, T]. Where the loss
    or the gradient is not finite, parameters and optimizer stay as they were, and the step counts
    as rejected. What is `frozen` goes to the loss after its other arguments, and has no gradient.
    """

    def step(
        state: TrainState, *inputs: Any, frozen: tuple[Any, ...] = ()
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        mean, weight, grads = _gradient(loss, state.params, prepare(*inputs), key, frozen)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        state = _updated(state, optimizer, grads, jnp.isfinite(mean) & jnp.isfinite(norm))
        return state, Metrics(mean, weight, norm, state.rejected, state.rejected_in_a_row)

    return jax.jit(step, donate_argnums=0)


def _gradient(
    loss: Loss,
    params: Params,
    batches: Batch,  # leaves [A, B, T]
    key: jax.Array,
    frozen: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array, Params]:  # f32[], f32[], like params
    """Return mean loss, tokens and gradient of micro-batches, as those of one big batch.

    With g_a the mean gradient of w_a tokens, it is sum(w_a g_a) / sum(w_a).
    """

    def total(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, weight = loss(params, batch, key, *frozen)
        return mean * weight, weight

    differentiate = jax.value_and_grad(total, has_aux=True)

    def add(carry: Any, micro: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, batch = micro
        found = differentiate(params, batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, carry, found), None

    count = jax.tree.leaves(batches)[0].shape[0]
    if count == 1:
        only = jax.tree.map(lambda leaf: leaf[0], batches)
        (summed, weight), grads = differentiate(params, only, jax.random.fold_in(key, 0))
    else:
        zero = jnp.zeros((), jnp.float32)
        start = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
        ((summed, weight), grads), _ = jax.lax.scan(add, start, (jnp.arange(count), batches))
    divisor = jnp.where(weight > 0, weight, 1.0)
    return summed / divisor, weight, jax.tree.map(lambda g: g / divisor, grads)


def _updated(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    grads: Params,
    accepted: jax.Array,  # bool[]
) -> TrainState:
    """Return the state after a step: updated where it is accepted, else only counted."""

    def update(grads: Params) -> tuple[Params, Any]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    def keep(grads: Params) -> tuple[Params, Any]:
        return state.params, state.opt_state

    params, opt_state = jax.lax.cond(accepted, update, keep, grads)
    return TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        key=state.key,
        rejected=state.rejected + jnp.where(accepted, 0, 1),
        rejected_in_a_row=jnp.where(accepted, 0, state.rejected_in_a_row + 1),
    )


def make_eval_step(
    scores: Callable[..., jax.Array], prepare: Prepare = lambda batch: batch
) -> Callable[..., jax.Array]:
    """Return the jitted `step(params, *inputs) -> scores(params, batch)`, without dropout."""

    def step(params: Params, *inputs: Any) -> jax.Array:  # f32[3]
        return scores(params, prepare(*inputs))

    return jax.jit(step)
