"""Beam search: the likeliest continuations of a prompt, for any model that decoding can serve.

At every step the beams are extended by every token. Of a row's `num_beams` best extensions, those
that end in a stop token are hypotheses; the `num_beams` best that do not stop live on (as in
fairseq and Hugging Face). What still lives behind the last step is a hypothesis too. The best
hypotheses by score, log p over a divisor of the length, are the result.

Ties go to the lower beam, then to the lower token id; of equal scores, to what ended earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.arguments import check_count, check_finite
from transformer_jax.decode import Step, check_prompt, prefill, ready, stop_tokens
from transformer_jax.meshes import by_compiler, split, split_rows
from transformer_jax.processors import (
    History,
    HistoryProcessor,
    apply_all,
    check_processors,
)
from transformer_jax.rows import count_rows, fork, gather
from transformer_jax.sampling import has_maximum


class Penalty(Protocol):
    """A divisor of the log-probability, by length: score = log p / penalty(length)."""

    def __call__(self, length: np.ndarray) -> np.ndarray:  # f64[n] -> f64[n], above 0
        ...


@dataclass(frozen=True)
class LengthPenalty:
    """score = log p / length**alpha: 0 is log p itself, 1 its mean over tokens (Hugging Face's).

    Length counts the new tokens with the stop token. Above 0 favours long texts, below 0 short.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_finite("alpha", self.alpha)

    def __call__(self, length: np.ndarray) -> np.ndarray:
        return length**self.alpha


@dataclass(frozen=True)
class GNMTPenalty:
    """score = log p / ((5 + length) / 6)**alpha (Wu et al. 2016, equation 14, without coverage)."""

    alpha: float

    def __post_init__(self) -> None:
        check_finite("alpha", self.alpha)

    def __call__(self, length: np.ndarray) -> np.ndarray:
        return ((5 + length) / 6) ** self.alpha


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beams:
    """R continuations of every row, best first.

    Where a row has fewer, the rest have length 0 and score -inf. A row whose logits were NaN or
    +inf has no result: length 0 and score NaN.
    """

    tokens: jax.Array  # i32[B, R, num_tokens]; -1 behind the end
    lengths: jax.Array  # i32[B, R]; with the stop token
    scores: jax.Array  # f32[B, R]
    log_probs: jax.Array  # f32[B, R]; of the whole continuation


def beam_search(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P], or rows of one length
    state: Any,
    *,
    num_tokens: int,
    num_beams: int,
    num_results: int = 1,
    stop: int | Sequence[int] = (),
    lengths: jax.Array | None = None,  # i32[B]; None is P in every row
    processors: Sequence[HistoryProcessor] = (),
    length_penalty: Penalty | None = None,
    groups: int = 1,
    diversity: float = 0.0,
    early_exit: bool = True,
    chunk: int | None = None,
) -> Beams:
    """The `num_results` best continuations of at most `num_tokens` tokens that the beams find.

    log p sums log_softmax(processed logits) over the new tokens, the stop token included. Without a
    `length_penalty`, the score is log p: the shorter of two texts tends to win.

    With `groups` G, the beams are G searches of num_beams / G side by side; each ranks its
    extensions by log p - `diversity` * (beams of the groups before it that took this token at this
    step), the Hamming diversity of Vijayakumar et al. 2018, equation 5. It decides what is kept at
    this step, and is no part of log p. A text that several groups find is returned once.

    `early_exit` leaves a row when no living beam can beat what it would return, whatever follows:
    the result is that of running to the end. A beam whose every token is excluded ends unheard.

    The state is consumed: `fork(state, 1)` keeps one. The prompt is read with B rows, all else
    runs with B * num_beams, and each step copies the state once, to let every beam follow its
    parent; leaves that `step` hands back untouched, such as the keys of a source, stay in place.

    ValueError where an argument is wrong, before anything is compiled or consumed.
    """
    plan = _plan(num_tokens, num_beams, num_results, stop, processors, groups, chunk)
    _check_diversity(diversity, plan)
    weights = _Weights.of(_divisors(length_penalty, plan.num_tokens), diversity, early_exit)
    prompt, lengths = check_prompt(prompt, lengths)
    prompt, lengths, state = ready(step, prompt, lengths, state, plan.num_tokens)
    if jax.tree.leaves(state) and count_rows(state) != len(prompt):
        raise ValueError(f"prompt has {len(prompt)} rows, the state {count_rows(state)}")
    return _search(step, params, prompt, lengths, state, weights, plan)[0]


