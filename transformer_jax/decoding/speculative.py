"""Speculative decoding: guess several tokens, verify them in one call, keep what the model agrees
with (Leviathan et al. 2023; Chen et al. 2023).

A proposed token x, drawn from q, stays with probability min(1, p(x) / q(x)), where p is what the
sampler makes of the model's logits; behind the first that does not, one token is drawn from
max(p - q, 0), normalised, and behind a run that stays whole one from p. So the tokens are
distributed as plain sampling's, and greedy ones are the same (up to ties within rounding: several
tokens are read at once), whatever is proposed. A proposal that is not drawn has q(x) = 1.

Rows advance by different amounts. What a row had read of rejected tokens is taken back by the
step's `rewind`; a step without it, such as a recurrent one, reads the tokens that stay once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.arguments import check_count, traced
from transformer_jax.decode import (
    Plan,
    Running,
    Step,
    begin,
    check_alive,
    prefill,
    prepare,
)
from transformer_jax.meshes import by_compiler, split, split_rows
from transformer_jax.processors import (
    History,
    HistoryProcessor,
    apply_all,
)
from transformer_jax.sampling import Greedy, Sample, Sampler

# Numbers no token has: a row's key folded with them gives keys that `generate` does not use.
_PROPOSE, _ACCEPT = 2**32 - 1, 2**32 - 2


class Turn(NamedTuple):
    """What a proposer may know."""

    history: History
    """Prompt and text so far; the newest token is the one no model has read yet."""
    active: jax.Array  # bool[B]; False: the row has ended
    room: jax.Array  # i32[B]; how many proposals can be of use, at most num_draft
    keys: jax.Array  # key[B]; fold in `history.new + j` for proposal j
    num_draft: int
    sampler: Sampler
    """With which the model's tokens are drawn."""


class Proposal(NamedTuple):
    """Guesses at the next tokens of every row."""

    tokens: jax.Array  # i32[B, num_draft]; a row's proposals end before the first -1
    logits: jax.Array | None = None  # f32[B, num_draft, V]
    """Token j was drawn from softmax(logits[:, j]); None: it was not drawn, but determined."""


class Proposer:
    """Guesses what a model says next; a value that JAX knows as a pytree.

    One of your own overrides `propose`, and what else it needs:

        @jax.tree_util.register_static
        @dataclass(frozen=True)
        class Repeat(Proposer):
            def propose(self, memory, turn):
                last = turn.history.length[:, None] - 1
                newest = jnp.take_along_axis(turn.history.tokens, last, axis=1)
                return Proposal(jnp.repeat(newest, turn.num_draft, axis=1)), memory

    Arrays it carries are traced (`jax.tree_util.register_dataclass`), the rest is static. What it
    remembers from round to round is its memory, any pytree whose leaves lead with B.
    """

    def check(
        self,
        prompt: Any,  # i32[B, P]
        total: np.ndarray | None,  # i32[B]; tokens of prompt and text; None under a trace
        num_draft: int,
        vocab_size: int,
    ) -> None:
        """ValueError where a request cannot be served."""

    def start(self, prompt: jax.Array, lengths: jax.Array, chunk: int | None) -> Any:
        """The memory behind the prompts: i32[B, P], of which lengths[b] tokens count."""
        return ()

    def propose(self, memory: Any, turn: Turn) -> tuple[Proposal, Any]:
        raise NotImplementedError

    def settle(self, memory: Any, history: History, gained: jax.Array) -> Any:
        """The memory when row b has gained `gained[b]` tokens, 0 in one that had ended."""
        return memory

    def finish(self, memory: Any, history: History) -> Any:
        """The memory as the result returns it."""
        return memory


@jax.tree_util.register_static
@dataclass(frozen=True)
class PromptLookup(Proposer):
    """What followed the last n-gram when it last occurred in prompt or text (Saxena 2023).

    Copying goes on into what it has just copied, so a loop is continued as a loop. Costs no model;
    pays where answers quote their prompts.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        check_count("ngram", self.ngram, 1)

    def propose(self, memory: Any, turn: Turn) -> tuple[Proposal, Any]:
        tokens, length = turn.history.tokens, turn.history.length
        rows, columns = tokens.shape
        if columns <= self.ngram:
            return Proposal(jnp.full((rows, turn.num_draft), -1, jnp.int32)), memory
        ends = jnp.arange(self.ngram, columns)[None]  # one past an n-gram
        same = ends < length[:, None]
        for i in range(self.ngram):
            at = jnp.clip(length - self.ngram + i, 0)[:, None]
            same &= tokens[:, i : columns - self.ngram + i] == _at(tokens, at)
        start = jnp.where(same, ends, 0).max(axis=1)[:, None]
        period = jnp.maximum(length[:, None] - start, 1)
        copied = _at(tokens, start + jnp.arange(turn.num_draft)[None] % period)
        return Proposal(jnp.where(start > 0, copied, -1)), memory


class _Behind(NamedTuple):
    """A draft model's state between rounds."""

    state: Any
    pending: jax.Array  # bool[B]; True: the token before the newest was not read either


