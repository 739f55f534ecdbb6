"""Speculative decoding, which verifies several proposed tokens in one call of the model.

A proposed token x, drawn from q, is accepted with probability min(1, p(x) / q(x)), where p is the
sampler's distribution for the model's logits. The first rejected token is replaced by a draw from
the normalized max(p - q, 0). If all proposals are accepted, one more token is drawn from p. For any
proposals, the tokens have the same distribution as with plain sampling (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023). A deterministic proposal has q(x) = 1. Greedy tokens equal those of
`generate` except for ties within rounding, because several tokens are read at once.

Rows advance by different numbers of tokens. The step's `rewind` method removes rejected tokens from
the state of a row. A step without this method, such as a recurrent one, reads the accepted tokens a
second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, has_finite_maximum
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding import proposers
from transformer_jax.decoding.arguments import (
    DecodeOptions,
    Lengths,
    PerRow,
    Prompts,
    TokenRows,
    check_arguments,
)
from transformer_jax.decoding.batch_rows import State
from transformer_jax.decoding.generation import DecodeState, start_decoding
from transformer_jax.decoding.logit_processors import History, HistoryProcessor, apply_processors
from transformer_jax.decoding.samplers import Greedy, Sampler
from transformer_jax.decoding.step import Params, Step, StepLike, count_vocab
from transformer_jax.models.ops import log_softmax
from transformer_jax.programs import program
from transformer_jax.sharding import by_compiler, split, split_rows
from transformer_jax.tracing import traced
from transformer_jax.values import value_class

# These are larger than any token number, so they derive keys that `generate` does not use.
_PROPOSE, _ACCEPT = 2**32 - 1, 2**32 - 2


@value_class(pytree=True)
class Speculation(Generic[State]):
    """Result of `speculate`.

    Attributes:
        tokens: i32[B, num_tokens], the new tokens, with -1 after the end of a row.
        lengths: i32[B], the number of new tokens, including a stop token.
        log_probs: f32[B, num_tokens], log softmax(logits)[token] in nats, before processors, with 0
            after the end of a row.
        state: the state after all tokens of each row except the last one.
        proposer_state: the proposer's state. For a `Draft`, this is the state of its model after
            the same tokens as `state`.
        proposed: i32[B], the number of tokens that were proposed and verified.
        accepted: i32[B], the number of proposed tokens in the result.
        calls: i32[], the number of model calls after the prompt.
    """

    tokens: jax.Array  # i32[B, num_tokens]
    lengths: jax.Array  # i32[B]
    log_probs: jax.Array  # f32[B, num_tokens]
    state: State
    proposer_state: proposers.ProposerState
    proposed: jax.Array  # i32[B]
    accepted: jax.Array  # i32[B]
    calls: jax.Array  # i32[]

    @property
    def acceptance(self) -> jax.Array:  # f32[B]
        """Ratio accepted / proposed of each row, or 0 if nothing was proposed."""
        return self.accepted / jnp.maximum(self.proposed, 1)

    def rows(self) -> list[np.ndarray]:
        """Return the tokens i32[lengths[b]] of each row, without the padding after the end."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length] for tokens, length in pairs]


