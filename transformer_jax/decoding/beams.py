"""Beam search for the most likely continuations of a prompt, for any model with a step.

Each step extends every beam with every token. Among the `num_beams` best extensions in a row, those
that end in a stop token become hypotheses. The `num_beams` best extensions that do not end in a
stop token become the next beams, as in fairseq and Hugging Face. Beams that are still alive after
the last step of a row also become hypotheses. The result contains the hypotheses with the best log
p / length penalty. Ties go to the lower beam, then to the lower token ID. Among hypotheses, ties go
to the one that ended first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import INT32, check_count, check_finite, has_finite_maximum
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding import arguments
from transformer_jax.decoding.batch_rows import State, count_rows, fork, gather_rows
from transformer_jax.decoding.generation import read_prompts
from transformer_jax.decoding.logit_processors import (
    History,
    HistoryProcessor,
    apply_processors,
    check_processors,
)
from transformer_jax.decoding.step import Params, Step, StepLike, as_step
from transformer_jax.models.ops import log_softmax
from transformer_jax.programs import program
from transformer_jax.sharding import by_compiler, split, split_rows
from transformer_jax.values import value_class


class Penalty(Protocol):
    """Function of the length that divides log p: score = log p / penalty(length)."""

    def __call__(self, length: np.ndarray) -> np.ndarray:  # f64[n] -> f64[n], positive
        ...


@value_class
class LengthPenalty:
    """Penalty length^alpha, as in Hugging Face, so that the score is log p / length^alpha.

    With alpha = 0, the score is log p. With alpha = 1, it is the mean of log p per token. The
    length is the number of new tokens, including the stop token.

    Attributes:
        alpha: exponent, from -1e30 to 1e30. Positive values favor long text, and negative values
            favor short text.

    Raises:
        ValueError: If alpha is not a finite number in that range.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_finite("alpha", self.alpha)

    def __call__(self, length: np.ndarray) -> np.ndarray:
        return length**self.alpha


