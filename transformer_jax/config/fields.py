"""Checks of config fields: types, ranges and mutually exclusive fields."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, is_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Protocol,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from transformer_jax.config.kinds import field_hints, kind_name


class Dataclass(Protocol):
    """Instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Hint: TypeAlias = Any
"""Type annotation of a field. Python has no type that includes unions and Literals."""

FieldValue: TypeAlias = Any
"""Value of any config field, which is restricted by the checks of the config."""


@dataclass(frozen=True)
class Rule:
    """Rule for the value of a field, stored in its annotation: `Annotated[int, POSITIVE]`."""

    accepts: Callable[[Any], bool]
    text: str


POSITIVE = Rule(lambda x: x > 0, "must be positive")
NON_NEGATIVE = Rule(lambda x: x >= 0, "must not be negative")
BELOW_INT32 = Rule(lambda x: x < 2**31, "must be below 2**31")

Size = Annotated[int, POSITIVE, BELOW_INT32]
Count = Annotated[int, NON_NEGATIVE, BELOW_INT32]
Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, NON_NEGATIVE]
Fraction = Annotated[float, Rule(lambda x: 0 <= x < 1, "must be at least 0 and below 1")]
# products and quotients with such a factor do not overflow float32
Factor = Annotated[
    float, Rule(lambda x: 1e-30 <= x <= 1e30, "must be positive, from 1e-30 to 1e30")
]


class ConfigError(ValueError):
    """Error for an invalid value of a config field, or for fields that contradict each other."""


LONGEST_FOLDER = 3840
"""Maximum length of the path of a folder, in bytes. Operating systems allow 4096 bytes for the
paths of its files."""


def fail(name: str, value: object, rule: str) -> NoReturn:
    """Raise a ConfigError that names a field, its value and the violated rule."""
    raise ConfigError(f"{name} is {value!r}: {rule}")


OTHER_NAMES = {
    "absolute": "learned", "adam": "adamw", "bert": "encoder", "bf16": "bfloat16",
    "bytes": "byte", "character": "char", "cnn": "convolution", "dpo": "preference",
    "fixed": "sinusoidal", "fp16": "float16", "fp32": "float32", "gelu_new": "gelu_tanh",
    "gpt": "decoder", "half": "float16", "layer_norm": "layernorm", "mlm": "masked",
    "relative": "shaw", "rms_norm": "rmsnorm", "rotary": "rope", "sft": "chat",
    "swish": "silu", "translation": "seq2seq", "warmup_stable_decay": "wsd",
}  # fmt: skip
"""Choices of this library, keyed by their names in other libraries."""


def nearest(text: object, known: Collection[str], least: float = 0.6) -> str:
    """Return `; did you mean X?`, where X is the most similar known name, or an empty string.

    `least` is the minimum similarity between the names, from 0 to 1.
    """
    other = OTHER_NAMES.get(str(text).lower().replace("-", "_"))
    near = [other] if other in known else difflib.get_close_matches(str(text), known, 1, least)
    near = near or difflib.get_close_matches(str(text).lower(), known, 1, least)
    return f"; did you mean {near[0]}?" if near else ""


def check_types(config: Dataclass) -> None:
    """Check that every field has its annotated type and satisfies the rules of the type.

    Strings and Booleans do not count as integers, and NaN does not count as a number. A dtype, such
    as `jnp.bfloat16`, is replaced by its name. The name of a kind, such as "chat" for a task, is
    replaced by that kind with its default fields.
    """
    for name, hint in field_hints(type(config)).items():
        value = getattr(config, name)
        if name.endswith("dtype") and not isinstance(value, str | None):
            spelled = getattr(value, "name", getattr(value, "__name__", None))
            if isinstance(spelled, str):
                value = spelled
                object.__setattr__(config, name, value)
        if name in getattr(type(config), "functions", ()) and is_function(value):
            continue
        options = get_args(hint) if get_origin(hint) not in (None, Literal, tuple) else (hint,)
        kinds = {kind_name(o): o for o in options if isinstance(o, type) and is_dataclass(o)}
        if isinstance(value, str) and value in kinds and len(kinds) > 1:
            # the instance is still being constructed, so a frozen field may be set
            object.__setattr__(config, name, kinds[value]())
        elif not any(_fits(value, option) for option in options):
            choices = [c for o in options if get_origin(o) is Literal for c in get_args(o)]
            near = nearest(value, choices) if isinstance(value, str) else ""
            if isinstance(value, str) and not choices:
                near = nearest(value, kinds)
            elif isinstance(value, type) and value in options:
                near = f"; pass an instance: {value.__name__}(...)"
            fail(name, value, f"must be {_spell(hint)}{near}")
    for name, rule in field_rules(type(config)):
        value = getattr(config, name)
        if value is not None and not rule.accepts(value):
            fail(name, value, rule.text)


@functools.cache
def field_rules(kind: type) -> list[tuple[str, Rule]]:
    """Return the rules in the annotations of the fields of a config class and its bases."""
    # read the bases one by one, so that a subclass that only changes a default keeps the rules of
    # its base
    hints = [x for base in kind.__mro__ for x in get_type_hints(base, include_extras=True).items()]
    options = [(name, option) for name, hint in hints for option in (hint, *get_args(hint))]
    found = (
        (name, rule)
        for name, option in options
        for rule in getattr(option, "__metadata__", ())
        if isinstance(rule, Rule)
    )
    return list(dict.fromkeys(found))


def is_function(value: object) -> bool:
    """Whether a value is callable but not a class."""
    return callable(value) and not isinstance(value, type)


def _fits(value: object, hint: Hint) -> bool:
    # a custom value validates itself, and its class is not part of the field's type
    base = getattr(value, "custom_kind_of", None)
    if base is not None and not isinstance(value, type):
        return isinstance(hint, type) and issubclass(hint, base)
    if get_origin(hint) is Literal:
        return value in get_args(hint) and isinstance(value, str)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        kinds = (item,) if get_origin(item) in (None, Literal) else get_args(item)
        return type(value) is tuple and all(any(_fits(v, k) for k in kinds) for v in value)
    if hint is float:
        # `isinstance` would accept True as an integer.
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is hint


def _spell(hint: Hint) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a tuple ({_spell(get_args(hint)[0])}, ...)"
    if get_origin(hint) is not None:
        return " or ".join(_spell(a) for a in get_args(hint)).replace(" or of type ", " or ")
    if hint is float:
        return "a finite number"
    return "None" if hint is type(None) else f"of type {hint.__name__}"


def check_new_folder(name: str, path: str) -> None:
    """Raise ConfigError if a path cannot be used for a new folder."""
    try:
        size = len(os.path.abspath(path).encode("utf-8"))
    except UnicodeEncodeError:
        fail(name, path, "must be UTF-8")
    if "\0" in path or not path:
        fail(name, path, "must be the name of a folder")
    # `gs://bucket` would silently become a local folder with the name "gs:".
    if re.match(r"[A-Za-z][\w+.-]*://", path):
        fail(name, path, "must be a folder on this machine, not an address")
    if size > LONGEST_FOLDER:
        fail(name, f"{path[:40]}...", f"must have at most {LONGEST_FOLDER} bytes, not {size}")


def unread(config: Dataclass, rule: str, *names: str) -> None:
    """Check that fields without effect have their default values.

    `rule` is the reason why they have no effect.
    """
    for name in names:
        value = getattr(config, name)
        if value != type(config).__dataclass_fields__[name].default:
            fail(name, value, rule)
