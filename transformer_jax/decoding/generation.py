"""Generate tokens: all in one compiled program, or as a stream.

A model is known only as `step(params, tokens, state, valid=...)`. `generate` is one jitted program:
it reads the prompt, then runs a `lax.scan`, or a `lax.while_loop` that ends when every row has
ended. `stream` yields the same tokens one by one. Both are made of `start_decoding` and
`decode_step`, which are pure functions of a `DecodeState`, whose every leaf leads with B.

Token n of a row is drawn with `fold_in(row's key, n)`. So it depends neither on the other rows nor
on which loop runs. Prompts are padded to a bucket, so one compilation serves every length in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.arguments import (
    CheckedArguments,
    DecodeOptions,
    Lengths,
    PerRow,
    Prompts,
    TokenRows,
    check_arguments,
    check_prompt,
    check_with_step,
)
from transformer_jax.decoding.batch_rows import State, select_rows
from transformer_jax.decoding.logit_processors import History, HistoryProcessor, apply_processors
from transformer_jax.decoding.samplers import RowSampling, Sampler
from transformer_jax.decoding.step import Params, Step, StepLike, as_step, count_vocab
from transformer_jax.programs import program
from transformer_jax.pytree import PyTree
from transformer_jax.sharding import by_compiler, split, split_rows, vary
from transformer_jax.tracing import traced
from transformer_jax.values import short_repr, value_class


@known_keywords
def prefill(
    step: StepLike[State],
    params: Params,
    prompt: jax.Array,  # i32[B, P]
    state: State,
    lengths: jax.Array,  # i32[B]
    chunk: int | None = None,
) -> tuple[jax.Array, State]:  # f32[B, V], state
    """Read the prompts; return the logits after each row's last token, and the state.

    It is a pure function, to be jitted by the caller. Of a step with `read`, no other logits are
    computed.

    Args:
        step: what runs the model, as in `generate`.
        params: what the step takes as the model's parameters.
        prompt: i32[B, P], token ids, P at least 1.
        state: the state to continue, of B rows; not consumed.
        lengths: i32[B], from 1 to P: row b's prompt is its first `lengths[b]` tokens; or a mask
            [B, P], as in `generate`.
        chunk: how many tokens are read at a time: the same numbers in less memory. None reads all
            at once.

    Returns:
        The logits f32[B, V], and the state after the prompts. A traced length outside 1..P gives
        logits -inf.

    Raises:
        ValueError: if the prompt is not integers [B, P], a length is not from 1 to P, the state has
            no room, or `chunk` is not an integer of at least 1.
    """
    if chunk is not None:
        check_count("chunk", chunk, 1)
    step = as_step(step, params, state)
    given = check_prompt(prompt, lengths)
    check_with_step(step, *given, 1, state)
    if not traced(given[1]) and (given[1] < given[0].shape[1]).any():
        step = step.told(padded=True)
    prompt, lengths = map(jnp.asarray, given)
    return read_prompts(step, params, prompt, lengths, state, chunk)


def read_prompts(
    step: Step[State],
    params: Params,
    prompt: jax.Array,  # i32[B, P]
    lengths: jax.Array,  # i32[B]
    state: State,
    chunk: int | None,
) -> tuple[jax.Array, State]:  # f32[B, V], state
    """Do what `prefill` does, with arguments that were checked."""
    prompt = jnp.where(jnp.arange(prompt.shape[1])[None] < lengths[:, None], prompt, 0)
    state = vary(state, (params, prompt))
    rows, columns = prompt.shape
    # Without `read`, a step computes logits of all tokens; a chunk bounds how many exist at once.
    whole = chunk is None  # then the length may be an export's open size
    if chunk is None or (step.reads_exactly and chunk > columns):
        chunk = columns
    padded = 0 if whole else -columns % chunk
    prompt = jnp.pad(prompt, ((0, 0), (0, padded)))
    step = step if whole or columns + padded == chunk else step.told(part=True)

    def read_chunk(
        state: State, start: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, State]:  # bool[B, 1], f32[B, V], state
        """Return the rows whose last token is in the chunk, and the logits after it."""
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        index = start + jnp.arange(chunk)
        valid = index[None] < lengths[:, None]
        offset = lengths - 1 - start  # [B]
        here = (offset >= 0) & (offset < chunk)
        at = jnp.clip(offset, 0, chunk - 1)[:, None]
        logits, state = step.read(params, tokens, state, at, valid=valid)
        # Rows whose last token is in another chunk get logits of a wrong token, which `here` rules
        # out.
        return here[:, None], logits[:, 0].astype(jnp.float32), state

    if whole or columns + padded == chunk:
        here, logits, state = read_chunk(state, 0)
        return jnp.where(here, logits, -jnp.inf), state

    def read_next(
        carry: tuple[jax.Array, State], start: jax.Array
    ) -> tuple[tuple[jax.Array, State], None]:
        here, logits, state = read_chunk(carry[1], start)
        return (jnp.where(here, logits, carry[0]), state), None

    # The carry of a scan has a fixed shape, so the width of the logits is needed before any exist.
    vocab = count_vocab(step, params, rows, state)
    first = vary((jnp.full((rows, vocab), -jnp.inf, jnp.float32), state))
    return jax.lax.scan(read_next, first, jnp.arange(0, columns + padded, chunk))[0]


@value_class(pytree=True)
class Generation(Generic[State]):
    """Result of `generate`.

    Attributes:
        tokens: i32[B, num_tokens], the new tokens; -1 after a row's end.
        lengths: i32[B], new tokens of a row, a stop token and the -1 of NaN logits included.
        log_probs: f32[B, num_tokens], log softmax(logits)[token] in nats, before processors; 0
            after a row's end.
        state: has read all but each row's last token: generate on, from that token, or `fork` it.
        captured: on request, by place its values [B, num_tokens, ...] where token n was chosen; 0
            after a row's end.
    """

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]
    log_probs: jax.Array  # f32[B, num_tokens]
    state: State
    captured: dict[str, jax.Array] | None = None

    def rows(self) -> list[np.ndarray]:
        """Return each row's tokens i32[lengths[b]], without what follows its end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


