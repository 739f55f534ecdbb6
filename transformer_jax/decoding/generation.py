"""Producing tokens. A decoder knows a model only as `step(params, tokens, state, valid=...)`.

`generate` is one jitted program: the prompt, then a `lax.scan`, or a `lax.while_loop` that ends
when every row has; `stream` yields the same tokens one by one. Both go through `begin` and
`advance`, which are pure: what runs is a `Running`, whose every leaf leads with B. Token n of a row
is drawn with `fold_in(row's key, n)`, so it depends neither on the other rows nor on who runs the
loop. Prompts are padded to a bucket, so one compilation serves every length in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.arguments import check_count, check_key, traced
from transformer_jax.cache import KVCache, next_positions
from transformer_jax.integers import as_int32
from transformer_jax.meshes import by_compiler, split, split_rows, vary
from transformer_jax.processors import (
    History,
    HistoryProcessor,
    apply_all,
    check_processors,
    one_or_more,
    token_ids,
)
from transformer_jax.recurrent import RecurrentLM, RecurrentSeq2Seq, RecurrentStep
from transformer_jax.rows import choose
from transformer_jax.sampling import Greedy, Sampler
from transformer_jax.transformer import (
    AttentionWeights,
    Decoder,
    EncoderDecoder,
    ModelCache,
    by_slot,
    cache_limit,
    check_one,
    check_tokens,
    rewind_cache,
)


class Step(Protocol):
    """A model as decoding sees it; hashable.

    It may also have `check(prompt, state, total_lengths)`, which raises ValueError where a known
    prompt, or its length with the new tokens, cannot be served; `rewind(state, before, count)`,
    the state as if of all it has read since `before` row b had read the first count[b] tokens only,
    with `check_rewind(state, count)`, which raises where so many tokens cannot be taken back;
    `read(params, tokens, state, at, valid=...)`, a call that returns the logits f32[B, Q, V] behind
    the tokens `at` i32[B, Q] alone, which is all that a prompt asks for; and `attend`, with the
    arguments of a call and one token a row, which returns the weights of its attention behind
    logits and state, a pytree whose leaves lead with B.
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
        return self.read(params, tokens, state, None, valid=valid)

    def read(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        at: jax.Array | None,  # i32[B, Q]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, ModelCache]:  # f32[B, Q, V]
        """As a call, with the logits behind the tokens `at` alone."""
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        arguments: dict[str, Any] = dict(positions=next_positions(state.length, valid), cache=state)
        result: Any = self.model.apply({"params": params}, tokens, at=at, **arguments)
        return result

    def attend(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, 1]
        state: ModelCache,
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, ModelCache, AttentionWeights]:
        """As a call with one token a row, and its weights [B, L, N, S] by slot of the cache."""
        check_one(tokens)
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        arguments: dict[str, Any] = dict(positions=next_positions(state.length, valid), cache=state)
        result: Any = self.model.apply({"params": params}, tokens, **arguments, method="attend")
        logits, state, weights = result
        return logits, state, by_slot(weights, state)

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

    def rewind(self, state: ModelCache, before: ModelCache, count: jax.Array) -> ModelCache:
        return rewind_cache(state, before.length + count)

    def check_rewind(self, state: ModelCache, count: int) -> None:
        """In a ring, a token that is taken back has overwritten the key `capacity` before it."""
        config, layers = self.model.config, state.layers
        limit = cache_limit(config, state.capacity)
        for i, window in enumerate(config.windows):
            layer = layers if isinstance(layers, KVCache) else layers[i]
            capacity = layer.positions.shape[-1]
            slots = capacity - layer.sinks
            turns = limit is None or capacity < limit
            if window is not None and turns and slots < window + count:
                raise ValueError(
                    f"cache capacity is {capacity}: a ring from which {count} tokens may be taken "
                    f"back must have at least window + {count} = {window + count} slots"
                    f"{f' beside its {layer.sinks} sinks' if layer.sinks else ''}"
                )


