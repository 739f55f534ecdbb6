"""Propose tokens for a model to verify: those of the text before, or of a smaller model.

A `Proposer` is a value; `speculative` asks it for guesses and tells it which of them were right.
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
"""A proposer's memory from turn to turn: any pytree whose leaves have B as their first axis."""


@short_repr
class Turn(NamedTuple):
    """Values that a proposer may use in one turn."""

    history: History
    """Prompt and text so far; the newest token is the one no model has read yet."""
    active: jax.Array  # bool[B]; False: the row has ended
    room: jax.Array  # i32[B]; how many proposals can be of use, at most num_draft
    keys: jax.Array  # key[B]; fold in `history.new + j` for proposal j
    num_draft: int
    sampler: Sampler
    """Draws the model's tokens."""


@short_repr
class Proposal(NamedTuple):
    """Guesses at the next tokens of every row."""

    tokens: jax.Array  # i32[B, num_draft]; a row's proposals end before the first -1
    logits: jax.Array | None = None  # f32[B, num_draft, V]
    """Token j was drawn from softmax(logits[:, j]); None: it was not drawn, but determined."""


class Proposer:
    """Guess what a model says next; a value that JAX knows as a pytree.

    One of your own overrides `propose`, and what else it needs:

        @jax.tree_util.register_static
        @dataclass(frozen=True)
        class Repeat(Proposer):
            def propose(self, proposer_state, turn):
                last = turn.history.length[:, None] - 1
                newest = jnp.take_along_axis(turn.history.tokens, last, axis=1)
                return Proposal(jnp.repeat(newest, turn.num_draft, axis=1)), proposer_state

    Arrays it carries are traced (`jax.tree_util.register_dataclass`), the rest is static. What it
    remembers from turn to turn is its state, any pytree whose leaves lead with B.
    """

    def check(
        self,
        prompt: Array,  # i32[B, P]
        total: np.ndarray | None,  # i32[B]
        num_draft: int,
        vocab_size: int,
    ) -> None:
        """Raise ValueError if a request cannot be served.

        Args:
            prompt: i32[B, P].
            total: i32[B], tokens of prompt and text; None under a trace.
            num_draft: the most proposals in a turn.
            vocab_size: V of the model.
        """

    def start(
        self,
        prompt: jax.Array,  # i32[B, P]
        lengths: jax.Array,  # i32[B]
        chunk: int | None,
    ) -> ProposerState:
        """Return the proposer's state after the prompts.

        Args:
            prompt: i32[B, P].
            lengths: i32[B]: the first `lengths[b]` tokens of row b count.
            chunk: how many tokens are read at a time; None reads all at once.
        """
        return ()

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Return proposals for every row, and what `settle` needs to know of them.

        Args:
            proposer_state: of `start` or of `settle`.
            turn: what may be known: the text so far, which rows are active, their keys.
        """
        raise NotImplementedError

    def settle(
        self,
        proposer_state: ProposerState,
        history: History,
        gained: jax.Array,  # i32[B]
    ) -> ProposerState:
        """Return the state after each row has gained its tokens.

        Args:
            proposer_state: of `propose`.
            history: prompt and text, the gained tokens included.
            gained: i32[B], from 0, in a row that had ended, to num_draft + 1.
        """
        return proposer_state

    def finish(self, proposer_state: ProposerState, history: History) -> ProposerState:
        """Return the state as the result holds it.

        Args:
            proposer_state: of the last `settle`, or of `start`.
            history: prompt and text.
        """
        return proposer_state


@value_class(static=("ngram",))
class PromptLookup(Proposer):
    """Propose what followed the last n-gram when it last occurred in prompt or text (Saxena 2023).

    Copying goes on into what it has just copied, so a loop is continued as a loop. It needs no
    second model, and pays where answers quote their prompts.

    Attributes:
        ngram: n, at least 1.

    Raises:
        ValueError: if `ngram` is not an integer of at least 1.
    """

    ngram: int = 3

    def __post_init__(self) -> None:
        check_count("ngram", self.ngram, 1)

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Return the tokens after the last earlier occurrence; -1 where there is none.

        Args:
            proposer_state: empty, and returned as it is.
            turn: the text so far.
        """
        tokens, length = turn.history.tokens, turn.history.length
        rows, columns = tokens.shape
        if columns <= self.ngram:
            return Proposal(jnp.full((rows, turn.num_draft), -1, jnp.int32)), proposer_state
        ends = jnp.arange(self.ngram, columns)[None]  # one past an n-gram
        # The n-gram at the very end is the one that is looked for, and does not count.
        same = ends < length[:, None]
        for i in range(self.ngram):
            at = jnp.clip(length - self.ngram + i, 0)[:, None]
            same &= tokens[:, i : columns - self.ngram + i] == gather_columns(tokens, at)
        start = jnp.where(same, ends, 0).max(axis=1)[:, None]
        # From the end on, copying repeats what lies between the two occurrences.
        period = jnp.maximum(length[:, None] - start, 1)
        copied = gather_columns(tokens, start + jnp.arange(turn.num_draft)[None] % period)
        return Proposal(jnp.where(start > 0, copied, -1)), proposer_state