class _Drafted(NamedTuple):
    """A draft model's state within a turn."""

    before: Any
    after: Any
    pending: jax.Array  # bool[B]
    tokens: jax.Array  # i32[B, num_draft + 1]; what it has read since `before`
    valid: jax.Array  # bool[B, num_draft + 1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "state"),
    meta_fields=("step", "sampler"),
)
@dataclass(frozen=True)
class Draft(Proposer):
    """A smaller model of the same vocabulary, with a state of its own for the same rows.

    The state has read what the model's has; it is not consumed, so one draft with an empty cache
    serves every request. Without `sampler` it draws as the model does.
    """

    step: Step
    params: Any
    state: Any
    sampler: Sampler | None = None

    def check(self, prompt: Any, total: np.ndarray | None, num_draft: int, vocab_size: int) -> None:
        if self.sampler is not None:
            _check_distribution("the draft's sampler", self.sampler)
        try:
            check_alive(self.state)
            if total is not None and hasattr(self.step, "check"):
                self.step.check(prompt, self.state, total)
            _check_rewind(self.step, self.state, num_draft)
        except ValueError as error:
            raise ValueError(f"the draft's {error}") from None
        vocab = _vocab_size(self.step, self.params, len(prompt), self.state)
        if vocab != vocab_size:
            raise ValueError(f"the draft has {vocab} tokens, the model {vocab_size}: must be equal")

    def start(self, prompt: jax.Array, lengths: jax.Array, chunk: int | None) -> Any:
        _, state = prefill(self.step, self.params, prompt, self.state, lengths, chunk)
        return _Behind(state, jnp.zeros(lengths.shape, bool))

    def propose(self, memory: Any, turn: Turn) -> tuple[Proposal, Any]:
        sampler: Any = turn.sampler if self.sampler is None else self.sampler
        history, (before, pending) = turn.history, memory

        def read(state, tokens, valid, j):
            tokens = jnp.where(valid, tokens, 0)
            logits, state = self.step(self.params, tokens, state, valid=valid)
            logits = sampler.distribution(logits[:, -1])
            token = _draw(sampler, _fold(turn.keys, history.new + j), logits)
            return (token, state), (tokens, valid, logits)

        def again(carry, j):
            token, state = carry
            carry, seen = read(state, token[:, None], (j < turn.room)[:, None], j)
            return carry, (*seen, token)

        at = jnp.clip(history.length[:, None] + jnp.array([[-2, -1]]), 0)
        valid = jnp.stack([pending & turn.active, turn.active], axis=1)
        carry, (tokens, valid, logits) = read(before, _at(history.tokens, at), valid, 0)
        (last, after), more = jax.lax.scan(again, carry, jnp.arange(1, turn.num_draft))
        later_tokens, later_valid, later_logits, proposed = (x.swapaxes(0, 1) for x in more)
        proposal = Proposal(jnp.concatenate([proposed, last[:, None]], axis=1))
        if not isinstance(sampler, Greedy):
            logits = jnp.concatenate([logits[:, None], later_logits], axis=1)
            proposal = proposal._replace(logits=logits)
        tokens = jnp.concatenate([tokens, later_tokens[..., 0]], axis=1)
        valid = jnp.concatenate([valid, later_valid[..., 0]], axis=1)
        return proposal, _Drafted(before, after, pending, tokens, valid)

    def settle(self, memory: Any, history: History, gained: jax.Array) -> Any:
        before, after, pending, tokens, valid = memory
        wanted, read = gained + (pending & (gained > 0)), valid.sum(axis=1, dtype=jnp.int32)
        kept = jnp.minimum(wanted, read)
        state = _take_back(self.step, self.params, before, after, tokens, valid, kept)
        return _Behind(state, jnp.where(gained > 0, wanted > read, pending))

    def finish(self, memory: Any, history: History) -> Any:
        token = _at(history.tokens, jnp.clip(history.length[:, None] - 2, 0))
        valid = memory.pending[:, None]
        token = jnp.where(valid, token, 0)
        return self.step(self.params, token, memory.state, valid=valid)[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation:
    """What `speculate` returns; behind a row's end tokens are -1 and log-probabilities 0."""

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]; new tokens of a row, a stop token included
    log_probs: jax.Array  # f32[B, num_tokens]; log softmax(logits)[token], before processors
    state: Any
    """Has read all but each row's last token."""
    memory: Any
    """The proposer's; of a `Draft` its state, which has read as much as `state`."""
    proposed: jax.Array  # i32[B]; tokens that were proposed and verified
    accepted: jax.Array  # i32[B]; of these, how many stand in the result
    calls: jax.Array  # i32[]; of the model, behind the prompt

    @property
    def acceptance(self) -> jax.Array:  # f32[B]
        """accepted / proposed; 0 where nothing was proposed."""
        return self.accepted / jnp.maximum(self.proposed, 1)

    def rows(self) -> list[np.ndarray]:
        """Each row's tokens, without what stands behind its end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


def speculate(
    step: Step,
    params: Any,
    prompt: jax.Array,  # i32[B, P], or rows of one length
    state: Any,
    *,
    proposer: Proposer,
    num_tokens: int,
    num_draft: int,
    lengths: jax.Array | None = None,  # i32[B]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: jax.Array | None = None,  # i32[B]
    chunk: int | None = None,
) -> Speculation:
    """`generate` with the same arguments, in fewer calls of the model.

    Each round verifies up to `num_draft` proposals a row in one call, and adds one token of the
    model's own. Greedy tokens are those of `generate`; sampled ones are distributed as its are, by
    other draws, of which row b's depend on its own key alone. A `sampler` of your own needs
    `distribution(logits)`. The processors are applied to the model, not to a draft.

    The state needs as much room as for `generate`; a ring must have num_draft slots more than its
    window. It is consumed, the proposer is not.
    """
    check_count("num_draft", num_draft, 1)
    _check_proposer(proposer)
    if sampler is not None:
        _check_distribution("sampler", sampler)
    given = prepare(
        step, params, prompt, state, num_tokens, lengths, sampler, key, processors, stop, limits,
        chunk, False,
    )  # fmt: skip
    _check_rewind(step, state, num_draft)
    prompt, lengths, _, limits, _ = given.arrays
    total = None
    if not traced(prompt, lengths, limits):
        known = jax.device_get((prompt, lengths, limits))
        total = known[1] + np.maximum(known[2], 1) - 1
        prompt = known[0]
    vocab = _vocab_size(step, params, len(prompt), state)
    proposer.check(prompt, total, num_draft, vocab)
    theirs = {id(leaf) for leaf in jax.tree.leaves(proposer)}
    if any(id(leaf) in theirs for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "state is also the proposer's: it is consumed, so give it a fork(state, 1)"
        )
    plan = given.plan._replace(ends=True)
    return _speculate(
        plan, step, params, proposer, *given.arrays, num_tokens, num_draft, vocab, chunk
    )


class _Out(NamedTuple):
    """What is written as the rounds go by."""

    tokens: jax.Array  # i32[B, num_tokens]
    log_probs: jax.Array  # f32[B, num_tokens]
    proposed: jax.Array  # i32[B]
    accepted: jax.Array  # i32[B]
    rounds: jax.Array  # i32[]


@partial(
    jax.jit,
    static_argnames=("plan", "step", "num_tokens", "num_draft", "vocab", "chunk"),
    donate_argnames="state",
)
def _speculate(
    plan, step, params, proposer, prompt, lengths, keys, limits, state, num_tokens, num_draft,
    vocab, chunk,
):  # fmt: skip
    rounds = partial(_rounds, plan, step, num_tokens, num_draft, vocab, chunk)
    arrays = [params, proposer, prompt, lengths, keys, limits, state]
    rows, held, calls = split_rows(state), jax.tree.map(split, state), split(0)
    results = Speculation(rows, rows, rows, held, rows, rows, rows, calls)
    return by_compiler(rounds, arrays, results)


def _rounds(
    plan, step, num_tokens, num_draft, vocab, chunk, params, proposer, prompt, lengths, keys,
    limits, state,
):  # fmt: skip
    running, chosen = begin(
        plan, step, params, prompt, lengths, state, keys, limits, num_tokens, chunk
    )
    if running.history is None:
        history = History.of(prompt, lengths, num_tokens)
        running = replace(running, history=history.append(chosen.token, limits > 0))
    rows = len(prompt)
    nothing = jnp.zeros((rows,), jnp.int32)
    out = _Out(
        jnp.full((rows, num_tokens), -1, jnp.int32).at[:, 0].set(chosen.token),
        jnp.zeros((rows, num_tokens), jnp.float32).at[:, 0].set(chosen.log_prob),
        nothing,
        nothing,
        jnp.int32(0),
    )

    def more(carry):
        return carry[0].active.any()

    def advance(carry):
        return _round(plan, step, params, proposer, num_draft, vocab, *carry)

    carry = running, proposer.start(prompt, lengths, chunk), out
    running, memory, out = jax.lax.while_loop(more, advance, carry)
    memory = proposer.finish(memory, running.history)
    calls = out.rounds if hasattr(step, "rewind") else 2 * out.rounds
    return Speculation(
        out.tokens, running.count, out.log_probs, running.state, memory, out.proposed,
        out.accepted, calls,
    )  # fmt: skip


def _round(
    plan: Plan,
    step: Step,
    params: Any,
    proposer: Proposer,
    num_draft: int,
    vocab: int,
    running: Running,
    memory: Any,
    out: _Out,
) -> tuple[Running, Any, _Out]:
    """Propose, verify in one call, keep each row's own prefix and add one token."""
    history, active, count = running.history, running.active, running.count
    assert history is not None
    sampler: Any = plan.sampler
    room = jnp.where(active, jnp.minimum(num_draft, running.limits - count - 1), 0)
    keys = _fold(running.keys, _PROPOSE)
    turn = Turn(history, active, room, keys, num_draft, plan.sampler)
    proposal, memory = proposer.propose(memory, turn)

    usable = _usable(proposal, room, vocab)
    valid = jnp.concatenate([active[:, None], usable], axis=1)
    tokens = jnp.concatenate([running.token[:, None], proposal.tokens], axis=1)
    tokens = jnp.where(valid, tokens, 0)
    logits, after = step(params, tokens, running.state, valid=valid)  # [B, num_draft + 1, V]
    wanted = sampler.distribution(_processed(plan, history, tokens, logits))

    p = jax.nn.softmax(wanted, axis=-1)
    q = jax.nn.one_hot(tokens[:, 1:], vocab)
    if proposal.logits is not None:
        q = jax.nn.softmax(proposal.logits.astype(jnp.float32), axis=-1)
    dice = jnp.zeros(usable.shape)  # a greedy token is certain or impossible
    if not isinstance(sampler, Greedy):
        numbers = count[:, None] + jnp.arange(num_draft)[None]
        dice = jax.vmap(jax.vmap(_uniform, (None, 0)))(_fold(running.keys, _ACCEPT), numbers)
    stays = usable & (dice < acceptance(_at(p[:, :-1], tokens[:, 1:]), _at(q, tokens[:, 1:])))
    run = jnp.cumprod(stays, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)  # [B]

    rest = residual(_of(p, run), _of(q, jnp.minimum(run, num_draft - 1)))
    rejected = run < usable.sum(axis=1, dtype=jnp.int32)
    own = jnp.where(rejected[:, None], jnp.log(rest), _of(wanted, run))
    own = _draw(sampler, _fold(running.keys, count + run), own)

    index = jnp.arange(num_draft + 1)[None]
    said = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    said = jnp.where(index < run[:, None], said, own[:, None])
    stops = jnp.isin(said, jnp.asarray(plan.stop, jnp.int32)) & (index <= run[:, None])
    gained = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1).astype(jnp.int32), run) + 1
    gained = jnp.where(active, gained, 0)
    log_probs = _at(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), jnp.clip(said, 0))
    log_probs = jnp.where(said < 0, jnp.nan, log_probs)

    length = history.length
    history = History(_write(history.tokens, length, said, gained), history.prompt, length + gained)
    state = _take_back(step, params, running.state, after, tokens, valid, gained)
    memory = proposer.settle(memory, history, gained)
    newest = _at(said, jnp.clip(gained - 1, 0)[:, None])[:, 0]
    out = _Out(
        _write(out.tokens, count, said, gained),
        _write(out.log_probs, count, log_probs, gained),
        out.proposed + usable.sum(axis=1, dtype=jnp.int32),
        out.accepted + jnp.minimum(run, gained),
        out.rounds + 1,
    )
    count = count + gained
    running = replace(
        running,
        token=jnp.where(active, newest, running.token),
        active=active & (count < running.limits) & ~stops.any(axis=1),
        count=count,
        state=state,
        history=history,
    )
    return running, memory, out


