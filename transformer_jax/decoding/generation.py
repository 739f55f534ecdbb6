"""Generate tokens: all in one compiled program, or as a stream.

A model is known only as `step(params, tokens, state, valid=...)`. `generate` is one jitted program:
it reads the prompt, then runs a `lax.scan`, or a `lax.while_loop` that ends when every row has
ended. `stream` yields the same tokens one by one. Both are made of `start_decoding` and
`decode_step`, which are pure functions of a `DecodeState`, whose every leaf leads with B.

Token n of a row is drawn with `fold_in(row's key, n)`. So it depends neither on the other rows nor
on which loop runs. Prompts are padded to a bucket, so one compilation serves every length in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Never, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import as_int32, check_count, check_key
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.decoding.batch_rows import State, select_rows
from transformer_jax.decoding.logit_processors import (
    History,
    HistoryProcessor,
    apply_processors,
    as_token_ids,
    as_tuple,
    check_processors,
)
from transformer_jax.decoding.samplers import Greedy, Sampler, as_threefry
from transformer_jax.decoding.step import (
    Params,
    PyTree,
    Step,
    check_params,
    check_state,
    check_step,
    count_vocab,
    has_attend,
    has_check,
    has_look,
    read_logits_at,
)
from transformer_jax.programs import program, shapes_of
from transformer_jax.sharding import by_compiler, split, split_rows, vary
from transformer_jax.shown import short_repr
from transformer_jax.tracing import traced

Array: TypeAlias = jax.Array | np.ndarray

Prompt: TypeAlias = Array | Sequence[Sequence[int]]
"""Token ids i32[B, P]: an array, or rows of one length."""

PerRow: TypeAlias = Array | Sequence[int]
"""One integer for each row, i32[B]."""


def bucket(length: int) -> int:
    """Return the smallest power of two from 16 on that holds `length` tokens."""
    return max(16, 1 << (length - 1).bit_length())


def prefill(
    step: Step[State],
    params: Params,
    prompt: jax.Array,  # i32[B, P]
    state: State,
    lengths: jax.Array,  # i32[B]; the first lengths[b] tokens of a row count
    chunk: int | None = None,
) -> tuple[jax.Array, State]:  # f32[B, V], state
    """Read the prompts; return the logits after each row's last token, and the state.

    It is pure: jit it yourself. Of a step with `read` no other logits are computed. With `chunk`,
    that many tokens are read at a time: the same numbers in less memory. ValueError where `chunk`
    is not an integer of at least 1, or there is no token.
    """
    if chunk is not None:
        check_count("chunk", chunk, 1)
    check_step(step)
    check_params(params)
    check_state(state)
    prompt, lengths = jnp.asarray(prompt), jnp.asarray(lengths)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt has shape {prompt.shape}: must be [B, P] with P at least 1")
    state = vary(state, (params, prompt))
    rows, columns = prompt.shape
    chunk = columns if chunk is None else chunk
    padded = -columns % chunk
    prompt = jnp.pad(prompt, ((0, 0), (0, padded)))
    starts = jnp.arange(0, columns + padded, chunk)

    def read_chunk(
        carry: tuple[jax.Array, State], start: jax.Array | int
    ) -> tuple[tuple[jax.Array, State], None]:
        last, state = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        index = start + jnp.arange(chunk)
        valid = index[None] < lengths[:, None]
        offset = lengths - 1 - start  # [B]
        here = (offset >= 0) & (offset < chunk)
        at = jnp.clip(offset, 0, chunk - 1)[:, None]
        logits, state = read_logits_at(step, params, tokens, state, at, valid)
        return (jnp.where(here[:, None], logits[:, 0].astype(last.dtype), last), state), None

    vocab = shapes_of(step, params, prompt[:, :1], state)[0].shape[-1]
    first = vary((jnp.full((rows, vocab), -jnp.inf, jnp.float32), state))
    if len(starts) == 1:
        return read_chunk(first, 0)[0]
    return jax.lax.scan(read_chunk, first, starts)[0]


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation(Generic[State]):
    """Hold what `generate` returns; after a row's end tokens are -1 and log-probabilities 0."""

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]; new tokens of a row, a stop token and -1 of NaN logits included
    log_probs: jax.Array  # f32[B, num_tokens]; log softmax(logits)[token], before processors
    state: State
    """Has read all but each row's last token: generate on, from that token, or `fork` it."""
    attention: PyTree = None
    """On request, `step.attend`'s weights [B, num_tokens, ...] of the query that chose token n;
    0 after a row's end."""
    captured: dict[str, jax.Array] | None = None
    """On request, by place its values [B, num_tokens, ...] where token n was chosen; 0 after a
    row's end."""

    def rows(self) -> list[np.ndarray]:
        """Return each row's tokens i32[lengths[b]], without what follows its end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


@short_repr
class DecodeOptions(NamedTuple):
    """Say what a program is compiled for; hashable."""

    sampler: Sampler
    processors: tuple[HistoryProcessor, ...] = ()
    stop: tuple[int, ...] = ()
    ends: bool = False
    """Whether a row may end before the others."""
    attention: bool = False
    capture: tuple[str, ...] = ()


@short_repr
class Prompts(NamedTuple):
    """Hold the texts that a batch goes on from, checked and padded to their bucket."""

    tokens: jax.Array  # i32[B, P]; zeros after a row's end
    lengths: jax.Array  # i32[B]
    keys: jax.Array  # key[B]
    limits: jax.Array  # i32[B]; new tokens at most


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState(Generic[State]):
    """Hold rows in the middle of being generated; every leaf leads with B."""

    token: jax.Array  # i32[B]; chosen, and not yet read by the model
    active: jax.Array  # bool[B]; False: the row has ended, its state stands still
    count: jax.Array  # i32[B]; new tokens so far
    limits: jax.Array  # i32[B]; new tokens at most
    keys: jax.Array  # key[B]
    state: State
    """The model's."""
    history: History | None  # None without processors


