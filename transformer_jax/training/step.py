"""Take one optimizer step as a pure function of its state, and measure the loss on held-out text.

Step n draws from `fold_in(key, n)`, its micro-batch i from `fold_in` of that and i, so a restored
state continues bit for bit.
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
from transformer_jax.training.batch import Batch, Loss, Params, as_given
from transformer_jax.training.data import IGNORE
from transformer_jax.training.optimizers import averaged_params, round_stochastically
from transformer_jax.values import value_class

_ROUNDING = np.uint32(2**32 - 1)
"""What `fold_in` makes the key of a step's rounding of: no micro-batch has this number."""


@value_class(pytree=True)
class TrainState:
    """Hold all that a step changes, and the key that all its randomness comes from.

    Attributes:
        step: i32[], steps taken, rejected ones included.
        params: of the model.
        opt_state: of the optimizer.
        key: a single key.
        rejected: i32[], steps whose loss or gradient was not finite.
        rejected_in_a_row: i32[], those of them since the last that was not rejected.
        average: f32, the parameters averaged over the steps, where a run keeps that; else None.
    """

    step: jax.Array  # i32[]
    params: Params
    opt_state: optax.OptState
    key: jax.Array  # key[]
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]
    average: Params | None = None

    @property
    def used_params(self) -> Params:
        """Return the parameters to evaluate and to use: an average, where there is one."""
        if self.average is not None:
            return self.average
        return averaged_params(self.opt_state, self.params)


@value_class(pytree=True)
class Metrics:
    """Hold what a step measured, before its update."""

    loss: jax.Array  # f32[]; mean over the step's tokens, in nats
    weight: jax.Array  # f32[]; tokens that counted
    grad_norm: jax.Array  # f32[]; before clipping
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]


Prepare = Callable[..., Batch]
"""What makes micro-batches, leaves [A, B, T], of a step's inputs."""


def init_state(
    config: AnyModelConfig,
    optimizer: optax.GradientTransformation,
    seed: jax.typing.ArrayLike,  # u32[]
    *,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    average: bool = False,
) -> TrainState:
    """Return the state of step 0, with fresh parameters.

    Args:
        config: of the model.
        optimizer: of optax.
        seed: u32[], which all randomness follows from.
        param_dtype: that parameters are held in.
        average: keep an average of them beside, in f32.
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
    """Return the state of step 0 with given parameters, which the first step then donates.

    Args:
        params: of the model.
        optimizer: of optax.
        key: a single key, which all randomness of the steps follows from.
        param_dtype: that parameters are held in.
        average: keep an average of them beside, in f32.

    Raises:
        ValueError: if the dtype has no room for a parameter.
    """
    # a compiled program cannot raise: the values are known only here
    check_ranges(params, param_dtype)
    return _start(optimizer, jnp.dtype(param_dtype), average, params, key)


@jax.jit
def split_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
    """Return the key of the parameters, and that of the steps."""
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
        # steps are computed in float32, whatever the parameters are held in
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
    """Return `length` tokens from each start, labelled with the next; past the end, ignored."""
    # an index past the end is clamped, and its label ignored: no window needs a shape of its own
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
    prepare: Prepare = as_given,
    *,
    ema_decay: float | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the jitted `step(state, *inputs, frozen=()) -> (state, metrics)`.

    The state is donated. Where the loss or the gradient is not finite, parameters and optimizer
    stay as they were, and the step counts as rejected. What is `frozen` goes to the loss after its
    other arguments, and has no gradient.

    Args:
        loss: called with (params, batch, key, *frozen), returns a mean and the sum of weights it is
            over.
        optimizer: of optax.
        prepare: called with the inputs of a step, returns its micro-batches, leaves [A, B, T].
        ema_decay: d: the average a becomes d a + (1 - d) params; None keeps none.
    """

    def total(
        params: Params, batch: Batch, key: jax.Array, frozen: tuple[Params, ...]
    ) -> tuple[jax.Array, jax.Array]:
        mean, weight = loss(params, batch, key, *frozen)
        return mean * weight, weight

    differentiate = jax.value_and_grad(total, has_aux=True)

    def update(held: PyTree, grads: Params, key: jax.Array) -> PyTree:
        params, opt_state, average = held
        wide = cast_floats(params, jnp.float32)
        updates, opt_state = optimizer.update(grads, opt_state, wide)
        new = optax.apply_updates(wide, updates)
        if ema_decay is not None:
            average = optax.incremental_update(new, average, 1 - ema_decay)
        old, structure = jax.tree.flatten(params)
        key = jax.random.fold_in(key, _ROUNDING)
        # rounded to the nearest, most steps would leave a bfloat16 where it is
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
        key = jax.random.fold_in(state.key, state.step)

        def add(carry: PyTree, micro: tuple[jax.Array, Batch]) -> tuple[PyTree, None]:
            index, batch = micro
            found, grads = differentiate(params, batch, jax.random.fold_in(key, index), frozen)
            wide = cast_floats(grads, jnp.float32)
            return jax.tree.map(jnp.add, carry, (found, wide)), None

        # the micro-batches weigh by their tokens, as in one big batch: with g_a the mean gradient
        # of w_a tokens, the gradient is sum(w_a g_a) / sum(w_a)
        count = jax.tree.leaves(batches)[0].shape[0]
        if count == 1:
            only = jax.tree.map(lambda leaf: leaf[0], batches)
            found = differentiate(params, only, jax.random.fold_in(key, 0), frozen)
        else:
            zero = jnp.zeros((), jnp.float32)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
            micro = jnp.arange(count), batches
            found, _ = jax.lax.scan(add, ((zero, zero), zeros), micro)
        (summed, weight), grads = found
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = summed / divisor
        grads = jax.tree.map(lambda g: g / divisor, cast_floats(grads, jnp.float32))
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        # a finite loss can have a gradient that is not, as sqrt has at 0
        accepted = jnp.isfinite(mean) & jnp.isfinite(norm)

        held = params, state.opt_state, state.average
        # the compiler splits the update as the state is split: optax knows no mesh
        held = by_compiler(
            lambda held, grads, accepted, key: jax.lax.cond(
                accepted, update, lambda held, *_: held, held, grads, key
            ),
            (held, grads, accepted, key),
            jax.tree.map(lambda leaf: split(leaf), held),
        )
        state = TrainState(
            step=state.step + 1,
            params=held[0],
            opt_state=held[1],
            key=state.key,
            rejected=state.rejected + jnp.where(accepted, 0, 1),
            rejected_in_a_row=jnp.where(accepted, 0, state.rejected_in_a_row + 1),
            average=held[2],
        )
        return state, Metrics(mean, weight, norm, state.rejected, state.rejected_in_a_row)

    # the old state dies with the step, so a run needs memory for one
    return jax.jit(step, donate_argnums=0)


def make_eval_step(
    scores: Callable[..., jax.Array], prepare: Prepare = as_given
) -> Callable[..., jax.Array]:
    """Return the jitted `step(params, *inputs, frozen=()) -> scores(params, batch, *frozen)`.

    There is no dropout.

    Args:
        scores: as `batch_scores(config)`, f32[3].
        prepare: called with the inputs, returns a batch.
    """

    def step(
        params: Params, *inputs: PyTree, frozen: tuple[Params, ...] = ()
    ) -> jax.Array:  # f32[3]
        return scores(params, prepare(*inputs), *frozen)

    return jax.jit(step)
