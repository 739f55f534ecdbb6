"""Define what decoding knows of a model: a step from tokens and state to logits and state.

A plain function is a step. A step may offer more: each `StepWith...` names one optional method, and
`has_...` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer_jax.cache.kv_cache import KVCache, next_positions
from transformer_jax.cache.model_cache import ModelCache, check_pages, rewind_cache, room_of
from transformer_jax.config import Learned
from transformer_jax.decoding.batch_rows import State
from transformer_jax.models.ngram import NgramLM
from transformer_jax.models.places import NO_EDIT, Captured, Edit, Places, places
from transformer_jax.models.recent_tokens import RecentTokensStep
from transformer_jax.models.recurrent import (
    RecurrentLM,
    RecurrentSeq2Seq,
    RecurrentStep,
    RecurrentTagger,
)
from transformer_jax.models.stack import AttentionWeights, by_slot
from transformer_jax.models.transformer import Decoder, EncoderDecoder, check_one, check_tokens
from transformer_jax.models.window import WindowLM
from transformer_jax.programs import shapes_of

Params: TypeAlias = Any
"""A model's parameters: any pytree of arrays. Decoding hands them to the step as they are."""

PyTree: TypeAlias = Any
"""A pytree of arrays whose structure is the model's own."""


class Step(Protocol[State]):
    """Read tokens and return the logits after each of them, and the new state.

    A step is hashable: equal steps share their compiled programs.
    """

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
    ) -> tuple[jax.Array, State]:  # f32[B, T, V], state
        ...


class StepWithRead(Step[State], Protocol[State]):
    """Compute the logits of some tokens alone, which is all that a prompt asks for."""

    def read(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        at: jax.Array,  # i32[B, Q]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, State]:  # f32[B, Q, V], state
        """Read the tokens and return the logits after the tokens `at` alone."""
        ...


class StepWithCheck(Step[State], Protocol[State]):
    """Say which prompts a step cannot serve."""

    def check(
        self,
        prompt: np.ndarray,  # i32[B, P]
        state: State,
        total: np.ndarray,  # i32[B]; tokens that a row reads, of the prompt and of its new ones
    ) -> None:
        """Raise ValueError where the prompt, or its length with new tokens, cannot be served."""
        ...


class StepWithRewind(Step[State], Protocol[State]):
    """Take tokens back from a step's state, which saves speculative decoding a call."""

    def rewind(
        self,
        state: State,
        before: State,
        count: jax.Array,  # i32[B]
    ) -> State:
        """Return the state as if, since `before`, row b had read its first `count[b]` tokens only.

        The step may also have `check_rewind(state, count)`, which raises ValueError where a state
        cannot take `count` tokens back.
        """
        ...


class StepWithAttend(Step[State], Protocol[State]):
    """Return a step's attention weights too."""

    def attend(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, 1]
        state: State,
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, State, PyTree]:  # f32[B, 1, V], state, weights whose leaves lead with B
        """Read one token a row and return the weights of its attention beside logits and state."""
        ...