def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p / q): the chance that a token proposed with probability q stays."""
    return jnp.where(p >= q, 1, p / jnp.where(q == 0, 1, q))  # of NaN: NaN, which nothing is below


def residual(p: jax.Array, q: jax.Array) -> jax.Array:  # [..., V] -> [..., V]
    """max(p - q, 0), normalised: what is drawn from when a token does not stay.

    p itself where nothing is left, which is where p and q differ by their rounding alone.
    """
    rest = jnp.maximum(p - q, 0)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)


def _usable(proposal: Proposal, room: jax.Array, vocab: int) -> jax.Array:  # bool[B, num_draft]
    """The proposals up to the first that is no token, has no distribution, or has no room."""
    tokens = proposal.tokens
    usable = (tokens >= 0) & (tokens < vocab)
    usable &= jnp.arange(tokens.shape[1])[None] < room[:, None]
    if proposal.logits is not None:
        usable &= jnp.isfinite(proposal.logits.max(axis=-1))
    return jnp.cumprod(usable, axis=1).astype(bool)


def _processed(plan: Plan, history: History, tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Each position's logits [B, T, V] as the processors make them behind the tokens before it."""
    logits = logits.astype(jnp.float32)
    if not plan.processors:
        return logits
    out = []
    for j in range(tokens.shape[1]):
        if j:
            history = history.append(tokens[:, j], jnp.ones(tokens.shape[:1], bool))
        out.append(apply_all(plan.processors, history, logits[:, j]))
    return jnp.stack(out, axis=1)


