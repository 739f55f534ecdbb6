"""Conversion of OpenAI API requests to validated values, and of results to OpenAI's JSON.

All functions are pure. `RequestError` rejects a request with OpenAI's error object, `{"error":
{"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_jax.decoding.structured import Form
from transformer_jax.server.schemas import CHAT, COMPLETION, EMBEDDING, Misfit, Schema, check
from transformer_jax.untrusted_files import Json, JsonObject, Untrusted

Endpoint = Literal["completion", "chat"]


class RequestError(ValueError):
    """Rejection of a request, in OpenAI's error format."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> JsonObject:
        """Return the error as a JSON object."""
        kinds = {404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self), "type": kinds.get(self.status, kind), "param": self.param,
                "code": self.code,
            }
        }  # fmt: skip


class AnswerForm(NamedTuple):
    """Form that an answer must have.

    Attributes:
        form: "schema", "regex" or "grammar".
        content: the JSON schema, or the text of the regular expression or grammar.
        param: name of the request parameter that contains the form.
    """

    form: Form
    content: JsonObject | str
    param: str


@dataclass(frozen=True)
class TextRequest:
    """Validated request for a completion or a chat answer.

    Attributes:
        endpoint: "completion" or "chat".
        prompt: a string or token IDs for a completion, or messages for a chat.
        num_tokens: maximum number of new tokens; None means as many tokens as fit.
        temperature: sampling temperature, from 0 (the likeliest token) to 2.
        top_p: total probability of the tokens to sample from, between 0 and 1.
        seed: random seed; None means a new random seed for each request.
        stop: stop strings, before which the answer ends.
        top: number of alternative log-probabilities per token; None returns no log-probabilities.
        stream: whether parts are sent as they are generated.
        include_usage: whether a stream ends with the token counts.
        form: required form of the answer; None allows any text.
    """

    endpoint: Endpoint
    prompt: str | tuple[int, ...] | tuple[dict[str, str], ...]
    num_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top: int | None = None
    stream: bool = False
    include_usage: bool = False
    form: AnswerForm | None = None


def read_request(endpoint: Endpoint, body: bytes, model: str) -> TextRequest:
    """Parse and validate a request for a model; a RequestError describes the first problem."""
    parsed = read_json(body)
    prompt = parsed.get("prompt") if isinstance(parsed, dict) else None
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int | float):
        message = f"prompt has {len(prompt)} strings: must have one, or be token IDs"
        raise RequestError(message, param="prompt")
    fields = _checked(parsed, CHAT if endpoint == "chat" else COMPLETION, model)
    if "max_tokens" in fields and "max_completion_tokens" in fields:
        message = "pass only one of max_tokens and max_completion_tokens"
        raise RequestError(message, param="max_tokens")
    count = fields.get("max_completion_tokens", fields.get("max_tokens"))
    top = fields.get("logprobs")
    if endpoint == "chat":
        top = int(fields.get("top_logprobs", 0)) if top else None
        if top is None and "top_logprobs" in fields:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
    elif count is None:
        count = 16  # OpenAI's default
    if "stream_options" in fields and not fields.get("stream"):
        raise RequestError("stream_options needs stream true", param="stream_options")
    stop = fields.get("stop", ())
    content: Any = fields["messages" if endpoint == "chat" else "prompt"]
    if endpoint == "chat":
        content = _messages(content)
    elif isinstance(content, list):  # a list of one string, or token IDs
        content = content[0] if isinstance(content[0], str) else tuple(map(int, content))
    return TextRequest(
        endpoint, content,
        num_tokens=None if count is None else int(count),
        temperature=float(fields.get("temperature", 1.0)), top_p=float(fields.get("top_p", 1.0)),
        seed=int(fields["seed"]) if "seed" in fields else None,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top=None if top is None else int(top), stream=fields.get("stream", False),
        include_usage=bool(fields.get("stream_options", {}).get("include_usage")),
        form=_form(body, fields),
    )  # fmt: skip


def _checked(body: Json, schema: Schema, model: str) -> dict[str, Any]:
    """Return the parameters in a body, without nulls; raise RequestError if one is invalid."""
    try:
        check(body, schema)
    except Misfit as error:
        raise RequestError(str(error), param=error.param) from None
    assert isinstance(body, dict)
    # Clients may send null instead of omitting a parameter.
    fields: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
    if fields["model"] != model:
        message = f"model is {fields['model'][:80]!r}: this server serves {model!r}"
        raise RequestError(message, 404, param="model", code="model_not_found")
    return fields


