"""Say which models can be looked into here, and run them with what a tool does not set itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax

from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.places import Captured, Edit, Places
from transformer_jax.models.transformer import Decoder, Encoder
from transformer_jax.pytree import Params

Transformer: TypeAlias = Decoder | Encoder | EncoderDecoder
"""The models with blocks and logits."""


def check_model(
    tool: str, model: Transformer, arguments: Mapping[str, Any], sets: str = ""
) -> None:
    """Raise ValueError unless a model has blocks and logits, and no argument is the tool's own.

    `key` would turn dropout on, and `sets` names more arguments that the tool sets.
    """
    if not isinstance(model, Decoder | Encoder | EncoderDecoder):
        rule = "must be a Decoder, Encoder or EncoderDecoder, as build(config) makes"
        raise ValueError(f"{tool} of a {type(model).__name__}: {rule}")
    if not model.config.has_logits:
        name = "embedding_dim" if model.config.inputs is None else "inputs"
        given = getattr(model.config, name)
        raise ValueError(f"{tool}: {name} is {given!r}: such an encoder has no logits")
    for name in ("key", "method", "cache", "at", *sets.split()):
        if name in arguments:
            raise ValueError(f"{tool} takes no {name}: it reads whole prompts, without dropout")


def known_places(model: Transformer, names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the places of names that may hold `*`; ValueError for one that is none."""
    return Places.of(model.config, (names,) if isinstance(names, str) else names, {}).capture


def refuse_edits(tool: str, model: Transformer, edit: Mapping[str, Edit], *names: str) -> None:
    """Raise ValueError where an edit is of a place that the tool computes by itself."""
    for name, _ in Places.of(model, (), edit).edit:
        if name in names:
            raise ValueError(f"{tool} with an edit of {name}: it computes {name} by itself")


def run(
    model: Transformer,
    params: Params,
    arguments: Mapping[str, Any],
    tokens: jax.Array,  # i32[B, T]
    *,
    capture: Iterable[str] = (),
    **asked: Any,
) -> tuple[jax.Array, Captured]:
    """Return the logits of a model, f32[B, T, V], and what is captured."""
    given = {**arguments, **asked, "capture": tuple(capture)}
    found: Any = model.apply({"params": params}, tokens, **given)
    return found[0], found[2] if given["capture"] else {}