@value_class(pytree=True)
class DecodeState(Generic[State]):
    """Rows in the middle of generation; every leaf leads with B."""

    token: jax.Array  # i32[B]; chosen, and not yet read by the model
    active: jax.Array  # bool[B]; False: the row has ended, its state stands still
    count: jax.Array  # i32[B]; new tokens so far
    limits: jax.Array  # i32[B]; new tokens at most
    keys: jax.Array  # key[B]
    state: State
    """The model's."""
    history: History | None  # None without processors
    sampling: RowSampling | None = None  # None: the sampler alone says how


NO_TOKEN = "no token can follow: every one is excluded, or the logits are not finite"
"""Why a row has token -1 and log-probability NaN."""


@short_repr
class StepOutput(NamedTuple):
    """One new token of every row."""

    token: jax.Array  # i32[B]; -1 where the row had ended
    log_prob: jax.Array  # f32[B]; 0 where the row had ended
    seen: PyTree
    """Captured values, or `Likeliest`, where they are requested."""


@short_repr
class Likeliest(NamedTuple):
    """The likeliest tokens of every row, the best first."""

    tokens: jax.Array  # i32[B, K]
    log_probs: jax.Array  # f32[B, K]; before processors


def start_decoding(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    room: int,
) -> tuple[DecodeState[State], StepOutput]:
    """Read the prompts and choose each row's first token; `room` is the most tokens it may get."""
    tokens, lengths, keys, limits, sampling, allowed = prompts
    history = History.of(tokens, lengths, room) if options.processors else None
    # `lengths` stands in for the token, which is chosen below: both are i32[B].
    decode_state = DecodeState(
        lengths, limits > 0, jnp.zeros_like(lengths), limits, keys, state, history, sampling
    )
    if not options.capture:
        logits, state = read_prompts(step, params, tokens, lengths, state, options.chunk)
        return _choose_tokens(options, replace(decode_state, state=state), logits, None, allowed)
    step = step.told(part=True)  # the last token, at which values are captured, is read by itself
    _, state = read_prompts(step, params, tokens, lengths - 1, state, options.chunk)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    logits, state, seen = step.look(params, last, state, options.capture)
    return _choose_tokens(options, replace(decode_state, state=state), logits[:, 0], seen, allowed)