class EmbeddingRequest(NamedTuple):
    """Validated request for embeddings.

    Attributes:
        inputs: strings, or lists of token IDs.
        base64: whether vectors are sent as base64-encoded little-endian float32 values.
        dimensions: requested size of the vectors; None means the model's size.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    base64: bool
    dimensions: int | None


def read_embedding_request(body: bytes, model: str) -> EmbeddingRequest:
    """Parse and validate an embeddings request; a RequestError describes the first problem."""
    fields = _checked(read_json(body), EMBEDDING, model)
    inputs = fields["input"]
    if isinstance(inputs, str) or not isinstance(inputs[0], str | list):
        inputs = [inputs]
    dimensions = fields.get("dimensions")
    return EmbeddingRequest(
        tuple(one if isinstance(one, str) else tuple(map(int, one)) for one in inputs),
        fields.get("encoding_format") == "base64",
        None if dimensions is None else int(dimensions),
    )


def embedding_answer(
    request: EmbeddingRequest,
    model: str,
    vectors: np.ndarray,  # f32[n, D]
    num_tokens: int,
) -> JsonObject:
    """Return the JSON object of an embeddings answer."""
    # The bytes are always little-endian, because clients decode them.
    rows = vectors.astype("<f4")
    sent = [b64encode(row.tobytes()).decode() if request.base64 else row.tolist() for row in rows]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": n, "embedding": e} for n, e in enumerate(sent)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _form(body: bytes, fields: JsonObject) -> AnswerForm | None:
    """Return the form that a request specifies, if any; raise RequestError if it specifies two."""
    if not fields.keys() & {"response_format", "structured_outputs"}:
        return None
    # Parse the body again with decimals, so that numbers in a schema, such as 0.1, stay exact.
    fields = read_json(body, decimals=True)  # type: ignore[assignment]
    response_format = fields.get("response_format") or {}
    structured_outputs = fields.get("structured_outputs") or {}
    found: list[AnswerForm] = []
    kind, json_schema = response_format.get("type"), response_format.get("json_schema")
    name = "response_format.json_schema"
    if (kind == "json_schema") != (json_schema is not None):
        rule = "is missing" if json_schema is None else "needs type 'json_schema'"
        raise RequestError(f"{name} {rule}", param=name)
    if json_schema is not None:
        found.append(AnswerForm("schema", json_schema["schema"], f"{name}.schema"))
    elif kind == "json_object":
        found.append(AnswerForm("schema", {"type": "object"}, "response_format"))
    forms: dict[str, Form] = {"json": "schema", "regex": "regex", "grammar": "grammar"}
    for name, content in structured_outputs.items():
        if content is not None:
            found.append(AnswerForm(forms[name], content, f"structured_outputs.{name}"))
    if len(found) > 1:
        message = f"pass only one of {found[0].param} and {found[1].param}"
        raise RequestError(message, param=found[1].param)
    return found[0] if found else None


class _BodyError(ValueError):
    pass


def read_json(body: bytes, *, decimals: bool = False) -> Json:
    """Parse strict JSON with valid Unicode; a RequestError describes the first problem."""
    try:
        found = Untrusted(_BodyError).json(body, "the body", decimals=decimals)
        # JSON can contain an escape for half of a surrogate pair, which UTF-8 cannot encode.
        json.dumps(found, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RequestError("the body: a string contains half of a surrogate pair") from None
    except _BodyError as error:
        raise RequestError(str(error)) from None
    return found


def _messages(messages: list[JsonObject]) -> tuple[dict[str, str], ...]:
    """Return messages whose contents are single strings."""
    found = []
    for message in messages:
        text, role = message["content"], message["role"]
        if not isinstance(text, str):
            text = "".join(part["text"] for part in text)
        # "developer" is OpenAI's new name for the role. Templates use the old name.
        found.append({"role": "system" if role == "developer" else role, "content": text})
    return tuple(found)


class Token(NamedTuple):
    """Token in an answer, with its log-probability.

    Attributes:
        piece: bytes of the token.
        log_prob: log softmax(logits) of the token in nats, before temperature and top_p.
        offset: index of the token's first character.
        top: bytes and log-probabilities of the likeliest tokens, in decreasing order.
    """

    piece: bytes
    log_prob: float
    offset: int
    top: tuple[tuple[bytes, float], ...]


End = Literal["stop", "length", "failed"]


@dataclass(frozen=True)
class Part:
    """New part of an answer, or the complete answer.

    Attributes:
        text: text of the part.
        tokens: tokens of the text, if log-probabilities are requested.
        count: number of tokens chosen so far, including one that ends the text.
        end: reason why the answer ended, or None if more parts follow.
        error: reason why the answer failed, or None.
        status: HTTP status of a failed answer.
        shared: number of prompt tokens taken from the cache of an earlier request.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    count: int = 0
    end: End | None = None
    error: str | None = None
    status: int = 500
    shared: int = 0


