"""Change the logits of the next token by the text so far: penalties, bans, forced tokens.

A processor is a value that maps (history, logits) to logits; a function of your own is as good as
these. `generate(..., processors=(RepetitionPenalty(1.2), NoRepeatNGram(3)))` applies them from left
to right before the sampler sees the logits; beam search applies the same values. A processor that
needs no history, such as `TopP`, goes into a sampler: `Sample(TopP(0.9))`.
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
    """The tokens of every row so far, prompt and new ones.

    Attributes:
        tokens: i32[B, C], -1 after the row's end.
        prompt: i32[B], how many of them were the prompt.
        length: i32[B], how many there are.
    """

    tokens: jax.Array  # i32[B, C]
    prompt: jax.Array  # i32[B]
    length: jax.Array  # i32[B]

    @property
    def new(self) -> jax.Array:  # i32[B]
        """Return how many tokens were generated so far."""
        return self.length - self.prompt

    @classmethod
    def of(cls, prompt: jax.Array, lengths: jax.Array, room: int) -> History:
        """Return the history of prompts, with room for new tokens.

        Args:
            prompt: i32[B, P].
            lengths: i32[B], tokens of each row's prompt.
            room: how many tokens can be appended to a row of P.
        """
        at = jnp.arange(prompt.shape[1])[None]
        tokens = jnp.where(at < lengths[:, None], prompt, -1).astype(jnp.int32)
        lengths = lengths.astype(jnp.int32)
        # -1 is no token: what follows a row's end equals nothing that is looked for.
        return cls(jnp.pad(tokens, ((0, 0), (0, room)), constant_values=-1), lengths, lengths)

    def append(self, token: jax.Array, active: jax.Array) -> History:  # i32[B], bool[B]
        """Append one token to each active row.

        Args:
            token: i32[B].
            active: bool[B]; the other rows stay as they are.
        """
        rows, columns = self.tokens.shape
        at = jnp.where(active, self.length, columns)  # the end itself is dropped
        tokens = self.tokens.at[jnp.arange(rows), at].set(token, mode="drop")
        return History(tokens, self.prompt, self.length + active)

    def counts(self, vocab_size: int, *, prompt: bool) -> jax.Array:  # i32[B, V]
        """Count each token of a row.

        Args:
            vocab_size: V.
            prompt: whether the prompt's tokens count as well as the new ones.

        Returns:
            i32[B, V].
        """
        rows, columns = self.tokens.shape
        at = jnp.arange(columns)[None]
        counted = at < self.length[:, None]
        if not prompt:
            counted = counted & (at >= self.prompt[:, None])
        # One past the vocabulary, where a scatter drops it. A nonfinite row has tokens -1.
        ids = jnp.where(counted & (self.tokens >= 0), self.tokens, vocab_size)
        zeros = jnp.zeros((rows, vocab_size), jnp.int32)
        return zeros.at[jnp.arange(rows)[:, None], ids].add(1, mode="drop")


class HistoryProcessor(Protocol):
    """Change the logits of the next token; hashable."""

    def __call__(
        self,
        history: History,
        logits: jax.Array,  # f32[B, V]
    ) -> jax.Array:  # f32[B, V]
        ...


@value_class
class RepetitionPenalty:
    """Penalise tokens that occur: x / p where the logit x is above 0, x p elsewhere.

    Keskar et al. 2019, section 4.1.

    Attributes:
        p: above 1 discourages repetition, below 1 encourages it; from 1e-30 to 1e30.
        prompt: whether the prompt's tokens count as well as the new ones.

    Raises:
        ValueError: if p is not a number in that range.
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
    """Subtract a from the logits of tokens that were generated.

    Attributes:
        a: from -1e30 to 1e30; below 0 it encourages repetition.
        prompt: whether the prompt's tokens count as well.

    Raises:
        ValueError: if a is not a number in that range.
    """

    a: float
    prompt: bool = False

    def __post_init__(self) -> None:
        check_finite("a", self.a)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return logits - self.a * (history.counts(logits.shape[-1], prompt=self.prompt) > 0)


