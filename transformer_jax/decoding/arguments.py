"""Argument checks for decoding, padding of prompts, and derivation of a key for each row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Generic, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import INT32, as_int32, check_count, check_key, check_not_consumed
from transformer_jax.decoding.batch_rows import State
from transformer_jax.decoding.logit_processors import (
    HistoryProcessor,
    as_token_ids,
    check_processors,
)
from transformer_jax.decoding.samplers import Greedy, RowSampling, Sampler, as_threefry
from transformer_jax.decoding.step import AppliedStep, Params, Step, StepLike, as_step, count_vocab
from transformer_jax.tracing import traced
from transformer_jax.values import short_repr

Array: TypeAlias = jax.Array | np.ndarray

TokenRows: TypeAlias = Array | Sequence[Sequence[int]]
"""Token IDs i32[B, P], as an array or as rows of equal length."""

PerRow: TypeAlias = Array | Sequence[int]
"""One integer for each row, i32[B]."""

Lengths: TypeAlias = PerRow | Sequence[Sequence[int]]
"""Number of tokens in each row, i32[B], or a mask of the tokens, bool[B, P]."""


@short_repr
class DecodeOptions(NamedTuple):
    """Static, hashable options of a decoding program."""

    sampler: Sampler
    processors: tuple[HistoryProcessor, ...] = ()
    stop: tuple[int, ...] = ()
    ends: bool = False
    """Whether a row may end before the others."""
    capture: tuple[str, ...] = ()
    top: int = 0
    """Number of most likely tokens to return with each chosen token."""
    chunk: int | None = None
    """Number of prompt tokens to read at a time; None means all at once."""
    invariant: bool = False
    """Whether the log-probabilities of a row have the same bits for any other rows."""


@short_repr
class Prompts(NamedTuple):
    """Prompts of a batch, which are checked and padded to their bucket."""

    tokens: jax.Array  # i32[B, P]; zeros after the end of a row
    lengths: jax.Array  # i32[B]
    keys: jax.Array  # key[B]
    limits: jax.Array  # i32[B]; maximum number of new tokens
    sampling: RowSampling | None = None
    """Temperature and top-p of each row; None means that only the options' sampler applies."""
    allowed: jax.Array | None = None  # bool[B, V]
    """Mask of the tokens allowed as the first new token; None allows all tokens."""


@short_repr
class CheckedArguments(NamedTuple, Generic[State]):
    """Checked arguments of `generate`."""

    step: Step[State]
    options: DecodeOptions
    prompts: Prompts
    state: State
    """State that can safely be donated."""


def bucket(length: int) -> int:
    """Return the smallest power of two that is at least 16 and at least `length`."""
    # With powers of two, a few programs serve all lengths, and padding less than doubles the length
    # of a prompt.
    return max(16, 1 << (length - 1).bit_length())


def check_arguments(
    step: StepLike[State],
    params: Params,
    prompt: TokenRows,
    state: State,
    *,
    num_tokens: int,
    lengths: Lengths | None,
    sampler: Sampler | None,
    key: jax.Array | None,
    processors: Sequence[HistoryProcessor],
    stop: int | Sequence[int],
    limits: PerRow | None,
    chunk: int | None,
    capture: Sequence[str] = (),
) -> CheckedArguments[State]:
    """Check the arguments of `generate` before anything is compiled.

    The returned prompts are padded to their bucket, and the returned state can be donated. Raise
    ValueError if an argument is invalid.
    """
    name, step = type(step).__name__, as_step(step, params, state)
    check_count("num_tokens", num_tokens, 1, INT32.max)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    # Do not split a string into letters, because the error message below quotes it.
    capture = capture if isinstance(capture, str) else tuple(capture)
    if capture and not step.implements("look"):
        raise ValueError(f"capture is {capture!r}: {name} has no `look` method")
    if capture:
        step.check_look(cast(tuple[str, ...], capture))
    if sampler is not None:
        check_sampler(sampler)
    sampler = Greedy() if sampler is None else sampler
    processors = check_processors(processors)
    stop = stop_tokens(stop)
    tokens, lengths = check_prompt(prompt, lengths)
    rows = tokens.shape[0]
    if key is None and not isinstance(sampler, Greedy):
        raise ValueError(f"key is None: must be set, because {sampler!r} draws random numbers")
    keys = row_keys(key, rows)
    # If no row can end early, the program does not need masks of finished rows.
    ends = bool(stop) or limits is not None
    options = DecodeOptions(
        sampler, processors, stop, ends, tuple(capture), chunk=chunk, invariant=step.invariant
    )
    limits = check_limits(limits, rows, num_tokens)
    state = make_donatable(state)
    tokens = check_with_step(step, tokens, lengths, limits, state)
    if stop:
        # Check this only now, because counting the vocabulary traces the step.
        check_stop(stop, step, params, rows, state)
    step, tokens, lengths = fill_prompts(step, tokens, lengths)
    prompts = Prompts(tokens, lengths, keys, jnp.asarray(limits, jnp.int32))
    return CheckedArguments(step, options, prompts, state)