class Stamp(NamedTuple):
    """Fields shared by all parts of an answer."""

    id: str
    created: int
    """Creation time in seconds since 1970."""
    model: str


def join_parts(parts: Sequence[Part]) -> Part:
    """Concatenate the parts of an answer."""
    tokens = tuple(token for part in parts for token in part.tokens)
    return replace(parts[-1], text="".join(part.text for part in parts), tokens=tokens)


def usage(prompt_tokens: int, part: Part) -> JsonObject:
    """Return the token counts of an answer, which its last part contains."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": part.count,
        "total_tokens": prompt_tokens + part.count,
        "prompt_tokens_details": {"cached_tokens": part.shared},
    }


def answer(request: TextRequest, stamp: Stamp, part: Part, prompt_tokens: int) -> JsonObject:
    """Return the JSON object of a complete answer."""
    choice: JsonObject = {"index": 0}
    if request.endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
    else:
        choice["text"] = part.text
    choice |= {"logprobs": _log_probs(request, part.tokens), "finish_reason": part.end}
    kind = "chat.completion" if request.endpoint == "chat" else "text_completion"
    return _framed(kind, stamp, [choice]) | {"usage": usage(prompt_tokens, part)}


def chunks(
    request: TextRequest, stamp: Stamp, part: Part, prompt_tokens: int, *, first: bool
) -> list[JsonObject]:
    """Return the JSON chunks that a stream sends for a part; `first` marks the first part."""
    choices: list[JsonObject] = []
    if request.endpoint == "chat":
        kind = "chat.completion.chunk"
        # OpenAI's first chunk contains the role and no text.
        if first:
            delta = {"role": "assistant", "content": ""}
            choices.append({"delta": delta, "logprobs": None, "finish_reason": None})
        if part.text or part.tokens:
            log_probs = _log_probs(request, part.tokens)
            delta = {"content": part.text}
            choices.append({"delta": delta, "logprobs": log_probs, "finish_reason": None})
        if part.end is not None:
            choices.append({"delta": {}, "logprobs": None, "finish_reason": part.end})
    else:
        kind = "text_completion"
        if part.text or part.tokens or part.end:
            log_probs = _log_probs(request, part.tokens)
            choices.append({"text": part.text, "logprobs": log_probs, "finish_reason": part.end})
    found = [_framed(kind, stamp, [{"index": 0} | choice]) for choice in choices]
    if request.include_usage:
        # If usage is requested, all chunks of OpenAI's API have this key.
        found = [{**one, "usage": None} for one in found]
        if part.end is not None:
            found.append(_framed(kind, stamp, []) | {"usage": usage(prompt_tokens, part)})
    return found


def _framed(kind: str, stamp: Stamp, choices: list[JsonObject]) -> JsonObject:
    return {
        "id": stamp.id, "object": kind, "created": stamp.created, "model": stamp.model,
        "choices": choices,
    }  # fmt: skip


def _log_probs(request: TextRequest, tokens: Sequence[Token]) -> JsonObject | None:
    if request.top is None:
        return None
    if request.endpoint == "chat":
        return {
            "content": [
                _likely(token.piece, token.log_prob)
                | {"top_logprobs": [_likely(*one) for one in token.top[: request.top]]}
                for token in tokens
            ],
            "refusal": None,
        }
    likeliest: list[JsonObject] = []
    for token in tokens:
        found: JsonObject = {}
        for piece, log_prob in token.top[: request.top]:
            # JSON keys must be unique, but several tokens, such as parts of characters, may have
            # the same text.
            name, n = _named(piece), 1
            while name in found:
                n += 1
                name = f"{_named(piece)} #{n}"
            found[name] = log_prob
        likeliest.append(found)
    return {
        "tokens": [_named(token.piece) for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": likeliest,
        "text_offset": [token.offset for token in tokens],
    }


def _likely(piece: bytes, log_prob: float) -> JsonObject:
    return {"token": _shown(piece), "logprob": log_prob, "bytes": list(piece)}


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _named(piece: bytes) -> str:
    r"""Return the text of a token, or OpenAI's notation `bytes:\xc3` for part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Escapes for the line boundaries of `str.splitlines` that `json` does not escape."""


def event(data: JsonObject | str) -> bytes:
    """Return a server-sent event whose data are a single line for every line reader."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode()
