"""Logit processors that depend on the text so far: penalties, bans and forced tokens.

A processor is a value that maps (history, logits) to logits. You can also use your own function.
`generate(..., processors=(RepetitionPenalty(1.2), NoRepeatNGram(3)))` applies the processors from
left to right before the sampler. Beam search accepts the same values. Processors that need no
history, such as `TopP`, are part of a sampler: `Sample(TopP(0.9))`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, check_factor, check_finite, has_finite_maximum
from transformer_jax.values import value_class


@value_class(pytree=True)
class History:
    """Tokens of every row so far: the prompt followed by the new tokens.

    Attributes:
        tokens: i32[B, C], the tokens, with -1 after the end of a row.
        prompt: i32[B], the number of prompt tokens.
        length: i32[B], the total number of tokens.
    """

    tokens: jax.Array  # i32[B, C]
    prompt: jax.Array  # i32[B]
    length: jax.Array  # i32[B]

    @property
    def new(self) -> jax.Array:  # i32[B]
        """Number of tokens generated in each row so far."""
        return self.length - self.prompt

    @classmethod
    def of(cls, prompt: jax.Array, lengths: jax.Array, room: int) -> History:
        """Create the history of the prompts, with room for new tokens.

        Args:
            prompt: i32[B, P], the token IDs of the prompts.
            lengths: i32[B], the length of each row's prompt.
            room: the number of tokens that can be appended to a row of length P.
        """
        at = jnp.arange(prompt.shape[1])[None]
        tokens = jnp.where(at < lengths[:, None], prompt, -1).astype(jnp.int32)
        lengths = lengths.astype(jnp.int32)
        # -1 is not a token, so the padding after the end of a row never matches.
        return cls(jnp.pad(tokens, ((0, 0), (0, room)), constant_values=-1), lengths, lengths)

    def append(self, token: jax.Array, active: jax.Array) -> History:  # i32[B], bool[B]
        """Append one token to each active row.

        Args:
            token: i32[B], the token for each row.
            active: bool[B], a mask of the active rows. The other rows do not change.
        """
        rows, columns = self.tokens.shape
        at = jnp.where(active, self.length, columns)  # the scatter drops out-of-bounds indices
        tokens = self.tokens.at[jnp.arange(rows), at].set(token, mode="drop")
        return History(tokens, self.prompt, self.length + active)

    def counts(self, vocab_size: int, *, prompt: bool) -> jax.Array:  # i32[B, V]
        """Count how often each token in the vocabulary occurs in each row.

        Args:
            vocab_size: V, the size of the vocabulary.
            prompt: whether to count the tokens of the prompt in addition to the new tokens.

        Returns:
            i32[B, V].
        """
        rows, columns = self.tokens.shape
        at = jnp.arange(columns)[None]
        counted = at < self.length[:, None]
        if not prompt:
            counted = counted & (at >= self.prompt[:, None])
        # Index V is out of bounds, so the scatter drops it. Nonfinite rows contain -1 as a token.
        ids = jnp.where(counted & (self.tokens >= 0), self.tokens, vocab_size)
        zeros = jnp.zeros((rows, vocab_size), jnp.int32)
        return zeros.at[jnp.arange(rows)[:, None], ids].add(1, mode="drop")


class HistoryProcessor(Protocol):
    """Hashable function of the history that changes the logits of the next token."""

    def __call__(
        self,
        history: History,
        logits: jax.Array,  # f32[B, V]
    ) -> jax.Array:  # f32[B, V]
        ...


@value_class
class RepetitionPenalty:
    """Repetition penalty: the logit x of a previous token becomes x / p, or x p if x <= 0.

    Keskar et al. 2019, section 4.1.

    Attributes:
        p: strength, from 1e-30 to 1e30. A value above 1 discourages repetition, and a value below 1
            encourages it.
        prompt: whether to penalize the tokens of the prompt in addition to the new tokens.

    Raises:
        ValueError: If p is not a number in that range.
    """

    p: float
    prompt: bool = True

    def __post_init__(self) -> None:
        check_factor("p", self.p)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        seen = history.counts(logits.shape[-1], prompt=self.prompt) > 0
        return jnp.where(seen, jnp.where(logits > 0, logits / self.p, logits * self.p), logits)


@value_class
class PresencePenalty:
    """Presence penalty: subtract `a` from the logits of tokens that were already generated.

    Attributes:
        a: strength, from -1e30 to 1e30. Negative values encourage repetition.
        prompt: whether to penalize the tokens of the prompt in addition to the new tokens.

    Raises:
        ValueError: If a is not a number in that range.
    """

    a: float
    prompt: bool = False

    def __post_init__(self) -> None:
        check_finite("a", self.a)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return logits - self.a * (history.counts(logits.shape[-1], prompt=self.prompt) > 0)


@value_class
class FrequencyPenalty:
    """Frequency penalty: subtract a * n from the logit of a token that was generated n times.

    Attributes:
        a: strength, from -1e30 to 1e30. Negative values encourage repetition.
        prompt: whether n includes the tokens of the prompt.

    Raises:
        ValueError: If a is not a number in that range.
    """

    a: float
    prompt: bool = False

    def __post_init__(self) -> None:
        check_finite("a", self.a)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return logits - self.a * history.counts(logits.shape[-1], prompt=self.prompt)


@value_class
class NoRepeatNGram:
    """Exclude tokens that would repeat an n-gram in the row (Paulus et al. 2018, section 2.5).

    Attributes:
        n: length of the n-grams, at least 1. The n-grams of the prompt are included.

    Raises:
        ValueError: If n is not an integer of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("n", self.n, 1)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        tokens, length = history.tokens, history.length
        rows, columns = tokens.shape
        vocab, before = logits.shape[-1], self.n - 1
        # A history shorter than an n-gram cannot repeat one.
        if columns < self.n:
            return logits
        at = jnp.arange(before, columns)[None]  # possible last positions of an n-gram
        again = at < length[:, None]
        for i in range(before):
            last = jnp.take_along_axis(tokens, jnp.clip(length - before + i, 0)[:, None], axis=1)
            again = again & (tokens[:, i : columns - before + i] == last)
        # The cost of a scatter with one update per token of the text does not depend on the
        # vocabulary size.
        banned = jnp.where(again, tokens[:, before:], vocab)
        return logits.at[jnp.arange(rows)[:, None], banned].set(-jnp.inf, mode="drop")


