"""Steps, the interface of a model in decoding: (params, tokens, state) -> (logits, state).

A plain function is a step. `Step` is the base class of steps with more methods. `ModelStep` runs a
transformer, and other models return their own step from `as_step`. The server's `--steps` flag and
`Batcher.steps` specify a number of tokens per turn, because each token requires one call of the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeAlias, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer_jax.cache.kv_cache import next_positions
from transformer_jax.cache.model_cache import (
    ModelCache,
    check_pages,
    max_positions,
    rewind_cache,
)
from transformer_jax.cache.state_cache import StateCache
from transformer_jax.checks import check_not_consumed
from transformer_jax.config import Learned
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.batch_rows import State
from transformer_jax.models.arguments import check_one, check_tokens
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.places import (
    OF_SOURCE,
    Captured,
    Places,
    places,
)
from transformer_jax.models.transformer import Decoder
from transformer_jax.programs import brings_code
from transformer_jax.tracing import traced
from transformer_jax.values import value_class

Params: TypeAlias = Any
"""Parameters of a model: any pytree of arrays, which is passed to the step unchanged."""


class Step(Generic[State]):
    """Base class of steps, which read tokens and return the logits after each token.

    Calling a step also returns the new state. Your own step overrides `__call__`, and other methods
    if it can improve on the defaults. It must be hashable, because equal steps share their compiled
    programs.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A class that overrides `__call__` must not inherit `read` and `look` from a base class,
        # because those return different logits.
        for name in ("read", "look"):
            first = next(kind for kind in cls.__mro__ if {name, "__call__"} & vars(kind).keys())
            if name not in vars(first):
                setattr(cls, name, getattr(Step, name))

    @property
    def invariant(self) -> bool:
        """Whether the log-probabilities of a row must have the same bits for any other rows."""
        return False

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False means padding
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
        """Read tokens and return the logits after some of them. This is sufficient for a prompt.

        Args:
            params: the model's parameters.
            tokens: i32[B, T], the token IDs.
            state: the state to continue, with B rows.
            at: i32[B, Q], the indices of the tokens, from 0 to T - 1.
            valid: bool[B, T]; False means padding. None means no padding.

        Returns:
            The logits f32[B, Q, V], and the new state.
        """
        logits, state = self(params, tokens, state, valid=valid)
        # This method computes the logits of all tokens. Override it if the step can compute fewer.
        return jnp.take_along_axis(logits, at[:, :, None], axis=1), state

    def check(
        self,
        prompt: np.ndarray,  # i32[B, P]
        state: State,
        total: np.ndarray,  # i32[B]
    ) -> None:
        """Raise ValueError if the step does not support the prompt or the total length.

        Args:
            prompt: i32[B, P], the token IDs of the prompts.
            state: the state to continue, with B rows.
            total: i32[B], the number of tokens that each row reads, including new tokens.
        """

    def with_facts(
        self, *, part: bool = False, apart: bool = False, padded: bool = False, first: int = 0
    ) -> Self:
        """Return the step for calls with these properties, which edits of the model may need.

        Args:
            part: whether the calls read only a part of each sequence.
            apart: whether the rows are unrelated to each other or unused.
            padded: whether some rows are shorter than others.
            first: the number of tokens of each sequence before those that the state has read.
        """
        return self

    @property
    def needs_unpadded(self) -> bool:
        """Whether the model rejects padded prompts; False by default."""
        return False

    def implements(self, name: str) -> bool:
        """Whether a subclass implements the method `name`, such as "rewind" or "look"."""
        # Check the class, because a dataclass field of the instance may have the same name.
        return getattr(type(self), name) is not getattr(Step, name)

    def rewind(
        self,
        state: State,
        before: State,
        count: jax.Array,  # i32[B]
    ) -> State:
        """Return the state as if each row had read fewer tokens.

        With this method, speculative decoding does not need a second call.

        Args:
            state: the current state.
            before: an earlier state.
            count: i32[B], the number of tokens after `before` to keep in each row.
        """
        raise NotImplementedError

    def check_rewind(self, state: State, count: int) -> None:
        """Raise ValueError if a state cannot be rewound. By default, every state is accepted.

        Args:
            state: a state with B rows.
            count: the maximum number of tokens to rewind.
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
        """Read one token per row and also return the values at some places inside the model.

        Args:
            params: the model's parameters.
            tokens: i32[B, 1], the token IDs.
            state: the state to continue, with B rows.
            capture: names of places, as listed by `transformer_jax.places`.
            valid: bool[B, 1]; False means padding. None means no padding.

        Returns:
            The logits f32[B, 1, V], the new state, and a dict of the captured values, [B, ...].
        """
        raise NotImplementedError

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError if `look` cannot capture one of these places."""