def check_with_step(
    step: Step[State],
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
    limits: Array | int,  # i32[B], or one limit for all rows
    state: State,
) -> Array:  # i32[B, P]
    """Return the prompts, or raise ValueError if the step cannot process them.

    A row reads its prompt and all of its new tokens except the last one. If an edit refers to a
    token past the end of a row and the lengths are traced, the tokens of the row become -1 and its
    logits become NaN.
    """
    numpy: ModuleType = jnp if traced(lengths, limits) else np
    # A row with limit 0 still reads its whole prompt, because the caller needs its state.
    total = lengths + numpy.maximum(limits, 1) - 1
    if not traced(prompt, total):
        step.check(np.asarray(prompt), state, total)
    too_short = step.too_short(state, total) if isinstance(step, AppliedStep) else None
    return prompt if too_short is None else jnp.where(too_short[:, None], -1, prompt)


def check_stop(
    stop: tuple[int, ...], step: Step[State], params: Params, rows: int, state: State
) -> None:
    """Raise ValueError if a stop token is outside the vocabulary."""
    vocab = count_vocab(step, params, rows, state)
    if max(stop) >= vocab:
        raise ValueError(f"stop is {max(stop)}: must be from 0 to {vocab - 1}")


def fill_prompts(
    step: Step[State],
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
) -> tuple[Step[State], jax.Array, jax.Array]:  # i32[B, bucket(P)], i32[B]
    """Pad checked prompts with zeros to the length for which their program is compiled.

    If the step must not see padding, this is the length of the longest prompt. The returned step
    knows whether rows have different lengths.
    """
    concrete, width = not traced(lengths), bucket(prompt.shape[1])
    if concrete and len(set(np.asarray(lengths).tolist())) > 1:
        step = step.with_facts(padded=True)
    if step.needs_unpadded:
        # An edit would see the padding and act on it, so each length has its own program.
        width = int(np.max(lengths, initial=1)) if concrete else prompt.shape[1]
    numpy: ModuleType = jnp if traced(prompt) else np
    fill = max(0, width - prompt.shape[1])
    prompt = numpy.pad(prompt, ((0, 0), (0, fill)))[:, :width]
    return step, jnp.asarray(prompt, jnp.int32), jnp.asarray(lengths, jnp.int32)


def check_prompt(prompt: TokenRows, lengths: Lengths | None) -> tuple[Array, Array]:
    """Return the prompts i32[B, P], with zeros after the end of each row, and the lengths i32[B].

    If `lengths` is a mask, the tokens of each row are moved to its beginning. Raise ValueError if a
    shape, a dtype or a concrete value is invalid. Traced values are not checked.
    """
    try:
        tokens: Array = prompt if isinstance(prompt, jax.core.Tracer) else np.asarray(prompt)
    except ValueError:
        raise ValueError(
            "prompt has rows of different lengths: pad them to one length and pass `lengths`"
        ) from None
    # NumPy would convert a string to an array, and passing a string is a common mistake.
    if tokens.dtype.kind in "SU":
        raise ValueError(
            "prompt is a string: must be token IDs; load(FOLDER).generate accepts a string"
        )
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"prompt has shape {tokens.shape}: must be [B, P] with P at least 1")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        actual = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(f"prompt is {actual}: must be integer token IDs")
    rows, columns = tokens.shape
    if lengths is None:
        return as_int32("prompt", tokens), np.full(rows, columns, np.int32)
    counts: Array = lengths if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths)
    if counts.shape not in ((rows,), tokens.shape):
        rule = f"must be ({rows},), or {tokens.shape} for a mask of the tokens"
        raise ValueError(f"lengths have shape {counts.shape}: {rule}")
    is_mask = counts.ndim == 2
    if not jnp.issubdtype(counts.dtype, jnp.integer) and not (is_mask and counts.dtype == bool):
        raise ValueError(f"lengths are {counts.dtype}: must be integers, or a bool mask [B, P]")
    if is_mask:
        numpy: ModuleType = jnp if traced(tokens, counts) else np
        valid = counts != 0
        if not traced(counts) and (wrong := counts[valid & (counts != 1)]).size:
            raise ValueError(
                f"lengths is a mask that contains {wrong[0]}: must contain only 0 and 1, or be bool"
            )
        # A stable sort keeps the order of the tokens, no matter which side is padded.
        order = numpy.argsort(~valid, axis=1, stable=True)
        tokens = numpy.take_along_axis(tokens, order, axis=1)
        counts = valid.sum(axis=1, dtype=np.int32)
    if traced(tokens, counts):
        return jnp.where(jnp.arange(columns)[None] < counts[:, None], tokens, 0), counts
    if rows and not 1 <= counts.min() <= counts.max() <= columns:
        raise ValueError(f"lengths are {counts.tolist()}: must be from 1 to {columns}")
    # Callers may pad with any number, but only 0 is a token in every vocabulary.
    tokens = np.where(np.arange(columns)[None] < counts[:, None], tokens, 0)
    return as_int32("prompt", tokens), counts


