"""JSON Schemas for requests, and a validator for the part of JSON Schema that they use.

The supported keywords of draft 2020-12 are `type`, `enum`, `minimum`, `maximum`, `minLength`,
`maxLength`, `minItems`, `maxItems`, `items`, `properties`, `required`, `additionalProperties` if it
is False, and `anyOf`. The parameter names come from OpenAI's API, except for `structured_outputs`,
which comes from vLLM.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from transformer_jax.config.fields import nearest
from transformer_jax.untrusted_files import Json, shown

Schema: TypeAlias = dict[str, Any]
"""Schema as parsed JSON."""

MOST_TOP = 20
"""Maximum number of alternative tokens whose log-probabilities are returned."""

ROLES = "developer", "system", "user", "assistant"
"""Roles of messages. OpenAI's newer models use `developer` instead of `system`."""

_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def _number(kind: str, low: float, high: float) -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


def _unsupported(verb: str, *neutral: Json) -> Schema:
    """Return the schema of a field in OpenAI's API that this server does not support.

    The field may be omitted, null, or a `neutral` value that requests nothing. The error message
    for any other value contains `verb`, as in "tools are not supported by this server".
    """
    kinds = dict.fromkeys(_KINDS[type(value)] for value in (*neutral, None))
    return {"type": [*kinds], "enum": [*neutral, None], "x-unsupported": verb}


def _only(*values: Json, kind: str) -> Schema:
    """Return the schema of a parameter with a single accepted value."""
    return {"type": [kind, "null"], "enum": [*values, None]}


_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"]}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": 256}

_COMMON: dict[str, Schema] = {
    "model": {"type": "string"},
    "max_tokens": _number("integer", 1, 2**31 - 1),
    "temperature": _number("number", 0, 2),
    "top_p": _number("number", 0, 1),
    "seed": _number("integer", 0, 2**32 - 1),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}, {"type": "null"}]},
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG},
        "additionalProperties": False,
    },
    "n": _only(1, kind="integer"),
    "presence_penalty": _only(0, kind="number"),
    "frequency_penalty": _only(0, kind="number"),
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": ["object", "null"],
                "required": ["schema"],
                "properties": {
                    "name": {"type": "string"}, "description": {"type": ["string", "null"]},
                    "strict": _FLAG, "schema": {"type": "object"},
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
    "structured_outputs": {
        "type": ["object", "null"],
        "properties": {
            "json": {"type": ["object", "null"]},
            "regex": {"type": ["string", "null"]},
            "grammar": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    },
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "audio": _unsupported("is"),
    "function_call": _unsupported("is", "none"),
    "functions": _unsupported("are", []),
    "logit_bias": _unsupported("is", {}),
    "modalities": _unsupported("are", ["text"]),
    "moderation": _unsupported("is"),
    "parallel_tool_calls": _unsupported("are", False, True),
    "prediction": _unsupported("is"),
    "prompt_cache_options": _unsupported("are"),
    "prompt_cache_retention": _unsupported("is"),
    "reasoning_effort": _unsupported("is", "none"),
    "service_tier": _unsupported("is", "auto", "default"),
    "store": _unsupported("is", False),
    "tool_choice": _unsupported("is", "none"),
    "tools": _unsupported("are", []),
    "verbosity": _unsupported("is"),
    "web_search_options": _unsupported("are"),
}  # fmt: skip

COMPLETION: Schema = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": _COMMON
    | {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                    "minItems": 1,
                },
            ]
        },
        "logprobs": _number("integer", 0, MOST_TOP),
        "echo": _only(False, kind="boolean"),
        "best_of": _only(1, kind="integer"),
        "suffix": {"type": "null"},
    },
    "additionalProperties": False,
}

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"},
        "annotations": _unsupported("are", []), "file": _unsupported("is"),
        "image_url": _unsupported("is"), "input_audio": _unsupported("is"),
        "prompt_cache_breakpoint": _unsupported("is"), "refusal": _unsupported("is"),
        "video_url": _unsupported("is"),
    },
    "additionalProperties": False,
}  # fmt: skip

