"""Token generation, in one compiled program or as a stream.

Generation uses a model only through `step(params, tokens, state, valid=...)`. `generate` is a
single jitted program that reads the prompt and then runs a `lax.scan`, or a `lax.while_loop` that
ends when every row has ended. `stream` yields the same tokens one by one. Both call
`start_decoding` and `decode_step`, which are pure functions of a `DecodeState`. The first axis of
all its leaves is B.

Token n of a row is drawn with `fold_in(row's key, n)`, so it does not depend on the other rows or
on the loop. Prompts are padded to the length of a bucket, so one compiled program serves all
lengths in the bucket.
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
from transformer_jax.decoding.split_step import split_step
from transformer_jax.decoding.step import Params, Step, StepLike, as_step, count_vocab
from transformer_jax.models.ops import log_softmax
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
    """Read the prompts and return the logits after the last token of each row, and the state.

    This function is pure, so you can call it inside your own `jit`. A step that implements `read`
    computes only these logits.

    Args:
        step: the step of the model, as in `generate`.
        params: the model's parameters, passed to the step.
        prompt: i32[B, P], token IDs, with P at least 1.
        state: the state to continue, with B rows. It is not consumed.
        lengths: i32[B], the length of each row's prompt, from 1 to P, or a mask [B, P], as in
            `generate`.
        chunk: number of tokens to read at a time. Smaller chunks save memory. None means all at
            once.

    Returns:
        The logits f32[B, V] (-inf for a traced length outside 1..P), and the state after the
        prompts.

    Raises:
        ValueError: If the prompt is not an integer array [B, P], if a length is not from 1 to P, if
            the state has no room, or if `chunk` is not an integer of at least 1.
    """
    if chunk is not None:
        check_count("chunk", chunk, 1)
    step = as_step(step, params, state)
    tokens, counts = check_prompt(prompt, lengths)
    check_with_step(step, tokens, counts, 1, state)
    if not traced(counts) and (counts < tokens.shape[1]).any():
        step = step.with_facts(padded=True)
    return read_prompts(step, params, jnp.asarray(tokens), jnp.asarray(counts), state, chunk)


def read_prompts(
    step: Step[State],
    params: Params,
    prompt: jax.Array,  # i32[B, P]
    lengths: jax.Array,  # i32[B]
    state: State,
    chunk: int | None,
) -> tuple[jax.Array, State]:  # f32[B, V], state
    """Run `prefill` with checked arguments."""
    prompt = jnp.where(jnp.arange(prompt.shape[1])[None] < lengths[:, None], prompt, 0)
    state = vary(state, (params, prompt))
    rows, columns = prompt.shape
    # A step without `read` computes the logits of all tokens, and a chunk limits their memory.
    whole = chunk is None  # the length may then be a symbolic dimension of an export
    if chunk is None or (step.needs_unpadded and chunk > columns):
        chunk = columns
    padded = 0 if whole else -columns % chunk
    prompt = jnp.pad(prompt, ((0, 0), (0, padded)))
    step = step if whole or columns + padded == chunk else step.with_facts(part=True)

    def read_chunk(
        state: State, start: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, State]:  # bool[B, 1], f32[B, V], state
        """Return a mask of rows that end in this chunk, and the logits after their last token."""
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        index = start + jnp.arange(chunk)
        valid = index[None] < lengths[:, None]
        offset = lengths - 1 - start  # [B]
        here = (offset >= 0) & (offset < chunk)
        at = jnp.clip(offset, 0, chunk - 1)[:, None]
        logits, state = step.read(params, tokens, state, at, valid=valid)
        # For rows that end in another chunk, these are the logits of a wrong token, which `here`
        # masks out.
        return here[:, None], logits[:, 0].astype(jnp.float32), state

    if whole or columns + padded == chunk:
        here, logits, state = read_chunk(state, 0)
        return jnp.where(here, logits, -jnp.inf), state

    def read_next(
        carry: tuple[jax.Array, State], start: jax.Array
    ) -> tuple[tuple[jax.Array, State], None]:
        here, logits, state = read_chunk(carry[1], start)
        return (jnp.where(here, logits, carry[0]), state), None

    # The carry of a scan has a fixed shape, so the vocabulary size must be known in advance.
    vocab = count_vocab(step, params, rows, state)
    first = vary((jnp.full((rows, vocab), -jnp.inf, jnp.float32), state))
    return jax.lax.scan(read_next, first, jnp.arange(0, columns + padded, chunk))[0]


@value_class(pytree=True)
class Generation(Generic[State]):
    """Result of `generate`.

    Attributes:
        tokens: i32[B, num_tokens], the new tokens, with -1 after the end of a row.
        lengths: i32[B], the number of new tokens, including a stop token and the -1 for NaN logits.
        log_probs: f32[B, num_tokens], log softmax(logits)[token] in nats, before processors, with 0
            after the end of a row.
        state: the state after all tokens of each row except the last one. To continue, pass the
            last token.
        captured: dict from each captured place to its values [B, num_tokens, ...]. Entry n contains
            the values at the step that chose token n, or 0 after the end of a row.
    """

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]
    log_probs: jax.Array  # f32[B, num_tokens]
    state: State
    captured: dict[str, jax.Array] | None = None

    def rows(self) -> list[np.ndarray]:
        """Return the tokens i32[lengths[b]] of each row, without the padding after the end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