@short_repr
class StepOutput(NamedTuple):
    """Hold one new token of every row."""

    token: jax.Array  # i32[B]; -1 where the row had ended
    log_prob: jax.Array  # f32[B]; 0 where the row had ended
    seen: PyTree
    """The weights of attention, or captured values, where they are asked for."""


@short_repr
class CheckedArguments(NamedTuple, Generic[State]):
    """Hold what `generate` was given, after all checks."""

    options: DecodeOptions
    prompts: Prompts
    state: State
    """It can be donated."""


def start_decoding(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    room: int,
    chunk: int | None = None,
) -> tuple[DecodeState[State], StepOutput]:
    """Read the prompts and choose each row's first token; `room` is the most tokens it may get."""
    tokens, lengths, keys, limits = prompts
    history = History.of(tokens, lengths, room) if options.processors else None
    decode_state = DecodeState(
        lengths, limits > 0, jnp.zeros_like(lengths), limits, keys, state, history
    )
    if not options.attention and not options.capture:
        logits, state = prefill(step, params, tokens, state, lengths, chunk)
        return _choose_tokens(options, replace(decode_state, state=state), logits, None)
    _, state = prefill(step, params, tokens, state, lengths - 1, chunk)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    logits, state, seen = _read_token(options, step, params, last, state, None)
    return _choose_tokens(options, replace(decode_state, state=state), logits[:, 0], seen)


def decode_step(
    options: DecodeOptions, step: Step[State], params: Params, decode_state: DecodeState[State]
) -> tuple[DecodeState[State], StepOutput]:
    """Let every active row read its newest token and choose the next."""
    token, valid = decode_state.token, None
    if options.ends:
        token, valid = jnp.where(decode_state.active, token, 0), decode_state.active[:, None]
    logits, state, seen = _read_token(
        options, step, params, token[:, None], decode_state.state, valid
    )
    return _choose_tokens(options, replace(decode_state, state=state), logits[:, 0], seen)


def _read_token(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    token: jax.Array,  # i32[B, 1]
    state: State,
    valid: jax.Array | None,  # bool[B, 1]
) -> tuple[jax.Array, State, PyTree]:  # [B, 1, V]
    """Read one token a row; return also what the options ask to see."""
    if options.attention:
        assert has_attend(step)
        return step.attend(params, token, state, valid=valid)
    if options.capture:
        assert has_look(step)
        return step.look(params, token, state, options.capture, valid=valid)
    return *step(params, token, state, valid=valid), None