def make_step(
    model: Decoder | EncoderDecoder | RecurrentLM | RecurrentSeq2Seq,
) -> ModelStep | RecurrentStep:
    """The model as `step(params, tokens, state, valid=None) -> (logits, state)`."""
    if isinstance(model, RecurrentLM | RecurrentSeq2Seq):
        return RecurrentStep(model)
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

    A step with `read` computes no others. `chunk` reads the prompt that many tokens at a time: the
    same numbers in less memory.
    """
    if chunk is not None:
        check_count("chunk", chunk, 1)
    prompt, lengths = jnp.asarray(prompt), jnp.asarray(lengths)
    state = vary(state, (params, prompt))
    rows, columns = prompt.shape
    chunk = columns if chunk is None else chunk
    padded = -columns % chunk
    prompt = jnp.pad(prompt, ((0, 0), (0, padded)))
    starts = jnp.arange(0, columns + padded, chunk)
    model: Any = step

    def read(carry, start):
        last, state = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        index = start + jnp.arange(chunk)
        valid = index[None] < lengths[:, None]
        offset = lengths - 1 - start  # [B]
        here = (offset >= 0) & (offset < chunk)
        at = jnp.clip(offset, 0, chunk - 1)[:, None]
        if _reads(step):
            picked, state = model.read(params, tokens, state, at, valid=valid)
        else:
            logits, state = step(params, tokens, state, valid=valid)
            picked = jnp.take_along_axis(logits, at[:, :, None], axis=1)
        picked = picked[:, 0].astype(last.dtype)
        return (jnp.where(here[:, None], picked, last), state), None

    vocab = jax.eval_shape(step, params, prompt[:, :1], state)[0].shape[-1]
    first = vary((jnp.full((rows, vocab), -jnp.inf, jnp.float32), state))
    if len(starts) == 1:
        return read(first, 0)[0]
    return jax.lax.scan(read, first, starts)[0]


def _reads(step: Step) -> bool:
    """It has `read`, and not one that it inherits behind a call of its own."""
    for kind in type(step).__mro__:
        if "read" in vars(kind) or "__call__" in vars(kind):
            return "read" in vars(kind)
    return False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """What `generate` returns; behind a row's end tokens are -1 and log-probabilities 0."""

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]; new tokens of a row, a stop token included
    log_probs: jax.Array  # f32[B, num_tokens]; log softmax(logits)[token], before processors
    state: Any
    """Has read all but each row's last token: generate on, from that token, or `fork` it."""
    attention: Any = None
    """On request, `step.attend`'s weights [B, num_tokens, ...] of the query that chose token n;
    0 behind a row's end."""

    def rows(self) -> list[np.ndarray]:
        """Each row's tokens, without what stands behind its end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


class Plan(NamedTuple):
    """What is known when compiling."""

    sampler: Sampler
    processors: tuple[HistoryProcessor, ...] = ()
    stop: tuple[int, ...] = ()
    ends: bool = False
    """Whether a row may end before the others."""
    attention: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Rows in the middle of being generated; every leaf leads with B."""

    token: jax.Array  # i32[B]; chosen, and not yet read by the model
    active: jax.Array  # bool[B]; False: the row has ended, its state stands still
    count: jax.Array  # i32[B]; new tokens so far
    limits: jax.Array  # i32[B]; new tokens at most
    keys: jax.Array  # key[B]
    state: Any
    history: History | None  # None without processors


class Chosen(NamedTuple):
    """One new token of every row."""

    token: jax.Array  # i32[B]; -1 where the row had ended
    log_prob: jax.Array  # f32[B]; 0 where the row had ended
    attention: Any


def begin(
    plan: Plan,
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P]
    lengths: jax.Array,  # i32[B]
    state: Any,
    keys: jax.Array,  # key[B]
    limits: jax.Array,  # i32[B]
    room: int,
    chunk: int | None = None,
) -> tuple[Running, Chosen]:
    """Read the prompts and choose each row's first token; `room` is the most tokens it may get."""
    history = History.of(prompt, lengths, room) if plan.processors else None
    active = limits > 0
    running = Running(lengths, active, jnp.zeros_like(lengths), limits, keys, state, history)
    if not plan.attention:
        logits, state = prefill(step, params, prompt, state, lengths, chunk)
        return _choose(plan, replace(running, state=state), logits, None)
    _, state = prefill(step, params, prompt, state, lengths - 1, chunk)
    last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)
    logits, state, weights = step.attend(params, last, state)  # type: ignore[attr-defined]
    return _choose(plan, replace(running, state=state), logits[:, 0], weights)


def advance(plan: Plan, step: Step, params: Any, running: Running) -> tuple[Running, Chosen]:
    """Every active row reads its newest token and chooses the next."""
    token, valid = running.token, None
    if plan.ends:
        token, valid = jnp.where(running.active, token, 0), running.active[:, None]
    weights = None
    if plan.attention:
        attend = step.attend  # type: ignore[attr-defined]
        logits, state, weights = attend(params, token[:, None], running.state, valid=valid)
    else:
        logits, state = step(params, token[:, None], running.state, valid=valid)
    return _choose(plan, replace(running, state=state), logits[:, 0], weights)


