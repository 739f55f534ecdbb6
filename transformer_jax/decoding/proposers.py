"""Proposers for speculative decoding, which guess tokens from earlier text or a smaller model.

A `Proposer` is a value from which `speculate` requests proposals, and to which it reports the
number of accepted tokens.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.decoding.arguments import Array
from transformer_jax.decoding.batch_rows import State
from transformer_jax.decoding.generation import read_prompts
from transformer_jax.decoding.logit_processors import History
from transformer_jax.decoding.samplers import Greedy, Sample, Sampler
from transformer_jax.decoding.step import Params, Step, StepLike, as_step, count_vocab
from transformer_jax.pytree import PyTree
from transformer_jax.values import short_repr, value_class

ProposerState: TypeAlias = PyTree
"""State of a proposer between turns: any pytree whose leaves have the first axis B."""


@short_repr
class Turn(NamedTuple):
    """Inputs to a proposer in one turn."""

    history: History
    """Prompt and text so far. No model has read the newest token yet."""
    active: jax.Array  # bool[B]; False means that the row has ended
    room: jax.Array  # i32[B]; number of proposals that each row can use, at most num_draft
    keys: jax.Array  # key[B]; for proposal j, fold in `history.new + j`
    num_draft: int
    sampler: Sampler
    """Sampler that draws the model's tokens."""


@short_repr
class Proposal(NamedTuple):
    """Proposed next tokens for every row."""

    tokens: jax.Array  # i32[B, num_draft]; proposals of a row end before the first -1
    logits: jax.Array | None = None  # f32[B, num_draft, V]
    """Logits of the proposal distributions. Token j was drawn from
    softmax(logits[:, j]). None means that the proposals are deterministic."""