StepLike: TypeAlias = Step[State] | Callable[..., tuple[jax.Array, State]]
"""A `Step`, or a function with the arguments of `Step.__call__`."""


@value_class
class FunctionStep(Step[State]):
    """Step that calls a plain function."""

    function: Callable[..., tuple[jax.Array, State]]

    def __call__(
        self, params: Params, tokens: jax.Array, state: State, *, valid: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        return self.function(params, tokens, state, valid=valid)


@dataclass(frozen=True)
class AppliedStep(Step[State]):
    """Step that calls a flax model. A subclass may pass different arguments to the model.

    Attributes:
        model: the result of `build(config)`, which may be edited.
    """

    model: Any  # a flax module; subclasses narrow the type

    @property
    def invariant(self) -> bool:
        """Whether the model's config promises the same bits for any other rows."""
        return getattr(getattr(self.model, "config", None), "invariant", False)

    def arguments(
        self,
        tokens: jax.Array,  # i32[B, T]
        state: State,
        valid: jax.Array | None,  # bool[B, T]
    ) -> dict[str, object]:
        """Return the arguments for calling the model, except the parameters and tokens.

        Args:
            tokens: i32[B, T], the token IDs.
            state: the state to continue, with B rows.
            valid: bool[B, T]; False means padding. None means no padding.
        """
        return dict(state=state, valid=valid)

    def with_facts(self, **properties: Any) -> Self:
        """Return the step with edits that store these properties of its calls."""
        # A model without edits returns itself, so its compiled programs are reused.
        model = self.model.with_facts(**properties)
        return self if model is self.model else replace(self, model=model)

    @property
    def needs_unpadded(self) -> bool:
        """Whether prompts must not be padded, because a custom edit would see the padding."""
        # Edits from `interpret` declare their needs and skip padding. Other functions may read
        # padding. The encoder has already read its source, so its edits do not matter.
        edits = [edit for name, edit in self.model.edits if not name.startswith("encoder/")]
        return any(not hasattr(edit.function, "needs") for edit in edits)

    def check(self, prompt: np.ndarray, state: State, total: np.ndarray) -> None:
        """Raise ValueError if an edit refers to a token past the end of a row."""
        self.too_short(state, total)

    def too_short(self, state: State, total: jax.Array | np.ndarray) -> jax.Array | None:  # bool[B]
        """Return a mask of the rows that are too short for an edit that refers to a token.

        Raise ValueError if concrete values contain such a row and return None if no mask is
        needed. `total`, i32[B], is the number of tokens that each row will read, and may be traced.
        """
        if not self.model.edits:  # avoids a transfer from the device
            return None
        length = state.length  # type: ignore[attr-defined]
        length = length if traced(length) else np.asarray(length)
        too_short: jax.Array | None = None
        for name, edit in self.model.edits:
            # The tokens of the source are counted separately and checked when the source is read.
            check = getattr(edit.function, "check_parts", None)
            if check and not name.startswith("encoder/") and not name.endswith(OF_SOURCE):
                rows = check(edit.first + length + total)
                if rows is not None:
                    too_short = rows if too_short is None else too_short | rows
        return too_short

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        *,
        valid: jax.Array | None = None,
        **more: object,
    ) -> Any:  # logits, the new state, and other results that `more` requests
        check_not_consumed(state)
        arguments = self.arguments(tokens, state, valid) | more
        return self.model.apply({"params": params}, tokens, **arguments)

    def read(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        at: jax.Array,
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State]:
        """Read the tokens and return only the logits after the tokens at indices `at`."""
        result: tuple[jax.Array, State] = self(params, tokens, state, valid=valid, at=at)
        return result

    def look(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State, Captured]:
        """Read one token per row and also return the captured values without their token axis."""
        check_one(tokens)
        logits, state, captured = self(params, tokens, state, valid=valid, capture=capture)
        # The token axis has length 1. Not every place has a token axis.
        shapes = places(self.model.config)
        return logits, state, {
            name: jnp.squeeze(x, shapes[name].index("T")) if "T" in shapes[name] else x
            for name, x in captured.items()
        }  # fmt: skip

    def check_look(self, capture: tuple[str, ...]) -> None:
        """Raise ValueError if a place does not exist, or if it is in the encoder."""
        for name in Places.of(self.model.config, capture).capture:
            if name.startswith("encoder/"):
                raise ValueError(
                    f"capture contains {name}: decoding does not run the encoder; "
                    "capture it where the source is read"
                )


