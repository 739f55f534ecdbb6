"""The keys of config.json, each stated once: how it is read, and how it is written.

A family lists its keys. `Key` is one field of `ModelConfig`, `Flag` chooses between fields, `Fixed`
is what all models of the family have, and `Code` is a pair of functions for keys that need logic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from transformer_jax.config import Activation, ConfigError, Experts, ModelConfig
from transformer_jax.config.fields import fail
from transformer_jax.pretrained.families.other_keys import aliases, other_keys
from transformer_jax.untrusted_files import MISSING, JsonObject, ObjectKeys, shown

Fields: TypeAlias = dict[str, Any]
"""Fields of a ModelConfig by name: the config checks their values."""
JsonValue: TypeAlias = Any
"""A number, text, list or object of a JSON file; readers check which."""
Value = TypeVar("Value")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
"""Published names of activations; several names may mean one function."""
ACTIVATION_KEYS: dict[Activation, str] = {
    "gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip
"""The name that is written for each activation."""


DEPTH_KEYS = frozenset(
    """
    decoder_layers encoder_layers n_layer n_layers num_decoder_layers num_experts
    num_hidden_layers num_layers num_local_experts
    """.split()
)
"""Keys that count layers or experts, each of which has at least one tensor."""
EXPERT_KEYS = frozenset({"num_experts", "num_local_experts"})
"""Keys that count experts."""


class ConfigKeys(ObjectKeys):
    """Keys of a JSON object, read with strict types.

    `other_keys` lists the keys of a family that are not read.
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
        """Take the object, the file's name, the names of the tensors, and the keys that count some.

        `names` tell which heads a model has. Without names nothing is counted.
        """
        super().__init__(content, where, prefix)
        self.names, self._counting, self._ignored = names, counting, set[str]()
        # transformers reads either name; both may be there, but not with two values
        for second, name in aliases(family).items():
            if second in content:
                value = self.content.pop(second)
                if self.content.setdefault(name, value) != value:
                    self.fail(second, value, f"must be {name}, {shown(content[name])}")
        self._others = other_keys(family)
        for name, allowed in self._others.items():
            if allowed is not None and name in self.content:
                self._check(name, self.content[name], allowed)

    def take(self, name: str, default: JsonValue = MISSING) -> JsonValue:
        """Return the value of a key as it stands in the file; an error if there is no default."""
        value = super().take(name, default)
        if value is MISSING:
            raise self.error(f"{self.where}: {name} is missing")
        return value

    @overload
    def integer(self, name: str, default: int = ..., *, least: int = 1) -> int: ...
    @overload
    def integer(self, name: str, default: None, *, least: int = 1) -> int | None: ...
    def integer(self, name: str, default: JsonValue = MISSING, *, least: int = 1) -> int | None:
        """Return an integer from `least` to 2^31 - 1, or the default if there is no such key."""
        value = self.take(name, default)
        if value is default and not isinstance(default, int):
            return value
        # isinstance would take true for 1
        if type(value) is not int or not least <= value < 2**31:
            self.fail(name, value, f"must be an integer from {least} to 2^31 - 1")
        # Before anything is made for each layer: a file that says 10^9 layers is refused here.
        if name in self._counting and 0 < len(self.names) < value:
            self.fail(name, value, f"the files have {len(self.names)} tensors")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """Return an integer, or None if the key is null."""
        return None if self.take(name, default) is None else self.integer(name, default)

    @overload
    def number(self, name: str, default: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None) -> float | None: ...
    def number(self, name: str, default: JsonValue = MISSING) -> float | None:
        """Return a number between -2^63 and 2^63, or the default if there is no such key."""
        value = self.take(name, default)
        if value is default and default is None:
            return value
        # json reads an integer of 400 digits, for which float() has no room; NaN fails, too
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
        """Return a number above 0, or above another limit."""
        value = self.number(name, default)
        if value is not None and not value > above:
            self.fail(name, value, f"must be above {above}" if above else "must be positive")
        return value

    def optional_positive(self, name: str, default: float | None) -> float | None:
        """Return a positive number, or None if the key is null."""
        return None if self.take(name, default) is None else self.positive(name, default)

    def rate(self, name: str, default: float) -> float:
        """Return a rate of dropout, at least 0 and below 1; null is 0."""
        if self.take(name, default) is None:
            return 0.0
        value = self.number(name, default)
        if not 0 <= value < 1:
            self.fail(name, value, "must be at least 0 and below 1")
        return value

    def flag(self, name: str, default: bool = MISSING) -> bool:
        """Return true or false."""
        value = self.take(name, default)
        if type(value) is not bool:
            self.fail(name, value, "must be true or false")
        return value

    def choice(self, name: str, options: Mapping[str, Value], default: str = MISSING) -> Value:
        """Return what `options` has for the text in a key."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in options:
            self.fail(name, value, "must be one of " + ", ".join(map(repr, options)))
        return options[value]

    def require(self, name: str, *allowed: object) -> None:
        """Check that a key, if it is there, has one of these values."""
        self._check(name, self.take(name, allowed[0]), allowed)
        self._ignored.add(name)

    def _check(self, name: str, value: JsonValue, allowed: Sequence[object]) -> None:
        def same(known: object) -> bool:
            if isinstance(known, tuple):  # a list of nothing else
                return isinstance(value, list) and all(part in known for part in value)
            # 1 == True in Python, and no key that is true or false may be a number.
            return type(value) is type(known) and value == known

        off = value is None and not any(allowed)  # null is as good as false or nothing
        if not off and not any(map(same, allowed)):
            rules = (f"a list of {x[0]!r}" if isinstance(x, tuple) else shown(x) for x in allowed)
            self.fail(name, value, f"must be {' or '.join(rules)}")

    def ignore(self, *names: str) -> None:
        """Accept keys that change nothing here."""
        self._ignored |= set(names)

    def kept(self) -> JsonObject:
        """Return the keys that say nothing about the config, such as token ids and names."""
        said = self.taken - self._ignored
        return {name: value for name, value in self.content.items() if name not in said}

    def check_all_read(self) -> None:
        """Refuse a key that was neither read nor is known to change nothing; null says nothing."""
        for name, value in self.content.items():
            if value is None or name in self.taken | self._ignored | self._others.keys():
                continue
            if name == "auto_map":
                self.fail(name, value, "code of a checkpoint is never run")
            self.fail(name, value, "no such key is known for this model_type")


# How a value is read and written


@dataclass(frozen=True)
class Kind:
    """How the value of a key is checked and read, and how it is written."""

    read: Callable[[ConfigKeys, str, JsonValue], Any]
    write: Callable[[Any], JsonValue] = lambda value: value


integer, optional_integer = Kind(ConfigKeys.integer), Kind(ConfigKeys.optional_integer)
optional_positive = Kind(ConfigKeys.optional_positive)
integer_or_default = Kind(
    lambda keys, name, default: keys.optional_integer(name, default) or default
)
"""An integer for which null is the default."""
number, positive, rate = Kind(ConfigKeys.number), Kind(ConfigKeys.positive), Kind(ConfigKeys.rate)
decimal = Kind(lambda keys, name, default: float(keys.positive(name, default)))
"""A positive number, read as a float."""
flag = Kind(ConfigKeys.flag)


def either(on: object, off: object) -> Kind:
    """Return the kind of a flag that chooses one of two values of a field."""
    return Kind(
        lambda keys, name, default: on if keys.flag(name, default) else off,
        lambda value: bool(value == on),
    )


def _multiplier(keys: ConfigKeys, name: str, default: float) -> float | None:
    scale = float(keys.positive(name, default))
    return None if scale == 1 else scale


def _write_divisor(scale: float | None) -> float:
    if scale is None:
        return 1.0
    # The inverse of an inverse may differ in the last bit: twelve digits are tried first.
    short = float(f"{1 / scale:.12g}")
    return short if 1 / short == scale else 1 / scale  # the shortest number whose inverse it is


multiplier = Kind(_multiplier, lambda scale: 1.0 if scale is None else scale)
"""A factor of which 1 is none."""
divisor = Kind(
    lambda keys, name, default: (scale := _multiplier(keys, name, default)) and 1 / scale,
    _write_divisor,
)
"""What logits are divided by, of which the field is the inverse."""


def activation(**spelled: str) -> Kind:
    """Return the kind of an activation; a family may spell some in its own way when it writes."""

    def write(value: object) -> str:
        if not isinstance(value, str):
            fail("activation", value, "no published family has a function of your own")
        return (ACTIVATION_KEYS | spelled)[value]

    return Kind(lambda keys, name, default: keys.choice(name, ACTIVATIONS, default), write)


# What a family lists


class Entry(Protocol):
    """What a family lists: keys, and the fields that they mean."""

    @property
    def read(self) -> Callable[[ConfigKeys, Fields], Fields]:
        """Makes fields from keys, and from the fields of the entries before."""

    @property
    def write(self) -> Callable[[ModelConfig], JsonObject]:
        """Makes the keys; those of later entries replace those of earlier ones."""


@dataclass(frozen=True)
class Key:
    """One key for one field.

    A field whose default is null is written as it is, any other as the value that None stands for.
    """

    name: str
    field: str | None
    """Of ModelConfig, or "experts.count" of its Experts; None if the value is only checked."""
    kind: Kind
    default: JsonValue = MISSING
    null: str | None = None
    """The field, of an earlier entry, whose value null stands for."""
    unless: str | None = None
    """The field, of an earlier entry, that has this value if this field is None."""
    older: str | None = None
    """An older name, which is read if this one is null or absent."""
    optional: bool = False
    """Whether the key is left out, rather than null, if the field is None."""

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        name = self.name
        if self.older is not None:
            old, new = keys.take(self.older, None), keys.take(name, None)
            name = self.older if new is None and old is not None else name
        value = self.kind.read(keys, name, self.default)
        if value is None and self.null is not None:
            value = fields[self.null]
        # A bias that is as `use_bias` says is None: two configs that mean the same are equal.
        if self.field is None or (self.unless is not None and fields[self.unless] == value):
            return {}
        return {self.field: value}

    def write(self, config: ModelConfig) -> JsonObject:
        if self.field is None:
            return {}
        if self.field.startswith("experts."):
            value = getattr(config.experts or Experts(), self.field.removeprefix("experts."))
        elif self.default is None and self.null is None:
            # null is a value here: GPT-2 means 4 times the width by an n_inner of null
            value = getattr(config, self.field)
        else:
            value = meant(config, self.field)
        if value is None and self.optional:
            return {}
        return {self.name: self.kind.write(value)}


@dataclass(frozen=True)
class Flag:
    """A key that is true or false, and the fields that each means.

    It is written by the first of these fields: true if that is as in `on`, or, if `on` is empty,
    unless it is as in `off`.
    """

    name: str
    default: bool
    on: Fields
    off: Fields

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return self.on if keys.flag(self.name, self.default) else self.off

    def write(self, config: ModelConfig) -> JsonObject:
        first = next(iter(self.on or self.off))
        return {self.name: (meant(config, first) == (self.on or self.off)[first]) is bool(self.on)}


class Fixed:
    """Fields that every model of a family has, which no key says."""

    def __init__(self, **fields: Any) -> None:
        """Take the fields."""
        self.fields = fields

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return self.fields

    def write(self, config: ModelConfig) -> JsonObject:
        return {}


class Written:
    """Keys that are the same in every file of a family: `other_keys` has what they may be."""

    def __init__(self, **keys: JsonValue) -> None:
        """Take the keys."""
        self.keys = keys

    def read(self, keys: ConfigKeys, fields: Fields) -> Fields:
        return {}

    def write(self, config: ModelConfig) -> JsonObject:
        return self.keys


@dataclass(frozen=True)
class Code:
    """Keys whose meaning is logic: a rotation, windows, heads."""

    read: Callable[[ConfigKeys, Fields], Fields] = lambda keys, fields: {}
    write: Callable[[ModelConfig], JsonObject] = lambda config: {}


def same(name: str, field: str, first: str, default: int | None = None) -> Code:
    """List a size that must be the one of an earlier key, if it is there or has a default."""

    def check(keys: ConfigKeys, fields: Fields) -> Fields:
        size, found = fields[field], keys.integer(name, default)
        if found not in (None, size):
            keys.fail(name, found, f"must be {first}, {size}")
        return {}

    return Code(check, lambda config: {name: meant(config, field)})


STANDS_FOR = dict(
    num_kv_heads="kv_heads", head_dim="key_dim", value_head_dim="value_dim", d_ff="ff_dim",
    num_decoder_layers="decoder_layers", pooler="pooling",
)  # fmt: skip
"""Fields of which None stands for the value of a property."""


def meant(config: ModelConfig, field: str) -> Any:
    """Return the value of a field; None is replaced by the value that it stands for."""
    value = getattr(config, STANDS_FOR.get(field, field))
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
    """List the sizes under their usual names; the arguments are defaults."""
    return [
        Key("vocab_size", "vocab_size", integer, vocab_size),
        Key("hidden_size", "d_model", integer, width),
        Key("intermediate_size", "d_ff", integer, hidden),
        Key("num_hidden_layers", "num_layers", integer, layers),
        Key("num_attention_heads", "num_heads", integer, heads),
        Key("max_position_embeddings", "max_len", integer, longest),
    ]