class Proposer:
    """Base class of proposers, which are values registered with JAX as pytrees.

    Your own proposer overrides `propose`, and other methods if necessary:

        @jax.tree_util.register_static
        @dataclass(frozen=True)
        class Repeat(Proposer):
            def propose(self, proposer_state, turn):
                last = turn.history.length[:, None] - 1
                newest = jnp.take_along_axis(turn.history.tokens, last, axis=1)
                return Proposal(jnp.repeat(newest, turn.num_draft, axis=1)), proposer_state

    Array fields are traced (see `jax.tree_util.register_dataclass`), and all other fields are
    static.
    """

    def check(
        self,
        prompt: Array,  # i32[B, P]
        total: np.ndarray | None,  # i32[B]
        num_draft: int,
        vocab_size: int,
    ) -> None:
        """Raise ValueError if the proposer does not support a request.

        Args:
            prompt: i32[B, P], the token IDs of the prompts.
            total: i32[B], the number of tokens in each row, including the new tokens; None inside a
                trace.
            num_draft: the maximum number of proposals per turn.
            vocab_size: V, the vocabulary size of the model.
        """

    def start(
        self,
        prompt: jax.Array,  # i32[B, P]
        lengths: jax.Array,  # i32[B]
        chunk: int | None,
    ) -> ProposerState:
        """Return the proposer's state after the prompts.

        Args:
            prompt: i32[B, P], the token IDs of the prompts.
            lengths: i32[B], the length of each row's prompt.
            chunk: number of tokens to read at a time; None means all at once.
        """
        return ()

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Return proposals for every row, and the state to pass to `settle`.

        Args:
            proposer_state: the result of `start` or `settle`.
            turn: the inputs of this turn, such as the text so far.
        """
        raise NotImplementedError

    def settle(
        self,
        proposer_state: ProposerState,
        history: History,
        gained: jax.Array,  # i32[B]
    ) -> ProposerState:
        """Return the state after new tokens have been added to each row.

        Args:
            proposer_state: the result of `propose`.
            history: the prompt and the text, including the new tokens.
            gained: i32[B], the number of new tokens in each row, from 1 to num_draft + 1, or 0 for
                rows that had ended.
        """
        return proposer_state

    def finish(self, proposer_state: ProposerState, history: History) -> ProposerState:
        """Convert the internal state to the form that is stored in the result.

        Args:
            proposer_state: the result of the last call of `settle`, or of `start`.
            history: the prompt and the text.
        """
        return proposer_state


@value_class(static=("ngram",))
class PromptLookup(Proposer):
    """Proposer that copies the tokens after the latest earlier occurrence of the last n-gram.

    Copying can continue into the copied tokens, so that a repeated phrase continues to repeat. This
    method needs no second model and is useful if answers quote their prompts (Saxena 2023).

    Attributes:
        ngram: length of the n-gram, at least 1.

    Raises:
        ValueError: If `ngram` is not an integer of at least 1.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        check_count("ngram", self.ngram, 1)

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Return the tokens after the latest earlier occurrence, or -1 if there is none."""
        tokens, length = turn.history.tokens, turn.history.length
        rows, columns = tokens.shape
        if columns <= self.ngram:
            return Proposal(jnp.full((rows, turn.num_draft), -1, jnp.int32)), proposer_state
        ends = jnp.arange(self.ngram, columns)[None]  # one past the end of each n-gram
        # Skip the last n-gram, which is the search term itself.
        same = ends < length[:, None]
        for i in range(self.ngram):
            at = jnp.clip(length - self.ngram + i, 0)[:, None]
            same &= tokens[:, i : columns - self.ngram + i] == jnp.take_along_axis(
                tokens, at, axis=1
            )
        start = jnp.where(same, ends, 0).max(axis=1)[:, None]
        # Past the end of the text, repeat the tokens between the two occurrences.
        period = jnp.maximum(length[:, None] - start, 1)
        copied = jnp.take_along_axis(
            tokens, start + jnp.arange(turn.num_draft)[None] % period, axis=1
        )
        return Proposal(jnp.where(start > 0, copied, -1)), proposer_state


class _DraftState(NamedTuple, Generic[State]):
    """State of a draft model between turns."""

    state: State
    pending: jax.Array  # bool[B]; True means that the token before the newest is also unread


class _DraftTurn(NamedTuple, Generic[State]):
    """State of a draft model within a turn."""

    before: State
    after: State
    pending: jax.Array  # bool[B]
    tokens: jax.Array  # i32[B, num_draft + 1]; the tokens read since `before`
    valid: jax.Array  # bool[B, num_draft + 1]


@value_class(arrays=("params", "state"), static=("step", "sampler"))
class Draft(Proposer, Generic[State]):
    """Proposer that runs a smaller model with the same vocabulary and its own state.

    Attributes:
        step: the step of the smaller model, such as `make_step(model)`.
        params: the parameters of the smaller model.
        state: the state of the smaller model, with the same rows and after the same tokens as the
            state of the large model. It is not consumed, so a draft with an empty cache can serve
            many requests.
        sampler: the sampler for proposals, which must have `distribution(logits)`; None means the
            sampler of the large model.
    """

    step: StepLike[State]
    params: Params
    state: State
    sampler: Sampler | None = None

    def check(
        self, prompt: Array, total: np.ndarray | None, num_draft: int, vocab_size: int
    ) -> None:
        """Raise ValueError if the draft does not support the request, or if its vocabulary differs.

        The draft's state must support rewinding by `num_draft` tokens.
        """
        if self.sampler is not None:
            check_distribution("the draft's sampler", self.sampler)
        try:
            check_not_consumed(self.state)
            step = as_step(self.step)
            if total is not None:
                step.check(np.asarray(prompt), self.state, total)
            step.check_rewind(self.state, num_draft)
        except ValueError as error:
            raise ValueError(f"the draft's {error}") from None
        vocab = count_vocab(step, self.params, len(prompt), self.state)
        if vocab != vocab_size:
            rule = f"must be {vocab_size}, as in the model"
            raise ValueError(f"the vocabulary of the draft has size {vocab}: {rule}")

    def start(self, prompt: jax.Array, lengths: jax.Array, chunk: int | None) -> ProposerState:
        """Return the draft's state after reading the prompts."""
        step = as_step(self.step)
        _, state = read_prompts(step, self.params, prompt, lengths, self.state, chunk)
        return _DraftState(state, jnp.zeros(lengths.shape, bool))

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Read the new tokens with the draft, and draw `num_draft` proposals, one per call."""
        sampler: Any = turn.sampler if self.sampler is None else self.sampler
        history, (before, pending) = turn.history, proposer_state
        step = as_step(self.step).with_facts(part=True)

        def read(
            state: State, tokens: jax.Array, valid: jax.Array, j: jax.Array | int
        ) -> tuple[tuple[jax.Array, State], tuple[jax.Array, jax.Array, jax.Array]]:
            # The history contains -1 where there is no token, and a model must not look up -1.
            tokens = jnp.where(valid, tokens, 0)
            logits, state = step(self.params, tokens, state, valid=valid)
            logits = sampler.distribution(logits[:, -1])
            token = draw(sampler, fold_keys(turn.keys, history.new + j), logits)
            return (token, state), (tokens, valid, logits)

        def read_proposal(
            carry: tuple[jax.Array, State], j: jax.Array
        ) -> tuple[tuple[jax.Array, State], tuple[jax.Array, ...]]:
            token, state = carry
            carry, seen = read(state, token[:, None], (j < turn.room)[:, None], j)
            return carry, (*seen, token)

        # If all proposals of the previous turn were accepted, the draft has not read the last one.
        at = jnp.clip(history.length[:, None] + jnp.array([[-2, -1]]), 0)
        valid = jnp.stack([pending & turn.active, turn.active], axis=1)
        newest = jnp.take_along_axis(history.tokens, at, axis=1)
        carry, (tokens, valid, logits) = read(before, newest, valid, 0)
        # The last proposal is not read, because it may be rejected. `settle` accounts for this.
        (last, after), later = jax.lax.scan(read_proposal, carry, jnp.arange(1, turn.num_draft))
        later_tokens, later_valid, later_logits, proposed = (x.swapaxes(0, 1) for x in later)
        proposal = Proposal(jnp.concatenate([proposed, last[:, None]], axis=1))
        # A greedy draft proposes one token with certainty, so no distribution is needed.
        if not isinstance(sampler, Greedy):
            logits = jnp.concatenate([logits[:, None], later_logits], axis=1)
            proposal = proposal._replace(logits=logits)
        tokens = jnp.concatenate([tokens, later_tokens[..., 0]], axis=1)
        valid = jnp.concatenate([valid, later_valid[..., 0]], axis=1)
        return proposal, _DraftTurn(before, after, pending, tokens, valid)

    def settle(
        self, proposer_state: ProposerState, history: History, gained: jax.Array
    ) -> ProposerState:
        """Rewind the draft to the accepted tokens, as far as it has read them."""
        before, after, pending, tokens, valid = proposer_state
        target, read = gained + (pending & (gained > 0)), valid.sum(axis=1, dtype=jnp.int32)
        # The draft has not read its own last proposal, which may have been accepted.
        kept = jnp.minimum(target, read)
        step = as_step(self.step).with_facts(part=True)
        state = keep_read(step, self.params, before, after, tokens, valid, kept)
        return _DraftState(state, jnp.where(gained > 0, target > read, pending))

    def finish(self, proposer_state: ProposerState, history: History) -> ProposerState:
        """Return the draft's state after the same tokens as the state of the large model."""
        token = jnp.take_along_axis(
            history.tokens, jnp.clip(history.length[:, None] - 2, 0), axis=1
        )
        valid = proposer_state.pending[:, None]
        token = jnp.where(valid, token, 0)
        step = as_step(self.step).with_facts(part=True)
        return step(self.params, token, proposer_state.state, valid=valid)[1]