class _DraftState(NamedTuple, Generic[State]):
    """State of a draft model between turns."""

    state: State
    pending: jax.Array  # bool[B]; True: the token before the newest was not read either


class _DraftTurn(NamedTuple, Generic[State]):
    """State of a draft model within a turn."""

    before: State
    after: State
    pending: jax.Array  # bool[B]
    tokens: jax.Array  # i32[B, num_draft + 1]; what it has read since `before`
    valid: jax.Array  # bool[B, num_draft + 1]


@value_class(arrays=("params", "state"), static=("step", "sampler"))
class Draft(Proposer, Generic[State]):
    """Propose what a smaller model of the same vocabulary says, with a state of its own.

    Attributes:
        step: what runs the smaller model, as `make_step(model)`.
        params: its parameters.
        state: its state, of as many rows as the model's, which has read what the model's has. It is
            not consumed, so one draft with an empty cache serves every request.
        sampler: draws its tokens, and needs `distribution(logits)`; None draws as the model does.
    """

    step: StepLike[State]
    params: Params
    state: State
    sampler: Sampler | None = None

    def check(
        self, prompt: Array, total: np.ndarray | None, num_draft: int, vocab_size: int
    ) -> None:
        """Raise ValueError if the draft cannot serve the request, or its vocabulary differs.

        Args:
            prompt: i32[B, P].
            total: i32[B], tokens of prompt and text; None under a trace.
            num_draft: the most proposals in a turn, which the draft's state must be able to take
                back.
            vocab_size: V of the model.
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
            raise ValueError(f"the draft has {vocab} tokens, the model {vocab_size}: must be equal")

    def start(self, prompt: jax.Array, lengths: jax.Array, chunk: int | None) -> ProposerState:
        """Return the draft's state after it has read the prompts.

        Args:
            prompt: i32[B, P].
            lengths: i32[B]: the first `lengths[b]` tokens of row b count.
            chunk: how many tokens are read at a time; None reads all at once.
        """
        step = as_step(self.step)
        _, state = read_prompts(step, self.params, prompt, lengths, self.state, chunk)
        return _DraftState(state, jnp.zeros(lengths.shape, bool))

    def propose(self, proposer_state: ProposerState, turn: Turn) -> tuple[Proposal, ProposerState]:
        """Let the draft read what is new and draw `num_draft` tokens, one call a token.

        Args:
            proposer_state: of `start` or of `settle`.
            turn: the text so far, which rows are active, their keys.
        """
        sampler: Any = turn.sampler if self.sampler is None else self.sampler
        history, (before, pending) = turn.history, proposer_state
        step = as_step(self.step).told(part=True)

        def read(
            state: State, tokens: jax.Array, valid: jax.Array, j: jax.Array | int
        ) -> tuple[tuple[jax.Array, State], tuple[jax.Array, jax.Array, jax.Array]]:
            tokens = jnp.where(valid, tokens, 0)
            logits, state = step(self.params, tokens, state, valid=valid)
            logits = sampler.distribution(logits[:, -1])
            token = draw(sampler, fold_keys(turn.keys, history.new + j), logits)
            return (token, state), (tokens, valid, logits)

        def read_own(
            carry: tuple[jax.Array, State], j: jax.Array
        ) -> tuple[tuple[jax.Array, State], tuple[jax.Array, ...]]:
            token, state = carry
            carry, seen = read(state, token[:, None], (j < turn.room)[:, None], j)
            return carry, (*seen, token)

        # If all proposals of a turn were accepted, the draft has not read the last of them.
        at = jnp.clip(history.length[:, None] + jnp.array([[-2, -1]]), 0)
        valid = jnp.stack([pending & turn.active, turn.active], axis=1)
        newest = gather_columns(history.tokens, at)
        carry, (tokens, valid, logits) = read(before, newest, valid, 0)
        # The last proposal is not read here: it may be rejected, and `settle` knows.
        (last, after), later = jax.lax.scan(read_own, carry, jnp.arange(1, turn.num_draft))
        later_tokens, later_valid, later_logits, proposed = (x.swapaxes(0, 1) for x in later)
        proposal = Proposal(jnp.concatenate([proposed, last[:, None]], axis=1))
        if not isinstance(sampler, Greedy):
            logits = jnp.concatenate([logits[:, None], later_logits], axis=1)
            proposal = proposal._replace(logits=logits)
        tokens = jnp.concatenate([tokens, later_tokens[..., 0]], axis=1)
        valid = jnp.concatenate([valid, later_valid[..., 0]], axis=1)
        return proposal, _DraftTurn(before, after, pending, tokens, valid)

    def settle(
        self, proposer_state: ProposerState, history: History, gained: jax.Array
    ) -> ProposerState:
        """Return the draft's state after the tokens that were kept, as far as it has read them.

        Args:
            proposer_state: of `propose`.
            history: prompt and text, the gained tokens included.
            gained: i32[B], from 0 to num_draft + 1.
        """
        before, after, pending, tokens, valid = proposer_state
        wanted, read = gained + (pending & (gained > 0)), valid.sum(axis=1, dtype=jnp.int32)
        # The draft has not read its own last proposal, which may have been kept.
        kept = jnp.minimum(wanted, read)
        step = as_step(self.step).told(part=True)
        state = keep_read(step, self.params, before, after, tokens, valid, kept)
        return _DraftState(state, jnp.where(gained > 0, wanted > read, pending))

    def finish(self, proposer_state: ProposerState, history: History) -> ProposerState:
        """Return the draft's state when it has read as much as the model's.

        Args:
            proposer_state: of the last `settle`, or of `start`.
            history: prompt and text.
        """
        token = gather_columns(history.tokens, jnp.clip(history.length[:, None] - 2, 0))
        valid = proposer_state.pending[:, None]
        token = jnp.where(valid, token, 0)
        step = as_step(self.step).told(part=True)
        return step(self.params, token, proposer_state.state, valid=valid)[1]


def keep_read(
    step: Step[State],
    params: Params,
    before: State,
    after: State,
    tokens: jax.Array,  # i32[B, T]; what was read in between
    valid: jax.Array,  # bool[B, T]
    count: jax.Array,  # i32[B]
) -> State:
    """Return the state after the first `count[b]` of the valid tokens."""
    if step.offers("rewind"):
        return step.rewind(after, before, count)
    # A step without `rewind` reads the tokens that are kept again, from the state before them.
    kept = valid & (jnp.cumsum(valid, axis=1) <= count[:, None])
    return step(params, jnp.where(kept, tokens, 0), before, valid=kept)[1]


def gather_columns(
    tokens: jax.Array,  # [B, C]
    index: jax.Array,  # i32[B, J]
) -> jax.Array:  # [B, J]
    """Take these columns of each row."""
    return jnp.take_along_axis(tokens, index, axis=1)


def fold_keys(keys: jax.Array, number: jax.Array | int) -> jax.Array:  # key[B], i32[B] or one
    """Fold a number into the key of each row, one for all or each row's own."""
    axes = (0, None) if isinstance(number, int) else (0, 0)
    return jax.vmap(jax.random.fold_in, axes)(keys, number)


def draw(sampler: Sampler, keys: jax.Array, logits: jax.Array) -> jax.Array:  # i32[B]
    """Draw from logits [B, V] that the sampler has processed; greedy ones need no random number."""
    return jax.vmap(Greedy() if isinstance(sampler, Greedy) else Sample())(keys, logits)


def check_distribution(name: str, sampler: Sampler) -> None:
    """Raise ValueError where a sampler is no value that says which distribution it draws from."""
    if isinstance(sampler, type) or not callable(getattr(sampler, "distribution", None)):
        rule = "speculate needs a value with `distribution(logits)`, as Greedy and Sample have"
        raise ValueError(f"{name} is {sampler!r}: {rule}")