@dataclass(frozen=True)
class ModelStep(AppliedStep[ModelCache]):
    """Step that calls a `Decoder` or an `EncoderDecoder`, with a `ModelCache` as its state.

    Attributes:
        model: the result of `build(config)`.
    """

    model: Decoder | EncoderDecoder

    def arguments(
        self, tokens: jax.Array, state: ModelCache, valid: jax.Array | None
    ) -> dict[str, object]:
        """Return the cache and the positions of the new tokens."""
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        # Padding has position -1, which the cache ignores.
        return dict(positions=next_positions(state.length, valid), cache=state)

    def check(self, prompt: np.ndarray, state: ModelCache, total: np.ndarray) -> None:
        """Raise ValueError if a token is outside the vocabulary, or if the cache is too small.

        `total`, i32[B], is the number of tokens that each row will read.
        """
        config = self.model.config
        check_tokens(prompt, config.vocab_size)
        if not isinstance(state, ModelCache):
            rule = "must be a cache, such as init_cache(config, rows, capacity)"
            raise ValueError(f"state is {_brief(state)}: {rule}")
        rows = state.length.shape[0]
        if len(prompt) != rows:
            raise ValueError(f"prompt has {len(prompt)} rows, but the cache has {rows}")
        self.too_short(state, total)
        limit = max_positions(config, state)
        # A ring has no limit, but a table of learned positions has one.
        if isinstance(config.positions, Learned):
            limit = config.max_len if limit is None else min(limit, config.max_len)
        # Inside a trace, a row that exceeds its cache becomes NaN instead.
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
        """Return the cache as if row b had read only `count[b]` tokens since `before`."""
        return rewind_cache(state, before.length + count)

    def check_rewind(self, state: ModelCache, count: int) -> None:
        """Raise ValueError if the cache cannot be rewound by `count` tokens.

        Pages, and layers with a slot for every position, can always be rewound. A ring needs
        `count` slots in addition to its window and sinks, because rewound tokens have overwritten
        keys. A layer with a state needs a cache with `slack` of at least `count`.
        """
        if state.exhausted is not None:
            return  # pages store every position
        config, layers = self.model.config, cast(Any, state.layers)
        limit = max_positions(config, state)
        # Layers may differ: some layers with a window may be rings, but other layers store all
        # positions.
        for i, layer in enumerate((layers,) if state.is_scanned else layers):
            if isinstance(layer, StateCache):
                if layer.slack < count:
                    rule = f"must be at least {count}, the number of tokens to rewind: init_cache"
                    raise ValueError(
                        f"cache of a layer with a state has slack {layer.slack}: {rule}(.., "
                        f"slack={count})"
                    )
                continue
            window = config.windows[i % len(config.windows)]
            capacity = layer.positions.shape[-1]
            slots = capacity - layer.sinks
            wraps = limit is None or capacity < limit
            if window is not None and wraps and slots < window + count:
                raise ValueError(
                    f"cache capacity is {capacity}: a ring that can be rewound by {count} tokens "
                    f"must have at least window + {count} = {window + count} slots"
                    f"{f' in addition to its {layer.sinks} sinks' if layer.sinks else ''}"
                )