def keep_read(
    step: Step[State],
    params: Params,
    before: State,
    after: State,
    tokens: jax.Array,  # i32[B, T]; the tokens read since `before`
    valid: jax.Array,  # bool[B, T]
    count: jax.Array,  # i32[B]
) -> State:
    """Return the state after the first `count[b]` of the valid tokens."""
    if step.implements("rewind"):
        return step.rewind(after, before, count)
    # A step without `rewind` re-reads the accepted tokens, starting from the earlier state.
    kept = valid & (jnp.cumsum(valid, axis=1) <= count[:, None])
    return step(params, jnp.where(kept, tokens, 0), before, valid=kept)[1]


def fold_keys(keys: jax.Array, number: jax.Array | int) -> jax.Array:  # key[B], i32[B] or one
    """Fold a number into the key of each row, either the same number or one for each row."""
    axes = (0, None) if isinstance(number, int) else (0, 0)
    return jax.vmap(jax.random.fold_in, axes)(keys, number)


def draw(sampler: Sampler, keys: jax.Array, logits: jax.Array) -> jax.Array:  # i32[B]
    """Draw from logits [B, V] that the sampler has processed. Greedy sampling ignores the keys."""
    return jax.vmap(Greedy() if isinstance(sampler, Greedy) else Sample())(keys, logits)


def check_distribution(name: str, sampler: Sampler) -> None:
    """Raise ValueError unless the sampler is a value with a `distribution` method."""
    if isinstance(sampler, type) or not callable(getattr(sampler, "distribution", None)):
        rule = "speculate needs a value with `distribution(logits)`, such as Greedy() or Sample()"
        raise ValueError(f"{name} is {sampler!r}: {rule}")