@value_class(init=False)
class Ban:
    """Exclude tokens at every step, for example `Ban(0, 5)`.

    Attributes:
        tokens: the token IDs, at least one.

    Raises:
        ValueError: If a value is not a token ID. Calling the processor also raises this error if a
            token is outside the vocabulary.
    """

    tokens: tuple[int, ...]

    def __init__(self, *tokens: int) -> None:
        object.__setattr__(self, "tokens", as_token_ids("tokens", tokens))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return _exclude(self, logits, self.tokens)


@value_class(init=False)
class BanSequences:
    """Exclude tokens that would complete a sequence, for example `BanSequences([3, 4], [5])`.

    Attributes:
        sequences: sequences of token IDs, at least one. A match may start in the prompt.

    Raises:
        ValueError: If there is no sequence, or if a sequence is empty or contains anything except
            token IDs. Calling the processor also raises this error if a token is outside the
            vocabulary.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __init__(self, *sequences: Sequence[int]) -> None:
        if not sequences:
            raise ValueError("sequences is empty: must contain at least one sequence")
        ids = tuple(as_token_ids(f"sequences[{i}]", tuple(s)) for i, s in enumerate(sequences))
        object.__setattr__(self, "sequences", ids)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        rows, vocab = logits.shape
        _check_vocab(self, [max(sequence) for sequence in self.sequences], vocab)
        # Stack the sequences of equal length so that one comparison serves all of them.
        for size in sorted({len(sequence) for sequence in self.sequences}):
            banned = jnp.asarray([s for s in self.sequences if len(s) == size])  # [M, size]
            at = history.length[:, None] + jnp.arange(1 - size, 0)[None]
            last = jnp.take_along_axis(history.tokens, jnp.clip(at, 0), axis=1)  # [B, size - 1]
            matches = (last[:, None] == banned[None, :, :-1]).all(-1)
            matches &= (history.length >= size - 1)[:, None]
            ends = jnp.where(matches, banned[None, :, -1], vocab)
            logits = logits.at[jnp.arange(rows)[:, None], ends].set(-jnp.inf, mode="drop")
        return logits


@value_class(init=False)
class Force:
    """Force the first new tokens, for example `Force(7, 2)`.

    Attributes:
        tokens: the token IDs in order, at least one.

    Raises:
        ValueError: If a value is not a token ID. Calling the processor also raises this error if a
            token is outside the vocabulary.
    """

    tokens: tuple[int, ...]

    def __init__(self, *tokens: int) -> None:
        object.__setattr__(self, "tokens", as_token_ids("tokens", tokens))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        vocab, count = logits.shape[-1], len(self.tokens)
        _check_vocab(self, self.tokens, vocab)
        # Each row has its own position, because rows in continuous batching start at different
        # times.
        token = jnp.asarray(self.tokens)[jnp.clip(history.new, 0, count - 1)][:, None]
        forced = jnp.where(jnp.arange(vocab)[None] == token, 0.0, -jnp.inf)
        return jnp.where((history.new < count)[:, None], forced, logits)


@value_class(init=False)
class MinLength:
    """Exclude the stop tokens until n tokens have been generated.

    Attributes:
        n: minimum number of new tokens, at least 0.
        stop: one or more token IDs that end the text.

    Raises:
        ValueError: If n is not an integer of at least 0, or if `stop` contains anything except
            token IDs. Calling the processor also raises this error if a token is outside the
            vocabulary.
    """

    n: int
    stop: tuple[int, ...]

    def __init__(self, n: int, stop: int | Sequence[int]) -> None:
        check_count("n", n, 0)
        object.__setattr__(self, "n", int(n))
        object.__setattr__(self, "stop", as_token_ids("stop", stop))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        longer = (history.new >= self.n)[:, None]
        return jnp.where(longer, logits, _exclude(self, logits, self.stop))


@value_class
class ForceLast:
    """Force the n-th new token, for example to end text that has not ended before.

    Attributes:
        n: number of the new token, counted from 1.
        token: ID of the forced token.

    Raises:
        ValueError: If n is not an integer of at least 1, or if `token` is not a token ID.
            Calling the processor also raises this error if the token is outside the vocabulary.
    """

    n: int
    token: int

    def __post_init__(self) -> None:
        check_count("n", self.n, 1)
        as_token_ids("token", (self.token,))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        _check_vocab(self, (self.token,), logits.shape[-1])
        forced = jnp.where(jnp.arange(logits.shape[-1])[None] == self.token, 0.0, -jnp.inf)
        return jnp.where((history.new == self.n - 1)[:, None], forced, logits)


def never(sequences: Sequence[Sequence[int]]) -> tuple[HistoryProcessor, ...]:
    """Return processors that exclude token sequences. All single tokens share one `Ban`."""
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    longer = [sequence for sequence in sequences if len(sequence) > 1]
    processors: list[HistoryProcessor] = [Ban(*single)] if single else []
    return (*processors, BanSequences(*longer)) if longer else tuple(processors)


def apply_processors(
    processors: Sequence[HistoryProcessor],
    history: History | None,
    logits: jax.Array,  # f32[B, V]
) -> jax.Array:  # f32[B, V]
    """Apply the processors from left to right. If there are none, `history` may be None.

    A row without a finite maximum becomes NaN, even if a processor would exclude the nonfinite
    logit.
    """
    processed = logits
    for processor in processors:
        assert history is not None
        processed = processor(history, processed)
    if not processors:
        return logits
    # Check the logits before processing, because banning the NaN token would hide the broken row.
    return jnp.where(has_finite_maximum(logits)[:, None], processed, jnp.nan)


def check_processors(processors: Sequence[HistoryProcessor]) -> tuple[HistoryProcessor, ...]:
    """Return the processors as a tuple.

    Raise ValueError if a processor is not a hashable value that can be called with (history,
    logits).
    """
    if not isinstance(processors, tuple | list):
        raise ValueError(f"processors is {processors!r}: must be a tuple of values")
    for processor in processors:
        rule = "must be callable with (history, logits)"
        # A class is also callable, and it is easy to write Ban instead of Ban(3).
        if isinstance(processor, type) or not callable(processor):
            raise ValueError(f"processor is {processor!r}: {rule}")
        try:
            inspect.signature(processor).bind(None, None)
        except TypeError:
            raise ValueError(
                f"processor is {processor!r}: {rule}; pass a processor that reads only logits to "
                "Sample(...)"
            ) from None
        except ValueError:  # built-in functions may have no signature
            pass
        try:
            # Processors are static arguments of compiled programs.
            hash(processor)
        except TypeError:
            raise ValueError(f"processor is {processor!r}: must be hashable") from None
    return tuple(processors)


def _exclude(processor: HistoryProcessor, logits: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    _check_vocab(processor, tokens, logits.shape[-1])
    return logits.at[..., jnp.asarray(tokens)].set(-jnp.inf)


def _check_vocab(processor: HistoryProcessor, tokens: Sequence[int], vocab: int) -> None:
    if max(tokens) >= vocab:
        raise ValueError(f"token {max(tokens)} of {processor!r}: must be from 0 to {vocab - 1}")


def as_token_ids(name: str, ids: int | Iterable[int], *, least: int = 1) -> tuple[int, ...]:
    """Convert one or more token IDs to a tuple of ints. A zero-dimensional array is one ID.

    Raise ValueError if a value is not a token ID, or if there are fewer than `least` IDs.
    """
    if isinstance(ids, jax.Array | np.ndarray | np.generic) and ids.ndim == 0:
        if isinstance(ids, jax.core.Tracer):  # IDs are compiled into the program
            raise ValueError(f"{name} is {ids!r}: must be a concrete token ID, not a traced one")
        ids = ids.item()
    if not isinstance(ids, Integral | Iterable):
        raise ValueError(f"{name} is {ids!r}: must be one or more token IDs")
    tokens = tuple(ids) if isinstance(ids, Iterable) else (ids,)
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{name} contains {token!r}: token IDs must be integers of at least 0")
    if len(tokens) < least:
        raise ValueError(f"{name} is empty: must contain at least one token")
    return tuple(int(token) for token in tokens)
