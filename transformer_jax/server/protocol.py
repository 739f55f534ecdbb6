"""Read requests of OpenAI's API as checked values, and write results as its JSON.

Pure functions of bytes, values and dicts. What a client sent and the server refuses is a
`RequestError`, which has OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.
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
    """Refusal of a request, in the form of OpenAI's API."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> JsonObject:
        """Return the JSON of the error."""
        kinds = {404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self), "type": kinds.get(self.status, kind), "param": self.param,
                "code": self.code,
            }
        }  # fmt: skip


class AnswerForm(NamedTuple):
    """The form that an answer must have.

    Attributes:
        form: "schema", "regex" or "grammar".
        content: a JSON schema, or a text.
        param: the name of the parameter that says so.
    """

    form: Form
    content: JsonObject | str
    param: str


@dataclass(frozen=True)
class TextRequest:
    """A checked request for a text.

    Attributes:
        endpoint: "completion" or "chat".
        prompt: a text or token ids of a completion, messages of a chat.
        num_tokens: the most new tokens; None is as many as fit.
        temperature: from 0, the likeliest token, to 2.
        top_p: from 0 to 1.
        seed: of what is drawn; None draws one.
        stop: texts before the first of which the answer ends.
        top: how many log-probabilities of other tokens are returned; None returns none at all.
        stream: whether parts are sent as they come.
        include_usage: whether a stream ends with the counts of tokens.
        form: the form that the answer is to have; None lets it have any.
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
    """Return the request that a body holds; RequestError says what is wrong with it.

    Args:
        endpoint: "completion" or "chat".
        body: JSON.
        model: the name of the model that is served.
    """
    given = read_json(body)
    prompt = given.get("prompt") if isinstance(given, dict) else None
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int | float):
        message = f"prompt has {len(prompt)} texts: must be one, or token ids"
        raise RequestError(message, param="prompt")
    asked = _checked(given, CHAT if endpoint == "chat" else COMPLETION, model)
    if "max_tokens" in asked and "max_completion_tokens" in asked:
        message = "max_tokens and max_completion_tokens: give one of them"
        raise RequestError(message, param="max_tokens")
    count = asked.get("max_completion_tokens", asked.get("max_tokens"))
    top = asked.get("logprobs")
    if endpoint == "chat":
        top = int(asked.get("top_logprobs", 0)) if top else None
        if top is None and "top_logprobs" in asked:
            raise RequestError("top_logprobs: needs logprobs true", param="top_logprobs")
    elif count is None:
        count = 16  # OpenAI's
    if "stream_options" in asked and not asked.get("stream"):
        raise RequestError("stream_options: needs stream true", param="stream_options")
    stop = asked.get("stop", ())
    return TextRequest(
        endpoint, _messages(asked["messages"]) if endpoint == "chat" else _prompt(asked["prompt"]),
        num_tokens=None if count is None else int(count),
        temperature=float(asked.get("temperature", 1.0)), top_p=float(asked.get("top_p", 1.0)),
        seed=int(asked["seed"]) if "seed" in asked else None,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top=None if top is None else int(top), stream=asked.get("stream", False),
        include_usage=bool(asked.get("stream_options", {}).get("include_usage")),
        form=_form(body, asked),
    )  # fmt: skip


def _checked(given: Json, schema: Schema, model: str) -> dict[str, Any]:
    """Return what a body says, nulls left out; RequestError where it does not fit its schema."""
    try:
        check(given, schema)
    except Misfit as error:
        raise RequestError(str(error), param=error.param) from None
    assert isinstance(given, dict)
    # Clients send null for what they leave out.
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if asked["model"] != model:
        message = f"model is {asked['model'][:80]!r}: this server has {model!r}"
        raise RequestError(message, 404, param="model", code="model_not_found")
    return asked


class EmbeddingRequest(NamedTuple):
    """A checked request for vectors.

    Attributes:
        inputs: each a string or token ids.
        base64: whether vectors are sent as bytes in base64, little-endian float32.
        dimensions: the width that the vectors must have; None is the model's.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    base64: bool
    dimensions: int | None