@known_keywords
def speculate(
    step: StepLike[State],
    params: Params,
    prompt: TokenRows,  # i32[B, P], or rows of equal length
    state: State,
    *,
    proposer: proposers.Proposer,
    num_tokens: int,
    num_draft: int,
    lengths: Lengths | None = None,  # i32[B], or bool[B, P]
    sampler: Sampler | None = None,
    key: jax.Array | None = None,  # one key, or one for each row
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    limits: PerRow | None = None,  # i32[B]
    chunk: int | None = None,
) -> Speculation[State]:
    """Generate tokens as `generate` does, but with fewer model calls.

    Each turn verifies up to `num_draft` proposals per row in one call, and adds one token from the
    model itself. Greedy tokens equal those of `generate` except for ties within rounding. Sampled
    tokens have the same distribution, but are different draws (Leviathan et al. 2023, algorithm 1).

    Args:
        step: the step of the model, as in `generate`.
        params: the model's parameters, passed to the step.
        prompt: i32[B, P], token IDs, as an array or as rows of equal length.
        state: the state to continue, with B rows and as much room as for `generate`. A ring needs
            num_draft more slots than its window. The state is consumed.
        proposer: `PromptLookup()`, `Draft(...)` or your own `Proposer`. It is not consumed.
        num_tokens: the maximum number of new tokens per row, at least 1.
        num_draft: the maximum number of proposals per turn, at least 1.
        lengths: i32[B], the length of each row's prompt, or a mask, as in `generate`; None means P.
        sampler: sampler for the model's tokens. A custom sampler must have `distribution(logits)`.
            None means `Greedy()`.
        key: a single key, or one key for each row, [B]. The tokens of a row depend only on its own
            key. The key is optional only for `Greedy`.
        processors: functions that change the logits of the model, but not those of a draft, based
            on the text.
        stop: one or more token IDs that end a row.
        limits: i32[B], the maximum number of new tokens for each row; None means num_tokens.
        chunk: number of prompt tokens to read at a time; None means all at once.

    Returns:
        `Speculation`, which contains the tokens, and the numbers of proposed tokens, accepted
        tokens and model calls.

    Raises:
        ValueError: If an argument is invalid. The error is raised before anything is compiled or
            consumed.
    """
    check_count("num_draft", num_draft, 1)
    if isinstance(proposer, type) or not isinstance(proposer, proposers.Proposer):
        rule = "must be a value, such as PromptLookup(3) or Draft(step, params, state)"
        raise ValueError(f"proposer is {proposer!r}: {rule}")
    if any(leaf is proposer for leaf in jax.tree.leaves(proposer)):
        name = type(proposer).__name__
        rule = "register it with jax.tree_util.register_static or register_dataclass"
        raise ValueError(f"proposer is of type {name}, which is not a pytree: {rule}")
    if sampler is not None:
        proposers.check_distribution("sampler", sampler)
    step, options, prompts, state = check_arguments(
        step, params, prompt, state, num_tokens=num_tokens, lengths=lengths,
        sampler=sampler, key=key, processors=processors, stop=stop, limits=limits, chunk=chunk,
    )  # fmt: skip
    step.check_rewind(state, num_draft)
    vocab = count_vocab(step, params, len(prompts.tokens), state)
    rows, counts, most = prompts.tokens, prompts.lengths, prompts.limits
    total = None
    if not traced(rows, counts, most):
        rows, counts, most = jax.device_get((rows, counts, most))
        total = np.asarray(counts) + np.maximum(most, 1) - 1
    proposer.check(rows, total, num_draft, vocab)
    # A draft may use the same model, but the state is donated and must not be shared.
    draft_leaves = {id(leaf) for leaf in jax.tree.leaves(proposer)}
    if any(id(leaf) in draft_leaves for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "state is shared with the proposer, but it is consumed: pass fork(state, 1)"
        )
    # Rows end in different turns, even without a stop token.
    options, sizes = options._replace(ends=True), _Sizes(num_tokens, num_draft, vocab)
    return _speculate(options, step, params, proposer, prompts, state, sizes)


class _Sizes(NamedTuple):
    num_tokens: int
    num_draft: int
    vocab: int


class _Output(NamedTuple):
    """Result so far."""

    tokens: jax.Array  # i32[B, num_tokens]
    log_probs: jax.Array  # f32[B, num_tokens]
    proposed: jax.Array  # i32[B]
    accepted: jax.Array  # i32[B]
    turns: jax.Array  # i32[]


_Carry: TypeAlias = tuple[DecodeState[State], proposers.ProposerState, _Output]