def _choose_tokens(
    options: DecodeOptions,
    decode_state: DecodeState[State],
    logits: jax.Array,  # [B, V]
    seen: PyTree,
) -> tuple[DecodeState[State], StepOutput]:
    """Apply processors and sampler, and end the rows that have their last token."""
    active, history = decode_state.active, decode_state.history
    logits = logits.astype(jnp.float32)
    processed = apply_processors(options.processors, history, logits)
    if options.ends:
        seen = select_rows(active, seen, jax.tree.map(jnp.zeros_like, seen))
    keys = jax.vmap(jax.random.fold_in)(decode_state.keys, decode_state.count)
    token = jax.vmap(lambda key, row: options.sampler(key, row[None])[0])(keys, processed)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    log_prob = jnp.take_along_axis(log_probs, jnp.clip(token, 0)[:, None], axis=1)[:, 0]
    log_prob = jnp.where(token < 0, jnp.nan, log_prob)
    output = StepOutput(
        jnp.where(active, token, -1) if options.ends else token,
        jnp.where(active, log_prob, 0.0) if options.ends else log_prob,
        seen,
    )
    count = decode_state.count + active.astype(jnp.int32)
    if history is not None:
        history = history.append(token, active)
    if options.ends:
        token = jnp.where(active, token, decode_state.token)
        active = active & (count < decode_state.limits)
    if options.stop:
        active = active & ~(token[:, None] == jnp.asarray(options.stop)[None]).any(axis=1)
    changed = replace(decode_state, token=token, active=active, count=count, history=history)
    return changed, output


def generate(
    step: Step[State],
    params: Params,
    prompt: Prompt,  # i32[B, P], or rows of one length
    state: State,
    *,
    num_tokens: int,
    lengths: PerRow | None = None,  # i32[B]; None is P in every row
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]; None is num_tokens in every row
    chunk: int | None = None,
    early_exit: bool | None = None,
    attention: bool = False,
    capture: Sequence[str] = (),
    **unknown: Never,
) -> Generation[State]:
    """Continue each row by up to `num_tokens` tokens; `sampler=None` takes the likeliest.

    Rows may have any length up to P: row b's prompt is its first `lengths[b]` tokens. A row ends
    after a `stop` token, which it keeps, or after `limits[b]` tokens: with 0 it has none, and its
    state has read its prompt whole. `processors` see the text so far; the sampler draws from what
    they leave. Row b uses `fold_in(key, b)`, or `key[b]`, alone. `chunk` is that of `prefill`;
    with `attention`, the result holds the weights of the step's `attend`, with `capture` the values
    of places inside the model where each token was chosen (`transformer_jax.places`).

    The state is consumed: its memory becomes the result's (`fork(state, 1)` keeps it). With
    `early_exit` the loop ends as soon as every row has (None: where a row may end at all); the
    tokens are the same. The compiled program is shared by all prompts of a bucket and by samplers
    and processors that are equal.

    ValueError where an argument is wrong, before anything is compiled or consumed. Under a trace
    of yours what is not known is not checked: a token outside the vocabulary and a position past
    the cache make their row nonfinite: it has token -1 and log-probability NaN. Limits are clipped
    to 0..num_tokens. Where every window has left such a token behind before the prompt ends, it
    changes nothing.
    """
    refuse_keywords(generate, unknown)
    options, prompts, state = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths, sampler=sampler,
        key=key, processors=processors, stop=stop, limits=limits, chunk=chunk, attention=attention,
        capture=capture,
    )  # fmt: skip
    if early_exit is None:
        early_exit = options.ends
    inside = traced(*jax.tree.leaves((params, prompts, state)))  # a trace that donates by itself
    program = _generate_inside if inside else _generate
    return program(options, step, params, prompts, state, num_tokens, chunk, early_exit)


