"""Check what decoding is called with, and complete it: padded prompts, a key for each row."""

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
"""Token ids i32[B, P]: an array, or rows of one length."""

PerRow: TypeAlias = Array | Sequence[int]
"""One integer for each row, i32[B]."""

Lengths: TypeAlias = PerRow | Sequence[Sequence[int]]
"""The number of tokens of each row, i32[B], or a mask of the tokens, bool[B, P]."""


@short_repr
class DecodeOptions(NamedTuple):
    """Static options of a decoding program; hashable."""

    sampler: Sampler
    processors: tuple[HistoryProcessor, ...] = ()
    stop: tuple[int, ...] = ()
    ends: bool = False
    """Whether a row may end before the others."""
    capture: tuple[str, ...] = ()
    top: int = 0
    """How many of the likeliest tokens are returned with the chosen one."""
    chunk: int | None = None
    """How many tokens of the prompts are read at a time; None: all at once."""


@short_repr
class Prompts(NamedTuple):
    """Texts that a batch continues, checked and padded to their bucket."""

    tokens: jax.Array  # i32[B, P]; zeros after a row's end
    lengths: jax.Array  # i32[B]
    keys: jax.Array  # key[B]
    limits: jax.Array  # i32[B]; new tokens at most
    sampling: RowSampling | None = None
    """How each row is drawn; None: all as the options say."""
    allowed: jax.Array | None = None  # bool[B, V]
    """The tokens from which the first one is chosen; None allows all."""


@short_repr
class CheckedArguments(NamedTuple, Generic[State]):
    """Arguments of `generate` after all checks."""

    step: Step[State]
    options: DecodeOptions
    prompts: Prompts
    state: State
    """It can be donated."""


def bucket(length: int) -> int:
    """Return the smallest power of two from 16 on that holds `length` tokens."""
    # Powers of two: few programs serve all lengths, and no long prompt is padded to twice its own.
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
    """Check what `generate` was given, before anything is compiled; ValueError says what is wrong.

    The prompts come back padded to their bucket, the state fit to be donated.
    """
    name, step = type(step).__name__, as_step(step, params, state)
    check_count("num_tokens", num_tokens, 1, INT32.max)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    # A string is a sequence of names of one letter each: it stays whole, for the error below.
    capture = capture if isinstance(capture, str) else tuple(capture)
    if capture and not step.offers("look"):
        raise ValueError(f"capture is {capture!r}: {name} has no `look`")
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
        raise ValueError(f"key is None: {sampler!r} draws random numbers")
    keys = row_keys(key, rows)
    # If no row can end early, the program has no masks of the rows that have ended.
    ends = bool(stop) or limits is not None
    options = DecodeOptions(sampler, processors, stop, ends, tuple(capture), chunk=chunk)
    limits = check_limits(limits, rows, num_tokens)
    state = make_donatable(state)
    tokens = check_with_step(step, tokens, lengths, limits, state)
    if stop:
        # Only a stop token needs the size of the vocabulary, which takes a trace of the step.
        check_stop(stop, step, params, rows, state)
    step, tokens, lengths = fill_prompts(step, tokens, lengths)
    prompts = Prompts(tokens, lengths, keys, jnp.asarray(limits, jnp.int32))
    return CheckedArguments(step, options, prompts, state)


def check_with_step(
    step: Step[State],
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
    limits: Array | int,  # i32[B], or one for all
    state: State,
) -> Array:  # i32[B, P]
    """Return the prompts; ValueError if the step is known not to serve them.

    A row reads its prompt and all new tokens but the last. If an edit names a token that a row does
    not reach, and this is traced, the row's tokens become -1, which makes its logits NaN.
    """
    numpy: ModuleType = jnp if traced(lengths, limits) else np
    # A row with limit 0 still reads its whole prompt: its state is what the caller wants.
    total = lengths + numpy.maximum(limits, 1) - 1
    if not traced(prompt, total):
        step.check(np.asarray(prompt), state, total)
    lacking = step.lacking(state, total) if isinstance(step, AppliedStep) else None
    return prompt if lacking is None else jnp.where(lacking[:, None], -1, prompt)


