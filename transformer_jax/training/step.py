"""Training step, which is a pure function of the state, and evaluation of held-out batches.

Step n uses the key `fold_in(key, n)`, and micro-batch i folds i into that key. Training from a
restored state is therefore bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.models.factory import init_params
from transformer_jax.programs import program
from transformer_jax.pytree import PyTree, cast_floats, check_ranges
from transformer_jax.sharding import by_compiler, split
from transformer_jax.training.batch import Batch, Loss, Params, identity
from transformer_jax.training.data import IGNORE
from transformer_jax.training.optimizers import averaged_params, round_stochastically
from transformer_jax.values import value_class

_ROUNDING = np.uint32(2**32 - 1)
"""`fold_in` constant for the stochastic rounding of a step. No micro-batch has this number."""


@value_class(pytree=True)
class TrainState:
    """Training state: everything that a step changes, and the key that determines all randomness.

    Attributes:
        step: number of steps that were taken, including rejected ones.
        params: model parameters.
        opt_state: optimizer state.
        key: a single PRNG key.
        rejected: number of steps with a non-finite loss or gradient.
        rejected_in_a_row: number of rejected steps since the last accepted one.
        average: moving average of the parameters in f32, or None if there is none.
    """

    step: jax.Array  # i32[]
    params: Params
    opt_state: optax.OptState
    key: jax.Array  # key[]
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]
    average: Params | None = None

    @property
    def eval_params(self) -> Params:
        """Return the parameters for evaluation and inference: the average if there is one."""
        if self.average is not None:
            return self.average
        return averaged_params(self.opt_state, self.params)


@value_class(pytree=True)
class Metrics:
    """Measurements of a step, taken before its update."""

    loss: jax.Array  # f32[]; mean over the tokens of the step, in nats
    weight: jax.Array  # f32[]; number of tokens in the loss
    grad_norm: jax.Array  # f32[]; before clipping
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]


Prepare = Callable[..., Batch]
"""Function that converts a step's inputs to micro-batches with leaves [A, B, T]."""


def init_state(
    config: AnyModelConfig,
    optimizer: optax.GradientTransformation,
    seed: jax.typing.ArrayLike,  # u32[]
    *,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    average: bool = False,
) -> TrainState:
    """Return the initial state with newly initialized parameters.

    Args:
        config: the config of the model.
        optimizer: an optax optimizer.
        seed: the source of all randomness.
        param_dtype: dtype of the parameters.
        average: whether to maintain a moving average of the parameters, in f32.
    """
    init_key, key = split_seed(seed)
    params = init_params(config, init_key)
    return start_state(params, optimizer, key, param_dtype=param_dtype, average=average)


def start_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    average: bool = False,
) -> TrainState:
    """Return the initial state with existing parameters, which the first step donates.

    Args:
        params: the parameters of the model.
        optimizer: an optax optimizer.
        key: a single key, which is the source of all randomness in the steps.
        param_dtype: dtype of the parameters.
        average: whether to maintain a moving average of the parameters, in f32.

    Raises:
        ValueError: If a parameter is outside the range of `param_dtype`.
    """
    # checked here because a compiled program cannot raise an error
    check_ranges(params, param_dtype)
    return _start(optimizer, jnp.dtype(param_dtype), average, params, key)


@jax.jit
def split_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
    """Return the key for the parameters and the key for the steps."""
    return tuple(jax.random.split(jax.random.key(seed)))


@program(static=("optimizer", "dtype", "average"))
def _start(
    optimizer: optax.GradientTransformation,
    dtype: np.dtype,
    average: bool,
    params: Params,
    key: jax.Array,
) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=cast_floats(params, dtype),
        # updates are computed in float32 for every parameter dtype
        opt_state=optimizer.init(cast_floats(params, jnp.float32)),
        key=key,
        rejected=jnp.zeros((), jnp.int32),
        rejected_in_a_row=jnp.zeros((), jnp.int32),
        average=cast_floats(params, jnp.float32) if average else None,
    )


