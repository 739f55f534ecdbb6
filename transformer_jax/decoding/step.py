"""Define what decoding knows of a model: a step from tokens and state to logits and state.

A plain function is a step. `Step` is the base class of those that offer more; `ModelStep` is that
of a transformer, and other models return their own by `as_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer_jax.cache.kv_cache import KVCache, next_positions
from transformer_jax.cache.model_cache import ModelCache, check_pages, rewind_cache, room_of
from transformer_jax.checks import check_not_consumed
from transformer_jax.config import Learned
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.batch_rows import State
from transformer_jax.models.arguments import check_one, check_tokens
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.places import (
    NO_EDIT,
    OF_SOURCE,
    Captured,
    Edit,
    Places,
    named_edits,
    places,
)
from transformer_jax.models.transformer import Decoder
from transformer_jax.programs import brings_code
from transformer_jax.tracing import traced
from transformer_jax.values import value_class

Params: TypeAlias = Any
"""A model's parameters: any pytree of arrays, whose type a step of one's own may narrow. Decoding
hands them to the step as they are."""


class Step(Generic[State]):
    """Read tokens and return the logits after each of them, and the new state.

    A step of your own overrides the call, and of the other methods those for which it has more than
    the call gives. It is hashable: equal steps share their compiled programs.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # a class with a call of its own must not take these from a base, which has other logits
        for name in ("read", "look"):
            first = next(kind for kind in cls.__mro__ if {name, "__call__"} & vars(kind).keys())
            if name not in vars(first):
                setattr(cls, name, getattr(Step, name))

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
    ) -> tuple[jax.Array, State]:  # f32[B, T, V], state
        raise NotImplementedError

    def read(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        at: jax.Array,  # i32[B, Q]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, State]:  # f32[B, Q, V], state
        """Read tokens and return the logits after some of them alone: all that a prompt needs.

        Args:
            params: the model's parameters.
            tokens: i32[B, T].
            state: of B rows.
            at: i32[B, Q], indices of tokens, 0 to T - 1.
            valid: bool[B, T], False is padding; None has none.

        Returns:
            Logits f32[B, Q, V] and the new state.
        """
        logits, state = self(params, tokens, state, valid=valid)
        # A plain call computes the logits of all tokens; a step that can do less overrides this.
        return jnp.take_along_axis(logits, at[:, :, None], axis=1), state

    def check(
        self,
        prompt: np.ndarray,  # i32[B, P]
        state: State,
        total: np.ndarray,  # i32[B]
    ) -> None:
        """Raise ValueError if the prompt, or its length with new tokens, cannot be served.

        Args:
            prompt: i32[B, P].
            state: of B rows.
            total: i32[B], tokens that a row reads, of the prompt and of its new ones.
        """

    def told(
        self, *, part: bool = False, apart: bool = False, padded: bool = False, first: int = 0
    ) -> Self:
        """Return the step for calls of which more is known; edits of the model need it.

        Args:
            part: they read a part of each sequence.
            apart: their rows have nothing to do with each other, or are none.
            padded: some rows of them are shorter than others.
            first: so many tokens of each sequence come before those that the state has read.
        """
        return self

    @property
    def reads_exactly(self) -> bool:
        """Whether a prompt must not be filled up to a longer one; this class does not mind."""
        return False

    def offers(self, name: str) -> bool:
        """Return whether the step has a `rewind`, an `attend` or a `look`: this class has none."""
        # The class is asked, not the instance: a field of a dataclass may have the same name.
        return getattr(type(self), name) is not getattr(Step, name)

    def rewind(
        self,
        state: State,
        before: State,
        count: jax.Array,  # i32[B]
    ) -> State:
        """Return the state as if each row had read fewer tokens: what saves speculation a call.

        Args:
            state: as it is now.
            before: an earlier state.
            count: i32[B]: row b has read its first `count[b]` tokens only since `before`.
        """
        raise NotImplementedError

    def check_rewind(self, state: State, count: int) -> None:
        """Raise ValueError if a state cannot take tokens back.

        Args:
            state: of B rows.
            count: how many tokens are taken back at most.
        """

    def look(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, 1]
        state: State,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, State, Captured]:  # f32[B, 1, V], state, leaves [B, ...]
        """Read one token a row and return the values of places that it passes too.

        Args:
            params: the model's parameters.
            tokens: i32[B, 1].
            state: of B rows.
            capture: names of places, as `transformer_jax.places` lists them.
            valid: bool[B, 1], False is padding; None has none.

        Returns:
            Logits f32[B, 1, V], the new state, and the values by name, [B, ...].
        """
        raise NotImplementedError

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError where a name is that of no place, or of one that it does not pass."""


StepLike: TypeAlias = Step[State] | Callable[..., tuple[jax.Array, State]]
"""The step of a public function of decoding: a `Step`, or a function with its arguments."""


@value_class
class FunctionStep(Step[State]):
    """Run a plain function as a step."""

    function: Callable[..., tuple[jax.Array, State]]

    def __call__(
        self, params: Params, tokens: jax.Array, state: State, *, valid: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        return self.function(params, tokens, state, valid=valid)


@dataclass(frozen=True)
class AppliedStep(Step[State]):
    """A flax model as a step; a subclass may call it with other arguments.

    Attributes:
        model: what `build(config)` gave, which may be edited.
    """

    model: Any  # of flax; a subclass says which

    def arguments(
        self,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        valid: jax.Array | None,  # bool[B, T]
    ) -> dict[str, object]:
        """Return the arguments of the model's call, with parameters and tokens.

        Args:
            tokens: i32[B, T].
            state: of B rows.
            valid: bool[B, T], False is padding; None has none.
        """
        return dict(state=state, valid=valid)

    def told(self, **known: Any) -> Self:
        """Return the step whose edits know what its calls read."""
        # An unedited model returns itself, so that its programs are found again.
        model = self.model.told(**known)
        return self if model is self.model else replace(self, model=model)

    @property
    def reads_exactly(self) -> bool:
        """Whether an edit is a function that does not say what it needs: it would see padding."""
        # Functions of `inside` declare their needs and skip padding; another might read it.
        # An encoder has read its source before, so its edits do not count.
        edits = [told for name, told in self.model.edits if not name.startswith("encoder/")]
        return any(not hasattr(told.function, "needs") for told in edits)

    def check(self, prompt: np.ndarray, state: State, total: np.ndarray) -> None:
        """Raise ValueError if an edit names a token that a row does not reach."""
        self.lacking(state, total)

    def lacking(self, state: State, total: jax.Array | np.ndarray) -> jax.Array | None:  # bool[B]
        """Return the rows in which an edit names a token that they do not reach.

        ValueError if there is one; None if there is none. `total`, i32[B], is how many tokens each
        row reads from now on; it, the state and the edit's tokens may be traced.
        """
        if not self.model.edits:  # then nothing is fetched from the device
            return None
        length = state.length  # type: ignore[attr-defined]
        length = length if traced(length) else np.asarray(length)
        found: jax.Array | None = None
        for name, told in self.model.edits:
            # tokens of the source are counted by themselves, and checked where the source is read
            check = getattr(told.function, "check_parts", None)
            if check and not name.startswith("encoder/") and not name.endswith(OF_SOURCE):
                rows = check(told.first + length + total)
                if rows is not None:
                    found = rows if found is None else found | rows
        return found

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        *,
        valid: jax.Array | None = None,
        **more: object,
    ) -> Any:  # logits, the new state, and what `more` makes the model return
        check_not_consumed(state)
        given = self.arguments(tokens, state, valid) | more
        return self.model.apply({"params": params}, tokens, **given)

    def read(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        at: jax.Array,
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State]:
        """Read the tokens and return the logits after the tokens `at` alone."""
        found: tuple[jax.Array, State] = self(params, tokens, state, valid=valid, at=at)
        return found

    def look(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State, Captured]:
        """Read one token a row; return, too, the captured values without their axis of tokens."""
        check_one(tokens)
        logits, state, captured = self(params, tokens, state, valid=valid, capture=capture)
        # One token was read: its axis has length 1. Not every place has an axis of tokens.
        shapes = places(self.model.config)
        return logits, state, {
            name: jnp.squeeze(x, shapes[name].index("T")) if "T" in shapes[name] else x
            for name, x in captured.items()
        }  # fmt: skip

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError where a name is that of no place, or of one in the encoder."""
        for name in Places.of(self.model.config, capture).capture:
            if name.startswith("encoder/"):
                raise ValueError(f"{name} while decoding: the source has been read before")