@program(static=("options", "step", "sizes"), donate=("state",))
def _speculate(
    options: DecodeOptions,
    step: Step[State],
    params: Params,
    proposer: proposers.Proposer,
    prompts: Prompts,
    state: State,
    sizes: _Sizes,
) -> Speculation[State]:
    """Read the prompts, then take turns until every row has ended."""
    num_tokens, num_draft, vocab = sizes
    later = step.with_facts(part=True)

    def run(
        params: Params, proposer: proposers.Proposer, prompts: Prompts, state: State
    ) -> Speculation[State]:
        def take_turn(carry: _Carry[State]) -> _Carry[State]:
            """Propose tokens, verify them in one call, keep the accepted ones, and add one more."""
            decode_state, proposer_state, written = carry
            active, count, history = decode_state.active, decode_state.count, decode_state.history
            assert history is not None
            # Minus one, because each turn also adds a token from the model itself.
            room = jnp.where(active, jnp.minimum(num_draft, decode_state.limits - count - 1), 0)
            # Use separate keys, because the proof requires that proposals are independent of the
            # model's draws.
            keys = proposers.fold_keys(decode_state.keys, _PROPOSE)
            turn = proposers.Turn(history, active, room, keys, num_draft, options.sampler)
            proposal, proposer_state = proposer.propose(proposer_state, turn)

            usable = _usable(proposal, room, vocab)
            valid = jnp.concatenate([active[:, None], usable], axis=1)
            # The newest token comes first, because the model chose it but has not read it.
            tokens = jnp.concatenate([decode_state.token[:, None], proposal.tokens], axis=1)
            tokens = jnp.where(valid, tokens, 0)
            logits, after = later(params, tokens, decode_state.state, valid=valid)

            proposal = proposal._replace(tokens=tokens[:, 1:])
            logits = processed = logits.astype(jnp.float32)
            if options.processors:  # the history for each position ends there
                seen, positions = history, []
                for j in range(tokens.shape[1]):
                    if j:
                        seen = seen.append(tokens[:, j], jnp.ones(len(tokens), bool))
                    positions.append(apply_processors(options.processors, seen, logits[:, j]))
                processed = jnp.stack(positions, axis=1)
            accepted, token = _verify(options, decode_state, processed, proposal, usable)

            # Keep the accepted tokens and the token after them, up to the first stop token.
            index = jnp.arange(tokens.shape[1])[None]
            new = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
            new = jnp.where(index < accepted[:, None], new, token[:, None])
            stops = jnp.isin(new, jnp.asarray(options.stop, jnp.int32))
            stops &= index <= accepted[:, None]
            stopped = stops.any(axis=1)
            gained = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32), accepted) + 1
            gained = jnp.where(active, gained, 0)

            state = proposers.keep_read(
                later, params, decode_state.state, after, tokens, valid, gained
            )
            kept = _write_tokens(history.tokens, history.length, new, gained)
            history = History(kept, history.prompt, history.length + gained)
            proposer_state = proposer.settle(proposer_state, history, gained)
            log_probs = log_softmax(logits, invariant=options.invariant)
            log_probs = _gather_vocab(log_probs, jnp.clip(new, 0))
            log_probs = jnp.where(new < 0, jnp.nan, log_probs)  # as in `generate`
            written = _Output(
                _write_tokens(written.tokens, count, new, gained),
                _write_tokens(written.log_probs, count, log_probs, gained),
                written.proposed + usable.sum(axis=1, dtype=jnp.int32),
                written.accepted + jnp.minimum(accepted, gained),
                written.turns + 1,
            )
            count = count + gained
            newest = jnp.take_along_axis(new, jnp.clip(gained - 1, 0)[:, None], axis=1)[:, 0]
            decode_state = replace(
                decode_state, token=jnp.where(active, newest, decode_state.token),
                active=active & (count < decode_state.limits) & ~stopped, count=count, state=state,
                history=history,
            )  # fmt: skip
            return decode_state, proposer_state, written

        tokens, lengths, limits = prompts.tokens, prompts.lengths, prompts.limits
        decode_state, first = start_decoding(options, step, params, prompts, state, num_tokens)
        # Proposers need the history even without processors.
        if decode_state.history is None:
            history = History.of(tokens, lengths, num_tokens).append(first.token, limits > 0)
            decode_state = replace(decode_state, history=history)
        rows = len(tokens)
        zeros = jnp.zeros((rows,), jnp.int32)
        written = _Output(
            jnp.full((rows, num_tokens), -1, jnp.int32).at[:, 0].set(first.token),
            jnp.zeros((rows, num_tokens), jnp.float32).at[:, 0].set(first.log_prob), zeros, zeros,
            jnp.int32(0),
        )  # fmt: skip
        # The first token of each row comes from the model, before any proposals.
        carry = decode_state, proposer.start(tokens, lengths, options.chunk), written
        if num_tokens > 1:
            carry = jax.lax.while_loop(lambda carry: carry[0].active.any(), take_turn, carry)
        decode_state, proposer_state, written = carry
        assert decode_state.history is not None
        return Speculation(
            tokens=written.tokens,
            lengths=decode_state.count,
            log_probs=written.log_probs,
            state=decode_state.state,
            proposer_state=proposer.finish(proposer_state, decode_state.history),
            proposed=written.proposed,
            accepted=written.accepted,
            # Without `rewind`, the accepted tokens are read a second time.
            calls=written.turns if step.implements("rewind") else 2 * written.turns,
        )

    rows: Any = split_rows(state)  # in place of arrays
    state_specs: Any = jax.tree.map(split, state)
    calls: Any = split(0)
    results = Speculation(rows, rows, rows, state_specs, rows, rows, rows, calls)
    return by_compiler(run, [params, proposer, prompts, state], results)