class StepWithLook(Step[State], Protocol[State]):
    """Return the values of places inside the model too."""

    def look(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, 1]
        state: State,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:  # f32[B, 1, V], state, leaves [B, ...]
        """Read one token a row and return the values of places that are captured on the way."""
        ...

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError where a name is that of no place, or of one that it does not pass."""
        ...


def has_read(step: Step[State]) -> TypeGuard[StepWithRead[State]]:
    """Return whether the step has a `read` that agrees with its call.

    A class that overrides the call and inherits `read` from its base has none: its `read` would
    return the logits of the base.
    """
    for kind in type(step).__mro__:
        if "read" in vars(kind) or "__call__" in vars(kind):
            return "read" in vars(kind)
    return False


def has_check(step: Step[State]) -> TypeGuard[StepWithCheck[State]]:
    """Return whether the step has `check`."""
    return hasattr(step, "check")


def has_rewind(step: Step[State]) -> TypeGuard[StepWithRewind[State]]:
    """Return whether the step has `rewind`."""
    return hasattr(step, "rewind")


def has_look(step: Step[State]) -> TypeGuard[StepWithLook[State]]:
    """Return whether the step has `look`."""
    return hasattr(step, "look")


def has_attend(step: Step[State]) -> TypeGuard[StepWithAttend[State]]:
    """Return whether the step has `attend`."""
    return hasattr(step, "attend")


def read_logits_at(
    step: Step[State],
    params: Params,
    tokens: jax.Array,  # i32[B, T]
    state: State,
    at: jax.Array,  # i32[B, Q]
    valid: jax.Array,  # bool[B, T]
) -> tuple[jax.Array, State]:  # f32[B, Q, V], state
    """Read the tokens; return the logits after the tokens `at` alone, and the state."""
    if has_read(step):
        return step.read(params, tokens, state, at, valid=valid)
    logits, state = step(params, tokens, state, valid=valid)
    return jnp.take_along_axis(logits, at[:, :, None], axis=1), state


def count_vocab(step: Step[State], params: Params, rows: int, state: State) -> int:
    """Return V, the number of logits that the step gives; nothing is computed or compiled."""
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    return shapes_of(step, params, tokens, state)[0].shape[-1]


@dataclass(frozen=True)
class ModelStep:
    """Run a `Decoder` or an `EncoderDecoder` as a step; the state is its `ModelCache`."""

    model: Decoder | EncoderDecoder
    edit: tuple[tuple[str, Edit], ...] = ()
    """Changes of places on the way, as pairs of a name and a function."""

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, ModelCache]:  # f32[B, T, V]
        return self.read(params, tokens, state, None, valid=valid)

    def read(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        at: jax.Array | None,  # i32[B, Q]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, ModelCache]:  # f32[B, Q, V]
        """Read the tokens and return the logits after the tokens `at` alone; None is all."""
        given = self.arguments(tokens, state, valid)
        result: Any = self.model.apply({"params": params}, tokens, at=at, **given)
        return result

    def arguments(
        self,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        valid: jax.Array | None,  # bool[B, T]
    ) -> dict[str, Any]:
        """Return what the model is called with beside the tokens: their positions and the cache."""
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        given: dict[str, Any] = dict(positions=next_positions(state.length, valid), cache=state)
        return given | dict(edit=dict(self.edit)) if self.edit else given

    def attend(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, 1]
        state: ModelCache,
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, ModelCache, AttentionWeights]:
        """Read one token a row; return also its weights [B, L, N, S] by slot of the cache."""
        check_one(tokens)
        given = self.arguments(tokens, state, valid)
        result: Any = self.model.apply({"params": params}, tokens, **given, method="attend")
        logits, state, weights = result
        return logits, state, by_slot(weights, state)

    def look(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, 1]
        state: ModelCache,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, ModelCache, Captured]:
        """Read one token a row; return also the captured values, without their axis of tokens."""
        check_one(tokens)
        given = self.arguments(tokens, state, valid)
        result: Any = self.model.apply({"params": params}, tokens, capture=capture, **given)
        logits, state, captured = result
        shapes = places(self.model.config)
        return logits, state, {
            name: jnp.squeeze(x, shapes[name].index("T")) if "T" in shapes[name] else x
            for name, x in captured.items()
        }  # fmt: skip

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError where a name is that of no place, or of one in the encoder."""
        found = Places.of(self.model.config, capture, NO_EDIT).capture
        for name in found:
            if name.startswith("encoder/"):
                raise ValueError(f"{name} while decoding: the source has been read before")

    def check(self, prompt: np.ndarray, state: ModelCache, total: np.ndarray) -> None:
        """Raise ValueError where a token is not in the vocabulary or the cache is too small.

        `total`, i32[B], is how many tokens each row reads from now on.
        """
        config = self.model.config
        check_tokens(prompt, config.vocab_size)
        if not isinstance(state, ModelCache):
            rule = "must be a cache, as init_cache(config, rows, capacity) makes one"
            raise ValueError(f"state is {_named(state)}: {rule}")
        rows = state.length.shape[0]
        if len(prompt) != rows:
            raise ValueError(f"prompt has {len(prompt)} rows, the cache {rows}")
        limit = room_of(config, state)
        if isinstance(config.positions, Learned):
            limit = config.max_len if limit is None else min(limit, config.max_len)
        if limit is None or isinstance(state.length, jax.core.Tracer):
            return
        longest = int((np.asarray(state.length) + total).max(initial=0))
        if longest > limit:
            raise ValueError(
                f"prompt and new tokens reach length {longest}: the limit is {limit} "
                f"(cache capacity {state.capacity}, max_len {config.max_len})"
            )
        check_pages(state, np.asarray(state.length) + total)

    def rewind(self, state: ModelCache, before: ModelCache, count: jax.Array) -> ModelCache:
        """Return the cache as if row b had read `count[b]`, i32[B], tokens since `before`."""
        return rewind_cache(state, before.length + count)

    def check_rewind(self, state: ModelCache, count: int) -> None:
        """Raise ValueError where the cache cannot take `count` tokens back.

        In a ring, a token that is taken back has overwritten the key `capacity` before it.
        """
        if state.exhausted is not None:
            return  # pages keep every position
        config, layers = self.model.config, state.layers
        limit = room_of(config, state)
        for i, window in enumerate(config.windows):
            layer: Any = layers if isinstance(layers, KVCache) else layers[i]
            capacity = layer.positions.shape[-1]
            slots = capacity - layer.sinks
            wraps = limit is None or capacity < limit
            if window is not None and wraps and slots < window + count:
                raise ValueError(
                    f"cache capacity is {capacity}: a ring from which {count} tokens may be taken "
                    f"back must have at least window + {count} = {window + count} slots"
                    f"{f' beside its {layer.sinks} sinks' if layer.sinks else ''}"
                )


