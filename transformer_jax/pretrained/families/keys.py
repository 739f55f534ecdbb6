"""Keys of config.json, whose entries define both how a key is read and how it is written.

A family lists its entries. `Key` maps a key to one field of `ModelConfig`, `Flag` chooses between
fields, `Fixed` contains the constant fields of the family, and `Code` is a pair of functions for
other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from transformer_jax.config import (
    Activation,
    ConfigError,
    Experts,
    GatedDelta,
    LatentAttention,
    ModelConfig,
    ShortConv,
)
from transformer_jax.config.fields import fail
from transformer_jax.pretrained.families.other_keys import aliases, other_keys
from transformer_jax.untrusted_files import MISSING, JsonObject, ObjectKeys, shown

Fields: TypeAlias = dict[str, Any]
"""Fields of a ModelConfig, keyed by name. The config validates their values."""
JsonValue: TypeAlias = Any
"""Value in a JSON file. Readers check its type."""
Value = TypeVar("Value")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "relu_squared", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Names of activations in published files. Several names may refer to the same function."""
ACTIVATION_KEYS: dict[Activation, str] = {
    "gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu_squared": "relu2", "silu": "silu",
}  # fmt: skip
"""Name to write for each activation."""


DEPTH_KEYS = frozenset(
    """
    decoder_layers encoder_layers n_layer n_layers n_routed_experts num_decoder_layers num_experts
    num_hidden_layers num_layers num_local_experts num_nextn_predict_layers
    """.split()
)
"""Keys that are numbers of layers or experts. Each layer or expert has at least one tensor."""
EXPERT_KEYS = frozenset({"n_routed_experts", "num_experts", "num_local_experts"})
"""Keys that are numbers of experts."""