def _verify(
    options: DecodeOptions,
    decode_state: DecodeState[State],
    logits: jax.Array,  # f32[B, num_draft + 1, V]; processed logits of the model
    proposal: proposers.Proposal,
    usable: jax.Array,  # bool[B, num_draft]
) -> tuple[jax.Array, jax.Array]:  # i32[B], i32[B]
    """Return the number of accepted proposals in each row, and the token drawn after them.

    Leviathan et al. 2023, algorithm 1, with separate keys for each row.
    """
    sampler: Any = options.sampler
    num_draft = usable.shape[1]
    keys, count = decode_state.keys, decode_state.count
    # p is the sampler's distribution, after temperature and truncation.
    target = sampler.distribution(logits)
    p = jax.nn.softmax(target, axis=-1)
    if proposal.logits is None:
        q = jax.nn.one_hot(proposal.tokens, logits.shape[-1])
    else:
        q = jax.nn.softmax(proposal.logits.astype(jnp.float32), axis=-1)
    uniform = jnp.zeros(usable.shape)  # greedy proposals are accepted with probability 0 or 1
    if not isinstance(sampler, Greedy):
        numbers = count[:, None] + jnp.arange(num_draft)[None]
        uniform = jax.vmap(jax.vmap(_draw_uniform, (None, 0)))(
            proposers.fold_keys(keys, _ACCEPT), numbers
        )
    chance = acceptance(
        _gather_vocab(p[:, :-1], proposal.tokens), _gather_vocab(q, proposal.tokens)
    )
    stays = usable & (uniform < chance)
    # Only the proposals before the first rejection count.
    accepted = jnp.cumprod(stays, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

    # If all proposals were accepted, there is no q to subtract, and `rest` is not used.
    last = jnp.minimum(accepted, num_draft - 1)
    rest = residual(_gather_position(p, accepted), _gather_position(q, last))
    rejected = accepted < usable.sum(axis=1, dtype=jnp.int32)
    final = jnp.where(rejected[:, None], jnp.log(rest), _gather_position(target, accepted))
    return accepted, proposers.draw(sampler, proposers.fold_keys(keys, count + accepted), final)


def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return min(1, p / q), the probability of accepting a token that was drawn from q.

    Args:
        p: f32[...], the model's probability of the token.
        q: f32[...], the proposer's probability of the token.
    """
    return jnp.where(p >= q, 1, p / jnp.where(q == 0, 1, q))  # NaN is never accepted


def residual(p: jax.Array, q: jax.Array) -> jax.Array:  # [..., V] -> [..., V]
    """Return the normalized max(p - q, 0), from which the replacement of a rejected token is drawn.

    If nothing is left, which happens only if p and q differ by rounding, return p.
    """
    rest = jnp.maximum(p - q, 0)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)


def _usable(
    proposal: proposers.Proposal, room: jax.Array, vocab: int
) -> jax.Array:  # bool[B, num_draft]
    """Return a mask of the proposals before the first invalid, nonfinite or surplus proposal."""
    usable = (proposal.tokens >= 0) & (proposal.tokens < vocab)
    usable &= jnp.arange(usable.shape[1])[None] < room[:, None]
    if proposal.logits is not None:
        usable &= has_finite_maximum(proposal.logits)
    return jnp.cumprod(usable, axis=1).astype(bool)


def _gather_vocab(x: jax.Array, ids: jax.Array) -> jax.Array:  # [B, J, V], i32[B, J] -> [B, J]
    return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]


def _gather_position(x: jax.Array, index: jax.Array) -> jax.Array:  # [B, T, V], i32[B] -> [B, V]
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _write_tokens(
    out: jax.Array,  # [B, C]
    start: jax.Array,  # i32[B]
    values: jax.Array,  # [B, T]
    count: jax.Array,  # i32[B]
) -> jax.Array:  # [B, C]
    """Write the first `count[b]` values of row b to the columns from `start[b]` on."""
    index = jnp.arange(values.shape[1])[None]
    # Indices past the end are dropped, so different numbers of tokens can be written in each row.
    at = jnp.where(index < count[:, None], start[:, None] + index, out.shape[1])
    return out.at[jnp.arange(len(out))[:, None], at].set(values, mode="drop")


def _draw_uniform(key: jax.Array, number: jax.Array) -> jax.Array:  # f32[], from 0 to below 1
    """Draw a uniform number in steps of 2^-46, so that rare acceptances remain possible."""
    high, low = jax.random.uniform(jax.random.fold_in(key, number), (2,))
    return jnp.minimum(high + 2.0**-23 * low, 1 - 2.0**-24)
