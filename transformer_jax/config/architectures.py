"""Base class of model configs, with the features and defaults of all kinds of models."""

from __future__ import annotations

from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from transformer_jax.config.experts import Experts
from transformer_jax.config.fields import FieldValue, check_types, fail
from transformer_jax.config.inputs import Inputs
from transformer_jax.config.kinds import has_kinds, kind_name, kinds_of

Shape = Literal["decoder", "encoder", "encoder-decoder"]

Ability = Literal[
    "adapters", "cache", "dropout", "dtypes", "gradients", "masks", "mesh", "muon", "output_layer",
    "plan", "positions", "preference", "shared_table",
]  # fmt: skip
"""A feature that not every kind of model has. adapters: LoRA. cache: keys and values of earlier
tokens. dtypes: dtypes other than float32. gradients: trained by steps instead of counted. masks: a
mask argument. muon: kernels for Muon. output_layer: hidden states and output matrix, for a loss in
chunks. plan: estimates of FLOPs and memory. positions: a `positions` argument in which -1 is
padding, instead of `valid`. shared_table: one embedding table for source and target."""

PlaceShapes = dict[str, tuple[str | int, ...]]
"""Shape of each place of a model. Letters are sizes that depend on the call."""


@has_kinds
class AnyModelConfig:
    """Base class of model configs.

    To add a kind of model, subclass this as a frozen dataclass with a `build`, override the members
    below that differ, and register its name with `register` (`config.kinds`). Its module is a
    `CheckedModule` that is called as `model.apply({"params": params}, tokens, state=..., valid=...,
    at=..., key=...)` and returns the logits and the new state. A model that generates tokens has an
    `as_step` (docs/howto_model.md).
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    vocab_size: int
    """Size of the vocabulary (V)."""
    source_vocab_size: int | None = None
    max_len: int | None = None
    """Maximum number of tokens; None has no limit."""
    num_classes: int | None = None
    classes_of: str = "text"
    inputs: Inputs | None = None
    """Numbers that the model reads instead of tokens, if any."""
    experts: Experts | None = None
    window: int | tuple[int | None, ...] | None = None
    scan_layers: bool = False
    logit_softcap: float | None = None
    masked_token_head: bool = False
    abilities: ClassVar[frozenset[Ability]] = frozenset({"dropout", "gradients"})

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def kind(self) -> Shape:
        """Return the shape of the model, regardless of its layers.

        A decoder continues a text, an encoder reads one in both directions, and an encoder-decoder
        reads one text and writes another.
        """
        return "decoder"

    @property
    def named(self) -> str:
        """Return the name of this kind for `--model`."""
        return kind_name(type(self))

    @property
    def pooling(self) -> str | None:
        """Return the activation of the pooler, or None if there is no pooler."""
        return None

    @property
    def longest_row(self) -> int | None:
        """Return the maximum number of tokens in one call; None has no limit."""
        return self.max_len

    def supports(self, ability: Ability) -> bool:
        """Whether the model has a feature."""
        return ability in self.abilities

    def check_supports(
        self, ability: Ability, field: str, value: FieldValue, what: str = "transformers"
    ) -> None:
        """Raise ConfigError if the model lacks a feature that a field needs.

        Args:
            ability: the feature.
            field: the name of the field.
            value: the value of the field, for the message.
            what: the models or parts that have the feature, for the message.
        """
        if ability not in self.abilities:
            fail(field, value, f"is for {what}, but the model is {kind_name(type(self))}")

    def check_training(self, run: FieldValue) -> None:
        """Raise ConfigError if a field of the `TrainConfig` does not fit this kind of model."""

    def with_max_len(self, count: int) -> AnyModelConfig:
        """Return the model with room for `count` tokens, unless it has no limit or a fixed one."""
        return self

    @classmethod
    def usual(cls, name: str, shape: Shape) -> Self | None:
        """Return a small model for `--model NAME`, or None if this kind has no model of the shape.

        Args:
            name: the registered name; a kind may have several.
            shape: the `kind` of the model.
        """
        config = cls()
        return config if config.kind == shape else None

    def build(self) -> Any:
        """Return the linen module of the config."""
        raise NotImplementedError

    def init_state(self, batch: int) -> Any:
        """Return the state of `batch` rows before the first token.

        The module of an encoder-decoder has this method instead, because it reads the source.
        """
        raise NotImplementedError

    def places(self) -> PlaceShapes:
        """Return the shape of each place of the model (`transformer_jax.places`).

        The module must capture and edit the values of all places. A model without places cannot be
        inspected or edited.
        """
        return {}

    def count(self, documents: Any) -> tuple[AnyModelConfig, Any]:
        """Return a config and parameters, counted from the documents instead of trained."""
        raise NotImplementedError

    def word_vectors(self, params: Any) -> Any:
        """Return the input embeddings [V, D], or None."""
        return None


def architecture_names(config: FieldValue) -> str:
    """Return the user-facing name of a config's kind, such as "transformer" or "lstm".

    For a class, return all of its names; for any other value, the name of its type.
    """
    if isinstance(config, AnyModelConfig):
        return config.named
    kind = config if isinstance(config, type) else type(config)
    names = [name for name, one in kinds_of(AnyModelConfig).items() if one is kind]
    return " or ".join(names) or ("None" if kind is type(None) else kind_name(kind))
