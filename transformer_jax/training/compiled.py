"""Compiled programs of a run: the initial state, the training step, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax._src.config import trace_context  # part of the cache key of `jax.jit`
from jax.stages import Compiled

from transformer_jax.checkpoints.run_folder import MAY_CHANGE
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.models.module import Watched
from transformer_jax.programs import retraces
from transformer_jax.pytree import PyTree
from transformer_jax.training.adapting import adapted_loss, fresh_adapters
from transformer_jax.training.batch import along_context, batch_loss, batch_scores, identity
from transformer_jax.training.optimizers import (
    learning_rate_schedule,
    make_optimizer,
    without_frozen,
)
from transformer_jax.training.preference import preference_loss, preference_scores
from transformer_jax.training.step import (
    Metrics,
    Prepare,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    split_seed,
    start_state,
)
from transformer_jax.training.tasks import TrainingTask
from transformer_jax.training.tasks.task import Learner
from transformer_jax.values import value_class

R = TypeVar("R")


class CompiledAhead(Generic[R]):
    """Jitted function of (state, *inputs) that is compiled ahead of time for each input shape.

    The shapes of the state and the keyword arguments must not change.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.function: Any = function  # the type of `jax.jit` loses R
        # `jax.jit` compiles only when called with arrays
        self._programs: dict[Hashable, Compiled] = {}

    def __call__(self, *args: PyTree, **named: PyTree) -> R:
        found: R = self.program(*args, **named)(*args, **named)
        return found

    def program(self, *args: PyTree, **named: PyTree) -> Compiled:
        """Return the program compiled for these arguments, which can be arrays or shapes."""
        leaves, structure = jax.tree.flatten(args[1:])
        # The state has the same shapes in every step, so the key contains only the inputs.
        key = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._programs:
            self._programs[key] = self.function.lower(*args, **named).compile()
        return self._programs[key]


@value_class
class Programs:
    """Functions that create, update, and evaluate the state of a run."""

    fresh_state: Callable[[jax.typing.ArrayLike], TrainState]
    """Create the initial state from a seed, u32[]."""
    state_of: Callable[..., TrainState]
    """Create the initial state from parameters and a key."""
    train_step: Callable[..., tuple[TrainState, Metrics]]
    eval_step: Callable[..., jax.Array]
    rate: Callable[[jax.Array], jax.Array]


def programs_of(task: TrainingTask) -> tuple[TrainConfig, Programs]:
    """Return the config and the programs of a task.

    The config of an n-gram model includes the table sizes. Runs with the same numerical settings
    share compiled programs.
    """
    config = task.config
    if not config.model.supports("gradients"):
        return counted(config, task)
    # no program depends on these fields, so they are reset to let runs share programs
    others = (MAY_CHANGE | {"seed"}) - {"steps", "mesh"}
    defaults: dict[str, FieldValue] = {
        x.name: x.default for x in fields(config) if x.name in others
    }
    numerics = replace(config, **defaults)
    if task.learner is None and not retraces(dict(numerics=numerics, prepare=task.prepare)):
        settings = trace_context(), Watched.replaced
        return config, cached_programs(numerics, task.prepare, settings)
    return config, make_programs(numerics, task.prepare, task.learner)


@lru_cache(maxsize=8)
def cached_programs(config: TrainConfig, prepare: Prepare, settings: Hashable) -> Programs:
    """Return the cached programs for a config.

    `settings` are the global settings that affect tracing, such as `jax_enable_x64`.
    """
    return make_programs(config, prepare)


def make_programs(
    config: TrainConfig, prepare: Prepare = identity, learner: Learner | None = None
) -> Programs:
    """Return the programs for a config without compiling them.

    If `learner` is not None, it is trained instead of the config's model.
    """
    optimizer = make_optimizer(config)
    row_shards = 1 if config.mesh is None else config.mesh.row_shards
    length_shards = 1 if config.mesh is None else config.mesh.context
    if length_shards > 1:
        balanced = length_shards if learner is None and needs_balance(config) else None
        prepare = partial(along_context, prepare, balanced)
    relative = isinstance(config.task, PreferenceTask)
    if learner is not None:
        loss, scores = learner.loss, learner.scores
    elif isinstance(config.task, PreferenceTask):
        beta = config.task.beta
        loss = preference_loss(config, beta, row_shards=row_shards)
        scores = preference_scores(config, beta, row_shards=row_shards)
    else:
        loss = batch_loss(
            config.model, config.label_smoothing, z_loss=config.z_loss, chunk=config.loss_chunk,
            row_shards=row_shards, length_shards=length_shards,
        )  # fmt: skip
        scores = batch_scores(config.model, row_shards=row_shards, length_shards=length_shards)
    state_options: dict[str, Any] = dict(
        param_dtype=jnp.dtype(config.param_dtype), average=config.ema_decay is not None
    )
    fresh: Callable[[jax.typing.ArrayLike], TrainState]
    fresh = partial(init_state, config.model, optimizer, **state_options)
    if learner is not None:
        make_params = learner.fresh

        def fresh_learner(seed: jax.typing.ArrayLike) -> TrainState:
            init_key, key = split_seed(seed)
            return start_state(make_params(init_key), optimizer, key, **state_options)

        fresh = fresh_learner
    # XLA then removes operations that are needed only for frozen gradients
    if config.frozen is not None:
        loss = without_frozen(loss, config.frozen)
    if config.lora is not None:
        loss = adapted_loss(loss, config.lora, relative=relative)
        fresh = partial(fresh_adapters, config, optimizer)
    return Programs(
        fresh_state=fresh,
        state_of=partial(start_state, optimizer=optimizer, **state_options),
        train_step=CompiledAhead(
            make_train_step(loss, optimizer, prepare, ema_decay=config.ema_decay)
        ),
        eval_step=make_eval_step(scores, prepare),
        rate=jax.jit(learning_rate_schedule(config)),
    )


def needs_balance(config: TrainConfig) -> bool:
    """Whether devices that split the tokens of a row need equal shares of a causal mask.

    The rows of windows are balanced in the usual order, in which each block is sent to one
    neighbor. Dropout depends on the index of a token, so another order would drop other values than
    on one device.
    """
    model = config.model
    if (
        not isinstance(model, ModelConfig)
        or model.kind != "decoder"
        or set(model.windows) != {None}
    ):
        return False
    rates = (
        model.dropout,
        model.attention_dropout,
        0 if config.lora is None else config.lora.dropout,
    )
    return not any(rates)


def counted(config: TrainConfig, task: TrainingTask) -> tuple[TrainConfig, Programs]:
    """Return the config and programs for an n-gram model, whose only step counts the tokens."""
    model, params = config.model.count(task.documents())
    scores = batch_scores(model)

    def step(state: TrainState, *inputs: PyTree, frozen: PyTree) -> tuple[TrainState, Metrics]:
        """Store the counts and return the loss of the first micro-batch."""
        # this loss is only displayed, so one micro-batch is enough
        first = jax.tree.map(lambda leaf: leaf[0], task.prepare(*inputs))
        total, labels, _ = jax.jit(scores)(params, first)
        none = jnp.zeros((), jnp.int32)
        state = replace(state, step=state.step + 1, params=jax.device_put(params))
        return state, Metrics(total / labels, labels, jnp.zeros(()), none, none)

    return replace(config, model=model), Programs(
        fresh_state=partial(init_state, model, optax.identity()),
        state_of=partial(start_state, optimizer=optax.identity()),
        train_step=step,
        eval_step=make_eval_step(scores, task.prepare),
        rate=lambda count: jnp.zeros(()),
    )