@value_class
class GNMTPenalty:
    """Penalty ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14, without coverage).

    Attributes:
        alpha: exponent, from -1e30 to 1e30. Positive values favor long text, and negative values
            favor short text.

    Raises:
        ValueError: If alpha is not a finite number in that range.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_finite("alpha", self.alpha)

    def __call__(self, length: np.ndarray) -> np.ndarray:
        return ((5 + length) / 6) ** self.alpha


@value_class(pytree=True)
class Beams:
    """The R best continuations of every row, with the best first.

    A missing continuation has length 0 and score -inf. If the logits of a row were NaN or +inf, all
    of its continuations have length 0 and score NaN.

    Attributes:
        tokens: i32[B, R, num_tokens], the new tokens, with -1 after the end.
        lengths: i32[B, R], the number of new tokens, including the stop token.
        scores: f32[B, R], log p divided by the length penalty.
        log_probs: f32[B, R], log p of each whole continuation, in nats.
    """

    tokens: jax.Array  # i32[B, R, num_tokens]
    lengths: jax.Array  # i32[B, R]
    scores: jax.Array  # f32[B, R]
    log_probs: jax.Array  # f32[B, R]


@known_keywords
def beam_search(
    step: StepLike[State],
    params: Params,
    prompt: arguments.TokenRows,  # i32[B, P], or rows of equal length
    state: State,
    *,
    num_tokens: int,
    num_beams: int,
    num_results: int = 1,
    stop: int | Sequence[int] = (),
    lengths: arguments.Lengths | None = None,  # i32[B], or bool[B, P]
    limits: arguments.PerRow | None = None,  # i32[B]
    processors: Sequence[HistoryProcessor] = (),
    length_penalty: Penalty | None = None,
    groups: int = 1,
    diversity: float = 0.0,
    early_exit: bool = True,
    chunk: int | None = None,
) -> Beams:
    """Return the best continuations of up to `num_tokens` tokens that beam search finds.

    log p is the sum of log_softmax(processed logits) over the new tokens, including the stop token.
    If the processors exclude all next tokens of a beam, the beam ends without a hypothesis.

    The prompt is read with B rows, and the search uses B * num_beams rows. Each step reorders the
    state once so that every beam continues its parent. Leaves that `step` returns unchanged, such
    as the keys of a source, are not copied. Inside your own `jit`, limits are clipped to
    0..num_tokens.

    Args:
        step: `make_step(model)`, or a function `step(params, tokens, state, *, valid=None) ->
            (logits, state)`.
        params: the model's parameters, passed to the step.
        prompt: i32[B, P], token IDs, as an array or as rows of equal length.
        state: the state to continue, with B rows. It is consumed; pass `fork(state, 1)` to keep it.
        num_tokens: the maximum number of new tokens per row, at least 1.
        num_beams: M, the number of beams per row, at least 1.
        num_results: R, the number of continuations to return for each row, from 1 to num_beams.
        stop: one or more token IDs that end the text.
        lengths: i32[B], the length of each row's prompt, from 1 to P, or a mask, as in `generate`.
            None means P for every row.
        limits: i32[B], the maximum number of new tokens for each row; 0 means no result. None means
            num_tokens for every row.
        processors: functions that change the logits based on the text so far, applied from left to
            right.
        length_penalty: the divisor of log p, such as `LengthPenalty(1.0)`. None means no penalty,
            which tends to favor short text.
        groups: G, the number of separate searches, each with num_beams / G beams. G must divide
            num_beams. Text that several groups find is returned once.
        diversity: the weight of the Hamming diversity (Vijayakumar et al. 2018, equation 5), at
            least 0, and 0 for a single group. Each group ranks its extensions by log p - diversity
            * (number of beams in earlier groups that chose this token at this step). log p itself
            does not change.
        early_exit: whether to end a row as soon as none of its beams can enter the result. This
            does not change the result.
        chunk: number of prompt tokens to read at a time, as in `prefill`; None means all at once.

    Returns:
        `Beams` with the R best texts of each row, and their lengths, scores and log-probabilities.

    Raises:
        ValueError: If an argument is invalid. The error is raised before anything is compiled or
            consumed.
    """
    step = as_step(step, params, state)
    counts = dict(num_tokens=num_tokens, num_beams=num_beams, num_results=num_results)
    counts["groups"] = groups
    for name, value in counts.items():
        check_count(name, value, 1, INT32.max)
    if num_results > num_beams:
        raise ValueError(f"num_results is {num_results}: must be at most num_beams, {num_beams}")
    if num_beams % groups:
        raise ValueError(f"groups is {groups}: must divide num_beams, {num_beams}")
    if chunk is not None:
        check_count("chunk", chunk, 1)
    options = _BeamOptions(
        # Sort and deduplicate the stop tokens, so that equal sets share a program.
        stop=tuple(sorted(set(arguments.stop_tokens(stop)))),
        processors=check_processors(processors),
        chunk=chunk,
        invariant=step.invariant,
        **{name: int(value) for name, value in counts.items()},
    )
    check_finite("diversity", diversity)
    if diversity < 0:
        raise ValueError(f"diversity is {diversity}: must be at least 0")
    if diversity and groups == 1:
        raise ValueError(
            f"diversity is {diversity} with 1 group: must be 0 unless groups is at least 2"
        )
    # Scores are products, not quotients: products round the same way everywhere, so the bound on a
    # score is exact.
    factors = (1 / _length_divisors(length_penalty, options.num_tokens)).astype(np.float32)
    numbers = factors, np.float32(diversity), np.bool_(early_exit)
    scoring = _Scoring(*jax.device_put(numbers))
    tokens, lengths = arguments.check_prompt(prompt, lengths)
    limits = jnp.asarray(arguments.check_limits(limits, len(tokens), options.num_tokens), jnp.int32)
    state = arguments.make_donatable(state)
    tokens = arguments.check_with_step(step, tokens, lengths, limits, state)
    if jax.tree.leaves(state) and count_rows(state) != len(tokens):
        raise ValueError(f"prompt has {len(tokens)} rows, but the state has {count_rows(state)}")
    step, tokens, lengths = arguments.fill_prompts(step, tokens, lengths)
    prompts = _BeamPrompts(tokens, lengths, limits)
    return _search(options, step, params, prompts, state, scoring)[0]


@dataclass(frozen=True)
class _BeamOptions:
    """Static, hashable options of a search."""

    num_tokens: int
    num_beams: int
    num_results: int
    stop: tuple[int, ...]
    processors: tuple[HistoryProcessor, ...]
    groups: int
    chunk: int | None
    invariant: bool


@value_class(pytree=True)
class _Scoring:
    """Parameters of the score, stored as arrays so that one program serves all values."""

    factors: jax.Array  # f32[num_tokens]; score = log p * factors[length - 1]
    diversity: jax.Array  # f32[]
    early_exit: jax.Array  # bool[]

    def best_factors(
        self,
        n: jax.Array,  # i32[]
        limits: jax.Array,  # i32[B]
    ) -> jax.Array:  # f32[B]
        """Return the factor for the best score that each row can still reach after n tokens.

        The length of such a text is from n + 1 to the row's limit, or the limit itself at the end.
        """
        length, limits = 1 + jnp.arange(len(self.factors))[None], limits[:, None]
        # log p is at most 0, so the smallest factor bounds the score.
        ahead = (length >= jnp.minimum(n + 1, limits)) & (length <= limits)
        return jnp.where(ahead, self.factors[None], jnp.inf).min(axis=1)


@value_class(pytree=True)
class _SearchState:
    """Beams [B, M] after n tokens.

    An ended beam has log p = -inf and arbitrary tokens. The beams of a row that has reached its
    limit no longer change.
    """

    n: jax.Array  # i32[]
    limits: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B, M, num_tokens]
    log_probs: jax.Array  # f32[B, M]
    hypotheses: Beams
    """Best finished texts."""
    nonfinite: jax.Array  # bool[B]

    @property
    def extended(self) -> jax.Array:  # bool[B]
        """Mask of the rows that have not reached their limit."""
        return self.n < self.limits


class _BeamPrompts(NamedTuple):
    tokens: jax.Array  # i32[B, P]
    lengths: jax.Array  # i32[B]
    limits: jax.Array  # i32[B]


_Carry: TypeAlias = tuple[_SearchState, State, History | None]


@program(static=("options", "step"), donate=("state",))
def _search(
    options: _BeamOptions,
    step: Step[State],
    params: Params,
    prompts: _BeamPrompts,
    state: State,
    scoring: _Scoring,
) -> tuple[Beams, State]:
    """Return the result and the state after the prompt, which reuses the donated memory."""
    M, N, R = options.num_beams, options.num_tokens, options.num_results

    def run(
        params: Params, prompts: _BeamPrompts, state: State, scoring: _Scoring
    ) -> tuple[Beams, State]:
        prompt, lengths, limits = prompts
        logits, after_prompt = read_prompts(step, params, prompt, lengths, state, options.chunk)
        if options.stop and options.stop[-1] >= logits.shape[-1]:
            limit = logits.shape[-1] - 1
            raise ValueError(f"stop contains {options.stop[-1]}: must be from 0 to {limit}")
        rows = len(limits)
        history = History.of(prompt, lengths, N) if options.processors else None
        logits, state, history = fork((logits, after_prompt, history), M)
        # Initially, all beams of a group contain the same text, so only one of them is alive. A row
        # with limit 0 has no beam that is alive, and thus no result.
        first = (jnp.arange(M) % (M // options.groups) == 0)[None] & (limits > 0)[:, None]
        search = _SearchState(
            n=jnp.int32(0),
            limits=limits,
            tokens=jnp.full((rows, M, N), -1, jnp.int32),
            log_probs=jnp.where(first, 0.0, -jnp.inf).astype(jnp.float32),
            hypotheses=Beams(
                tokens=jnp.full((rows, R, N), -1, jnp.int32),
                lengths=jnp.zeros((rows, R), jnp.int32),
                scores=jnp.full((rows, R), -jnp.inf, jnp.float32),
                log_probs=jnp.full((rows, R), -jnp.inf, jnp.float32),
            ),
            nonfinite=jnp.zeros((rows,), bool),
        )
        search, history, _ = _extend_beams(options, scoring, search, logits, history)

        def any_alive(carry: _Carry[State]) -> jax.Array:
            search = carry[0]
            return (search.extended[:, None] & (search.log_probs > -jnp.inf)).any()

        def search_step(carry: _Carry[State]) -> _Carry[State]:
            search, state, history = carry
            last = jnp.take(search.tokens, search.n - 1, axis=2, mode="clip")
            valid = jnp.repeat(search.extended, M)[:, None]
            beams = step.with_facts(part=True, apart=True)
            logits, new = beams(params, last.reshape(-1, 1), state, valid=valid)
            search, history, parents = _extend_beams(
                options, scoring, search, logits[:, 0], history
            )

            def follow(before: jax.Array, after: jax.Array) -> jax.Array:
                # A leaf that the step returned unchanged (the same tracer), such as the keys of a
                # source, is equal in all beams of a row and needs no gather.
                return after if after is before else gather_rows(after, parents)

            return search, jax.tree.map(follow, state, new), history

        if N > 1:
            search, _, _ = jax.lax.while_loop(any_alive, search_step, (search, state, history))
        factor = jnp.take(scoring.factors, limits - 1, mode="clip")
        best = _keep_best(
            options, search.hypotheses, search.tokens, limits, search.log_probs, factor
        )
        nonfinite = search.nonfinite[:, None]
        return Beams(
            tokens=jnp.where(nonfinite[..., None], -1, best.tokens),
            lengths=jnp.where(nonfinite, 0, best.lengths),
            scores=jnp.where(nonfinite, jnp.nan, best.scores),
            log_probs=jnp.where(nonfinite, jnp.nan, best.log_probs),
        ), after_prompt

    results = split_rows(state), jax.tree.map(split, state)
    return by_compiler(run, [params, prompts, state, scoring], results)


def _extend_beams(
    options: _BeamOptions,
    scoring: _Scoring,
    search: _SearchState,
    logits: jax.Array,  # [B * M, V]
    history: History | None,
) -> tuple[_SearchState, History | None, jax.Array]:
    """Extend the beams by one token and also return the parent index of each beam, i32[B * M]."""
    rows, M = search.log_probs.shape
    extended = search.extended[:, None]
    step_log_probs, usable = _log_probs(options, history, logits)
    living = extended & (search.log_probs > -jnp.inf)
    nonfinite = search.nonfinite | (living & ~usable.reshape(rows, M)).any(axis=1)
    totals = search.log_probs[..., None] + step_log_probs.reshape(rows, M, logits.shape[-1])
    totals = jnp.where((extended & ~nonfinite[:, None])[..., None], totals, -jnp.inf)
    alive, ended = _best_extensions(options, totals, scoring.diversity)

    def texts(extensions: _Extensions) -> jax.Array:  # i32[B, M, num_tokens]
        # Copy the whole text of the parent, because a beam may continue any beam in its row.
        tokens = _gather_beams(search.tokens, extensions.parent)
        return tokens.at[:, :, search.n].set(extensions.token, mode="promise_in_bounds")

    # Compare finished texts now. Beams that are still alive are compared after the last step.
    n, hypotheses, log_probs = search.n + 1, search.hypotheses, alive.log_prob
    if options.stop:
        length, factor = jnp.full(rows, n), jnp.full(rows, scoring.factors[search.n])
        hypotheses = _keep_best(options, hypotheses, texts(ended), length, ended.log_prob, factor)
    bound = log_probs.max(axis=1) * scoring.best_factors(n, search.limits)
    # The last hypothesis is the worst one. The row is decided as soon as no beam can replace it.
    decided = scoring.early_exit & (bound <= hypotheses.scores[:, -1])
    log_probs = jnp.where(decided[:, None], -jnp.inf, log_probs)
    log_probs = jnp.where(extended, log_probs, search.log_probs)
    tokens = jnp.where(extended[..., None], texts(alive), search.tokens)
    parents = (alive.parent + M * jnp.arange(rows)[:, None]).reshape(-1)
    if history is not None:
        history = gather_rows(history, parents).append(alive.token.reshape(-1), jnp.bool_(True))
    search = _SearchState(n, search.limits, tokens, log_probs, hypotheses, nonfinite)
    return search, history, parents


def _log_probs(
    options: _BeamOptions,
    history: History | None,
    logits: jax.Array,  # [R, V]
) -> tuple[jax.Array, jax.Array]:  # f32[R, V], bool[R]
    """Return log_softmax of the processed logits, and a mask of the usable rows."""
    logits = logits.astype(jnp.float32)
    processed = apply_processors(options.processors, history, logits)
    # As in a sampler, the largest logit of a row must be finite. However, if the processors exclude
    # all tokens, the whole row is -inf, and the beam ends without a hypothesis.
    excluded = (processed == -jnp.inf).all(axis=-1)
    usable = has_finite_maximum(logits) & (has_finite_maximum(processed) | excluded)
    finite = has_finite_maximum(processed)[:, None]
    log_probs = log_softmax(jnp.where(finite, processed, 0.0), invariant=options.invariant)
    return jnp.where(finite, log_probs, -jnp.inf), usable


@value_class(pytree=True)
class _Extensions:
    """Extensions of beams, with the best first in each group."""

    parent: jax.Array  # i32[B, M]; index of the extended beam in its row
    token: jax.Array  # i32[B, M]
    log_prob: jax.Array  # f32[B, M]; -inf marks a missing extension


def _best_extensions(
    options: _BeamOptions,
    totals: jax.Array,  # f32[B, M, V]
    diversity: jax.Array,
) -> tuple[_Extensions, _Extensions]:
    """Return the best extensions that do not stop, and the overall best extensions that stop."""
    rows, M, vocab = totals.shape
    width = M // options.groups
    # Each beam has one extension per stop token, so at least `width` of these extensions do not
    # stop.
    count = min(width * (1 + len(options.stop)), width * vocab)
    taken = jnp.zeros((rows, vocab), jnp.float32)
    alive, ended = [], []
    for first in range(0, M, width):
        group = totals[:, first : first + width]
        ranked = group - diversity * taken[:, None]
        rank, index = jax.lax.top_k(ranked.reshape(rows, width * vocab), count)
        parent, token = first + index // vocab, index % vocab
        total = _gather_beams(group.reshape(rows, width * vocab), index)
        stops = (token[..., None] == np.array(options.stop, np.int32)[None, None]).any(axis=2)
        stopped = _Extensions(parent, token, jnp.where(stops, total, -jnp.inf))
        # A text becomes a hypothesis only if it is among the best `width` extensions of its group.
        ended.append(jax.tree.map(lambda x: x[:, :width], stopped))
        order = jax.lax.top_k(jnp.where(stops, -jnp.inf, rank), width)[1]
        others = _Extensions(parent, token, jnp.where(stops, -jnp.inf, total))
        alive.append(jax.tree.map(partial(_gather_beams, index=order), others))
        lives = alive[-1].log_prob > -jnp.inf
        # An ended beam has an arbitrary token, which must not count as chosen.
        taken = taken.at[jnp.arange(rows)[:, None], alive[-1].token].add(lives.astype(taken.dtype))

    join = lambda *groups: jnp.concatenate(groups, axis=1)  # noqa: E731
    return jax.tree.map(join, *alive), jax.tree.map(join, *ended)


def _keep_best(
    options: _BeamOptions,
    hypotheses: Beams,
    tokens: jax.Array,  # i32[B, M, num_tokens]
    length: jax.Array,  # i32[B]
    log_probs: jax.Array,  # f32[B, M]; -inf marks a missing text
    factor: jax.Array,  # f32[B]
) -> Beams:
    """Return the best of the old and new hypotheses. All new ones have length `length[b]`."""
    # Groups search independently and may find the same text, so keep only the first copy.
    if options.groups > 1:
        same = (tokens[:, :, None] == tokens[:, None]).all(axis=-1)  # [B, M, M]
        before = np.tril(np.ones(same.shape[1:], bool), -1)[None]
        repeated = (same & before & (log_probs > -jnp.inf)[:, None]).any(axis=2)
        log_probs = jnp.where(repeated, -jnp.inf, log_probs)
    scores = log_probs * factor[:, None]
    lengths = jnp.broadcast_to(length.astype(jnp.int32)[:, None], scores.shape)
    new = Beams(tokens, lengths, scores, log_probs)
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), hypotheses, new)
    # `top_k` resolves ties in favor of the lower index, which belongs to the text that ended
    # earlier.
    best = jax.lax.top_k(both.scores, options.num_results)[1]
    return jax.tree.map(partial(_gather_beams, index=best), both)


def _gather_beams(
    leaf: jax.Array,  # [B, M, ...]
    index: jax.Array,  # i32[B, R]
) -> jax.Array:  # [B, R, ...]
    """Return leaf[b, index[b, r]] for every row b."""
    index = index.reshape(*index.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1, mode="promise_in_bounds")


def _length_divisors(penalty: Penalty | None, count: int) -> np.ndarray:  # f64[count]
    """Return the divisor for each length from 1 to `count`.

    Raise ValueError if float32 cannot represent a divisor or its inverse.
    """
    lengths = np.arange(1, count + 1, dtype=np.float64)
    if penalty is None:
        return np.ones_like(lengths)
    if isinstance(penalty, type) or not callable(penalty):
        rule = "must be a value, such as LengthPenalty(1.0)"
        raise ValueError(f"length_penalty is {penalty!r}: {rule}")
    # A custom penalty may overflow, and the check below reports this in one line.
    with np.errstate(all="ignore"):
        divisors = np.asarray(penalty(lengths), np.float64)
    if divisors.shape != (count,):
        raise ValueError(
            f"{penalty!r} returned shape {divisors.shape} for {count} lengths: must be ({count},)"
        )
    limit = float(np.finfo(np.float32).max) / 4
    wrong = ~((divisors >= 1 / limit) & (divisors <= limit))
    if wrong.any():
        i = int(np.argmax(wrong))
        rule = "must be above 0 and within float32"
        raise ValueError(f"{penalty!r} for length {i + 1} is {divisors[i]:g}: {rule}")
    return divisors