CHAT: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": _COMMON
    | {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string", "enum": list(ROLES)},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
                    # fields of answers that clients, such as OpenAI's, send back
                    "annotations": _unsupported("are", []),
                    "audio": _unsupported("is"),
                    "function_call": _unsupported("is"),
                    "name": _unsupported("is"),
                    "parsed": {"type": ["string", "number", "boolean", "array", "object", "null"]},
                    "reasoning": _unsupported("is", ""),
                    "reasoning_content": _unsupported("is", ""),
                    "reasoning_details": _unsupported("are", []),
                    "refusal": _unsupported("is"),
                    "tool_call_id": _unsupported("is"),
                    "tool_calls": _unsupported("are", []),
                },
                "additionalProperties": False,
            },
        },
        "max_completion_tokens": _number("integer", 1, 2**31 - 1),
        "logprobs": _FLAG,
        "top_logprobs": _number("integer", 0, MOST_TOP),
        "metadata": {"type": ["object", "null"]},
    },
    "additionalProperties": False,
}

_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}

EMBEDDING: Schema = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": {"type": "string"},
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2048},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": 2048},
            ]
        },
        "encoding_format": {"type": ["string", "null"], "enum": ["float", "base64", None]},
        "dimensions": _number("integer", 1, 2**31 - 1),
        "user": _TEXT,
    },
    "additionalProperties": False,
}

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip

_NAMES = {
    "string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


class Misfit(ValueError):
    """Violation of the schema of a request."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


def check(value: Json, schema: Schema, name: str = "") -> None:
    """Raise Misfit if a value violates its schema; `name` is the path of the value."""

    def misfit(rule: str) -> Misfit:
        return Misfit(name or None, f"{name or 'the body'} is {shown(value)}: must be {rule}")

    fits_kind = _is_kind(value, schema)
    if "x-unsupported" in schema and not (fits_kind and value in schema["enum"]):
        raise Misfit(name, f"{name} {schema['x-unsupported']} not supported by this server")
    if "anyOf" in schema:
        if not fits_kind:
            raise misfit(_describe(schema))
        fits = [kind for kind in schema["anyOf"] if _is_kind(value, kind)]
        # Use the first item to decide between strings and IDs, for a better error message.
        if isinstance(value, list) and value:
            fits = [kind for kind in fits if _is_kind(value[0], kind["items"])] or fits
        for kind in fits:
            try:
                return check(value, kind, name)
            except Misfit:
                if kind is fits[-1]:
                    raise
    if not fits_kind or value not in schema.get("enum", [value]):
        raise misfit(_describe(schema))
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high:
            raise misfit(f"{_describe(schema)} from {low} to {high}")
    elif isinstance(value, str | list):
        kind, unit = ("Length", "characters") if isinstance(value, str) else ("Items", "items")
        low, high = schema.get(f"min{kind}", 0), schema.get(f"max{kind}", len(value))
        if not low <= len(value) <= high:
            rule = f"at most {high}" if len(value) > high else f"at least {low}"
            message = f"{name} has {len(value)} {unit}: must have {rule}"
            raise Misfit(name, message)
        for n, item in enumerate(value if "items" in schema else ()):
            check(item, schema["items"], f"{name}[{n}]")
    else:
        known, before = schema.get("properties", {}), f"{name}." if name else ""
        # Ignoring an unknown parameter would silently change the answer.
        for key in value if schema.get("additionalProperties") is False else ():
            if key not in known:
                hint = nearest(key, known) if known else ""
                message = f"{before}{shown(key)[1:-1]} is not a parameter of this server{hint}"
                raise Misfit(before + key[:80], message)
        for key in value:
            # Check this first, because a tool call also lacks the required content.
            if "x-unsupported" in known.get(key, {}):
                check(value[key], known[key], before + key)
        for key in schema.get("required", ()):
            if key not in value:
                raise Misfit(before + key, f"{before}{key} is missing")
        for key, item in value.items():
            if key in known:
                check(item, known[key], before + key)


def _types(schema: Schema) -> list[str]:
    if "anyOf" in schema:
        return [name for kind in schema["anyOf"] for name in _types(kind)]
    kinds = schema["type"]
    return [kinds] if isinstance(kinds, str) else kinds


def _is_kind(value: Json, schema: Schema) -> bool:
    """Whether a value has the type of a schema. true is not a number, and 5.0 is an integer."""
    kinds = _types(schema)
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return any(isinstance(value, _TYPES[kind]) for kind in kinds)


def _describe(schema: Schema) -> str:
    """Return a description of the values that a schema accepts."""
    if "enum" in schema:
        return " or ".join("null" if v is None else repr(v).lower() for v in schema["enum"])
    return " or ".join(dict.fromkeys(_NAMES[kind] for kind in _types(schema)))