def _choose(
    plan: Plan, running: Running, logits: jax.Array, weights: Any
) -> tuple[Running, Chosen]:
    """Processors, then the sampler; who has the last token of its kind ends."""
    active, history = running.active, running.history
    logits = logits.astype(jnp.float32)
    processed = apply_all(plan.processors, history, logits)
    if plan.ends:
        weights = choose(active, weights, jax.tree.map(jnp.zeros_like, weights))
    keys = jax.vmap(jax.random.fold_in)(running.keys, running.count)
    token = jax.vmap(lambda key, row: plan.sampler(key, row[None])[0])(keys, processed)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    log_prob = jnp.take_along_axis(log_probs, jnp.clip(token, 0)[:, None], axis=1)[:, 0]
    log_prob = jnp.where(token < 0, jnp.nan, log_prob)
    chosen = Chosen(
        jnp.where(active, token, -1) if plan.ends else token,
        jnp.where(active, log_prob, 0.0) if plan.ends else log_prob,
        weights,
    )
    count = running.count + active
    if history is not None:
        history = history.append(token, active)
    if plan.ends:
        token = jnp.where(active, token, running.token)
        active = active & (count < running.limits)
    if plan.stop:
        active = active & ~(token[:, None] == jnp.asarray(plan.stop)[None]).any(axis=1)
    return replace(running, token=token, active=active, count=count, history=history), chosen


def generate(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P], or rows of one length
    state: Any,
    *,
    num_tokens: int,
    lengths: jax.Array | None = None,  # i32[B]; None is P in every row
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: jax.Array | None = None,  # i32[B]; None is num_tokens in every row
    chunk: int | None = None,
    early_exit: bool | None = None,
    attention: bool = False,
) -> Generation:
    """Continue each row by up to `num_tokens` tokens; `sampler=None` takes the likeliest.

    Rows may have any length up to P: row b's prompt is its first `lengths[b]` tokens. A row ends
    behind a `stop` token, which it keeps, or after `limits[b]` tokens: with 0 it has none, and its
    state has read its prompt whole. `processors` see the text so far; the sampler draws from what
    they leave. Row b uses `fold_in(key, b)`, or `key[b]`, alone.

    The state is consumed: its memory becomes the result's (`fork(state, 1)` keeps it). With
    `early_exit` the loop ends as soon as every row has (None: where a row may end at all); the
    tokens are the same. The compiled program is shared by all prompts of a bucket and by samplers
    and processors that are equal.

    Under a trace of yours what is not known is not checked: a token outside the vocabulary and a
    position past the cache poison their row, which then has token -1 and log-probability NaN, and
    limits are clipped to 0..num_tokens. A token that has left every window before the prompt ends
    poisons nothing.
    """
    given = prepare(
        step, params, prompt, state, num_tokens, lengths, sampler, key, processors, stop, limits,
        chunk, attention,
    )  # fmt: skip
    if early_exit is None:
        early_exit = given.plan.ends
    inside = traced(*jax.tree.leaves((params, given.arrays)))  # a trace that donates by itself
    loop = _generate_within if inside else _generate
    return loop(given.plan, step, params, *given.arrays, num_tokens, chunk, early_exit)


def _generate_all(
    plan, step, params, prompt, lengths, keys, limits, state, num_tokens, chunk, early_exit
):
    loop = partial(_loop, plan, step, num_tokens, chunk, early_exit)
    rows = split_rows(state)
    weights = rows if plan.attention else None
    results = Generation(rows, rows, rows, jax.tree.map(split, state), weights)
    return by_compiler(loop, [params, prompt, lengths, keys, limits, state], results)


