"""Checks of a JSON schema that its parser, llguidance, omits.

llguidance 1.9.1 ignores unknown keys and rounds some numbers. This module rejects such schemas with
an error that contains the path of the key. For keywords that it does not implement, llguidance
itself raises an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from transformer_jax.config.fields import nearest
from transformer_jax.decoding.posix_classes import with_unicode_classes
from transformer_jax.untrusted_files import DEPTH_LIMIT, shown

_SCHEMA = (
    "additionalProperties", "additionalItems", "contains", "else", "if", "not", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = "allOf", "anyOf", "oneOf", "prefixItems"
_NAMED = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas"
_BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
)  # fmt: skip
_TEXTS = (
    "$ref", "$id", "id", "$anchor", "pattern", "format", "$schema", "$comment", "title",
    "description",
)  # fmt: skip
_VALUES = (
    "const", "enum", "type", "required", "dependencies", "dependentRequired", "uniqueItems",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
)  # fmt: skip
_NOTES = (
    "$schema", "$comment", "$vocabulary", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "discriminator",
)  # fmt: skip
"""Keys that do not constrain the text. Pydantic's `discriminator` duplicates a `const`."""
_KNOWN = {
    *_SCHEMA, *_LISTS, *_NAMED, *_BOUNDS, *_COUNTS, *_TEXTS, *_VALUES, *_NOTES, "items",
    "multipleOf",
}  # fmt: skip
_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"
)  # fmt: skip
_APART = {"$defs", "definitions", "$id", "id", "$anchor"}
"""Keywords that do not constrain the value itself."""
_LIMITS, _MEETING = "multiples and bounds of one value", "several schemas of one value"
_UNIONS = "schemas with oneOf"
_INSTEAD = {
    "nullable": 'is not JSON Schema but OpenAPI: write {"type": ["string", "null"]}',
    "contentEncoding": "is not supported, and the text would ignore it",
    "contentMediaType": "is not supported, and the text would ignore it",
    "contentSchema": "is not supported, and the text would ignore it",
    "x-guidance": "is allowed only at the top level of a schema",
}
_LARGEST = 2**53 - 1
_MOST_CHARACTERS = 2**32 - 1
"""Maximum length, because the parser stores lengths in 32 bits."""
_MOST_PLACES = 8
"""Maximum decimal places of a multiple, because the parser computes 9 * 10^places in 32 bits."""
_MOST_REMAINDERS, _MOST_STATES = 2**16 - 1, 2**14
"""Limits on the number of parser states: one per remainder (0.4 s for 65,537, 7 s for 1,000,003),
times the number of digits of a bound. With bounds, it failed at 40,000 states."""