def check_step(step: Any) -> None:
    """Raise ValueError where this is no step, but a model, a config or parameters."""
    name = type(step).__name__
    if isinstance(step, nn.Module):
        raise ValueError(f"step is the model {name}: must be a step, make_step(model)")
    if hasattr(step, "vocab_size"):
        raise ValueError(f"step is a {name}: must be a step, make_step(build(config))")
    if isinstance(getattr(step, "__self__", None), nn.Module) and step.__name__ == "apply":
        raise ValueError("step is the model's apply: must be a step, make_step(model)")
    if isinstance(step, type) or not callable(step):
        rule = "must be called with (params, tokens, state, valid=...), as make_step(model) is"
        raise ValueError(f"step is {_named(step)}: {rule}")


def check_params(params: Any) -> None:
    """Raise ValueError where a model's variables, or a model, stand in the place of parameters."""
    if isinstance(params, Mapping) and list(params) == ["params"]:
        raise ValueError("params is {'params': ...}: must be what is in it, variables['params']")
    if isinstance(params, nn.Module) or hasattr(params, "vocab_size") or isinstance(params, str):
        rule = "must be parameters, as init_params(config, key) are"
        raise ValueError(f"params is {_named(params)}: {rule}")


def check_state(state: Any) -> None:
    """Raise ValueError where a config, a model or a word stands in the place of a state."""
    if isinstance(state, nn.Module | str | type) or hasattr(state, "vocab_size"):
        rule = "must be a state, as init_cache(config, rows, capacity) makes one"
        raise ValueError(f"state is {_named(state)}: {rule}")


def _named(value: Any) -> str:
    """Return a number, a word or a key as it is written, of anything else its type."""
    if isinstance(value, str | int | float | type | None):
        return repr(value)
    return f"a {type(value).__name__}"


@overload
def make_step(model: Decoder | EncoderDecoder, *, edit: Mapping[str, Edit] = ...) -> ModelStep: ...
@overload
def make_step(model: RecurrentLM | RecurrentSeq2Seq) -> RecurrentStep: ...
@overload
def make_step(model: WindowLM | NgramLM) -> RecentTokensStep: ...
def make_step(
    model: Decoder | EncoderDecoder | RecurrentLM | RecurrentSeq2Seq | WindowLM | NgramLM,
    *,
    edit: Mapping[str, Edit] = NO_EDIT,
) -> ModelStep | RecurrentStep | RecentTokensStep:
    """Return the model as `step(params, tokens, state, *, valid=None) -> (logits, state)`.

    `models.init_decode_state` makes the first state. `edit` changes values inside the model for all
    that decodes with the step (`transformer_jax.places`). ValueError where the model makes no
    tokens, as an encoder or a tagger, and where an edit is of no place of its.
    """
    if edit and not isinstance(model, Decoder | EncoderDecoder):
        raise ValueError(f"edit with a {type(model).__name__}: it has no places to edit")
    if isinstance(model, RecurrentLM | RecurrentSeq2Seq):
        return RecurrentStep(model)
    if isinstance(model, WindowLM | NgramLM):
        return RecentTokensStep(model)
    if isinstance(model, RecurrentTagger):
        raise ValueError(
            "model is a RecurrentTagger: it reads from both ends, and writes no tokens"
        )
    if hasattr(model, "vocab_size") or isinstance(model, str | Mapping):
        rule = "must be a model: make_step(build(config))"
        raise ValueError(f"model is {_named(model)}: {rule}")
    if not isinstance(model, Decoder | EncoderDecoder):
        given = type(model).__name__
        raise ValueError(f"model is of type {given}: must be a decoder or an encoder-decoder")
    for name, _ in Places.of(model.config, (), edit).edit:
        if name.startswith("encoder/"):
            rule = "edit it where the source is read, in `init_cache` of the model"
            raise ValueError(f"edit of {name} in a step: {rule}")
    return ModelStep(model, tuple(edit.items()))