def _generate_sharded(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    num_tokens: int,
    chunk: int | None,
    early_exit: bool,
) -> Generation[State]:
    run = partial(_generate_tokens, options, step, num_tokens, chunk, early_exit)
    rows: Any = split_rows(state)  # in place of arrays
    weights, captured = (rows if asked else None for asked in (options.attention, options.capture))
    results = Generation(rows, rows, rows, jax.tree.map(split, state), weights, captured)
    return by_compiler(run, [params, prompts, state], results)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Tokens so far, i32[]; the rows; the outputs of all steps, [num_tokens, B]."""


def _generate_tokens(
    options: DecodeOptions,
    step: Step[State],
    num_tokens: int,
    chunk: int | None,
    early_exit: bool,
    params: Params,
    prompts: Prompts,
    state: State,
) -> Generation[State]:
    """Read the prompts, then choose a token at a time, each written into its place."""

    def buffer(first: jax.Array, fill: int = 0) -> jax.Array:
        rest = jnp.full((num_tokens - 1, *first.shape), fill, first.dtype)
        return jnp.concatenate([first[None], rest])

    def unfinished(carry: _Carry[State]) -> jax.Array:
        n, decode_state, _ = carry
        return (n < num_tokens) & decode_state.active.any()

    def write_next(carry: _Carry[State]) -> _Carry[State]:
        n, decode_state, outputs = carry
        decode_state, output = decode_step(options, step, params, decode_state)
        return n + 1, decode_state, jax.tree.map(lambda all, x: all.at[n].set(x), outputs, output)

    decode_state, first = start_decoding(options, step, params, prompts, state, num_tokens, chunk)
    seen = jax.tree.map(buffer, first.seen)
    outputs = StepOutput(buffer(first.token, -1), buffer(first.log_prob), seen)
    carry = jnp.int32(1), decode_state, outputs
    if early_exit:
        _, decode_state, outputs = jax.lax.while_loop(unfinished, write_next, carry)
    else:
        steps = None, num_tokens - 1
        _, decode_state, outputs = jax.lax.scan(
            lambda carry, _: (write_next(carry), None), carry, *steps
        )[0]
    outputs = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
    return Generation(
        outputs.token,
        decode_state.count,
        outputs.log_prob,
        decode_state.state,
        outputs.seen if options.attention else None,
        outputs.seen if options.capture else None,
    )


_STATIC = ("options", "step", "num_tokens", "chunk", "early_exit")
_generate_inside = program(_generate_sharded, static=_STATIC)
_generate = program(_generate_sharded, static=_STATIC, donate=("state",))


def stream(
    step: Step[State],
    params: Params,
    prompt: Prompt,  # i32[B, P], or rows of one length
    state: State,
    *,
    num_tokens: int,
    lengths: PerRow | None = None,  # i32[B]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]
    chunk: int | None = None,
    **unknown: Never,
) -> Iterator[np.ndarray]:  # i32[B], at most num_tokens times
    """Yield the tokens of `generate` with the same arguments, each as soon as it is drawn.

    A row that has ended gives -1; when all have, the iterator ends. The state is consumed.
    ValueError where an argument is wrong, at the call.
    """
    refuse_keywords(stream, unknown)
    arguments = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths, sampler=sampler,
        key=key, processors=processors, stop=stop, limits=limits, chunk=chunk, attention=False,
    )  # fmt: skip
    return _stream_tokens(arguments, step, params, num_tokens, chunk)


def _stream_tokens(
    arguments: CheckedArguments[State],
    step: Step[State],
    params: Params,
    num_tokens: int,
    chunk: int | None,
) -> Iterator[np.ndarray]:
    options, prompts, state = arguments
    decode_state, token = _first_token(options, step, params, prompts, state, num_tokens, chunk)
    for n in range(1, num_tokens + 1):
        newest, active = token, decode_state.active
        if n < num_tokens:  # the next token is computed while the caller reads this one
            if options.ends:
                active = active.copy()  # the next call consumes the decode state
            decode_state, token = _next_token(options, step, params, decode_state)
        yield jax.device_get(newest)
        if options.ends and not jax.device_get(active).any():
            return


@program(static=("options", "step", "num_tokens", "chunk"), donate=("state",))
def _first_token(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    num_tokens: int,
    chunk: int | None,
) -> tuple[DecodeState[State], jax.Array]:  # i32[B]
    def first(
        params: Params, prompts: Prompts, state: State
    ) -> tuple[DecodeState[State], jax.Array]:
        decode_state, output = start_decoding(
            options, step, params, prompts, state, num_tokens, chunk
        )
        return decode_state, output.token

    rows: Any = split_rows(state)  # in place of arrays
    history = rows if options.processors else None
    specs = DecodeState(rows, rows, rows, rows, rows, jax.tree.map(split, state), history)
    return by_compiler(first, [params, prompts, state], (specs, rows))


@program(static=("options", "step"), donate=("decode_state",))
def _next_token(
    options: DecodeOptions, step: Step[State], params: Params, decode_state: DecodeState[State]
) -> tuple[DecodeState[State], jax.Array]:  # i32[B]
    def following(
        params: Params, decode_state: DecodeState[State]
    ) -> tuple[DecodeState[State], jax.Array]:
        decode_state, output = decode_step(options, step, params, decode_state)
        return decode_state, output.token

    results = jax.tree.map(split, decode_state), split(decode_state.token)
    return by_compiler(following, [params, decode_state], results)


def check_arguments(
    step: Step[State],
    params: Params,
    prompt: Prompt,
    state: State,
    *,
    num_tokens: int,
    lengths: PerRow | None,
    sampler: Sampler | None,
    key: jax.Array | None,
    processors: Sequence[HistoryProcessor],
    stop: int | Sequence[int],
    limits: PerRow | None,
    chunk: int | None,
    attention: bool,
    capture: Sequence[str] = (),
) -> CheckedArguments[State]:
    """Check what `generate` was given, before anything is compiled; ValueError says what is wrong.

    The prompts come back padded to their bucket, the state fit to be donated.
    """
    check_step(step)
    check_params(params)
    check_state(state)
    check_count("num_tokens", num_tokens, 1)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if attention and not has_attend(step):
        raise ValueError(f"attention is True: {type(step).__name__} has no `attend`")
    capture = capture if isinstance(capture, str) else tuple(capture)
    if capture and not has_look(step):
        raise ValueError(f"capture is {capture!r}: {type(step).__name__} has no `look`")
    if capture and has_look(step):
        if attention:
            raise ValueError("attention with capture: capture 'block_*/attention/weights' too")
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
    ends = bool(stop) or limits is not None
    options = DecodeOptions(sampler, processors, stop, ends, attention, tuple(capture))
    limits = check_limits(limits, rows, num_tokens)
    state = make_donatable(state)
    check_with_step(step, tokens, lengths, limits, state)
    check_stop(stop, step, params, rows, state)
    tokens, lengths = pad_to_bucket(tokens, lengths)
    prompts = Prompts(tokens, lengths, keys, jnp.asarray(limits, jnp.int32))
    return CheckedArguments(options, prompts, state)


def total_lengths(lengths: np.ndarray, limits: np.ndarray | int) -> np.ndarray:  # i32[B]
    """Return how many tokens each row reads: its prompt, and its new tokens but the last."""
    return np.asarray(lengths) + np.maximum(limits, 1) - 1


def check_with_step(
    step: Step[State],
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
    limits: Array | int,  # i32[B], or one for all
    state: State,
) -> None:
    """Ask a step that has `check` whether it can serve these prompts, where they are known."""
    if has_check(step) and not traced(prompt, lengths, limits):
        total = total_lengths(np.asarray(lengths), np.asarray(limits))
        step.check(np.asarray(prompt), state, total)


def check_stop(
    stop: tuple[int, ...], step: Step[State], params: Params, rows: int, state: State
) -> None:
    """Raise ValueError where a stop token is outside the vocabulary."""
    if stop:
        vocab = count_vocab(step, params, rows, state)
        if max(stop) >= vocab:
            raise ValueError(f"stop is {max(stop)}: must be in 0..{vocab - 1}")


def pad_to_bucket(
    prompt: Array,  # i32[B, P]
    lengths: Array,  # i32[B]
) -> tuple[jax.Array, jax.Array]:  # i32[B, bucket(P)], i32[B]
    """Pad a checked prompt with zeros, up to the length that its program is compiled for."""
    fill = bucket(prompt.shape[1]) - prompt.shape[1]
    numpy: Any = jnp if traced(prompt) else np
    prompt = numpy.pad(prompt, ((0, 0), (0, fill)))
    return jnp.asarray(prompt, jnp.int32), jnp.asarray(lengths, jnp.int32)


def check_prompt(prompt: Prompt, lengths: PerRow | None) -> tuple[Array, Array]:
    """Return prompt i32[B, P], with zeros after a row's end, and lengths i32[B].

    ValueError where shape or dtype are wrong, or a known value is; traced values are not checked.
    """
    tokens: Any = prompt
    if not traced(tokens):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise ValueError(
                "prompt has rows of several lengths: fill them up to one, and give `lengths`"
            ) from None
    if tokens.dtype.kind in "SU":
        raise ValueError("prompt is text: must be token ids; text.complete takes a text")
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"prompt has shape {tokens.shape}: must be [B, P] with P at least 1")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(f"prompt is {given}: must be token ids, integers")
    rows, columns = tokens.shape
    if lengths is None:
        return as_int32("prompt", tokens), np.full(rows, columns, np.int32)
    counts: Any = lengths if traced(lengths) else np.asarray(lengths)
    if counts.shape != (rows,):
        raise ValueError(f"lengths have shape {counts.shape}: must be ({rows},)")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"lengths are {counts.dtype}: must be integers")
    if traced(tokens, counts):
        return jnp.where(jnp.arange(columns)[None] < counts[:, None], tokens, 0), counts
    if rows and not 1 <= counts.min() <= counts.max() <= columns:
        raise ValueError(f"lengths are {counts.tolist()}: must be from 1 to {columns}")
    tokens = np.where(np.arange(columns)[None] < counts[:, None], tokens, 0)
    return as_int32("prompt", tokens), counts


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
    if shape == (rows,) if typed else dtype == jnp.uint32 and len(key.shape) == 2:
        if shape[0] != rows:
            raise ValueError(f"key is {dtype}{tuple(shape)}: must be one key, or one for each row")
        return as_threefry(key)
    check_key("key", key)
    return _fold_rows(as_threefry(key), rows)


@partial(jax.jit, static_argnames="rows")
def _fold_rows(key: jax.Array, rows: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def stop_tokens(stop: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return one stop token or several as a tuple, None as none.

    ValueError where one is no token id.
    """
    if isinstance(stop, str | bytes):
        rule = "must be token ids; text.complete(..., stop=...) ends at a text"
        raise ValueError(f"stop is {stop!r}: {rule}")
    if stop is None:
        return ()
    ids = as_tuple("stop", stop)
    return as_token_ids("stop", ids) if ids else ()