def check_schema(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a schema as plain JSON without annotations.

    Args:
        schema: the schema. `Decimal` numbers are interpreted exactly as written.
        name: the name of the schema in error messages.

    Raises:
        ValueError: If a key is unknown, or if the parser would misread a value.
    """
    seen: dict[str, list[Any]] = {}
    found = _checked(schema, name, seen, 0)
    stays = seen.keys() & {"$id", "id"} or any("/oneOf/" in ref for ref in seen.get("$ref", ()))
    for one in () if stays else seen.get(_UNIONS, ()):
        if "anyOf" not in one and _are_apart(one["oneOf"], found):
            one["anyOf"] = one.pop("oneOf")  # the parser does not compare the targets of $ref
    # If several schemas apply to the same value, the parser combines their multiples and bounds.
    limits = seen.get(_LIMITS, [])
    if _MEETING in seen:
        _check_excluded(seen, name)
        limits = [_limits(seen)]
    for multiples, bounds in limits:
        places = max(map(_decimals, multiples), default=0)
        units = {int(x.scaleb(places)) for x in multiples}
        digits = max((len(str(int(x.scaleb(places)))) for x in bounds), default=0)
        listed = " and ".join(str(x) for x in sorted({*multiples})[:4])
        # The parser does not detect overflow, but below 2^16, its products fit in 32 bits.
        limit = _MOST_STATES // digits if digits else _MOST_REMAINDERS
        if math.lcm(*units) > limit:
            multiple = "the least common multiple " * (len(units) > 1)
            bound = f" with a bound of {digits} digits" * bool(digits)
            rule = f"{multiple}must be at most {Decimal(limit).scaleb(-places):f}{bound}"
            raise ValueError(f"{name}: multipleOf is {listed}: {rule}")
        # With a maximum of 1.56, the parser allows 1.50 but not 1.5, and with multipleOf 0.5, it
        # allows neither.
        most = places if len(units) == 1 else 1
        long = [x for x in bounds if places and _decimals(x) > most]
        if long:
            plural = "s" * (most > 1)
            rule = f"must have at most {most} decimal place{plural} with multipleOf {listed}"
            raise ValueError(f"{name}: a bound is {long[0]}: {rule}")
    return found


def _checked(schema: Any, where: str, seen: dict[str, list[Any]], depth: int) -> Any:
    """Return a checked subschema for the parser and collect the values of each key in `seen`."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} is {schema!r:.80}: must be an object")
    if depth > DEPTH_LIMIT:
        raise ValueError(f"{where} is nested more than {DEPTH_LIMIT} levels deep")
    found: dict[str, Any] = {}

    def inner(schema: Any, where: str) -> Any:
        return _checked(schema, where, seen, depth + 1)

    for key, value in schema.items():
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r:.80}: keys must be strings")
        at = f"{where}.{shown(key)[1:-1]}"
        if key == "x-guidance" and not depth:
            if not isinstance(value, Mapping):
                raise ValueError(f"{at} is {value!r:.80}: must be an object")
            found[key] = _plain(value, at, 0)
            continue
        # llguidance silently ignores these keys, so the text would not satisfy the schema.
        if key in _INSTEAD:
            raise ValueError(f"{at} {_INSTEAD[key]}")
        if key not in _KNOWN and not key.startswith("x-"):
            raise ValueError(f"{at} is not a JSON Schema keyword{nearest(key, _KNOWN)}")
        if key in _TEXTS and not isinstance(value, str) and not (key in _NOTES and value is None):
            raise ValueError(f"{at} is {value!r:.80}: must be a string")
        if key in _NOTES or key.startswith("x-") or (key == "uniqueItems" and value is False):
            continue
        seen.setdefault(key, []).append(value)
        if key in _NAMED:
            if not isinstance(value, Mapping):
                raise ValueError(f"{at} is {value!r:.80}: must be an object of schemas")
            for name in value:
                if not isinstance(name, str):
                    raise ValueError(f"{at} has the key {name!r:.80}: keys must be strings")
            names = {name: name for name in value}
            if key == "patternProperties":  # its property names are regular expressions
                names = {name: with_unicode_classes(name, at) for name in value}
            found[key] = {
                names[name]: inner(one, f"{at}.{shown(name)[1:-1]}") for name, one in value.items()
            }
        elif key in _LISTS or (key == "items" and isinstance(value, list | tuple)):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{at} is {value!r:.80}: must be a list of schemas")
            found[key] = [inner(one, f"{at}[{n}]") for n, one in enumerate(value)]
        elif key in _SCHEMA or key == "items":
            found[key] = inner(value, at)
        elif key in _VALUES:
            if key in ("enum", "required") and not isinstance(value, list | tuple):
                raise ValueError(f"{at} is {value!r:.80}: must be a list")
            found[key] = _plain(value, at, depth)
        elif key in _TEXTS:
            if key == "format" and value not in _FORMATS:
                rule = nearest(value, _FORMATS) or f": must be one of {', '.join(_FORMATS)}"
                raise ValueError(f"{at} is {shown(value)}, which is not a known format{rule}")
            found[key] = with_unicode_classes(value, at) if key == "pattern" else value
        else:  # the value is a number, except that `exclusiveMinimum` is a flag in draft 4
            flag = isinstance(value, bool)
            if flag != (flag and key.startswith("exclusive")) or not isinstance(
                value, int | float | Decimal
            ):
                raise ValueError(f"{at} is {value!r:.80}: must be a number")
            # With a bound of -0.0, the parser would exclude 0.
            found[key] = value if flag else _exact(value, at) or 0
            if key in _COUNTS and not (isinstance(found[key], int) and found[key] >= 0):
                raise ValueError(f"{at} is {value}: must be an integer of at least 0")
            if key.endswith("Length") and found[key] > _MOST_CHARACTERS:
                raise ValueError(f"{at} is {value}: must be at most {_MOST_CHARACTERS}")
            if key == "multipleOf" and value <= 0:
                raise ValueError(f"{at} is {value}: must be above 0")
            if key == "multipleOf" and _decimals(Decimal(str(value))) > _MOST_PLACES:
                raise ValueError(
                    f"{at} is {value}: must have at most {_MOST_PLACES} decimal places"
                )
    _check_excluded({key: [found[key]] for key in _BOUNDS if key in found}, where)
    if "oneOf" in found:
        seen.setdefault(_UNIONS, []).append(found)
    if "multipleOf" in found:
        seen.setdefault(_LIMITS, []).append(_limits({key: [found[key]] for key in found}))
    # Here, the parser may combine several schemas for one value.
    combines, patterns = len(found.keys() - _APART) > 1, found.get("patternProperties", ())
    if (
        "oneOf" in found
        or (combines and found.keys() & {"$ref", "anyOf", "allOf"})
        or len(found.get("allOf", ())) > 1
        or len(patterns) > 1
        or (patterns and "properties" in found)
    ):
        seen.setdefault(_MEETING, []).append(True)
    # llguidance reads either the old keys or the new key, and ignores the rest.
    old = "additionalItems" in found, isinstance(found.get("items"), list)
    if "prefixItems" in found and any(old):
        other = "additionalItems" if old[0] else "a list of items"
        raise ValueError(f"{where} has prefixItems and {other}: use only one of them")
    return found