@value_class
class FrequencyPenalty:
    """Subtract a n from the logit of a token that was generated n times.

    Attributes:
        a: from -1e30 to 1e30; below 0 it encourages repetition.
        prompt: whether n counts the prompt's tokens as well.

    Raises:
        ValueError: if a is not a number in that range.
    """

    a: float
    prompt: bool = False

    def __post_init__(self) -> None:
        check_finite("a", self.a)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return logits - self.a * history.counts(logits.shape[-1], prompt=self.prompt)


@value_class
class NoRepeatNGram:
    """Exclude tokens that would repeat an n-gram of the row (Paulus et al. 2018, section 2.5).

    Attributes:
        n: tokens of an n-gram, at least 1; the prompt's count.

    Raises:
        ValueError: if n is not an integer of at least 1.
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
        at = jnp.arange(before, columns)[None]  # where an n-gram may end
        again = at < length[:, None]
        for i in range(before):
            last = jnp.take_along_axis(tokens, jnp.clip(length - before + i, 0)[:, None], axis=1)
            again = again & (tokens[:, i : columns - before + i] == last)
        # A scatter of as many updates as the text has tokens, whatever the vocabulary's size.
        banned = jnp.where(again, tokens[:, before:], vocab)
        return logits.at[jnp.arange(rows)[:, None], banned].set(-jnp.inf, mode="drop")


@value_class(init=False)
class Ban:
    """Exclude tokens always: `Ban(0, 5)`.

    Attributes:
        tokens: the token ids, at least one.

    Raises:
        ValueError: if one is no token id, or when it is called, if one is outside the vocabulary.
    """

    tokens: tuple[int, ...]

    def __init__(self, *tokens: int) -> None:
        object.__setattr__(self, "tokens", as_token_ids("tokens", tokens))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return _exclude(self, logits, self.tokens)


@value_class(init=False)
class BanSequences:
    """Exclude a token that would end one of these sequences: `BanSequences([3, 4], [5])`.

    Attributes:
        sequences: of token ids, at least one; a sequence may begin in the prompt.

    Raises:
        ValueError: without a sequence, if one is empty or holds what is no token id, or when it is
            called, if a token is outside the vocabulary.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __init__(self, *sequences: Sequence[int]) -> None:
        if not sequences:
            raise ValueError("sequences is empty: must name at least one")
        ids = tuple(as_token_ids(f"sequences[{i}]", tuple(s)) for i, s in enumerate(sequences))
        object.__setattr__(self, "sequences", ids)

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        rows, vocab = logits.shape
        _check_vocab(self, [max(sequence) for sequence in self.sequences], vocab)
        # Sequences of one length are one array; one comparison serves all of them.
        for size in sorted({len(sequence) for sequence in self.sequences}):
            banned = jnp.asarray([s for s in self.sequences if len(s) == size])  # [M, size]
            at = history.length[:, None] + jnp.arange(1 - size, 0)[None]
            last = jnp.take_along_axis(history.tokens, jnp.clip(at, 0), axis=1)  # [B, size - 1]
            begun = (last[:, None] == banned[None, :, :-1]).all(-1)
            begun &= (history.length >= size - 1)[:, None]
            ends = jnp.where(begun, banned[None, :, -1], vocab)
            logits = logits.at[jnp.arange(rows)[:, None], ends].set(-jnp.inf, mode="drop")
        return logits


@value_class(init=False)
class Force:
    """Force the first new tokens: `Force(7, 2)`.

    Attributes:
        tokens: the token ids, at least one; the first is new token number 1.

    Raises:
        ValueError: if one is no token id, or when it is called, if one is outside the vocabulary.
    """

    tokens: tuple[int, ...]

    def __init__(self, *tokens: int) -> None:
        object.__setattr__(self, "tokens", as_token_ids("tokens", tokens))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        vocab, count = logits.shape[-1], len(self.tokens)
        _check_vocab(self, self.tokens, vocab)
        # Each row is at a place of its own: rows of continuous batching begin at different times.
        wanted = jnp.asarray(self.tokens)[jnp.clip(history.new, 0, count - 1)][:, None]
        alone = jnp.where(jnp.arange(vocab)[None] == wanted, 0.0, -jnp.inf)
        return jnp.where((history.new < count)[:, None], alone, logits)