def _loop(plan, step, num_tokens, chunk, early_exit, params, prompt, lengths, keys, limits, state):
    running, chosen = begin(
        plan, step, params, prompt, lengths, state, keys, limits, num_tokens, chunk
    )

    def buffer(first: jax.Array, fill: Any = 0) -> jax.Array:
        rest = jnp.full((num_tokens - 1, *first.shape), fill, first.dtype)
        return jnp.concatenate([first[None], rest])

    def more(carry):
        n, running, _ = carry
        return (n < num_tokens) & running.active.any()

    def write(carry):
        n, running, out = carry
        running, chosen = advance(plan, step, params, running)
        return n + 1, running, jax.tree.map(lambda all, x: all.at[n].set(x), out, chosen)

    weights = jax.tree.map(buffer, chosen.attention)
    out = Chosen(buffer(chosen.token, -1), buffer(chosen.log_prob), weights)
    carry = jnp.int32(1), running, out
    if early_exit:
        _, running, out = jax.lax.while_loop(more, write, carry)
    else:
        steps = None, num_tokens - 1
        _, running, out = jax.lax.scan(lambda c, _: (write(c), None), carry, *steps)[0]
    out = jax.tree.map(lambda x: x.swapaxes(0, 1), out)
    return Generation(out.token, running.count, out.log_prob, running.state, out.attention)


_STATIC = ("plan", "step", "num_tokens", "chunk", "early_exit")
_generate_within = jax.jit(_generate_all, static_argnames=_STATIC)
_generate = jax.jit(_generate_all, static_argnames=_STATIC, donate_argnames="state")


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
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: jax.Array | None = None,  # i32[B]
    chunk: int | None = None,
) -> Iterator[np.ndarray]:  # i32[B], at most num_tokens times
    """The tokens of `generate` with the same arguments, each as soon as it is drawn.

    A row that has ended gives -1; when all have, the iterator ends. The state is consumed.
    """
    given = prepare(
        step, params, prompt, state, num_tokens, lengths, sampler, key, processors, stop, limits,
        chunk, False,
    )  # fmt: skip
    return _stream(given, step, params, num_tokens, chunk)


def _stream(given: Given, step: Step, params: Any, num_tokens: int, chunk: int | None):
    plan = given.plan
    running, token = _first(plan, step, params, *given.arrays, num_tokens, chunk)
    for n in range(1, num_tokens + 1):
        ahead, active = token, running.active
        if n < num_tokens:  # the next token is computed while the caller reads this one
            if plan.ends:
                active = active.copy()  # the next call consumes what is running
            running, token = _next(plan, step, params, running)
        yield jax.device_get(ahead)
        if plan.ends and not jax.device_get(active).any():
            return


@partial(jax.jit, static_argnames=("plan", "step", "num_tokens", "chunk"), donate_argnames="state")
def _first(plan, step, params, prompt, lengths, keys, limits, state, num_tokens, chunk):
    def first(params, prompt, lengths, keys, limits, state):
        running, chosen = begin(
            plan, step, params, prompt, lengths, state, keys, limits, num_tokens, chunk
        )
        return running, chosen.token

    rows = split_rows(state)
    history = rows if plan.processors else None
    running = Running(rows, rows, rows, rows, rows, jax.tree.map(split, state), history)
    return by_compiler(first, [params, prompt, lengths, keys, limits, state], (running, rows))


@partial(jax.jit, static_argnames=("plan", "step"), donate_argnames="running")
def _next(plan, step, params, running):
    def following(params, running):
        running, chosen = advance(plan, step, params, running)
        return running, chosen.token

    results = jax.tree.map(split, running), split(running.token)
    return by_compiler(following, [params, running], results)


class Given(NamedTuple):
    """Checked arguments."""

    plan: Plan
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array, Any]
    """Prompt, padded to its bucket; lengths, keys, limits and the state."""


def prepare(
    step, params, prompt, state, num_tokens, lengths, sampler, key, processors, stop, limits,
    chunk, attention,
) -> Given:  # fmt: skip
    """Check what `generate` was given, before anything is compiled."""
    check_count("num_tokens", num_tokens, 1)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if attention and not hasattr(step, "attend"):
        raise ValueError(f"attention is True: {type(step).__name__} has no `attend`")
    if sampler is not None:
        check_sampler(sampler)
    sampler = Greedy() if sampler is None else sampler
    processors = check_processors(processors)
    stop = stop_tokens(stop)
    prompt, lengths = check_prompt(prompt, lengths)
    rows = prompt.shape[0]
    if key is None and not isinstance(sampler, Greedy):
        raise ValueError(f"key is None: {sampler!r} draws random numbers")
    keys = row_keys(key, rows)
    plan = Plan(sampler, processors, stop, bool(stop) or limits is not None, attention)
    limits = _limits(limits, rows, num_tokens)
    prompt, lengths, state = ready(step, prompt, lengths, state, limits)
    if stop:
        vocab = jax.eval_shape(step, params, jnp.zeros((rows, 1), jnp.int32), state)[0].shape[-1]
        if max(stop) >= vocab:
            raise ValueError(f"stop is {max(stop)}: must be in 0..{vocab - 1}")
    return Given(plan, (prompt, lengths, keys, jnp.asarray(limits, jnp.int32), state))