def _limits(keys: Mapping[str, Sequence[Any]]) -> tuple[list[Decimal], list[Decimal]]:
    """Return the multiples and bounds of one value. An integer is a multiple of 1."""
    multiples = [Decimal(str(value)) for value in keys.get("multipleOf", ())]
    if "integer" in str(keys.get("type")):
        multiples.append(Decimal(1))
    bounds = [value for key in _BOUNDS for value in keys.get(key, ())]
    return multiples, [Decimal(str(abs(x))) for x in bounds if not isinstance(x, bool)]


def _check_excluded(bounds: Mapping[str, Sequence[Any]], where: str) -> None:
    """Raise ValueError if a range excludes an integer that is less than 1 from its other bound.

    llguidance would allow such an integer. For example, it would allow 3 as a number above 3 and at
    most 3.5.
    """
    for side, sign in ("Minimum", 1), ("Maximum", -1):
        excluded = list(bounds.get(f"exclusive{side}", ()))
        if True in [value is True for value in excluded]:  # this is a flag in draft 4
            excluded += bounds.get(side.lower(), ())
        other = "Maximum" if sign == 1 else "Minimum"
        ends = [*bounds.get(other.lower(), ()), *bounds.get(f"exclusive{other}", ())]
        for value, end in itertools.product(excluded, ends):
            if not isinstance(value, bool) and not isinstance(end, bool):
                if value == int(value) and value * sign >= 0 and 0 < (end - value) * sign < 1:
                    rule = f"must differ from the other bound, {end}, by at least 1"
                    why = f"or the parser would allow {value}"
                    raise ValueError(f"{where}: exclusive{side} is {value}: {rule}, {why}")


def _are_apart(schemas: Sequence[Any], root: Any) -> bool:
    """Whether a required property distinguishes these objects, as pydantic's discriminator does."""
    tags = []  # for each schema, the values of each required property if they are listed strings
    for schema in schemas:
        # The number of steps is limited, because references may form a cycle.
        for _ in range(DEPTH_LIMIT):
            if not isinstance(schema, Mapping) or not schema.get("$ref", "").startswith("#/"):
                break
            parts, schema = schema["$ref"][2:].split("/"), root
            for part in parts:
                key = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(key) if isinstance(schema, Mapping) else None
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            return False
        found: dict[str, set[str]] = {}
        for name in schema.get("required", ()):
            prop = schema.get("properties", {}).get(name) if isinstance(name, str) else None
            prop = prop if isinstance(prop, Mapping) else {}
            values = prop.get("enum", [prop["const"]] if "const" in prop else ())
            if values and all(isinstance(value, str) for value in values):
                found[name] = {*values}
        tags.append(found)
    for name in set.intersection(*map(set, tags)) if tags else ():
        values = [value for one in tags for value in one[name]]
        if len(values) == len(set(values)):
            return True
    return False


def _plain(value: Any, where: str, depth: int) -> Any:
    """Check that the parser reads the numbers in a JSON value exactly and return the value."""
    if depth > DEPTH_LIMIT:
        raise ValueError(f"{where} is nested more than {DEPTH_LIMIT} levels deep")
    if isinstance(value, Mapping):
        return {
            key: _plain(one, f"{where}.{shown(str(key))[1:-1]}", depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(one, f"{where}[{n}]", depth + 1) for n, one in enumerate(value)]
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _exact(value, where)
    return value


def _exact(value: float | Decimal, where: str) -> float:
    """Return a number that the parser reads exactly, or raise ValueError for any other number.

    The parser stores a float64, which it computes from the digits with one multiplication or
    division. The result is exact for integers below 2^53, and correctly rounded for 15 digits with
    at most 22 decimal places. A number of 2^63 or more can crash the process.
    """
    number = Decimal(float.__repr__(value)) if isinstance(value, float) else Decimal(value)
    if not number.is_finite():
        raise ValueError(f"{where} is {value}: must be a finite number")
    if not number:
        return -0.0 if number.is_signed() else 0
    places, digits = _decimals(number), "".join(map(str, number.as_tuple().digits)).strip("0")
    if number.adjusted() > 15 or (not places and abs(number) > _LARGEST):
        rule = f"must be from -{_LARGEST} to {_LARGEST}, or the parser would round it"
    elif not places:
        return int(number)
    elif len(digits) <= 15 and places <= 22:
        return float(number)
    else:
        rule = (
            "must have at most 15 digits, and at most 22 after the decimal point, or the parser "
            "would round it"
        )
    raise ValueError(f"{where} is {str(number) if len(digits) < 40 else f'{number:.5e}'}: {rule}")


def _decimals(number: Decimal) -> int:
    """Return the number of decimal places that a number needs."""
    exponent = number.as_tuple().exponent
    digits = "".join(map(str, number.as_tuple().digits))
    assert isinstance(exponent, int)
    return max(0, -exponent - (len(digits) - len(digits.rstrip("0"))))