def read_embedding_request(body: bytes, model: str) -> EmbeddingRequest:
    """Return a request for vectors; RequestError says what is wrong with it."""
    asked = _checked(read_json(body), EMBEDDING, model)
    given = asked["input"]
    if isinstance(given, str) or not isinstance(given[0], str | list):
        given = [given]
    inputs = (one if isinstance(one, str) else tuple(map(int, one)) for one in given)
    dimensions = asked.get("dimensions")
    return EmbeddingRequest(
        tuple(inputs),
        asked.get("encoding_format") == "base64",
        None if dimensions is None else int(dimensions),
    )


def embedding_answer(
    asked: EmbeddingRequest,
    model: str,
    vectors: np.ndarray,  # f32[n, D]
    num_tokens: int,
) -> JsonObject:
    """Return the JSON of vectors."""
    # Little-endian whatever the machine: the client decodes bytes.
    rows = vectors.astype("<f4")
    sent = [b64encode(row.tobytes()).decode() if asked.base64 else row.tolist() for row in rows]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": n, "embedding": e} for n, e in enumerate(sent)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _form(body: bytes, asked: JsonObject) -> AnswerForm | None:
    """Return the one form that a request names; RequestError where it names two."""
    if not asked.keys() & {"response_format", "structured_outputs"}:
        return None
    # Read again with its digits: a schema's 0.1 must not become a float on the way.
    asked = read_json(body, decimals=True)  # type: ignore[assignment]
    response_format = asked.get("response_format") or {}
    structured_outputs = asked.get("structured_outputs") or {}
    found: list[AnswerForm] = []
    kind, described = response_format.get("type"), response_format.get("json_schema")
    name = "response_format.json_schema"
    if (kind == "json_schema") != (described is not None):
        rule = "is missing" if described is None else "needs type 'json_schema'"
        raise RequestError(f"{name}: {rule}", param=name)
    if described is not None:
        found.append(AnswerForm("schema", described["schema"], f"{name}.schema"))
    elif kind == "json_object":
        found.append(AnswerForm("schema", {"type": "object"}, "response_format"))
    forms: dict[str, Form] = {"json": "schema", "regex": "regex", "grammar": "grammar"}
    for name, content in structured_outputs.items():
        if content is not None:
            found.append(AnswerForm(forms[name], content, f"structured_outputs.{name}"))
    if len(found) > 1:
        message = f"{found[0].param} and {found[1].param}: give one of them"
        raise RequestError(message, param=found[1].param)
    return found[0] if found else None


class _BodyError(ValueError):
    pass