class ConfigKeys(ObjectKeys):
    """Reader of the keys of a JSON object that checks types strictly.

    The module `other_keys` lists the keys of a family that are accepted but not read.
    """

    error = ConfigError

    def __init__(
        self,
        content: Mapping[str, JsonValue],
        where: str,
        family: str = "",
        names: frozenset[str] = frozenset(),
        counting: frozenset[str] = DEPTH_KEYS,
        prefix: str = "",
    ) -> None:
        """Store the object, the name of the file, the tensor names, and the keys that count layers.

        The tensor `names` determine the heads of a model. Without them, numbers of layers are not
        checked.
        """
        super().__init__(content, where, prefix)
        self.names, self._counting, self._ignored = names, counting, set[str]()
        # transformers reads either name, so if both are present, their values must agree
        for second, name in aliases(family).items():
            if second in content:
                value = self.content.pop(second)
                if self.content.setdefault(name, value) != value:
                    self.fail(second, value, f"must equal {name}, {shown(content[name])}")
        self._others = other_keys(family)
        for name, allowed in self._others.items():
            if allowed is not None and name in self.content:
                self._check(name, self.content[name], allowed)

    def take(self, name: str, default: JsonValue = MISSING) -> JsonValue:
        """Return the value of a key as stored.

        Raises an error if the key is missing and has no default.
        """
        value = super().take(name, default)
        if value is MISSING:
            raise self.error(f"{self.where}: {name} is missing")
        return value

    @overload
    def integer(self, name: str, default: int = ..., *, least: int = 1) -> int: ...
    @overload
    def integer(self, name: str, default: None, *, least: int = 1) -> int | None: ...
    def integer(self, name: str, default: JsonValue = MISSING, *, least: int = 1) -> int | None:
        """Return an integer from `least` to 2^31 - 1, or the default if the key is missing."""
        value = self.take(name, default)
        if value is default and not isinstance(default, int):
            return value
        # isinstance would accept true as 1
        if type(value) is not int or not least <= value < 2**31:
            self.fail(name, value, f"must be an integer from {least} to 2^31 - 1")
        # Reject 10^9 layers here, before anything is created for each layer.
        if name in self._counting and 0 < len(self.names) < value:
            rule = f"must be at most {len(self.names)}, the number of tensors in the files"
            self.fail(name, value, rule)
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """Return an integer, or None if the key is null."""
        return None if self.take(name, default) is None else self.integer(name, default)

    @overload
    def number(self, name: str, default: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None) -> float | None: ...
    def number(self, name: str, default: JsonValue = MISSING) -> float | None:
        """Return a number between -2^63 and 2^63, or the default if the key is missing."""
        value = self.take(name, default)
        if value is default and default is None:
            return value
        # json accepts integers with 400 digits, which overflow float(); this check also rejects NaN
        if type(value) not in (int, float) or not abs(value) < 2**63:
            self.fail(name, value, "must be a number between -2^63 and 2^63")
        return value

    @overload
    def positive(self, name: str, default: float = ..., *, above: float = 0) -> float: ...
    @overload
    def positive(self, name: str, default: None, *, above: float = 0) -> float | None: ...
    def positive(
        self, name: str, default: JsonValue = MISSING, *, above: float = 0
    ) -> float | None:
        """Return a number greater than `above`, or the default if the key is missing."""
        value = self.number(name, default)
        if value is not None and not value > above:
            self.fail(name, value, f"must exceed {above}" if above else "must be positive")
        return value

    def optional_positive(self, name: str, default: float | None) -> float | None:
        """Return a positive number, or None if the key is null."""
        return None if self.take(name, default) is None else self.positive(name, default)

    def rate(self, name: str, default: float) -> float:
        """Return a dropout rate that is at least 0 and below 1, where null means 0."""
        if self.take(name, default) is None:
            return 0.0
        value = self.number(name, default)
        if not 0 <= value < 1:
            self.fail(name, value, "must be at least 0 and below 1")
        return value

    def flag(self, name: str, default: bool = MISSING) -> bool:
        """Return a Boolean value, or the default if the key is missing."""
        value = self.take(name, default)
        if type(value) is not bool:
            self.fail(name, value, "must be true or false")
        return value

    def choice(self, name: str, options: Mapping[str, Value], default: str = MISSING) -> Value:
        """Return the option whose name is the value of a key."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in options:
            self.fail(name, value, "must be one of " + ", ".join(map(repr, options)))
        return options[value]

    def require(self, name: str, *allowed: object) -> None:
        """Raise an error unless a key is missing or has one of these values."""
        self._check(name, self.take(name, allowed[0]), allowed)
        self._ignored.add(name)

    def _check(self, name: str, value: JsonValue, allowed: Sequence[object]) -> None:
        def same(option: object) -> bool:
            if isinstance(option, tuple):  # a list that contains only these items
                return isinstance(value, list) and all(part in option for part in value)
            # 1 == True in Python, but a Boolean key must not be a number.
            return type(value) is type(option) and value == option

        off = value is None and not any(allowed)  # null means false or empty
        if not off and not any(map(same, allowed)):
            rules = (f"a list of {x[0]!r}" if isinstance(x, tuple) else shown(x) for x in allowed)
            self.fail(name, value, f"must be {' or '.join(rules)}")

    def ignore(self, *names: str) -> None:
        """Accept keys that have no effect here."""
        self._ignored |= set(names)

    def kept(self) -> JsonObject:
        """Return the keys that do not affect the config, such as token IDs and names."""
        read = self.taken - self._ignored
        return {name: value for name, value in self.content.items() if name not in read}

    def check_all_read(self) -> None:
        """Reject keys that are neither read nor known to have no effect, unless they are null."""
        for name, value in self.content.items():
            if value is None or name in self.taken | self._ignored | self._others.keys():
                continue
            if name == "auto_map":
                self.fail(name, value, "code in a checkpoint is never run")
            self.fail(name, value, "this key is not supported for this model_type")


# How a value is read and written


@dataclass(frozen=True)
class Kind:
    """Functions that read and validate the value of a key, and that write it."""

    read: Callable[[ConfigKeys, str, JsonValue], Any]
    write: Callable[[Any], JsonValue] = lambda value: value


integer, optional_integer = Kind(ConfigKeys.integer), Kind(ConfigKeys.optional_integer)
optional_positive = Kind(ConfigKeys.optional_positive)
integer_or_default = Kind(
    lambda keys, name, default: keys.optional_integer(name, default) or default
)
"""Kind of an integer, where null means the default."""
number, positive, rate = Kind(ConfigKeys.number), Kind(ConfigKeys.positive), Kind(ConfigKeys.rate)
decimal = Kind(lambda keys, name, default: float(keys.positive(name, default)))
"""Kind of a positive number, which is read as a float."""
flag = Kind(ConfigKeys.flag)


def either(on: object, off: object) -> Kind:
    """Return the kind of a flag that chooses between two values of a field."""
    return Kind(
        lambda keys, name, default: on if keys.flag(name, default) else off,
        lambda value: bool(value == on),
    )


def _multiplier(keys: ConfigKeys, name: str, default: float) -> float | None:
    scale = float(keys.positive(name, default))
    # 1 is read as None, so that equivalent configs are equal.
    return None if scale == 1 else scale


def _write_divisor(scale: float | None) -> float:
    if scale is None:
        return 1.0
    # The inverse of an inverse may differ in the last bit, so try a value with twelve digits first.
    short = float(f"{1 / scale:.12g}")
    return short if 1 / short == scale else 1 / scale


multiplier = Kind(_multiplier, lambda scale: 1.0 if scale is None else scale)
"""Kind of a factor, where 1 is read as None."""
divisor = Kind(
    lambda keys, name, default: (scale := _multiplier(keys, name, default)) and 1 / scale,
    _write_divisor,
)
"""Kind of a divisor of the logits. The field is its inverse."""


def activation(**spelled: str) -> Kind:
    """Return the kind of an activation. `spelled` overrides the names to write, or adds names."""
    names = {str(value): name for value, name in ACTIVATION_KEYS.items()} | spelled

    def write(value: object) -> str:
        if not isinstance(value, str):
            fail("activation", value, "no published family supports a custom function")
        if value not in names:
            fail("activation", value, f"must be one of {', '.join(names)}")
        return names[value]

    read = ACTIVATIONS | {name: value for value, name in spelled.items()}
    return Kind(lambda keys, name, default: keys.choice(name, read, default), write)


# Entries of a family

GROUPS: dict[str, Callable[..., Experts | GatedDelta | ShortConv | LatentAttention]] = dict(
    experts=Experts, gated_delta=GatedDelta, short_conv=ShortConv, latent_attention=LatentAttention
)
"""Classes of the fields of ModelConfig that have fields of their own."""


class Entry(Protocol):
    """Entry of a family, which consists of keys and the fields that they define."""

    @property
    def read(self) -> Callable[[ConfigKeys, Fields], Fields]:
        """Return a function that converts keys, and the fields of earlier entries, to fields."""

    @property
    def write(self) -> Callable[[ModelConfig], JsonObject]:
        """Return a function that converts a config to keys. Later entries override earlier ones."""


@dataclass(frozen=True)
class Key:
    """Entry for one key that defines one field.

    If the default of the key is null, the field is written unchanged. Otherwise, None is replaced
    by the value that it means.
    """

    name: str
    field: str | None
    """Field of ModelConfig, or of one of its `GROUPS`, such as "experts.count". None only checks
    the value."""
    kind: Kind
    default: JsonValue = MISSING
    null: str | None = None
    """Field of an earlier entry whose value replaces null."""
    unless: str | None = None
    """Field of an earlier entry that defines the value if this field is None."""
    older: str | None = None
    """Older name of the key, which is read if the current name is null or missing."""
    optional: bool = False
    """Whether the key is omitted instead of being null if the field is None."""

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        name = self.name
        if self.older is not None:
            old, new = keys.take(self.older, None), keys.take(name, None)
            name = self.older if new is None and old is not None else name
        value = self.kind.read(keys, name, self.default)
        if value is None and self.null is not None:
            value = fields[self.null]
        # A bias that matches `use_bias` stays None, so that equivalent configs are equal.
        if self.field is None or (self.unless is not None and fields[self.unless] == value):
            return {}
        return {self.field: value}

    def write(self, config: ModelConfig) -> JsonObject:
        if self.field is None:
            return {}
        group, _, name = self.field.rpartition(".")
        if group:
            value = getattr(getattr(config, group) or GROUPS[group](), name)
        elif self.default is None and self.null is None:
            # null is a value here; n_inner=null in GPT-2 means 4 times the width
            value = getattr(config, self.field)
        else:
            value = effective(config, self.field)
        if value is None and self.optional:
            return {}
        return {self.name: self.kind.write(value)}


@dataclass(frozen=True)
class Flag:
    """Entry for a Boolean key, with the fields that each value sets.

    The first of these fields determines the value to write, which is true if the field matches
    `on`. If `on` is empty, the value is true unless the field matches `off`.
    """

    name: str
    default: bool
    on: Fields
    off: Fields

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return self.on if keys.flag(self.name, self.default) else self.off

    def write(self, config: ModelConfig) -> JsonObject:
        first = next(iter(self.on or self.off))
        return {
            self.name: (effective(config, first) == (self.on or self.off)[first]) is bool(self.on)
        }


class Fixed:
    """Entry for fields that are constant in a family and have no key."""

    def __init__(self, **fields: Any) -> None:
        """Store the fields by name."""
        self.fields = fields

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return self.fields

    def write(self, config: ModelConfig) -> JsonObject:
        return {}


class FixedKeys:
    """Entry for keys that are written with a constant value.

    `other_keys` lists the values that are accepted.
    """

    def __init__(self, **keys: JsonValue) -> None:
        """Store the keys with their values."""
        self.keys = keys

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return {}

    def write(self, config: ModelConfig) -> JsonObject:
        return self.keys


@dataclass(frozen=True)
class Code:
    """Entry for keys that require logic, such as those of RoPE, windows and heads."""

    read: Callable[[ConfigKeys, Fields], Fields] = lambda keys, fields: {}
    write: Callable[[ModelConfig], JsonObject] = lambda config: {}


def same(name: str, field: str, first: str, default: int | None = None) -> Code:
    """List a size that, if present or with a default, must equal that of an earlier key."""

    def check(keys: ConfigKeys, fields: Fields) -> Fields:
        size, found = fields[field], keys.integer(name, default)
        if found not in (None, size):
            keys.fail(name, found, f"must equal {first}, {size}")
        return {}

    return Code(check, lambda config: {name: effective(config, field)})


MEANINGS = dict(
    num_kv_heads="kv_heads", head_dim="key_dim", value_head_dim="value_dim", d_ff="ff_dim",
    num_decoder_layers="decoder_layers", pooler="pooling",
)  # fmt: skip
"""Fields for which None means the value of a property."""


def effective(config: ModelConfig, field: str) -> Any:
    """Return the value of a field, with None replaced by the default that it means."""
    value = getattr(config, MEANINGS.get(field, field))
    if value is None and field in ("qkv_bias", "out_bias", "ff_bias"):
        return config.use_bias
    if value is None and field == "attention_scale":
        return config.key_dim**-0.5
    return value


def standard_sizes(
    vocab_size: int = MISSING,
    width: int = MISSING,
    hidden: int = MISSING,
    layers: int = MISSING,
    heads: int = MISSING,
    longest: int = MISSING,
) -> list[Entry]:
    """List the sizes under their usual names. The arguments are default values."""
    return [
        Key("vocab_size", "vocab_size", integer, vocab_size),
        Key("hidden_size", "d_model", integer, width),
        Key("intermediate_size", "d_ff", integer, hidden),
        Key("num_hidden_layers", "num_layers", integer, layers),
        Key("num_attention_heads", "num_heads", integer, heads),
        Key("max_position_embeddings", "max_len", integer, longest),
    ]
