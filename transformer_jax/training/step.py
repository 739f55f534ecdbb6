"""One optimizer step as a pure function of its state, and the loss on held-out text.

AdamW (Loshchilov & Hutter 2019), warm-up and cosine (Loshchilov & Hutter 2017), clipping of the
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
import numpy as np
import optax

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.data import IGNORE
from transformer_jax.losses import cross_entropy
from transformer_jax.models import build, init_params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Tokens and, at each of them, the one to predict."""

    tokens: jax.Array  # i32[..., B, T]
    labels: jax.Array  # i32[..., B, T]; IGNORE where there is none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the key all its randomness comes from."""

    step: jax.Array  # i32[]; steps taken, rejected ones included
    params: Any
    opt_state: Any
    key: jax.Array  # key[]
    rejected: jax.Array  # i32[]; steps whose loss or gradient was not finite
    rejected_in_a_row: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What a step measured, before its update."""

    loss: jax.Array  # f32[]; mean over the step's tokens, in nats
    weight: jax.Array  # f32[]; tokens that counted
    grad_norm: jax.Array  # f32[]; before clipping
    rejected: jax.Array  # i32[]
    rejected_in_a_row: jax.Array  # i32[]


Loss = Callable[..., tuple[jax.Array, jax.Array]]
"""`loss(params, batch, dropout_key, *frozen) -> (mean, weight)`; no key is no dropout."""


def language_model_loss(config: ModelConfig, label_smoothing: float = 0.0) -> Loss:
    """Mean cross-entropy of a decoder's next tokens."""
    model = build(config)

    def loss(params, batch, key):
        logits, _ = model.apply({"params": params}, batch.tokens, key=key)
        return cross_entropy(
            logits, batch.labels, ignore_label=IGNORE, label_smoothing=label_smoothing
        )

    return loss


def learning_rate(config: TrainConfig, count: Any, xp: Any = np) -> Any:
    """Rate of update `count` = 0, 1, ...; `xp` is numpy or jax.numpy.

    With W warm-up steps of N, peak p and end m:
        p (count + 1) / (W + 1)                                     count < W
        m + (p - m) (1 + cos(pi (count - W) / (N - W))) / 2         W <= count < N
    and m from N on.
    """
    peak, end = config.learning_rate, config.min_learning_rate
    warmup, steps = config.warmup_steps, config.steps
    rising = peak * (count + 1) / (warmup + 1)
    done = xp.clip((count - warmup) / (steps - warmup), 0.0, 1.0) if steps > warmup else 1.0
    falling = end + 0.5 * (peak - end) * (1.0 + xp.cos(np.pi * done))
    return xp.where(count < warmup, rising, falling)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW on the schedule; weight decay on matrices and tables only."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lambda count: learning_rate(config, count, jnp),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def decays(params: Any) -> Any:
    """Which parameters weight decay shrinks: all but biases, norm scales and sinks.

    By name, not by rank: a bias of heads has two axes, and stacked layers add one to everything.
    """

    def decay(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim >= 2 and not name.endswith(("bias", "scale", "sinks"))

    return jax.tree_util.tree_map_with_path(decay, params)


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: jax.typing.ArrayLike,  # u32[]
) -> TrainState:
    """Step 0 with fresh parameters."""
    init_key, key = split_seed(seed)
    return start_state(init_params(config, init_key), optimizer, key)


def start_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Step 0 with these parameters, which the first step then donates."""
    return _start(optimizer, params, key)


@jax.jit
def split_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
    """The key of the parameters, and that of the steps."""
    return tuple(jax.random.split(jax.random.key(seed)))


@partial(jax.jit, static_argnums=0)
def _start(optimizer, params, key):
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
    """`length` tokens from each start, labelled with the next; past the text's end, ignored."""
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
    prepare: Callable[..., Batch] = lambda batches: batches,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Jitted `step(state, *inputs, frozen=()) -> (state, metrics)`; the state is donated.

    `prepare(*inputs)` gives micro-batches, leaves [A, B, T]. Their gradients are weighted by their
    tokens: with g_a the mean gradient of w_a tokens, the step uses sum(w_a g_a) / sum(w_a), that of
    the one big batch. Where the loss or the gradient is not finite, parameters and optimizer stay
    as they were, and the step counts as rejected. What is `frozen` goes to the loss behind its
    other arguments, and has no gradient.
    """

    def gradient(params, batches, key, frozen):
        def total(params, batch, key):
            mean, weight = loss(params, batch, key, *frozen)
            return mean * weight, weight

        def add(carry, micro):
            index, batch = micro
            found = jax.value_and_grad(total, has_aux=True)(
                params, batch, jax.random.fold_in(key, index)
            )
            return jax.tree.map(jnp.add, carry, found), None

        count = batches.tokens.shape[0]
        if count == 1:
            only = jax.tree.map(lambda leaf: leaf[0], batches)
            key = jax.random.fold_in(key, 0)
            (summed, weight), grads = jax.value_and_grad(total, has_aux=True)(params, only, key)
        else:
            zero = jnp.zeros((), jnp.float32)
            start = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
            ((summed, weight), grads), _ = jax.lax.scan(add, start, (jnp.arange(count), batches))
        divisor = jnp.where(weight > 0, weight, 1.0)
        return summed / divisor, weight, jax.tree.map(lambda g: g / divisor, grads)

    def step(state, *inputs, frozen=()):
        batches = prepare(*inputs)
        key = jax.random.fold_in(state.key, state.step)
        mean, weight, grads = gradient(state.params, batches, key, frozen)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        accepted = jnp.isfinite(mean) & jnp.isfinite(norm)

        def update(grads):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state

        def keep(grads):
            return state.params, state.opt_state

        params, opt_state = jax.lax.cond(accepted, update, keep, grads)
        rejected_in_a_row = jnp.where(accepted, 0, state.rejected_in_a_row + 1)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            key=state.key,
            rejected=state.rejected + jnp.where(accepted, 0, 1),
            rejected_in_a_row=rejected_in_a_row,
        )
        return new, Metrics(mean, weight, norm, new.rejected, rejected_in_a_row)

    return jax.jit(step, donate_argnums=0)


def make_eval_step(
    loss: Loss, prepare: Callable[..., Batch] = lambda batch: batch
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Jitted `step(params, *inputs) -> (summed loss, tokens)`, without dropout."""

    def step(params, *inputs):
        mean, weight = loss(params, prepare(*inputs), None)
        return mean * weight, weight

    return jax.jit(step)