def check_stop(
    stop: tuple[int, ...], step: Step[State], params: Params, rows: int, state: State
) -> None:
    """Raise ValueError where a stop token is outside the vocabulary."""
    vocab = count_vocab(step, params, rows, state)
    if max(stop) >= vocab:
        raise ValueError(f"stop is {max(stop)}: must be in 0..{vocab - 1}")


def fill_prompts(
    step: Step[State],
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
) -> tuple[Step[State], jax.Array, jax.Array]:  # i32[B, bucket(P)], i32[B]
    """Pad a checked prompt with zeros, up to the length that its program is compiled for.

    Where the step reads exactly what it is given, that is the longest prompt's. The step that is
    returned knows whether others are shorter.
    """
    known, width = not traced(lengths), bucket(prompt.shape[1])
    if known and len(set(np.asarray(lengths).tolist())) > 1:
        step = step.told(padded=True)
    if step.reads_exactly:
        # Such an edit would see the padding and act on it: each length gets a program of its own.
        width = int(np.max(lengths, initial=1)) if known else prompt.shape[1]
    numpy: ModuleType = jnp if traced(prompt) else np
    fill = max(0, width - prompt.shape[1])
    prompt = numpy.pad(prompt, ((0, 0), (0, fill)))[:, :width]
    return step, jnp.asarray(prompt, jnp.int32), jnp.asarray(lengths, jnp.int32)


def check_prompt(prompt: TokenRows, lengths: Lengths | None) -> tuple[Array, Array]:
    """Return prompt i32[B, P], with zeros after a row's end, and lengths i32[B].

    If `lengths` is a mask, the tokens of a row move to its beginning. ValueError if a shape, a
    dtype or a known value is wrong; traced values are not checked.
    """
    try:
        tokens: Array = prompt if isinstance(prompt, jax.core.Tracer) else np.asarray(prompt)
    except ValueError:
        raise ValueError(
            "prompt has rows of several lengths: fill them up to one, and give `lengths`"
        ) from None
    # NumPy makes an array of a string, too, and a text is a likely mistake.
    if tokens.dtype.kind in "SU":
        raise ValueError("prompt is text: must be token ids; load(FOLDER).generate takes a text")
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"prompt has shape {tokens.shape}: must be [B, P] with P at least 1")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(f"prompt is {given}: must be token ids, integers")
    rows, columns = tokens.shape
    if lengths is None:
        return as_int32("prompt", tokens), np.full(rows, columns, np.int32)
    counts: Array = lengths if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths)
    if counts.shape not in ((rows,), tokens.shape):
        rule = f"must be ({rows},), or a mask {tokens.shape} of the tokens"
        raise ValueError(f"lengths have shape {counts.shape}: {rule}")
    is_mask = counts.ndim == 2
    if not jnp.issubdtype(counts.dtype, jnp.integer) and not (is_mask and counts.dtype == bool):
        raise ValueError(f"lengths are {counts.dtype}: must be integers, or a bool mask [B, P]")
    if is_mask:
        numpy: ModuleType = jnp if traced(tokens, counts) else np
        valid = counts != 0
        if not traced(counts) and (wrong := counts[valid & (counts != 1)]).size:
            raise ValueError(f"lengths is a mask with {wrong[0]}: must be 0 and 1, or bool")
        # A stable sort keeps the tokens in order, whichever side the padding is on.
        order = numpy.argsort(~valid, axis=1, stable=True)
        tokens = numpy.take_along_axis(tokens, order, axis=1)
        counts = valid.sum(axis=1, dtype=np.int32)
    if traced(tokens, counts):
        return jnp.where(jnp.arange(columns)[None] < counts[:, None], tokens, 0), counts
    if rows and not 1 <= counts.min() <= counts.max() <= columns:
        raise ValueError(f"lengths are {counts.tolist()}: must be from 1 to {columns}")
    # What stands after a row's end may be any number; 0 is a token of every vocabulary.
    tokens = np.where(np.arange(columns)[None] < counts[:, None], tokens, 0)
    return as_int32("prompt", tokens), counts


