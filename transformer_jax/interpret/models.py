"""Checks and the forward pass shared by the interpretability tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax

from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.places import Captured, Places
from transformer_jax.models.transformer import Decoder, Encoder
from transformer_jax.pytree import Params

Transformer: TypeAlias = Decoder | Encoder | EncoderDecoder
"""Classes of models with blocks and logits."""


def check_model(
    tool: str, model: Transformer, arguments: Mapping[str, Any], sets: str = ""
) -> None:
    """Raise ValueError unless the model has blocks and logits and all arguments are allowed.

    `sets` contains the names of arguments that the tool sets itself. `key` is not allowed, because
    it would enable dropout.
    """
    if not isinstance(model, Decoder | Encoder | EncoderDecoder):
        rule = "must be a Decoder, Encoder or EncoderDecoder, as build(config) returns"
        raise ValueError(f"{tool} received a model of type {type(model).__name__}: {rule}")
    if not model.config.has_logits:
        name = "embedding_dim" if model.config.inputs is None else "inputs"
        value = getattr(model.config, name)
        raise ValueError(f"{tool}: {name} is {value!r}: such an encoder has no logits")
    for name in ("key", "method", "cache", "at", *sets.split()):
        if name in arguments:
            raise ValueError(
                f"{tool} does not accept {name}: it reads whole prompts, without dropout"
            )


def resolve_places(model: Transformer, names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the places that match names or `*` patterns; raise ValueError if one has no match."""
    return Places.of(model.config, (names,) if isinstance(names, str) else names).capture


def refuse_edits(tool: str, model: Transformer, *names: str) -> None:
    """Raise ValueError if the model edits a place that the tool computes itself."""
    for name, _ in model.edits:
        if name in names:
            raise ValueError(f"{tool} does not accept an edit of {name}, which it computes itself")


def run(
    model: Transformer,
    params: Params,
    arguments: Mapping[str, Any],
    tokens: jax.Array,  # i32[B, T]
    *,
    capture: Iterable[str] = (),
    **more: Any,
) -> tuple[jax.Array, Captured]:
    """Run a model and return its logits, f32[B, T, V], and the captured values."""
    places = tuple(capture)
    out: Any = model.apply({"params": params}, tokens, **{**arguments, **more, "capture": places})
    return out[0], out[2] if places else {}