def decode_step(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    decode_state: DecodeState[State],
    allowed: jax.Array | None = None,  # bool[B, V]
) -> tuple[DecodeState[State], StepOutput]:
    """Read the newest token of every active row and choose its next, of the allowed ones."""
    step = step.told(part=True)
    # `told` lets an edit that needs a whole sequence refuse: a step reads one token of it.
    token, valid = decode_state.token, None
    if options.ends:
        # A row that has ended reads nothing. Its last token may be -1, whose embedding is NaN.
        token, valid = jnp.where(decode_state.active, token, 0), decode_state.active[:, None]
    given, seen = (params, token[:, None], decode_state.state), None
    if options.capture:
        logits, state, seen = step.look(*given, options.capture, valid=valid)
    else:
        logits, state = step(*given, valid=valid)
    return _choose_tokens(options, replace(decode_state, state=state), logits[:, 0], seen, allowed)


def _choose_tokens(
    options: DecodeOptions,
    decode_state: DecodeState[State],
    logits: jax.Array,  # [B, V]
    seen: PyTree,
    allowed: jax.Array | None,  # bool[B, V]
) -> tuple[DecodeState[State], StepOutput]:
    """Apply processors and sampler, and end the rows that have their last token."""
    active, history = decode_state.active, decode_state.history
    logits = logits.astype(jnp.float32)
    processed = logits
    if options.processors:
        processed = apply_processors(options.processors, history, logits)
    if allowed is not None:
        if allowed.shape != logits.shape or allowed.dtype != bool:
            given = f"{allowed.dtype}{list(allowed.shape)}"
            raise ValueError(f"allowed is {given}: must be bool{list(logits.shape)}")
        processed = jnp.where(allowed, processed, -jnp.inf)
    if decode_state.sampling is not None:
        processed = decode_state.sampling(processed)
    if options.ends:
        # Values of rows that have ended are those of a token 0 that was never written.
        seen = select_rows(active, seen, jax.tree.map(jnp.zeros_like, seen))
    keys = jax.vmap(jax.random.fold_in)(decode_state.keys, decode_state.count)
    # Each row is drawn by itself, as a batch of one: with a key for all, a draw would depend on the
    # row's place in the batch.
    token = jax.vmap(lambda key, row: options.sampler(key, row[None])[0])(keys, processed)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    if options.top:
        likeliest = jax.lax.top_k(log_probs, min(options.top, log_probs.shape[-1]))
        seen = Likeliest(likeliest[1], likeliest[0])
    # Token -1 would take the last of the vocabulary; it has no log-probability, but NaN.
    log_prob = jnp.take_along_axis(log_probs, jnp.clip(token, 0)[:, None], axis=1)[:, 0]
    log_prob = jnp.where(token < 0, jnp.nan, log_prob)
    output = StepOutput(
        jnp.where(active, token, -1) if options.ends else token,
        jnp.where(active, log_prob, 0.0) if options.ends else log_prob,
        seen,
    )
    # Counts are of the rows that were active before this token: a stop token counts.
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