_fold_rows = jax.jit(
    lambda key, rows: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows)),
    static_argnums=1,
)


def row_keys(key: jax.Array | None, rows: int) -> jax.Array:  # key[B], Threefry's
    """Return `fold_in(key, b)` for each row b, or the keys themselves if there is one for each row.

    Keys may have any implementation, or may be raw words as in older JAX versions. The result uses
    Threefry, whose random numbers for a row depend only on the key of that row. Raise ValueError if
    `key` is neither a single key nor one key for each row.
    """
    if key is None:
        key = jax.random.key(0)
    if not isinstance(key, jax.Array | np.ndarray):
        check_key("key", key)
    dtype, shape = key.dtype, key.shape
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # Raw keys from older JAX versions have an extra axis of words.
    if shape == (rows,) if typed else dtype == jnp.uint32 and len(key.shape) == 2:
        if shape[0] != rows:
            rule = "must be one key, or one key for each row"
            raise ValueError(f"key is {dtype}{tuple(shape)}: {rule}")
        return as_threefry(key)
    check_key("key", key)
    return _fold_rows(as_threefry(key), rows)


def stop_tokens(stop: int | Sequence[int] | None) -> tuple[int, ...]:
    """Convert one or more stop tokens, or None, to a tuple, after checking the IDs."""
    if isinstance(stop, str | bytes):
        rule = "must be token IDs; load(FOLDER).generate(..., stop=...) accepts stop strings"
        raise ValueError(f"stop is {stop!r}: {rule}")
    return () if stop is None else as_token_ids("stop", stop, least=0)


def make_donatable(state: State) -> State:
    """Copy arrays that occur more than once in a state, so that the state can be donated.

    Raise ValueError if the state was already consumed.
    """
    check_not_consumed(state)
    # XLA does not allow donating the same buffer twice.
    leaves, tree = jax.tree.flatten(state)
    seen: set[int] = set()
    for i, x in enumerate(leaves):
        if isinstance(x, jax.Array) and id(x) in seen:
            leaves[i] = x.copy()
        seen.add(id(x))
    donatable: State = jax.tree.unflatten(tree, leaves)
    return donatable


def check_limits(limits: PerRow | None, rows: int, num_tokens: int) -> Array:  # i32[B]
    """Return the maximum number of new tokens for each row; None means `num_tokens` for all rows.

    Raise ValueError unless the limits are integers from 0 to `num_tokens`. Traced limits are
    clipped.
    """
    if limits is None:
        return np.full(rows, num_tokens, np.int32)
    array: Array = limits if isinstance(limits, jax.core.Tracer) else np.asarray(limits)
    if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"limits are {array.dtype}{list(array.shape)}: must be integers [{rows}]")
    if traced(array):
        return jnp.clip(array, 0, num_tokens)
    if rows and not 0 <= array.min() <= array.max() <= num_tokens:
        raise ValueError(f"limits are {array.tolist()}: must be from 0 to {num_tokens}")
    return array


def check_sampler(sampler: Sampler) -> None:
    """Raise ValueError unless the sampler is a value that can be called with (key, logits)."""
    if isinstance(sampler, type):
        rule = "must be a value, such as Greedy() or Sample(TopK(40))"
        raise ValueError(f"sampler is the class {sampler.__name__}: {rule}")
    if not callable(sampler):
        raise ValueError(f"sampler is {sampler!r}: must be callable with (key, logits)")
    try:
        # A processor such as TopK(40) is also callable, but takes only logits.
        inspect.signature(sampler).bind(None, None)
    except TypeError:
        rule = f"must be callable with (key, logits); wrap a processor as Sample({sampler!r})"
        raise ValueError(f"sampler is {sampler!r}: {rule}") from None
    except ValueError:  # built-in functions may have no signature
        pass
