"""OpenAPI 3.1 description of the server, generated from the schemas that validate requests.

The format is defined by the OpenAPI Specification 3.1.0 (OpenAPI Initiative 2021).
"""

from __future__ import annotations

import sys

from transformer_jax.server.schemas import CHAT, COMPLETION, EMBEDDING, Schema

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip

_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer", "minimum": 0}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}

_MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"}, "object": {"type": "string", "enum": ["model"]},
        "created": {"type": "integer"}, "owned_by": {"type": "string"},
    },
}  # fmt: skip

_MODELS: Schema = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"enum": ["list"]}, "data": {"type": "array", "items": _MODEL}},
}

_HEALTH: Schema = {
    "type": "object",
    "required": ["status", "slots", "running", "waiting"],
    "properties": {
        "status": {"enum": ["ok"]},
        **{name: {"type": "integer", "minimum": 0} for name in ("slots", "running", "waiting")},
    },
}

_VECTORS: Schema = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"enum": ["list"]},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"enum": ["embedding"]},
                    "index": {"type": "integer"},
                    "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                },
            },
        },
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {
                "prompt_tokens": {"type": "integer"},
                "total_tokens": {"type": "integer"},
            },
        },
    },
}

_ERRORS = {
    400: "the request is invalid", 404: "there is no such model", 408: "the body took too long",
    413: "the body is too large", 415: "the body is not JSON", 429: "too many requests are waiting",
    503: "the server is stopping, or the answer took too long",
}  # fmt: skip


def describe(name: str, *, embeds: bool = False) -> Schema:
    """Return the content of /openapi.json for a text model, or for a model that `embeds` texts."""
    of_model = {"type": "string", "enum": [name]}
    posts = {
        "/v1/completions": _post("Continue a prompt.", COMPLETION, of_model, "text"),
        "/v1/chat/completions": _post("Answer messages.", CHAT, of_model, "message"),
    }
    if embeds:
        operation = _operation("Embed texts.", _VECTORS, *_ERRORS)
        posts = {"/v1/embeddings": _with_body(operation, EMBEDDING, of_model)}
    model = {"name": "model", "in": "path", "required": True, "schema": of_model}
    return {
        "openapi": "3.1.0",
        "info": {"title": "transformer_jax", "version": sys.modules["transformer_jax"].__version__},
        "paths": {
            "/health": {"get": _operation("Report whether requests are served.", _HEALTH, 503)},
            "/v1/models": {"get": _operation("List the model.", _MODELS)},
            "/v1/models/{model}": {
                "get": {**_operation("Describe the model.", _MODEL, 404), "parameters": [model]}
            },
            **posts,
        },
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _operation(summary: str, schema: Schema, *errors: int) -> Schema:
    responses: Schema = {"200": {"description": "OK", "content": _json(schema)}}
    for status in errors:
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(_ERROR)}
    return {"summary": summary, "responses": responses}


def _post(summary: str, body: Schema, of_model: Schema, content: str) -> Schema:
    kind = "text_completion" if content == "text" else "chat.completion"
    answer = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"enum": [kind]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["index", content, "logprobs", "finish_reason"],
                    "properties": {"finish_reason": {"enum": ["stop", "length"]}},
                },
            },
            "usage": _USAGE,
        },
    }
    operation = _operation(summary, answer, *_ERRORS)
    # in OpenAPI 3.1, the schema of a stream describes each event
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    return _with_body(operation, body, of_model)


def _with_body(operation: Schema, body: Schema, of_model: Schema) -> Schema:
    body = body | {"properties": body["properties"] | {"model": of_model}}
    return {"post": {**operation, "requestBody": {"required": True, "content": _json(body)}}}