def read_json(body: bytes, *, decimals: bool = False) -> Json:
    """Return strict JSON, whose texts are Unicode; RequestError says what is wrong with it."""
    try:
        found = Untrusted(_BodyError).json(body, "the body", decimals=decimals)
        # JSON can escape half of a surrogate pair, which has no UTF-8.
        json.dumps(found, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RequestError("the body: a text has half of a surrogate pair") from None
    except _BodyError as error:
        raise RequestError(str(error)) from None
    return found


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    return given[0] if isinstance(given[0], str) else tuple(map(int, given))


def _messages(given: list[JsonObject]) -> tuple[dict[str, str], ...]:
    """Return messages whose content is one text."""
    found = []
    for message in given:
        said = message["content"]
        text = said if isinstance(said, str) else "".join(part["text"] for part in said)
        role = message["role"]
        # OpenAI renamed the role; templates know the old name.
        found.append({"role": "system" if role == "developer" else role, "content": text})
    return tuple(found)


class Token(NamedTuple):
    """A token of an answer and its log-probability.

    Attributes:
        piece: its bytes.
        log_prob: log softmax(logits) of it, in nats, before temperature and top_p.
        offset: how many characters stand before that in which it begins.
        top: bytes and log-probabilities of the likeliest, the best first.
    """

    piece: bytes
    log_prob: float
    offset: int
    top: tuple[tuple[bytes, float], ...]


End = Literal["stop", "length", "failed"]


@dataclass(frozen=True)
class Part:
    """The text of an answer: all of it, or the newest part.

    Attributes:
        text: what was written.
        tokens: of the text, if their log-probabilities are requested.
        count: how many tokens were chosen so far, one that ends the text included.
        end: why it ended; None: more is to come.
        error: why it failed.
        status: of HTTP, where it failed.
        shared: how many tokens of the prompt were taken from the cache of an earlier request.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    count: int = 0
    end: End | None = None
    error: str | None = None
    status: int = 500
    shared: int = 0


class Stamp(NamedTuple):
    """Fields that all parts of an answer share."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str


def join_parts(parts: Sequence[Part]) -> Part:
    """Return parts as one."""
    tokens = tuple(token for part in parts for token in part.tokens)
    return replace(parts[-1], text="".join(part.text for part in parts), tokens=tokens)


def usage(prompt_tokens: int, part: Part) -> JsonObject:
    """Return the counts of tokens of an answer, of which this is the last part."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": part.count,
        "total_tokens": prompt_tokens + part.count,
        "prompt_tokens_details": {"cached_tokens": part.shared},
    }


def answer(asked: TextRequest, stamp: Stamp, part: Part, prompt_tokens: int) -> JsonObject:
    """Return the JSON of a whole answer."""
    choice: JsonObject = {"index": 0}
    if asked.endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
    else:
        choice["text"] = part.text
    choice |= {"logprobs": _log_probs(asked, part.tokens), "finish_reason": part.end}
    kind = "chat.completion" if asked.endpoint == "chat" else "text_completion"
    return _framed(kind, stamp, [choice]) | {"usage": usage(prompt_tokens, part)}


def chunks(
    asked: TextRequest, stamp: Stamp, part: Part, prompt_tokens: int, *, first: bool
) -> list[JsonObject]:
    """Return the JSON of what a stream sends for a part of an answer.

    Args:
        asked: the request.
        stamp: of the answer.
        part: the newest part.
        prompt_tokens: of the request.
        first: whether nothing was sent before.
    """
    choices: list[JsonObject] = []
    if asked.endpoint == "chat":
        kind = "chat.completion.chunk"
        # OpenAI's first chunk has the role and no text.
        if first:
            delta = {"role": "assistant", "content": ""}
            choices.append({"delta": delta, "logprobs": None, "finish_reason": None})
        if part.text or part.tokens:
            said = {"content": part.text}, _log_probs(asked, part.tokens)
            choices.append({"delta": said[0], "logprobs": said[1], "finish_reason": None})
        if part.end is not None:
            choices.append({"delta": {}, "logprobs": None, "finish_reason": part.end})
    else:
        kind = "text_completion"
        if part.text or part.tokens or part.end:
            log_probs = _log_probs(asked, part.tokens)
            choices.append({"text": part.text, "logprobs": log_probs, "finish_reason": part.end})
    found = [_framed(kind, stamp, [{"index": 0} | choice]) for choice in choices]
    if asked.include_usage:
        # With usage, OpenAI's chunks have the key from the first one on.
        found = [{**one, "usage": None} for one in found]
        if part.end is not None:
            found.append(_framed(kind, stamp, []) | {"usage": usage(prompt_tokens, part)})
    return found


def _framed(kind: str, stamp: Stamp, choices: list[JsonObject]) -> JsonObject:
    return {
        "id": stamp.id, "object": kind, "created": stamp.created, "model": stamp.model,
        "choices": choices,
    }  # fmt: skip


def _log_probs(asked: TextRequest, tokens: Sequence[Token]) -> JsonObject | None:
    if asked.top is None:
        return None
    if asked.endpoint == "chat":
        return {
            "content": [
                _likely(token.piece, token.log_prob)
                | {"top_logprobs": [_likely(*one) for one in token.top[: asked.top]]}
                for token in tokens
            ],
            "refusal": None,
        }
    return {
        "tokens": [_named(token.piece) for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": [_by_name(token.top[: asked.top]) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _likely(piece: bytes, log_prob: float) -> JsonObject:
    return {"token": _shown(piece), "logprob": log_prob, "bytes": list(piece)}


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _named(piece: bytes) -> str:
    r"""Return a token's text; of a part of a character its bytes as OpenAI has it, `bytes:\xc3`."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _by_name(top: Sequence[tuple[bytes, float]]) -> JsonObject:
    """Return log-probabilities by the texts of tokens, numbered where several share a text."""
    found: JsonObject = {}
    for piece, log_prob in top:
        # JSON keys are unique, but several tokens may have the same text, such as parts of
        # characters.
        name, n = _named(piece), 1
        while name in found:
            n += 1
            name = f"{_named(piece)} #{n}"
        found[name] = log_prob
    return found


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Escapes for the ends of lines, as `str.splitlines` has them, that `json` leaves as they are."""


def event(data: JsonObject | str) -> bytes:
    """Return one server-sent event, which is one line to every reader of lines."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode()