def ready(
    step: Step, prompt: Any, lengths: Any, state: Any, room: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Of a checked prompt: i32[B, bucket], i32[B], and a state that holds them and can be donated.

    `room` is how many new tokens a row may get, i32[B] or one for all; the last is not read.
    """
    state = own(state)
    if hasattr(step, "check") and not traced(prompt, lengths, room):
        step.check(prompt, state, np.asarray(lengths) + np.maximum(room, 1) - 1)
    fill = bucket(prompt.shape[1]) - prompt.shape[1]
    numpy = jnp if traced(prompt) else np
    prompt = numpy.pad(prompt, ((0, 0), (0, fill)))
    return jnp.asarray(prompt, jnp.int32), jnp.asarray(lengths, jnp.int32), state


def check_prompt(prompt: Any, lengths: Any) -> tuple[Any, Any]:
    """i32[B, P] and i32[B]; zeros behind a row's end. What is traced keeps its values unchecked."""
    if not traced(prompt):
        try:
            prompt = np.asarray(prompt)
        except ValueError:
            raise ValueError(
                "prompt has rows of several lengths: fill them up to one, and give `lengths`"
            ) from None
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt has shape {prompt.shape}: must be [B, P] with P at least 1")
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        given = f"{prompt.dtype}{list(prompt.shape)}"
        raise ValueError(f"prompt is {given}: must be token ids, integers")
    rows, columns = prompt.shape
    if lengths is None:
        return as_int32("prompt", prompt), np.full(rows, columns, np.int32)
    lengths = lengths if traced(lengths) else np.asarray(lengths)
    if lengths.shape != (rows,):
        raise ValueError(f"lengths have shape {lengths.shape}: must be ({rows},)")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths are {lengths.dtype}: must be integers")
    if traced(prompt, lengths):
        return jnp.where(jnp.arange(columns)[None] < lengths[:, None], prompt, 0), lengths
    if rows and not 1 <= lengths.min() <= lengths.max() <= columns:
        raise ValueError(f"lengths are {lengths.tolist()}: must be from 1 to {columns}")
    prompt = np.where(np.arange(columns)[None] < lengths[:, None], prompt, 0)
    return as_int32("prompt", prompt), lengths


def row_keys(key: jax.Array | None, rows: int) -> jax.Array:  # key[B]
    """`fold_in(key, b)` for row b of one key; as many keys as rows are taken as they are."""
    if key is None:
        key = jax.random.key(0)
    if getattr(key, "shape", None) == (rows,) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    check_key("key", key)
    return _fold_rows(key, rows)


@partial(jax.jit, static_argnames="rows")
def _fold_rows(key, rows):
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def stop_tokens(stop: Any) -> tuple[int, ...]:
    """One id or several, as a tuple of ints."""
    ids = one_or_more("stop", stop)
    return token_ids("stop", ids) if ids else ()


def check_alive(state: Any) -> None:
    """A state whose memory was handed on is refused by name."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not traced(leaf) and leaf.is_deleted():
            raise ValueError("state was consumed by an earlier call: fork(state, 1) keeps a copy")


def own(state: Any) -> Any:
    """The state, fit to be donated: none of it was before, and no array stands in it twice."""
    check_alive(state)
    seen: set[int] = set()

    def leaf(x: Any) -> Any:
        twice = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        return x.copy() if twice else x

    return jax.tree.map(leaf, state)


def _limits(limits: Any, rows: int, num_tokens: int) -> Any:
    if limits is None:
        return np.full(rows, num_tokens, np.int32)
    limits = limits if traced(limits) else np.asarray(limits)
    if limits.shape != (rows,) or not jnp.issubdtype(limits.dtype, jnp.integer):
        raise ValueError(
            f"limits are {limits.dtype}{list(limits.shape)}: must be integers [{rows}]"
        )
    if traced(limits):
        return jnp.clip(limits, 0, num_tokens)
    if rows and not 0 <= limits.min() <= limits.max() <= num_tokens:
        raise ValueError(f"limits are {limits.tolist()}: must be from 0 to {num_tokens}")
    return limits


def check_sampler(sampler: Any) -> None:
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