@value_class(pytree=True)
class DecodeState(Generic[State]):
    """State of decoding in progress. The first axis of every leaf is B."""

    token: jax.Array  # i32[B]; the newest token, which the model has not read yet
    active: jax.Array  # bool[B]; False: the row has ended, and its state no longer changes
    count: jax.Array  # i32[B]; number of new tokens so far
    limits: jax.Array  # i32[B]; maximum number of new tokens
    keys: jax.Array  # key[B]
    state: State
    """State of the model."""
    history: History | None  # None without processors
    sampling: RowSampling | None = None  # None means that only the sampler of the options applies


NO_TOKEN = "no token can follow: all tokens are excluded, or the logits are not finite"
"""Error message for token -1 with log-probability NaN."""


@short_repr
class StepOutput(NamedTuple):
    """One new token for every row."""

    token: jax.Array  # i32[B]; -1 if the row had ended
    log_prob: jax.Array  # f32[B]; 0 if the row had ended
    seen: PyTree
    """Captured values or `TopTokens` if requested."""


@short_repr
class TopTokens(NamedTuple):
    """Most likely tokens of every row, with the best first."""

    tokens: jax.Array  # i32[B, K]
    log_probs: jax.Array  # f32[B, K], before processors


def start_decoding(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    room: int,
) -> tuple[DecodeState[State], StepOutput]:
    """Read the prompts and choose the first token. The history has room for `room` new tokens."""
    tokens, lengths, keys, limits, sampling, allowed = prompts
    history = History.of(tokens, lengths, room) if options.processors else None
    # `lengths` is a placeholder for the token, which is chosen below. Both are i32[B].
    decode_state = DecodeState(
        lengths, limits > 0, jnp.zeros_like(lengths), limits, keys, state, history, sampling
    )
    if not options.capture:
        logits, state = read_prompts(step, params, tokens, lengths, state, options.chunk)
        return _choose_tokens(options, replace(decode_state, state=state), logits, None, allowed)
    step = step.with_facts(
        part=True
    )  # the last token, for which values are captured, is read separately
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
    """Read the newest token of every active row and choose the next token from `allowed`."""
    # A step reads a single token, so an edit that requires the whole sequence must raise an error.
    step = step.with_facts(part=True)
    token, valid = decode_state.token, None
    if options.ends:
        # Ended rows do not read their last token, because it may be -1, whose embedding is NaN.
        token, valid = jnp.where(decode_state.active, token, 0), decode_state.active[:, None]
    tokens, seen = token[:, None], None
    if options.capture:
        logits, state, seen = step.look(
            params, tokens, decode_state.state, options.capture, valid=valid
        )
    else:
        logits, state = step(params, tokens, decode_state.state, valid=valid)
    return _choose_tokens(options, replace(decode_state, state=state), logits[:, 0], seen, allowed)