@value_class(init=False)
class MinLength:
    """Exclude the stop tokens until n tokens were generated.

    Attributes:
        n: new tokens, at least 0.
        stop: the token id, or ids, that end a text.

    Raises:
        ValueError: if n is not an integer of at least 0, `stop` holds what is no token id, or when
            it is called, if one is outside the vocabulary.
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
    """Force new token number n, to end a text that has not ended by then.

    Attributes:
        n: counted from 1.
        token: its id.

    Raises:
        ValueError: if n is not an integer of at least 1, `token` is no token id, or when it is
            called, if it is outside the vocabulary.
    """

    n: int
    token: int

    def __post_init__(self) -> None:
        check_count("n", self.n, 1)
        as_token_ids("token", (self.token,))

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        _check_vocab(self, (self.token,), logits.shape[-1])
        alone = jnp.where(jnp.arange(logits.shape[-1])[None] == self.token, 0.0, -jnp.inf)
        return jnp.where((history.new == self.n - 1)[:, None], alone, logits)


def never(sequences: Sequence[Sequence[int]]) -> tuple[HistoryProcessor, ...]:
    """Return what excludes sequences of tokens; those of one token are one `Ban`."""
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    longer = [sequence for sequence in sequences if len(sequence) > 1]
    found: list[HistoryProcessor] = [Ban(*single)] if single else []
    return (*found, BanSequences(*longer)) if longer else tuple(found)


def apply_processors(
    processors: Sequence[HistoryProcessor],
    history: History | None,
    logits: jax.Array,  # f32[B, V]
) -> jax.Array:  # f32[B, V]
    """Apply the processors from left to right; with none, `history` may be None.

    A row without a finite maximum becomes NaN, also if a processor would exclude what is wrong.
    """
    processed = logits
    for processor in processors:
        assert history is not None
        processed = processor(history, processed)
    if not processors:
        return logits
    # Looked at before the processors: a ban of the NaN would hide that a row is broken.
    return jnp.where(has_finite_maximum(logits)[:, None], processed, jnp.nan)


def check_processors(processors: Sequence[HistoryProcessor]) -> tuple[HistoryProcessor, ...]:
    """Return the processors as a tuple.

    ValueError where one is not a hashable value that is called with (history, logits).
    """
    if not isinstance(processors, tuple | list):
        raise ValueError(f"processors is {processors!r}: must be a tuple of values")
    for processor in processors:
        rule = "must be called with (history, logits)"
        # A class can be called, too: Ban for Ban(3) is an easy slip.
        if isinstance(processor, type) or not callable(processor):
            raise ValueError(f"processor is {processor!r}: {rule}")
        try:
            inspect.signature(processor).bind(None, None)
        except TypeError:
            raise ValueError(
                f"processor is {processor!r}: {rule}; one of logits alone goes into Sample(...)"
            ) from None
        except ValueError:  # a builtin may have no signature
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
        raise ValueError(f"token {max(tokens)} of {processor!r}: must be in 0..{vocab - 1}")


def as_token_ids(name: str, ids: int | Iterable[int], *, least: int = 1) -> tuple[int, ...]:
    """Return one token id, also as an array without axes, or several of them as a tuple of ints.

    ValueError where one is no token id, or there are fewer than `least`.
    """
    if isinstance(ids, jax.Array | np.ndarray | np.generic) and ids.ndim == 0:
        if isinstance(ids, jax.core.Tracer):  # ids are static: a program is compiled for them
            raise ValueError(f"{name} is {ids!r}: must be a known token id")
        ids = ids.item()
    if not isinstance(ids, Integral | Iterable):
        raise ValueError(f"{name} is {ids!r}: must be a token id or several")
    tokens = tuple(ids) if isinstance(ids, Iterable) else (ids,)
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{name} have {token!r}: must be token ids, integers from 0")
    if len(tokens) < least:
        raise ValueError(f"{name} is empty: must name at least one token")
    return tuple(int(token) for token in tokens)
