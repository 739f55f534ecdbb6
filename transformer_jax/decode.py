"""Producing tokens. A decoder knows a model only as `step(params, tokens, state, valid=...)`.

`generate` is one jitted prefill and `lax.scan`; token n draws with `fold_in(key, n)`, so `stream`,
which yields the same tokens one by one, needs no state but the model's. Prompts are padded to a
bucket, so one compilation serves every length in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.arguments import check_key
from transformer_jax.cache import next_positions
from transformer_jax.sampling import Greedy, Sampler
from transformer_jax.transformer import (
    Decoder,
    EncoderDecoder,
    ModelCache,
    cache_limit,
    check_tokens,
)


class Step(Protocol):
    """A model as decoding sees it; hashable.

    It may also have `check(prompt, state, total_lengths)`, which raises ValueError where a known
    prompt, or its length with the new tokens, cannot be served.
    """

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, T]
        state: Any,
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
    ) -> tuple[jax.Array, Any]:  # f32[B, T, V], state
        ...


@dataclass(frozen=True)
class ModelStep:
    """`Decoder` or `EncoderDecoder` as a step; the state is its `ModelCache`."""

    model: Decoder | EncoderDecoder

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        positions = next_positions(state.length, valid)
        return self.model.apply({"params": params}, tokens, positions=positions, cache=state)

    def check(self, prompt: np.ndarray, state: ModelCache, total: np.ndarray) -> None:
        config = self.model.config
        check_tokens(prompt, config.vocab_size)
        rows = state.length.shape[0]
        if len(prompt) != rows:
            raise ValueError(f"prompt has {len(prompt)} rows, the cache {rows}")
        limit = cache_limit(config, state.capacity)
        if config.positions == "learned":
            limit = config.max_len if limit is None else min(limit, config.max_len)
        if limit is None or isinstance(state.length, jax.core.Tracer):
            return
        longest = int((np.asarray(state.length) + total).max(initial=0))
        if longest > limit:
            raise ValueError(
                f"prompt and new tokens reach length {longest}: the limit is {limit} "
                f"(cache capacity {state.capacity}, max_len {config.max_len})"
            )


def make_step(model: Decoder | EncoderDecoder) -> ModelStep:
    """The model as `step(params, tokens, state, valid=None) -> (logits, state)`."""
    return ModelStep(model)


def bucket(length: int) -> int:
    """The smallest power of two from 16 on that holds `length` tokens."""
    return max(16, 1 << (length - 1).bit_length())


def prefill(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P]
    state: Any,
    lengths: jax.Array,  # i32[B]; the first lengths[b] tokens of a row count
    chunk: int | None = None,
) -> tuple[jax.Array, Any]:  # f32[B, V], state
    """Logits behind each row's last prompt token, and the state after it; pure, jit it yourself.

    `chunk` reads the prompt that many tokens at a time: the same numbers in less memory.
    """
    prompt, lengths = jnp.asarray(prompt), jnp.asarray(lengths)
    rows, columns = prompt.shape
    chunk = columns if chunk is None else chunk
    padded = -columns % chunk
    prompt = jnp.pad(prompt, ((0, 0), (0, padded)))
    starts = jnp.arange(0, columns + padded, chunk)

    def read(carry, start):
        last, state = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        index = start + jnp.arange(chunk)
        logits, state = step(params, tokens, state, valid=index[None] < lengths[:, None])
        offset = lengths - 1 - start  # [B]
        here = (offset >= 0) & (offset < chunk)
        picked = jnp.take_along_axis(logits, jnp.clip(offset, 0, chunk - 1)[:, None, None], axis=1)
        return (jnp.where(here[:, None], picked[:, 0], last), state), None

    vocab = jax.eval_shape(step, params, prompt[:, :1], state)[0].shape[-1]
    first = (jnp.full((rows, vocab), -jnp.inf, jnp.float32), state)
    if len(starts) == 1:
        return read(first, 0)[0]
    return jax.lax.scan(read, first, starts)[0]


def generate(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P], or rows of one length
    state: Any,
    *,
    num_tokens: int,
    lengths: jax.Array | None = None,  # i32[B]; None is P in every row
    sampler: Sampler | None = None,
    key: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:  # i32[B, num_tokens]
    """Continue each row by `num_tokens` tokens; `sampler=None` takes the likeliest.

    Rows may have any length up to P: row b's prompt is its first `lengths[b]` tokens. The compiled
    program is shared by all prompts of a bucket and by samplers that are equal.
    """
    prompt, lengths, key = _prepare(step, prompt, state, lengths, num_tokens, sampler, key, chunk)
    return _generate(
        step, params, prompt, lengths, state, key, num_tokens, sampler or Greedy(), chunk
    )


@partial(jax.jit, static_argnames=("step", "num_tokens", "sampler", "chunk"))
def _generate(step, params, prompt, lengths, state, key, num_tokens, sampler, chunk):
    logits, state = prefill(step, params, prompt, state, lengths, chunk)
    first = sampler(jax.random.fold_in(key, 0), logits)

    def advance(carry, n):
        token, state = carry
        logits, state = step(params, token[:, None], state)
        token = sampler(jax.random.fold_in(key, n), logits[:, 0])
        return (token, state), token

    _, rest = jax.lax.scan(advance, (first, state), jnp.arange(1, num_tokens))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def stream(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P], or rows of one length
    state: Any,
    *,
    num_tokens: int,
    lengths: jax.Array | None = None,  # i32[B]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,
    chunk: int | None = None,
) -> Iterator[np.ndarray]:  # i32[B], num_tokens times
    """The tokens of `generate` with the same arguments, each as soon as it is drawn."""
    prompt, lengths, key = _prepare(step, prompt, state, lengths, num_tokens, sampler, key, chunk)
    sampler = sampler or Greedy()
    token, state = _first(step, params, prompt, lengths, state, key, sampler, chunk)
    for n in range(1, num_tokens + 1):
        ahead = token
        if n < num_tokens:  # the next token is computed while the caller reads this one
            number = jax.device_put(np.int32(n))
            token, state = _next(step, params, token, state, key, number, sampler)
        yield jax.device_get(ahead)


@partial(jax.jit, static_argnames=("step", "sampler", "chunk"))
def _first(step, params, prompt, lengths, state, key, sampler, chunk):
    logits, state = prefill(step, params, prompt, state, lengths, chunk)
    return sampler(jax.random.fold_in(key, 0), logits), state


@partial(jax.jit, static_argnames=("step", "sampler"), donate_argnames="state")
def _next(step, params, token, state, key, n, sampler):
    logits, state = step(params, token[:, None], state)
    return sampler(jax.random.fold_in(key, n), logits[:, 0]), state


def _prepare(step, prompt, state, lengths, num_tokens, sampler, key, chunk):
    """Checked arguments, the prompt padded to its bucket."""
    if isinstance(prompt, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        raise ValueError("prompt and lengths must be known: in a jit of your own, call prefill")
    try:
        prompt = np.asarray(prompt)
    except ValueError:
        raise ValueError(
            "prompt has rows of several lengths: fill them up to one, and give `lengths`"
        ) from None
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt has shape {prompt.shape}: must be [B, P] with P at least 1")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: must be at least 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: must be at least 1")
    if sampler is not None:
        _check_sampler(sampler)
    if key is None:
        if sampler is not None and not isinstance(sampler, Greedy):
            raise ValueError(f"key is None: {sampler!r} draws random numbers")
        key = jax.random.key(0)
    check_key("key", key)
    rows, columns = prompt.shape
    lengths = np.full(rows, columns, np.int32) if lengths is None else np.asarray(lengths)
    if lengths.shape != (rows,):
        raise ValueError(f"lengths have shape {lengths.shape}: must be ({rows},)")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths are {lengths.dtype}: must be integers")
    if rows and not 1 <= lengths.min() <= lengths.max() <= columns:
        raise ValueError(f"lengths are {lengths.tolist()}: must be from 1 to {columns}")
    inside = np.arange(columns)[None] < lengths[:, None]
    prompt = np.where(inside, prompt, 0)
    if hasattr(step, "check"):
        step.check(prompt, state, lengths + num_tokens - 1)
    prompt = np.pad(prompt, ((0, 0), (0, bucket(columns) - columns)))
    return jnp.asarray(prompt, jnp.int32), jnp.asarray(lengths, jnp.int32), key


def _check_sampler(sampler: Any) -> None:
    """A value that takes (key, logits)."""
    if isinstance(sampler, type):
        rule = "must be a value, such as Greedy() or Sample(TopK(40))"
        raise ValueError(f"sampler is the class {sampler.__name__}: {rule}")
    if not callable(sampler):
        raise ValueError(f"sampler is {sampler!r}: must be called with (key, logits)")
    try:
        inspect.signature(sampler).bind(None, None)
    except TypeError:
        rule = f"must be called with (key, logits); a processor goes into Sample({sampler!r})"
        raise ValueError(f"sampler is {sampler!r}: {rule}") from None
    except ValueError:  # a builtin may have no signature
        pass