@dataclass(frozen=True)
class _Plan:
    """What one program is compiled for; hashable."""

    num_tokens: int
    num_beams: int
    num_results: int
    stop: tuple[int, ...]
    processors: tuple[HistoryProcessor, ...]
    groups: int
    chunk: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weights:
    """What one program serves all values of."""

    factors: jax.Array  # f32[num_tokens]; score = log p * factors[length - 1]
    kindest: jax.Array  # f32[num_tokens]; of the best length behind n tokens, at n - 1
    diversity: jax.Array  # f32[]
    early_exit: jax.Array  # bool[]

    @classmethod
    def of(cls, divisors: np.ndarray, diversity: float, early_exit: bool) -> _Weights:
        """Scores are products, which round alike wherever they are computed: a bound is a bound."""
        factors = (1 / divisors).astype(np.float32)
        least = np.minimum.accumulate(factors[::-1])[::-1]  # log p is never above 0
        kindest = np.append(least[1:], least[-1])
        numbers = factors, kindest, np.float32(diversity), np.bool_(early_exit)
        return cls(*jax.device_put(numbers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Search:
    """Beams [B, M] after n tokens; one that does not live has log p -inf, and some token."""

    n: jax.Array  # i32[]
    tokens: jax.Array  # i32[B, M, num_tokens]
    log_probs: jax.Array  # f32[B, M]
    found: Beams
    broken: jax.Array  # bool[B]


@partial(jax.jit, static_argnames=("step", "plan"), donate_argnames="state")
def _search(step, params, prompt, lengths, state, weights, plan):
    """The result; and the state behind the prompt, written where the given one was."""
    arrays = [params, prompt, lengths, state, weights]
    results = split_rows(state), jax.tree.map(split, state)
    return by_compiler(partial(_beams, step, plan), arrays, results)


def _beams(step, plan, params, prompt, lengths, state, weights):
    logits, read = prefill(step, params, prompt, state, lengths, plan.chunk)
    if plan.stop and plan.stop[-1] >= logits.shape[-1]:
        raise ValueError(f"stop has {plan.stop[-1]}: must be in 0..{logits.shape[-1] - 1}")
    history = History.of(prompt, lengths, plan.num_tokens) if plan.processors else None
    logits, state, history = fork((logits, read, history), plan.num_beams)
    search, history, _ = _extend(plan, weights, _start(plan, len(prompt)), logits, history)

    def lives(carry):
        search = carry[0]
        return (search.n < plan.num_tokens) & (search.log_probs > -jnp.inf).any()

    def advance(carry):
        search, state, history = carry
        last = jnp.take(search.tokens, search.n - 1, axis=2, mode="clip")
        logits, new = step(params, last.reshape(-1, 1), state)
        search, history, rows = _extend(plan, weights, search, logits[:, 0], history)
        return search, _follow(state, new, rows), history

    search, _, _ = jax.lax.while_loop(lives, advance, (search, state, history))
    factor = weights.factors[-1]
    found = _keep(plan, search.found, search.tokens, plan.num_tokens, search.log_probs, factor)
    broken = search.broken[:, None]
    return Beams(
        tokens=jnp.where(broken[..., None], -1, found.tokens),
        lengths=jnp.where(broken, 0, found.lengths),
        scores=jnp.where(broken, jnp.nan, found.scores),
        log_probs=jnp.where(broken, jnp.nan, found.log_probs),
    ), read


def _start(plan: _Plan, rows: int) -> _Search:
    """The empty text, once a group: what would repeat it does not live."""
    M, N, R = plan.num_beams, plan.num_tokens, plan.num_results
    first = jnp.arange(M) % (M // plan.groups) == 0
    return _Search(
        n=jnp.int32(0),
        tokens=jnp.full((rows, M, N), -1, jnp.int32),
        log_probs=jnp.tile(jnp.where(first, 0.0, -jnp.inf).astype(jnp.float32), (rows, 1)),
        found=Beams(
            tokens=jnp.full((rows, R, N), -1, jnp.int32),
            lengths=jnp.zeros((rows, R), jnp.int32),
            scores=jnp.full((rows, R), -jnp.inf, jnp.float32),
            log_probs=jnp.full((rows, R), -jnp.inf, jnp.float32),
        ),
        broken=jnp.zeros((rows,), bool),
    )


def _extend(
    plan: _Plan,
    weights: _Weights,
    search: _Search,
    logits: jax.Array,  # [B * M, V]
    history: History | None,
) -> tuple[_Search, History | None, jax.Array]:
    """One more token; and the row i32[B * M] of B * M that each beam continues."""
    rows, M = search.log_probs.shape
    step_log_probs, usable = _log_probs(plan.processors, history, logits)
    living = search.log_probs > -jnp.inf
    broken = search.broken | (living & ~usable.reshape(rows, M)).any(axis=1)
    totals = search.log_probs[..., None] + step_log_probs.reshape(rows, M, logits.shape[-1])
    totals = jnp.where(broken[:, None, None], -jnp.inf, totals)
    alive, ended = _best(plan, totals, weights.diversity)

    def texts(chosen):
        tokens = _pick(search.tokens, chosen.parent)
        return tokens.at[:, :, search.n].set(chosen.token, mode="promise_in_bounds")

    n, found, log_probs = search.n + 1, search.found, alive.log_prob
    if plan.stop:
        factor = weights.factors[search.n]
        found = _keep(plan, found, texts(ended), n, ended.log_prob, factor)
    reachable = log_probs.max(axis=1) * weights.kindest[search.n]
    settled = weights.early_exit & (reachable <= found.scores[:, -1])
    log_probs = jnp.where(settled[:, None], -jnp.inf, log_probs)
    parents = (alive.parent + M * jnp.arange(rows)[:, None]).reshape(-1)
    if history is not None:
        history = gather(history, parents).append(alive.token.reshape(-1), jnp.bool_(True))
    return _Search(n, texts(alive), log_probs, found, broken), history, parents


def _log_probs(
    processors: tuple[HistoryProcessor, ...],
    history: History | None,
    logits: jax.Array,  # [R, V]
) -> tuple[jax.Array, jax.Array]:  # f32[R, V], bool[R]
    """log_softmax of the processed logits, -inf where all are; and which rows are not broken.

    As for a sampler, given logits have to have a finite maximum; processors may exclude all.
    """
    logits = logits.astype(jnp.float32)
    processed = apply_all(processors, history, logits)
    nothing = (processed == -jnp.inf).all(axis=-1)
    usable = has_maximum(logits) & (has_maximum(processed) | nothing)
    finite = has_maximum(processed)[:, None]
    log_probs = jax.nn.log_softmax(jnp.where(finite, processed, 0.0), axis=-1)
    return jnp.where(finite, log_probs, -jnp.inf), usable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Chosen:
    """Extensions of beams, best first within each group."""

    parent: jax.Array  # i32[B, M]
    token: jax.Array  # i32[B, M]
    log_prob: jax.Array  # f32[B, M]; -inf is none


def _best(
    plan: _Plan,
    totals: jax.Array,  # f32[B, M, V]
    diversity: jax.Array,
) -> tuple[_Chosen, _Chosen]:
    """The best extensions that live on; and those that stop, of the best of all."""
    rows, M, vocab = totals.shape
    width = M // plan.groups
    # Each beam has one extension a stop token, so among so many there are `width` that live on.
    many = min(width * (1 + len(plan.stop)), width * vocab)
    taken = jnp.zeros((rows, vocab), jnp.float32)
    alive, ended = [], []
    for first in range(0, M, width):
        group = totals[:, first : first + width]
        ranked = group - diversity * taken[:, None]
        rank, index = jax.lax.top_k(ranked.reshape(rows, width * vocab), many)
        parent, token = first + index // vocab, index % vocab
        total = _pick(group.reshape(rows, width * vocab), index)
        stops = (token[..., None] == np.array(plan.stop, np.int32)[None, None]).any(axis=2)
        best = _Chosen(parent, token, jnp.where(stops, total, -jnp.inf))
        ended.append(jax.tree.map(lambda x: x[:, :width], best))
        order = jax.lax.top_k(jnp.where(stops, -jnp.inf, rank), width)[1]
        best = _Chosen(parent, token, jnp.where(stops, -jnp.inf, total))
        alive.append(jax.tree.map(partial(_pick, index=order), best))
        lives = alive[-1].log_prob > -jnp.inf
        taken = taken.at[jnp.arange(rows)[:, None], alive[-1].token].add(lives)

    def together(*parts):
        return jnp.concatenate(parts, axis=1)

    return jax.tree.map(together, *alive), jax.tree.map(together, *ended)


def _keep(
    plan: _Plan,
    found: Beams,
    tokens: jax.Array,  # i32[B, M, num_tokens]
    length: jax.Array | int,
    log_probs: jax.Array,  # f32[B, M]; -inf is none
    factor: jax.Array,
) -> Beams:
    """The best of what was found and of these, all of one length."""
    if plan.groups > 1:
        same = (tokens[:, :, None] == tokens[:, None]).all(axis=-1)  # [B, M, M]
        before = np.tril(np.ones(same.shape[1:], bool), -1)[None]
        again = (same & before & (log_probs > -jnp.inf)[:, None]).any(axis=2)
        log_probs = jnp.where(again, -jnp.inf, log_probs)
    scores = log_probs * factor
    more = Beams(tokens, jnp.full(scores.shape, length, jnp.int32), scores, log_probs)
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), found, more)
    best = jax.lax.top_k(both.scores, plan.num_results)[1]
    return jax.tree.map(partial(_pick, index=best), both)


def _pick(leaf: jax.Array, index: jax.Array) -> jax.Array:  # [B, M, ...], i32[B, R] -> [B, R, ...]
    """Of every row, what stands at `index[b]`."""
    index = index.reshape(*index.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1, mode="promise_in_bounds")


def _follow(old: Any, new: Any, rows: jax.Array) -> Any:
    """Row i of the new state is that of row `rows[i]`.

    A leaf that `step` handed back as it was is alike in all beams of a row, and stays.
    """

    def leaf(before: jax.Array, after: jax.Array) -> jax.Array:
        return after if after is before else gather(after, rows)

    return jax.tree.map(leaf, old, new)


def _plan(num_tokens, num_beams, num_results, stop, processors, groups, chunk) -> _Plan:
    """Checked arguments; equal ones share a program."""
    counts = dict(num_tokens=num_tokens, num_beams=num_beams, num_results=num_results)
    counts["groups"] = groups
    for name, value in counts.items():
        check_count(name, value, 1)
    if num_results > num_beams:
        raise ValueError(f"num_results is {num_results}: must be at most num_beams, {num_beams}")
    if num_beams % groups:
        raise ValueError(f"groups {groups} does not divide num_beams {num_beams}")
    if chunk is not None:
        check_count("chunk", chunk, 1)
    return _Plan(
        stop=tuple(sorted(set(stop_tokens(stop)))),
        processors=check_processors(processors),
        chunk=chunk,
        **{name: int(value) for name, value in counts.items()},
    )


def _check_diversity(diversity: Any, plan: _Plan) -> None:
    check_finite("diversity", diversity)
    if diversity < 0:
        raise ValueError(f"diversity is {diversity}: must be at least 0")
    if diversity and plan.groups == 1:
        raise ValueError(f"diversity is {diversity} with 1 group: there is none to differ from")


def _divisors(penalty: Any, count: int) -> np.ndarray:  # f64[count]
    """The divisor of every length from 1 on; float32 has to hold it and its inverse."""
    lengths = np.arange(1, count + 1, dtype=np.float64)
    if penalty is None:
        return np.ones_like(lengths)
    if isinstance(penalty, type) or not callable(penalty):
        rule = "must be a value, such as LengthPenalty(1.0)"
        raise ValueError(f"length_penalty is {penalty!r}: {rule}")
    with np.errstate(all="ignore"):
        divisors = np.asarray(penalty(lengths), np.float64)
    if divisors.shape != (count,):
        raise ValueError(f"{penalty!r} of {count} lengths is {divisors.shape}: must be ({count},)")
    limit = float(np.finfo(np.float32).max) / 4
    wrong = ~((divisors >= 1 / limit) & (divisors <= limit))
    if wrong.any():
        i = int(np.argmax(wrong))
        rule = "must be above 0 and within float32"
        raise ValueError(f"{penalty!r} of length {i + 1} is {divisors[i]:g}: {rule}")
    return divisors