def _choose_tokens(
    options: DecodeOptions,
    decode_state: DecodeState[State],
    logits: jax.Array,  # [B, V]
    seen: PyTree,
    allowed: jax.Array | None,  # bool[B, V]
) -> tuple[DecodeState[State], StepOutput]:
    """Apply the processors and the sampler. End rows that reach a stop token or their limit."""
    active, history = decode_state.active, decode_state.history
    logits = logits.astype(jnp.float32)
    processed = logits
    if options.processors:
        processed = apply_processors(options.processors, history, logits)
    if allowed is not None:
        if allowed.shape != logits.shape or allowed.dtype != bool:
            actual = f"{allowed.dtype}{list(allowed.shape)}"
            raise ValueError(f"allowed is {actual}: must be bool{list(logits.shape)}")
        processed = jnp.where(allowed, processed, -jnp.inf)
    if decode_state.sampling is not None:
        processed = decode_state.sampling(processed)
    if options.ends:
        # Ended rows read a dummy token, 0, whose values are meaningless.
        seen = select_rows(active, seen, jax.tree.map(jnp.zeros_like, seen))
    keys = jax.vmap(jax.random.fold_in)(decode_state.keys, decode_state.count)
    # Draw each row as a batch of one. With one key for all rows, a draw would depend on the
    # position of the row in the batch.
    token = jax.vmap(lambda key, row: options.sampler(key, row[None])[0])(keys, processed)
    log_probs = log_softmax(logits, invariant=options.invariant)
    if options.top:
        likeliest = jax.lax.top_k(log_probs, min(options.top, log_probs.shape[-1]))
        seen = TopTokens(likeliest[1], likeliest[0])
    # Index -1 would select the last token in the vocabulary, so use NaN for token -1.
    log_prob = jnp.take_along_axis(log_probs, jnp.clip(token, 0)[:, None], axis=1)[:, 0]
    log_prob = jnp.where(token < 0, jnp.nan, log_prob)
    output = StepOutput(
        jnp.where(active, token, -1) if options.ends else token,
        jnp.where(active, log_prob, 0.0) if options.ends else log_prob,
        seen,
    )
    # Rows that were active before this token count it, so a stop token is counted.
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
    prompt: TokenRows,  # i32[B, P], or rows of equal length
    state: State,
    *,
    num_tokens: int,
    lengths: Lengths | None = None,  # i32[B], or bool[B, P]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one key, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]
    chunk: int | None = None,
    early_exit: bool | None = None,
    capture: Sequence[str] = (),
) -> Generation[State]:
    """Continue each row by up to `num_tokens` tokens.

    A row ends after a `stop` token, which is part of the result, or after `limits[b]` tokens. Calls
    with equal samplers and processors share one program for each prompt bucket (up to 16, 32, ...
    tokens).

    Inside your own `jit`, traced values are not checked. Limits are clipped to 0..num_tokens. A
    token outside the vocabulary or past the end of the cache makes its row nonfinite (token -1 with
    log-probability NaN), unless it has left all attention windows before the prompt ends.

    Args:
        step: `make_step(model)`, or a function `step(params, tokens, state, *, valid=None) ->
            (logits, state)`.
        params: the model's parameters, passed to the step.
        prompt: i32[B, P], token IDs, as an array or as rows of equal length.
        state: the state to continue, with B rows, such as `init_cache(config, B, capacity)`. It is
            consumed, because the result reuses its memory. Pass `fork(state, 1)` to keep it.
        num_tokens: the maximum number of new tokens per row, at least 1.
        lengths: i32[B], the length of each row's prompt, from 1 to P. None means P for every row.
            You can also pass a mask [B, P] of the tokens, bool or 0/1, with padding on either side,
            such as the `attention_mask` of Hugging Face Transformers.
        sampler: function of (key, logits) that chooses a token; None means `Greedy()`.
        key: a single key, so that row b uses `fold_in(key, b)`, or one key for each row, [B]. Token
            n of a row is drawn with `fold_in(the row's key, n)`. The key is optional only for
            `Greedy`.
        processors: functions that change the logits based on the text so far, applied from left to
            right.
        stop: one or more token IDs that end a row.
        limits: i32[B], the maximum number of new tokens for each row, from 0 to num_tokens. None
            means num_tokens. For a row with limit 0, no token is generated, but the whole prompt is
            read.
        chunk: number of prompt tokens to read at a time, as in `prefill`; None means all at once.
        early_exit: whether to end the loop as soon as all rows have ended, which does not change
            the tokens. None means True if a row can end early.
        capture: names of places (see `transformer_jax.places`), such as
            "block_*/attention/weights", whose values are returned for each new token.

    Returns:
        `Generation` with the tokens i32[B, num_tokens], the number of tokens in each row, their
        log-probabilities in nats, the state, and the captured values.

    Raises:
        ValueError: If an argument is invalid. The error is raised before anything is compiled or
            consumed.
    """
    step, options, prompts, state = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths, sampler=sampler,
        key=key, processors=processors, stop=stop, limits=limits, chunk=chunk, capture=capture,
    )  # fmt: skip
    if early_exit is None:
        early_exit = options.ends
    # Inside an outer trace, the outer program controls donation.
    inside = traced(*jax.tree.leaves((params, prompts, state)))
    program = _generate_inside if inside else _generate
    return program(options, step, params, prompts, state, num_tokens, early_exit)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Number of tokens so far, i32[], the rows, and the outputs of all steps, [num_tokens, B]."""


def _generate_tokens(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    prompts: Prompts,
    state: State,
    num_tokens: int,
    early_exit: bool,
) -> Generation[State]:
    """Read the prompts, then choose one token at a time."""
    step = split_step(step, params, state)

    def run(params: Params, prompts: Prompts, state: State) -> Generation[State]:
        def write_next(carry: _Carry[State]) -> _Carry[State]:
            n, rows, outputs = carry
            rows, output = decode_step(options, step, params, rows)
            # A while loop returns only its carry, so each token is written to the carry.
            return n + 1, rows, jax.tree.map(lambda all, x: all.at[n].set(x), outputs, output)

        rows, first = start_decoding(options, step, params, prompts, state, num_tokens)
        fill = jax.tree.map(lambda _: 0, first)._replace(token=-1)  # values after the end of a row
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
    # If mesh axes are explicit, the results are sharded like the rows of the state.
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
    prompt: TokenRows,  # i32[B, P], or rows of equal length
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
    """Yield the tokens of `generate` with the same arguments, each one as soon as it is drawn.

    Args:
        step: the step of the model, as in `generate`.
        params: the model's parameters, passed to the step.
        prompt: i32[B, P], token IDs, as an array or as rows of equal length.
        state: the state to continue, with B rows. It is consumed.
        num_tokens: the maximum number of new tokens per row, at least 1.
        lengths: i32[B], the length of each row's prompt, or a mask, as in `generate`; None means P.
        sampler: function of (key, logits) that chooses a token; None means `Greedy()`.
        key: a single key, or one key for each row, [B], as in `generate`. The key is optional only
            for `Greedy`.
        processors: functions that change the logits based on the text so far, before sampling.
        stop: one or more token IDs that end a row.
        limits: i32[B], the maximum number of new tokens for each row; None means num_tokens.
        chunk: number of prompt tokens to read at a time; None means all at once.

    Yields:
        One token for each row, i32[B], with -1 for rows that have ended. The iterator ends after
        `num_tokens` items, or when all rows have ended.

    Raises:
        ValueError: If an argument is invalid. The call itself raises the error, before the first
            item.
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
        if n < num_tokens:  # compute the next token while the caller processes the current one
            if options.ends:
                active = active.copy()  # the next call consumes `decode_state`
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
        decode_state, output = start_decoding(options, inner, params, prompts, state, num_tokens)
        return decode_state, output.token

    inner = split_step(step, params, state)
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
        decode_state, output = decode_step(options, inner, params, decode_state)
        return decode_state, output.token

    inner = split_step(step, params, decode_state.state)
    results = jax.tree.map(split, decode_state), split(decode_state.token)
    return by_compiler(following, [params, decode_state], results)