_fold_rows = jax.jit(
    lambda key, rows: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows)),
    static_argnums=1,
)


def row_keys(key: jax.Array | None, rows: int) -> jax.Array:  # key[B], Threefry's
    """Return `fold_in(key, b)` for row b; as many keys as rows are returned as they are.

    Keys may be of any implementation, or raw words as in older JAX. What comes back is of Threefry,
    whose numbers of a row depend on its own key alone. ValueError where `key` is neither a single
    key nor one for each row.
    """
    if key is None:
        key = jax.random.key(0)
    if not isinstance(key, jax.Array | np.ndarray):
        check_key("key", key)
    dtype, shape = key.dtype, key.shape
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # Raw keys of older JAX have an axis of words more than typed ones.
    if shape == (rows,) if typed else dtype == jnp.uint32 and len(key.shape) == 2:
        if shape[0] != rows:
            raise ValueError(f"key is {dtype}{tuple(shape)}: must be one key, or one for each row")
        return as_threefry(key)
    check_key("key", key)
    return _fold_rows(as_threefry(key), rows)


def stop_tokens(stop: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return one stop token or several as a tuple, None as none.

    ValueError where one is no token id.
    """
    if isinstance(stop, str | bytes):
        rule = "must be token ids; load(FOLDER).generate(..., stop=...) ends at a text"
        raise ValueError(f"stop is {stop!r}: {rule}")
    return () if stop is None else as_token_ids("stop", stop, least=0)


def make_donatable(state: State) -> State:
    """Return the state, an array that stands in it twice copied: memory is given away once.

    ValueError where the state was consumed before.
    """
    check_not_consumed(state)
    # XLA refuses to donate one buffer twice, and a state may contain an array twice.
    leaves, tree = jax.tree.flatten(state)
    seen: set[int] = set()
    for i, x in enumerate(leaves):
        if isinstance(x, jax.Array) and id(x) in seen:
            leaves[i] = x.copy()
        seen.add(id(x))
    found: State = jax.tree.unflatten(tree, leaves)
    return found


def check_limits(limits: PerRow | None, rows: int, num_tokens: int) -> Array:  # i32[B]
    """Return the most new tokens of each row; None is `num_tokens` in all.

    ValueError where they are no integers from 0 to `num_tokens`; under a trace they are clipped.
    """
    if limits is None:
        return np.full(rows, num_tokens, np.int32)
    given: Array = limits if isinstance(limits, jax.core.Tracer) else np.asarray(limits)
    if given.shape != (rows,) or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"limits are {given.dtype}{list(given.shape)}: must be integers [{rows}]")
    if traced(given):
        return jnp.clip(given, 0, num_tokens)
    if rows and not 0 <= given.min() <= given.max() <= num_tokens:
        raise ValueError(f"limits are {given.tolist()}: must be from 0 to {num_tokens}")
    return given


def check_sampler(sampler: Sampler) -> None:
    """Raise ValueError where the sampler is not a value that is called with (key, logits)."""
    if isinstance(sampler, type):
        rule = "must be a value, such as Greedy() or Sample(TopK(40))"
        raise ValueError(f"sampler is the class {sampler.__name__}: {rule}")
    if not callable(sampler):
        raise ValueError(f"sampler is {sampler!r}: must be called with (key, logits)")
    try:
        # A processor such as TopK(40) is a value and can be called, too, but with logits alone.
        inspect.signature(sampler).bind(None, None)
    except TypeError:
        rule = f"must be called with (key, logits); a processor goes into Sample({sampler!r})"
        raise ValueError(f"sampler is {sampler!r}: {rule}") from None
    except ValueError:  # a builtin may have no signature
        pass