@known_keywords
def generate(
    step: StepLike[State],
    params: Params,
    prompt: TokenRows,  # i32[B, P], or rows of one length
    state: State,
    *,
    num_tokens: int,
    lengths: Lengths | None = None,  # i32[B], or bool[B, P]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]
    chunk: int | None = None,
    early_exit: bool | None = None,
    capture: Sequence[str] = (),
) -> Generation[State]:
    """Continue each row by up to `num_tokens` tokens.

    A row ends after a `stop` token, which it keeps, or after `limits[b]` tokens. The compiled
    program is shared by all prompts of a bucket (of lengths up to 16, 32, 64 ...) and by samplers
    and processors that are equal.

    Inside your own `jit`, traced values are not checked. A token outside the vocabulary and a
    position past the cache make their row nonfinite: it has token -1 and log-probability NaN; where
    every window has left such a token behind before the prompt ends, it changes nothing. Limits are
    clipped to 0..num_tokens.

    Args:
        step: what runs the model: `make_step(model)`, or a function `step(params, tokens, state, *,
            valid=None) -> (logits, state)`.
        params: what the step takes as the model's parameters.
        prompt: i32[B, P], token ids, as an array or as rows of one length.
        state: the state to continue, of B rows, such as `init_cache(config, B, capacity)`. It
            is consumed: its memory becomes the result's. `fork(state, 1)` keeps a copy.
        num_tokens: the most new tokens of a row, at least 1.
        lengths: i32[B], from 1 to P: row b's prompt is its first `lengths[b]` tokens; None is P in
            every row. Or a mask [B, P] of the tokens, bool or 0 and 1, such as the
            `attention_mask` of transformers: padding may be on either side.
        sampler: chooses a token, called with (key, logits); None takes the likeliest.
        key: one key, of which row b uses `fold_in(key, b)`, or one for each row, [B]. Token n of a
            row is drawn with `fold_in(the row's key, n)`. Only `Greedy` does without.
        processors: change the logits by the text so far, from left to right, before the sampler
            sees them.
        stop: the token id, or ids, after which a row ends.
        limits: i32[B], from 0 to num_tokens: the most new tokens of each row; None is num_tokens. A
            row with 0 has none, and its state has read its prompt whole.
        chunk: how many tokens of the prompt are read at a time, as in `prefill`; None reads all at
            once.
        early_exit: end the loop as soon as every row has ended; the tokens are the same. None does
            so where a row may end early at all.
        capture: names of places inside the model (`transformer_jax.places`), whose values are
            returned where each token was chosen, such as "block_*/attention/weights".

    Returns:
        The tokens i32[B, num_tokens], how many each row has, their log-probabilities in nats, and
        the state.

    Raises:
        ValueError: if an argument is wrong, before anything is compiled or consumed.
    """
    step, options, prompts, state = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths, sampler=sampler,
        key=key, processors=processors, stop=stop, limits=limits, chunk=chunk, capture=capture,
    )  # fmt: skip
    if early_exit is None:
        early_exit = options.ends
    inside = traced(*jax.tree.leaves((params, prompts, state)))  # a trace that donates by itself
    program = _generate_inside if inside else _generate
    return program(options, step, params, prompts, state, num_tokens, early_exit)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Tokens so far, i32[]; the rows; the outputs of all steps, [num_tokens, B]."""


def _generate_tokens(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    num_tokens: int,
    early_exit: bool,
) -> Generation[State]:
    """Read the prompts, then choose a token at a time, each written into its place."""

    def run(params: Params, prompts: Prompts, state: State) -> Generation[State]:
        def write_next(carry: _Carry[State]) -> _Carry[State]:
            n, rows, outputs = carry
            rows, output = decode_step(options, step, params, rows)
            # A while loop has no outputs but its carry, so each token is written into its place
            # there.
            return n + 1, rows, jax.tree.map(lambda all, x: all.at[n].set(x), outputs, output)

        rows, first = start_decoding(options, step, params, prompts, state, num_tokens)
        fill = jax.tree.map(lambda _: 0, first)._replace(token=-1)  # after a row's end
        outputs = jax.tree.map(
            lambda x, fill: jnp.concatenate(
                [x[None], jnp.full((num_tokens - 1, *x.shape), fill, x.dtype)]
            ),
            first,
            fill,
        )
        carry = jnp.int32(1), rows, outputs
        if num_tokens > 1 and early_exit:
            carry = jax.lax.while_loop(
                lambda carry: (carry[0] < num_tokens) & carry[1].active.any(), write_next, carry
            )
        elif num_tokens > 1:
            carry = jax.lax.scan(
                lambda carry, _: (write_next(carry), None), carry, None, num_tokens - 1
            )[0]
        _, rows, outputs = carry
        token, log_prob, seen = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
        return Generation(token, rows.count, log_prob, rows.state, seen)

    rows: Any = split_rows(state)  # in place of arrays
    # On explicit axes of a mesh, results are split as the rows of the state are.
    seen = rows if options.capture else None
    results = Generation(rows, rows, rows, jax.tree.map(split, state), seen)
    return by_compiler(run, [params, prompts, state], results)


_STATIC = "options", "step", "num_tokens", "early_exit"
_generate_inside = program(static=_STATIC)(_generate_tokens)
_generate = program(static=_STATIC, donate=("state",))(_generate_tokens)


@known_keywords
def stream(
    step: StepLike[State],
    params: Params,
    prompt: TokenRows,  # i32[B, P], or rows of one length
    state: State,
    *,
    num_tokens: int,
    lengths: Lengths | None = None,  # i32[B], or bool[B, P]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]
    chunk: int | None = None,
) -> Iterator[np.ndarray]:  # i32[B], at most num_tokens times
    """Yield the tokens of `generate` with the same arguments, each as soon as it is drawn.

    Args:
        step: what runs the model, as in `generate`.
        params: what the step takes as the model's parameters.
        prompt: i32[B, P], token ids, as an array or as rows of one length.
        state: the state to continue, of B rows; it is consumed.
        num_tokens: the most new tokens of a row, at least 1.
        lengths: i32[B], from 1 to P, tokens of each row's prompt, or a mask [B, P], as in
            `generate`; None is P.
        sampler: chooses a token, called with (key, logits); None takes the likeliest.
        key: one key, or one for each row, [B], as in `generate`. Only `Greedy` does without.
        processors: change the logits by the text so far, before the sampler sees them.
        stop: the token id, or ids, after which a row ends.
        limits: i32[B], from 0 to num_tokens, the most new tokens of each row; None is num_tokens.
        chunk: how many tokens of the prompt are read at a time; None reads all at once.

    Yields:
        i32[B], one token of each row, -1 of a row that has ended, at most `num_tokens` times; when
        all rows have ended, the iterator ends.

    Raises:
        ValueError: if an argument is wrong, at the call.
    """
    arguments = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths, sampler=sampler,
        key=key, processors=processors, stop=stop, limits=limits, chunk=chunk,
    )  # fmt: skip
    return _stream_tokens(arguments, params, num_tokens)


def _stream_tokens(
    arguments: CheckedArguments[State], params: Params, num_tokens: int
) -> Iterator[np.ndarray]:
    step, options, prompts, state = arguments
    decode_state, token = _first_token(options, step, params, prompts, state, num_tokens)
    for n in range(1, num_tokens + 1):
        newest, active = token, decode_state.active
        if n < num_tokens:  # the next token is computed while the caller reads this one
            if options.ends:
                active = active.copy()  # the next call consumes the decode state
            decode_state, token = _next_token(options, step, params, decode_state)
        yield jax.device_get(newest)
        if options.ends and not jax.device_get(active).any():
            return


@program(static=("options", "step", "num_tokens"), donate=("state",))
def _first_token(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    num_tokens: int,
) -> tuple[DecodeState[State], jax.Array]:  # i32[B]
    def first(
        params: Params, prompts: Prompts, state: State
    ) -> tuple[DecodeState[State], jax.Array]:
        decode_state, output = start_decoding(options, step, params, prompts, state, num_tokens)
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
