"""State of models that see a fixed number of recent tokens.

The convolutional, feed-forward, and n-gram models use `RecentTokens`. Training gathers all windows
at once, whereas decoding slides the window by one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.decoding.step import AppliedStep
from transformer_jax.models.arguments import CheckedModule, check_tokens, gather_tokens
from transformer_jax.models.layers import refuse_rngs
from transformer_jax.models.packing import (
    check_segments,
    check_valid,
    last_document,
    number_documents,
    sequence_positions,
)
from transformer_jax.models.places import Captured, Places, Visit
from transformer_jax.values import value_class


@value_class(pytree=True, exportable=True)
class RecentTokens:
    """Immutable state with the last tokens of each row. Each call returns a new state.

    Attributes:
        tokens: i32[B, C], with the newest token last; -1 before the first token.
        length: i32[B], the number of tokens that have been read.
    """

    tokens: jax.Array  # i32[B, C]
    length: jax.Array  # i32[B]


class WindowSizes(Protocol):
    """Vocabulary size and context of a model."""

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size, V."""
        ...

    @property
    def context(self) -> int:
        """Return the number of tokens in a window, C."""
        ...


def init_recent_tokens(config: WindowSizes, batch: int) -> RecentTokens:
    """Create the initial state: all C values in each row are -1.

    Args:
        config: a `ConvolutionConfig`, a `WindowConfig`, or an `NgramConfig`.
        batch: B, the number of rows.

    Raises:
        ValueError: If `batch` is not a nonnegative integer.
    """
    check_count("batch", batch, 0)
    empty = jnp.full((batch, config.context), -1, jnp.int32)
    return RecentTokens(empty, jnp.zeros((batch,), jnp.int32))


def check_recent_tokens(
    config: WindowSizes, state: RecentTokens, rows: int, subject: str = "tokens have"
) -> None:
    """Raise ValueError unless the state matches the rows of the tokens and the model's context."""
    if not isinstance(state, RecentTokens):
        raise ValueError(f"state is of type {type(state).__name__}: must be RecentTokens")
    check_not_consumed(state)
    state_rows, width = state.tokens.shape
    if state_rows != rows:
        raise ValueError(f"{subject} {rows} rows, but the state has {state_rows}")
    if width != config.context:
        raise ValueError(
            f"state.tokens have width {width}, but the model's context is {config.context}"
        )


def slide_window(
    config: WindowSizes,
    tokens: jax.Array,  # i32[B, T]
    state: RecentTokens | None,
    valid: jax.Array | None,  # bool[B, T]
    segments: jax.Array | None,  # i32[B, T]
    at: jax.Array | None,  # i32[B, Q]
    places: Places,
) -> tuple[jax.Array, RecentTokens, Visit]:  # i32[B, T, C] or i32[B, Q, C]
    """Return the window of each token, the state after all tokens, and a `Visit` of the tokens.

    A window contains the last C valid tokens, including its own. Tokens before the beginning or
    from another document are -1. Under tracing, tokens outside the vocabulary become V, as do the
    windows for out-of-range values in `at`. Edits see all tokens, so they ignore `at`. Raises
    ValueError if the arguments are invalid.
    """
    size, positions = config.vocab_size, None
    check_tokens(tokens, size)
    check_segments(tokens, segments, state)
    whole = state is None
    if places.edit:
        at, length = None, None if state is None else state.length
        positions = sequence_positions(tokens, length, valid, segments)
    places = places.with_facts(positions, whole=whole, packed=segments is not None)
    visit = places.visit(positions=positions)
    if state is None:
        state = init_recent_tokens(config, tokens.shape[0])
    check_recent_tokens(config, state, tokens.shape[0])
    is_token = check_valid("tokens", tokens, valid)
    tokens = jnp.asarray(tokens).astype(jnp.int32)
    # a traced token cannot be rejected, so V makes its logits NaN
    tokens = jnp.where((tokens < 0) | (tokens >= size), size, tokens)
    documents = jnp.zeros_like(tokens) if segments is None else number_documents(segments)
    seen = documents if valid is None else last_document(documents, is_token)
    read = is_token.sum(axis=1, dtype=jnp.int32)
    if valid is None:
        count = jnp.broadcast_to(jnp.arange(1, tokens.shape[1] + 1)[None], tokens.shape)
    else:
        count = jnp.cumsum(is_token, axis=1, dtype=jnp.int32)
        # move the padding to the end of the row
        order = jnp.argsort(~is_token, axis=1, stable=True)
        tokens = jnp.take_along_axis(tokens, order, axis=1)
        documents = jnp.take_along_axis(documents, order, axis=1)
    # the valid tokens of a row directly follow those of the state, so a window is a slice
    line = jnp.concatenate([state.tokens, tokens], axis=1)
    owner = jnp.concatenate([jnp.zeros_like(state.tokens), documents], axis=1)
    last_seen = seen.max(axis=1, initial=0, keepdims=True)
    windows = _windows(config.context, line, owner, count, seen)
    last = _windows(config.context, line, owner, read[:, None], last_seen)[:, 0]
    length = state.length + read
    if segments is not None:
        in_last = is_token & (number_documents(segments) == last_seen)
        length = in_last.sum(axis=1, dtype=jnp.int32)
    if at is not None:
        if not jnp.issubdtype(at.dtype, jnp.integer) or at.ndim != 2 or len(at) != len(windows):
            rule = f"must be integers [{len(windows)}, Q]"
            raise ValueError(f"at is {at.dtype}{list(at.shape)}: {rule}")
        # a negative index would count from the end
        index = jnp.where(at < 0, windows.shape[1], at)[:, :, None]
        windows = jnp.take_along_axis(windows, index, axis=1, mode="fill", fill_value=size)
    return windows, RecentTokens(last, length), visit