def windows(
    corpus: jax.Array,  # uint or i32[n]
    starts: jax.Array,  # i32[..., B]
    length: int,
) -> Batch:
    """Return `length` tokens from each start, labeled with the next tokens.

    Labels past the end are IGNORE.
    """
    # past the end, indices are clamped and labels are ignored, so all windows have the same shape
    last = corpus.shape[0] - 1

    def cut(corpus: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        offsets = jnp.arange(length, dtype=jnp.int32).reshape(*(1,) * starts.ndim, length)
        index = starts[..., None] + offsets
        tokens = corpus[jnp.minimum(index, last)].astype(jnp.int32)
        labels = corpus[jnp.minimum(index + 1, last)].astype(jnp.int32)
        return tokens, jnp.where(index < last, labels, IGNORE)

    rows = split(starts, after=(None,))
    return Batch(*by_compiler(cut, (corpus, starts), (rows, rows)))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    prepare: Prepare = identity,
    *,
    ema_decay: float | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the jitted `step(state, *inputs, frozen=()) -> (state, metrics)`.

    The state is donated. If the loss or the gradient is not finite, the step is rejected, and the
    parameters and optimizer state do not change. The `frozen` values are passed as the last
    arguments of the loss and have no gradient.

    Args:
        loss: function that takes (params, batch, key, *frozen) and returns (mean, sum of weights).
        optimizer: an optax optimizer.
        prepare: function that takes a step's inputs and returns its micro-batches, leaves [A, B,
            T].
        ema_decay: d in average = d average + (1 - d) params; None disables the average.
    """

    def total(
        params: Params, batch: Batch, key: jax.Array, frozen: tuple[Params, ...]
    ) -> tuple[jax.Array, jax.Array]:
        mean, weight = loss(params, batch, key, *frozen)
        # The gradient is that of a sum, so that micro-batches with different weights can be added.
        return mean * weight, weight

    differentiate = jax.value_and_grad(total, has_aux=True)

    def update(parts: PyTree, grads: Params, key: jax.Array) -> PyTree:
        params, opt_state, average = parts
        wide = cast_floats(params, jnp.float32)
        updates, opt_state = optimizer.update(grads, opt_state, wide)
        new = optax.apply_updates(wide, updates)
        if ema_decay is not None:
            average = optax.incremental_update(new, average, 1 - ema_decay)
        old, structure = jax.tree.flatten(params)
        key = jax.random.fold_in(key, _ROUNDING)
        # rounding to the nearest value would leave most bfloat16 values unchanged
        found = [
            value.astype(leaf.dtype)
            if leaf.dtype != jnp.bfloat16
            else round_stochastically(value, jax.random.fold_in(key, number))
            for number, (leaf, value) in enumerate(zip(old, jax.tree.leaves(new), strict=True))
        ]
        return jax.tree.unflatten(structure, found), opt_state, average

    def step(
        state: TrainState, *inputs: PyTree, frozen: tuple[Params, ...] = ()
    ) -> tuple[TrainState, Metrics]:
        params, batches = state.params, prepare(*inputs)
        # The key depends only on the number of the step, so a resumed run draws the same numbers.
        key = jax.random.fold_in(state.key, state.step)

        def add(carry: PyTree, micro: tuple[jax.Array, Batch]) -> tuple[PyTree, None]:
            index, batch = micro
            found, grads = differentiate(params, batch, jax.random.fold_in(key, index), frozen)
            # A bfloat16 sum over many micro-batches would lose the smaller terms.
            wide = cast_floats(grads, jnp.float32)
            return jax.tree.map(jnp.add, carry, (found, wide)), None

        # micro-batches are weighted by their tokens, as in one large batch: sum(w_a g_a) /
        # sum(w_a), where g_a is the mean gradient over w_a tokens
        count = jax.tree.leaves(batches)[0].shape[0]
        # A scan over one micro-batch would need memory for a second copy of the gradients.
        if count == 1:
            only = jax.tree.map(lambda leaf: leaf[0], batches)
            found = differentiate(params, only, jax.random.fold_in(key, 0), frozen)
        else:
            zero = jnp.zeros((), jnp.float32)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
            micro = jnp.arange(count), batches
            found, _ = jax.lax.scan(add, ((zero, zero), zeros), micro)
        (summed, weight), grads = found
        # A step may have no labels at all, for example if every conversation was cut before its
        # answer.
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = summed / divisor
        grads = jax.tree.map(lambda g: g / divisor, cast_floats(grads, jnp.float32))
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        # a finite loss can have an infinite gradient, such as sqrt at 0
        accepted = jnp.isfinite(mean) & jnp.isfinite(norm)

        parts = params, state.opt_state, state.average
        # optax ignores the mesh, so the compiler shards the update like the state
        parts = by_compiler(
            lambda parts, grads, accepted, key: jax.lax.cond(
                accepted, update, lambda parts, *_: parts, parts, grads, key
            ),
            (parts, grads, accepted, key),
            jax.tree.map(lambda leaf: split(leaf), parts),
        )
        state = TrainState(
            step=state.step + 1,
            params=parts[0],
            opt_state=parts[1],
            key=state.key,
            rejected=state.rejected + jnp.where(accepted, 0, 1),
            rejected_in_a_row=jnp.where(accepted, 0, state.rejected_in_a_row + 1),
            average=parts[2],
        )
        return state, Metrics(mean, weight, norm, state.rejected, state.rejected_in_a_row)

    # the old state is donated so that memory contains only one state
    return jax.jit(step, donate_argnums=0)


def make_eval_step(
    scores: Callable[..., jax.Array], prepare: Prepare = identity
) -> Callable[..., jax.Array]:
    """Return the jitted `step(params, *inputs, frozen=()) -> scores(params, batch, *frozen)`.

    Dropout is disabled.

    Args:
        scores: function that returns f32[3], for example `batch_scores(config)`.
        prepare: function that takes the inputs and returns a batch.
    """

    def step(
        params: Params, *inputs: PyTree, frozen: tuple[Params, ...] = ()
    ) -> jax.Array:  # f32[3]
        return scores(params, prepare(*inputs), *frozen)

    return jax.jit(step)