def _take_back(
    step: Step,
    params: Any,
    before: Any,
    after: Any,
    tokens: jax.Array,  # i32[B, T]; what was read in between
    valid: jax.Array,  # bool[B, T]
    count: jax.Array,  # i32[B]
) -> Any:
    """The state behind the first `count[b]` of the valid tokens."""
    if hasattr(step, "rewind"):
        return step.rewind(after, before, count)
    kept = valid & (jnp.cumsum(valid, axis=1) <= count[:, None])
    return step(params, jnp.where(kept, tokens, 0), before, valid=kept)[1]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b, j]] of [B, C]; x[b, j, index[b, j]] of [B, J, V]."""
    if x.ndim == 3:
        return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    return jnp.take_along_axis(x, index, axis=1)


def _of(x: jax.Array, index: jax.Array) -> jax.Array:  # [B, T, V], i32[B] -> [B, V]
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _write(out: jax.Array, start: jax.Array, values: jax.Array, count: jax.Array) -> jax.Array:
    """`out` [B, C] with the first `count[b]` values of row b from column `start[b]` on."""
    index = jnp.arange(values.shape[1])[None]
    at = jnp.where(index < count[:, None], start[:, None] + index, out.shape[1])
    return out.at[jnp.arange(len(out))[:, None], at].set(values, mode="drop")


def _fold(keys: jax.Array, number: Any) -> jax.Array:  # key[B], i32[B] or a number
    axes = (0, None) if isinstance(number, int) else (0, 0)
    return jax.vmap(jax.random.fold_in, axes)(keys, number)


def _draw(sampler: Sampler, keys: jax.Array, logits: jax.Array) -> jax.Array:  # i32[B]
    """From logits [B, V] that the sampler has processed; greedy ones need no random numbers."""
    return jax.vmap(Greedy() if isinstance(sampler, Greedy) else Sample())(keys, logits)


def _uniform(key: jax.Array, number: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, number))


def _vocab_size(step: Step, params: Any, rows: int, state: Any) -> int:
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    return jax.eval_shape(step, params, tokens, state)[0].shape[-1]


def _check_proposer(proposer: Any) -> None:
    if isinstance(proposer, type) or not isinstance(proposer, Proposer):
        rule = "must be a value, such as PromptLookup(3) or Draft(step, params, state)"
        raise ValueError(f"proposer is {proposer!r}: {rule}")
    if any(leaf is proposer for leaf in jax.tree.leaves(proposer)):
        name = type(proposer).__name__
        rule = "register it with jax.tree_util.register_static or register_dataclass"
        raise ValueError(f"proposer is of {name}, which JAX does not know as a pytree: {rule}")


def _check_distribution(name: str, sampler: Any) -> None:
    if isinstance(sampler, type) or not callable(getattr(sampler, "distribution", None)):
        rule = "speculate needs a value with `distribution(logits)`, as Greedy and Sample have"
        raise ValueError(f"{name} is {sampler!r}: {rule}")


def _check_rewind(step: Any, state: Any, num_draft: int) -> None:
    if hasattr(step, "rewind") and hasattr(step, "check_rewind"):
        step.check_rewind(state, num_draft)