@dataclass(frozen=True)
class ModelStep(AppliedStep[ModelCache]):
    """Run a `Decoder` or an `EncoderDecoder` as a step; the state is its `ModelCache`.

    Attributes:
        model: what `build(config)` gave.
    """

    model: Decoder | EncoderDecoder

    def arguments(
        self, tokens: jax.Array, state: ModelCache, valid: jax.Array | None
    ) -> dict[str, object]:
        """Return the cache, and the positions after what it holds."""
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        # Padding gets position -1, which the cache neither stores nor sees.
        return dict(positions=next_positions(state.length, valid), cache=state)

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
        self.lacking(state, total)
        limit = room_of(config, state)
        # A ring has no limit of its own, but a table of learned positions ends.
        if isinstance(config.positions, Learned):
            limit = config.max_len if limit is None else min(limit, config.max_len)
        # Under a trace a row that outgrows its cache becomes NaN instead.
        if limit is None or isinstance(state.length, jax.core.Tracer):
            return
        longest = int((np.asarray(state.length) + total).max(initial=0))
        if longest > limit:
            raise ValueError(
                f"prompt and new tokens reach length {longest}: the limit is {limit} "
                f"(cache capacity {state.capacity}, max_len {config.max_len})"
            )
        if state.exhausted is not None:
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
        # Layers may differ: one with a window may be a ring next to one that keeps everything.
        for i, window in enumerate(config.windows):
            layer = layers if isinstance(layers, KVCache) else layers[i]
            assert isinstance(layer, KVCache)
            capacity = layer.positions.shape[-1]
            slots = capacity - layer.sinks
            wraps = limit is None or capacity < limit
            if window is not None and wraps and slots < window + count:
                raise ValueError(
                    f"cache capacity is {capacity}: a ring from which {count} tokens may be taken "
                    f"back must have at least window + {count} = {window + count} slots"
                    f"{f' beside its {layer.sinks} sinks' if layer.sinks else ''}"
                )