def check_not_consumed(state: State) -> None:
    """Raise ValueError where the memory of a state was given to the result of an earlier call."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not traced(leaf) and leaf.is_deleted():
            raise ValueError("state was consumed by an earlier call: fork(state, 1) keeps a copy")


def make_donatable(state: State) -> State:
    """Return the state, an array that stands in it twice copied: memory is given away once.

    ValueError where the state was consumed before.
    """
    check_not_consumed(state)
    seen: set[int] = set()

    def copy_repeated(x: jax.Array) -> jax.Array:
        repeated = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        return x.copy() if repeated else x

    return jax.tree.map(copy_repeated, state)


def check_limits(limits: PerRow | None, rows: int, num_tokens: int) -> Array:  # i32[B]
    """Return the most new tokens of each row; None is `num_tokens` in all.

    ValueError where they are no integers from 0 to `num_tokens`; under a trace they are clipped.
    """
    if limits is None:
        return np.full(rows, num_tokens, np.int32)
    given: Any = limits if traced(limits) else np.asarray(limits)
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
        inspect.signature(sampler).bind(None, None)
    except TypeError:
        rule = f"must be called with (key, logits); a processor goes into Sample({sampler!r})"
        raise ValueError(f"sampler is {sampler!r}: {rule}") from None
    except ValueError:  # a builtin may have no signature
        pass
