"""The config of a model of any kind, and the kinds that `train.py --model` builds by name."""

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
"""A feature that not every kind of model has. adapters: LoRA; cache: keys and values of the tokens
already read; dtypes: other than float32; gradients: it is trained by steps, and not counted; masks:
a mask as an argument; muon: kernels for Muon; output_layer: hidden states and output matrix, for a
loss in chunks; plan: FLOPs and memory are counted; positions: as an argument, -1 is padding; others
take `valid`; shared_table: one table of vectors for source and target."""

PlaceShapes = dict[str, tuple[str | int, ...]]
"""The shape of each place of a model; letters are sizes of a call."""


@has_kinds
class AnyModelConfig:
    """The config of a model of any kind: all that the package may ask about a model.

    A kind of your own is a frozen dataclass of this with a `build`; `register` (`config.kinds`)
    makes it known by name. It overrides those of the values below that differ. Its module is a
    `CheckedModule` that is called as `model.apply({"params": params}, tokens, state=..., valid=...,
    at=..., key=...)` and returns the logits and the new state. One that writes tokens has an
    `as_step` (docs/howto_model.md).
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    vocab_size: int
    """V, token kinds."""
    source_vocab_size: int | None = None
    max_len: int | None = None
    """The most tokens that the model reads; None has no limit."""
    num_classes: int | None = None
    classes_of: str = "text"
    inputs: Inputs | None = None
    """The numbers that are read instead of tokens, if any."""
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
        """Whether it continues a text, reads one from both ends, or reads one and writes another.

        These are a decoder, an encoder and an encoder-decoder, whatever they are built of.
        """
        return "decoder"

    @property
    def named(self) -> str:
        """Return the name by which a user calls the kind, as `--model` takes it."""
        return kind_name(type(self))

    @property
    def pooling(self) -> str | None:
        """Return the activation of the pooler; None has no pooler."""
        return None

    @property
    def longest_row(self) -> int | None:
        """Return the most tokens of one call; None has no limit."""
        return self.max_len

    def supports(self, ability: Ability) -> bool:
        """Whether the model has a feature."""
        return ability in self.abilities

    def check_supports(
        self, ability: Ability, field: str, value: FieldValue, what: str = "transformers"
    ) -> None:
        """Raise ConfigError for a field that needs a feature that the model lacks.

        Args:
            ability: the feature.
            field: the name of the field.
            value: of the field, for the message.
            what: the models or parts of models that have the feature, for the message.
        """
        if ability not in self.abilities:
            fail(field, value, f"is for {what}, the model is {kind_name(type(self))}")

    def check_training(self, run: FieldValue) -> None:
        """Raise ConfigError if a field of the `TrainConfig` does not fit this kind of model."""

    def with_max_len(self, count: int) -> AnyModelConfig:
        """Return the same model with room for `count` tokens, if it has a limit that may change."""
        return self

    @classmethod
    def usual(cls, name: str, shape: Shape) -> Self | None:
        """Return a small model of a shape for `--model NAME`; None if this kind has none.

        Args:
            name: the one under which the kind is registered, which may have several.
            shape: the `kind` of the model.
        """
        found = cls()
        return found if found.kind == shape else None

    def build(self) -> Any:
        """Return the linen module of the config."""
        raise NotImplementedError

    def init_state(self, batch: int) -> Any:
        """Return the state of `batch` rows that have read nothing.

        The module of an encoder-decoder has an `init_state` instead, which reads the source.
        """
        raise NotImplementedError

    def places(self) -> PlaceShapes:
        """Return the shape of each place of the model (`transformer_jax.places`).

        A module captures and edits the values of all places itself; without places it is neither
        looked into nor edited.
        """
        return {}

    def count(self, documents: Any) -> tuple[AnyModelConfig, Any]:
        """Return the config and the parameters that are counted instead of trained."""
        raise NotImplementedError

    def word_vectors(self, params: Any) -> Any:
        """Return the vectors [V, D] of the tokens that are read, or None."""
        return None


def architecture_names(config: FieldValue) -> str:
    """Return the name of a config's kind as a user knows it: transformer, or lstm.

    A class has all names that it may have; a value that is no model has its own kind's.
    """
    if isinstance(config, AnyModelConfig):
        return config.named
    kind = config if isinstance(config, type) else type(config)
    names = [name for name, one in kinds_of(AnyModelConfig).items() if one is kind]
    return " or ".join(names) or ("None" if kind is type(None) else kind_name(kind))