def result_of(
    visit: Visit,
    places: Places,
    logits: jax.Array,  # f32[B, Q, V]
    state: RecentTokens,
    at: jax.Array | None,  # i32[B, Q]
) -> Any:
    """Return the result of a call: logits (only for `at`), the state, and captured values."""
    captured = places.in_order(visit.captured)
    if places.edit and at is not None:  # the edit needed all tokens
        logits, captured = jax.tree.map(lambda x: gather_tokens(x, at), (logits, captured))
    return (logits, state, captured) if places.capture else (logits, state)


def _windows(
    context: int,
    line: jax.Array,  # i32[B, C + T]
    owner: jax.Array,  # i32[B, C + T]: the document of each token
    count: jax.Array,  # i32[B, Q]: number of tokens read
    document: jax.Array,  # i32[B, Q]
) -> jax.Array:  # i32[B, Q, C]
    """Return the newest C tokens after `count` tokens, with -1 for tokens of other documents."""
    index = count[:, :, None] + jnp.arange(context)[None, None]
    rows = jnp.arange(line.shape[0])[:, None, None]
    # The tokens of the state have document 0, like an unsegmented row, which continues them.
    same = owner[rows, index] == jnp.maximum(document, 0)[:, :, None]
    return jnp.where(same, line[rows, index], -1)


class RecentTokensLM(CheckedModule):
    """Language model that predicts each token from a window of previous ones."""

    config: Any

    @nn.nowrap
    def as_step(self) -> RecentTokensStep:
        """Return the decoding step for `make_step`."""
        return RecentTokensStep(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        state: RecentTokens | None = None,
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> tuple[jax.Array, RecentTokens] | tuple[jax.Array, RecentTokens, Captured]:
        """Return the logits of the next tokens and the new state.

        Args:
            tokens: i32[B, T].
            state: the state after the previous tokens; None starts a sequence.
            valid: bool[B, T], False marks padding; None means no padding.
            segments: i32[B, T], IDs of packed documents, which cannot see each other. The new state
                belongs to the last document. This argument cannot be combined with `state`.
            at: i32[B, Q], indices of the tokens to compute logits for; None means all tokens.
            key: a single PRNG key, which enables dropout.
            capture: names of places (`transformer_jax.places`) to return the values of.

        Returns:
            Logits f32[B, T, V], or [B, Q, V] with `at`; the new state; and with `capture` the
            values keyed by place.

        Raises:
            ValueError: If the arguments do not fit.
        """
        places = Places.of(self, capture)
        refuse_rngs(self, key)
        # Only windows of consecutive tokens overlap, which a convolution can use.
        every = at is None or bool(places.edit)
        whole = valid is None and segments is None and every and tokens.shape[1] > 0
        windows, state, visit = slide_window(
            self.config, tokens, state, valid, segments, at, places
        )
        logits = self._predict(windows, key, visit, whole)
        return result_of(visit, places, visit("logits", logits), state, at)

    def _predict(
        self,
        windows: jax.Array,  # i32[B, Q, C]; -1 before the first token
        key: jax.Array | None,
        visit: Visit,
        whole: bool,
    ) -> jax.Array:  # f32[B, Q, V]
        """Return the logits after each window.

        If `whole` is true, the windows start at consecutive tokens.
        """
        raise NotImplementedError


@value_class
class RecentTokensStep(AppliedStep[RecentTokens]):
    """Decoding step of a model whose state is `RecentTokens`.

    Attributes:
        model: model that `build(config)` returned.
    """

    model: Any  # a ConvolutionLM, WindowLM or NgramLM, which import this module

    def check(self, prompt: np.ndarray, state: RecentTokens, total: np.ndarray) -> None:
        """Raise ValueError if the prompt or the state is invalid. Any length is allowed."""
        check_tokens(prompt, self.model.config.vocab_size)
        check_recent_tokens(self.model.config, state, prompt.shape[0], "prompt has")
        super().check(prompt, state, total)