def count_vocab(step: Step[State], params: Params, rows: int, state: State) -> int:
    """Return V, the number of logits that the step gives; nothing is computed or compiled."""
    # Only shapes are traced: nothing is computed or compiled.
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    if brings_code(step):  # or `eval_shape` would recall what its code read before
        return jax.eval_shape(lambda *args: step(*args), params, tokens, state)[0].shape[-1]
    return jax.eval_shape(step, params, tokens, state)[0].shape[-1]


def as_step(step: StepLike[State], params: object = None, state: object = None) -> Step[State]:
    """Return a step as it is, or made of a function.

    ValueError if the step is a model or a config, or one of them is passed as the step's
    parameters or state.
    """
    name = type(step).__name__
    found: Step[State]
    if isinstance(step, nn.Module):
        raise ValueError(f"step is the model {name}: must be a step, make_step(model)")
    if isinstance(step, Step):
        found = step
    elif hasattr(step, "vocab_size"):
        raise ValueError(f"step is a {name}: must be a step, make_step(build(config))")
    elif isinstance(getattr(step, "__self__", None), nn.Module) and step.__name__ == "apply":
        raise ValueError("step is the model's apply: must be a step, make_step(model)")
    elif isinstance(step, type) or not callable(step):
        rule = "must be called with (params, tokens, state, valid=...), as make_step(model) is"
        raise ValueError(f"step is {_named(step)}: {rule}")
    else:
        for more in ("read", "check", "rewind", "look"):
            if callable(getattr(type(step), more, None)):  # a method; a field may have any name
                rule = "make it a subclass of transformer_jax.decoding.Step"
                raise ValueError(
                    f"step is a {name} with `{more}`, which a function has not: {rule}"
                )
        found = FunctionStep(step)
    if isinstance(params, Mapping) and list(params) == ["params"]:
        raise ValueError("params is {'params': ...}: must be what is in it, variables['params']")
    if isinstance(params, nn.Module) or hasattr(params, "vocab_size") or isinstance(params, str):
        rule = "must be parameters, as init_params(config, key) are"
        raise ValueError(f"params is {_named(params)}: {rule}")
    if isinstance(state, nn.Module | str | type) or hasattr(state, "vocab_size"):
        rule = "must be a state, as init_cache(config, rows, capacity) makes one"
        raise ValueError(f"state is {_named(state)}: {rule}")
    check_not_consumed(state)
    return found


def _named(value: object) -> str:
    """Return a number, a word or a key as it is written, of anything else its type."""
    if isinstance(value, str | int | float | type | None):
        return repr(value)
    return f"a {type(value).__name__}"


@overload
def make_step(model: Decoder | EncoderDecoder, *, edit: Mapping[str, Edit] = ...) -> ModelStep: ...
@overload
def make_step(model: nn.Module, *, edit: Mapping[str, Edit] = ...) -> AppliedStep[Any]: ...
@known_keywords
def make_step(model: nn.Module, *, edit: Mapping[str, Edit] = NO_EDIT) -> AppliedStep[Any]:
    """Return the model as `step(params, tokens, state, *, valid=None) -> (logits, state)`.

    `init_decode_state` makes the first state. A step with an edit is that of the edited model.

    Args:
        model: what `build(config)` gave, of a model that writes tokens. A module of your own has
            an `as_step()`, which returns its `AppliedStep`.
        edit: functions by the names of places, as in `model.edited`.

    Returns:
        A hashable step, which gives logits f32[B, T, V] of tokens i32[B, T] and valid bool[B, T].

    Raises:
        ValueError: if the model writes no tokens, as an encoder or a tagger, or an edit is of no
            place of its decoder.
    """
    if hasattr(model, "vocab_size") or isinstance(model, str | Mapping):
        rule = "must be a model: make_step(build(config))"
        raise ValueError(f"model is {_named(model)}: {rule}")
    own: Any = model
    if not isinstance(model, Decoder | EncoderDecoder) and not hasattr(model, "as_step"):
        given = type(model).__name__
        raise ValueError(f"model is of type {given}: must be a decoder or an encoder-decoder")
    for name, _ in named_edits(own.config, edit):
        if name.startswith("encoder/"):
            rule = "edit it where the source is read, in `init_cache` of the model"
            raise ValueError(f"edit of {name} in a step: {rule}")
    own = own.edited(edit) if edit else own
    return ModelStep(own) if isinstance(model, Decoder | EncoderDecoder) else own.as_step()
