"""Base class of model configs, with the features and defaults that all kinds of models share."""

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
"""Feature that not every kind of model has. adapters: LoRA. cache: keys and values of earlier
tokens. dtypes: dtypes other than float32. gradients: training by gradient steps instead of
counting. masks: a mask argument. muon: kernels for Muon. output_layer: hidden states and an output
matrix, for a loss computed in chunks. plan: estimates of FLOPs and memory. positions: a `positions`
argument in which -1 is padding, instead of `valid`. shared_table: one embedding table for source
and target."""

PlaceShapes = dict[str, tuple[str | int, ...]]
"""Shape of the value at each place of a model. A letter is a size that depends on the call."""


@has_kinds
class AnyModelConfig:
    """Base class of model configs.

    To add a kind of model, write a subclass that is a frozen dataclass and has a `build` method.
    Override the members below that differ, and register the name of the kind with `register`
    (`config.kinds`). `build` returns a `CheckedModule`, which is called as `model.apply({"params":
    params}, tokens, state=..., valid=..., at=..., key=...)` and returns the logits and the new
    state. A model that generates tokens needs an `as_step` method (docs/howto_model.md).
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    vocab_size: int
    """Vocabulary size (V)."""
    source_vocab_size: int | None = None
    max_len: int | None = None
    """Maximum number of tokens. None means no limit."""
    num_classes: int | None = None
    classes_of: str = "text"
    inputs: Inputs | None = None
    """Inputs that the model reads instead of tokens, if any."""
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
        """Return the shape of the model, which is independent of its layers.

        A decoder continues text, an encoder reads text in both directions, and an encoder-decoder
        reads one text and writes another.
        """
        return "decoder"

    @property
    def named(self) -> str:
        """Return the name of this kind of model, as used in `--model`."""
        return kind_name(type(self))

    @property
    def pooling(self) -> str | None:
        """Return the activation of the pooler, or None if the model has no pooler."""
        return None

    @property
    def longest_row(self) -> int | None:
        """Return the maximum number of tokens in one call, or None if there is no limit."""
        return self.max_len

    def supports(self, ability: Ability) -> bool:
        """Whether the model has a feature."""
        return ability in self.abilities

    def check_supports(
        self, ability: Ability, field: str, value: FieldValue, what: str = "transformers"
    ) -> None:
        """Raise ConfigError if the model lacks a feature that a field requires.

        Args:
            ability: the required feature.
            field: the name of the field, for the message.
            value: the value of the field, for the message.
            what: the models or parts that have the feature, for the message.
        """
        if not self.supports(ability):
            fail(
                field,
                value,
                f"is supported only by {what}, but the model is {kind_name(type(self))}",
            )

    def check_training(self, run: FieldValue) -> None:
        """Raise ConfigError if this kind of model does not support a field of a `TrainConfig`."""

    def with_max_len(self, count: int) -> AnyModelConfig:
        """Return the config with `count` as its token limit, unless it has none or a fixed one."""
        return self

    @classmethod
    def usual(cls, name: str, shape: Shape) -> Self | None:
        """Return a small model for `--model NAME`, or None if this kind does not support the shape.

        Args:
            name: the registered name. A kind may have several names.
            shape: the shape of the model, as in `kind`.
        """
        config = cls()
        return config if config.kind == shape else None

    def build(self) -> Any:
        """Return the linen module that the config describes."""
        raise NotImplementedError

    def init_state(self, batch: int) -> Any:
        """Return the initial state for `batch` rows, before the first token.

        In an encoder-decoder, the module has this method instead, because it reads the source.
        """
        raise NotImplementedError

    def places(self) -> PlaceShapes:
        """Return the shape of the value at each place of the model (`transformer_jax.places`).

        The module must be able to capture and edit the values at all places. A model without places
        cannot be inspected or edited.
        """
        return {}

    def count(self, documents: Any) -> tuple[AnyModelConfig, Any]:
        """Return a config and parameters that are counted from documents instead of trained."""
        raise NotImplementedError

    def word_vectors(self, params: Any) -> Any:
        """Return the input embeddings, [V, D], or None if there are none."""
        return None


def architecture_names(config: FieldValue) -> str:
    """Return the user-facing name of a kind of config, such as "transformer" or "lstm".

    If `config` is a class, return all of its names. If it is any other value, return the name of
    its type.
    """
    if isinstance(config, AnyModelConfig):
        return config.named
    kind = config if isinstance(config, type) else type(config)
    names = [name for name, one in kinds_of(AnyModelConfig).items() if one is kind]
    return " or ".join(names) or ("None" if kind is type(None) else kind_name(kind))