def count_vocab(step: Step[State], params: Params, rows: int, state: State) -> int:
    """Return the vocabulary size of a step, determined from abstract shapes without compiling."""
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    if brings_code(step):  # use a new lambda, because `eval_shape` caches traces of user code
        return jax.eval_shape(lambda *args: step(*args), params, tokens, state)[0].shape[-1]
    return jax.eval_shape(step, params, tokens, state)[0].shape[-1]


def as_step(step: StepLike[State], params: object = None, state: object = None) -> Step[State]:
    """Return the step, which is wrapped in `FunctionStep` if it is a function.

    Raise ValueError if an argument has the wrong type, for example if it is a model or a config.
    """
    name = type(step).__name__
    result: Step[State]
    if isinstance(step, nn.Module):
        raise ValueError(f"step is the model {name}: must be a step, such as make_step(model)")
    if isinstance(step, Step):
        result = step
    elif hasattr(step, "vocab_size"):
        raise ValueError(
            f"step is of type {name}: must be a step, such as make_step(build(config))"
        )
    elif isinstance(getattr(step, "__self__", None), nn.Module) and step.__name__ == "apply":
        raise ValueError("step is the model's apply: must be a step, such as make_step(model)")
    elif isinstance(step, type) or not callable(step):
        rule = "must be callable with (params, tokens, state, valid=...), such as make_step(model)"
        raise ValueError(f"step is {_brief(step)}: {rule}")
    else:
        for method in ("read", "check", "rewind", "look"):
            if callable(getattr(type(step), method, None)):  # an instance field may have any name
                rule = "make it a subclass of transformer_jax.decoding.Step"
                raise ValueError(
                    f"step is of type {name} with `{method}`, which would not be called: {rule}"
                )
        result = FunctionStep(step)
    if isinstance(params, Mapping) and list(params) == ["params"]:
        raise ValueError("params is {'params': ...}: must be the inner dict, variables['params']")
    if isinstance(params, nn.Module) or hasattr(params, "vocab_size") or isinstance(params, str):
        rule = "must be parameters, such as init_params(config, key)"
        raise ValueError(f"params is {_brief(params)}: {rule}")
    if isinstance(state, nn.Module | str | type) or hasattr(state, "vocab_size"):
        rule = "must be a state, such as init_cache(config, rows, capacity)"
        raise ValueError(f"state is {_brief(state)}: {rule}")
    check_not_consumed(state)
    return result


def _brief(value: object) -> str:
    """Return the repr of a number, string or type, or the type name of anything else."""
    if isinstance(value, str | int | float | type | None):
        return repr(value)
    return f"of type {type(value).__name__}"


@overload
def make_step(model: Decoder | EncoderDecoder) -> ModelStep: ...
@overload
def make_step(model: nn.Module) -> AppliedStep[Any]: ...
@known_keywords
def make_step(model: nn.Module) -> AppliedStep[Any]:
    """Return the model as `step(params, tokens, state, *, valid=None) -> (logits, state)`.

    Create the initial state with `init_decode_state`.

    Args:
        model: the result of `build(config)` for a model that generates tokens, or your own module
            with an `as_step()` method that returns an `AppliedStep`.

    Returns:
        A hashable step that maps tokens i32[B, T] and valid bool[B, T] to logits f32[B, T, V].

    Raises:
        ValueError: If the model does not generate tokens, such as an encoder or a tagger.
    """
    if hasattr(model, "vocab_size") or isinstance(model, str | Mapping):
        rule = "must be a model: make_step(build(config))"
        raise ValueError(f"model is {_brief(model)}: {rule}")
    if not isinstance(model, Decoder | EncoderDecoder) and not hasattr(model, "as_step"):
        name = type(model).__name__
        raise ValueError(f"model is of type {name}: must be a decoder or an encoder-decoder")
    if isinstance(model, Decoder | EncoderDecoder):
        return ModelStep(model)
    step: AppliedStep[Any] = model.as_step()
    return step
