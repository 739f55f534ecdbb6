"""HTTP answers of a fake engine with fixed parts: JSON, streams, errors, headers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.server import app as apps
from transformer_jax.server.app import make_app
from transformer_jax.server.engine import Engine, Ticket
from transformer_jax.server.protocol import AnswerForm, Part, RequestError, TextRequest, Token

pytest.importorskip("starlette")
TALK = [{"role": "developer", "content": "be"}, {"role": "user", "content": [
    {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]  # fmt: skip
TOP = ((b"x", -0.5), (b"\xc3", -1.5), (b"x", -2.0))
PARTS = [
    Part("hé", (Token("hé".encode(), -0.25, 0, TOP),), 1, None, shared=4),
    Part("\u2028o", (Token(b"\xe2", -1.0, 2, TOP), Token(b"o", -2.0, 3, ())), 4, "stop", shared=4),
]


class FixedEngine:
    """An engine that answers every request with fixed parts and records the requests."""

    slots, running, waiting, alive, context = 3, 1, 2, True, 17

    def __init__(self, parts=PARTS):
        self.parts, self.requests, self.cancelled = parts, [], 0

    def read(self, request):
        return np.arange(5), 7

    def match(self, request):
        return "the matcher"

    def submit(self, request, ids, count, deliver, matcher):
        self.requests.append((request, list(ids), count, matcher))
        for part in self.parts:
            deliver(part)
        return Ticket(request, ids, count, deliver)

    def cancel(self, ticket):
        self.cancelled += 1

    def stop(self):
        self.alive = False


@pytest.fixture
def client(monkeypatch):
    from starlette.testclient import TestClient

    monkeypatch.setattr(apps.time, "time", lambda: 1234.5)
    monkeypatch.setattr(apps.secrets, "token_hex", lambda count: f"{count} bytes")
    made = lambda engine, **options: TestClient(  # noqa: E731
        make_app(engine, "m", **options), raise_server_exceptions=False
    )
    return made


USAGE = {
    "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip


def test_completion_response_joins_streamed_parts(client):
    engine = FixedEngine()
    body = {
        "model": "m", "prompt": "p", "max_tokens": 6, "temperature": 0.5, "top_p": 0.75, "seed": 3,
        "stop": ["x", "y"], "logprobs": 2, "structured_outputs": {"regex": "a+"}, "user": None,
    }  # fmt: skip
    found = client(engine).post("/v1/completions", json=body)
    form = AnswerForm("regex", "a+", "structured_outputs.regex")
    request = TextRequest("completion", "p", 6, 0.5, 0.75, 3, ("x", "y"), 2, form=form)
    assert (
        engine.requests == [(request, [0, 1, 2, 3, 4], 7, "the matcher")] and engine.cancelled == 1
    )
    assert found.json() == {
        "id": "cmpl-12 bytes", "object": "text_completion", "created": 1234, "model": "m",
        "usage": USAGE,
        "choices": [{
            "index": 0, "text": "hé\u2028o", "finish_reason": "stop",
            "logprobs": {
                "tokens": ["hé", "bytes:\\xe2", "o"], "token_logprobs": [-0.25, -1.0, -2.0],
                "top_logprobs": [{"x": -0.5, "bytes:\\xc3": -1.5}] * 2 + [{}],
                "text_offset": [0, 2, 3],
            },
        }],
    }  # fmt: skip
    client(engine).post("/v1/completions", json={"model": "m", "prompt": [3, 4], "stop": "z"})
    assert engine.requests[1][0] == TextRequest("completion", (3, 4), 16, stop=("z",))


def events(found) -> list:
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.headers["cache-control"] == "no-cache"
    lines = found.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    assert all(len(line.splitlines()) == 1 for line in lines)
    return [data if data == "[DONE]" else json.loads(data) for data in (x[6:] for x in lines)]


def test_chat_stream_ends_with_token_usage(client):
    engine = FixedEngine()
    body = {
        "model": "m", "messages": TALK, "max_completion_tokens": 6, "logprobs": True,
        "top_logprobs": 1, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    found = events(client(engine).post("/v1/chat/completions", json=body))
    prompt = ({"role": "system", "content": "be"}, {"role": "user", "content": "ab"})
    request = TextRequest("chat", prompt, 6, top=1, stream=True, include_usage=True)
    assert engine.requests[0][0] == request and engine.cancelled == 1
    frame = {"id": "chatcmpl-12 bytes", "object": "chat.completion.chunk", "created": 1234}
    frame |= {"model": "m", "usage": None}

    def chunk(delta, content=None, end=None):
        log_probs = None if content is None else {"content": content, "refusal": None}
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": end}
        return frame | {"choices": [choice]}

    def token(text, log_prob, *likely):
        one = {"token": text.decode("utf-8", "replace"), "logprob": log_prob, "bytes": list(text)}
        return one | ({"top_logprobs": [token(*likely)]} if likely else {})

    one = token("hé".encode(), -0.25, b"x", -0.5)
    two = token(b"\xe2", -1.0, b"x", -0.5), token(b"o", -2.0) | {"top_logprobs": []}
    assert found == [
        chunk({"role": "assistant", "content": ""}), chunk({"content": "hé"}, [one]),
        chunk({"content": "\u2028o"}, [*two]), chunk({}, end="stop"),
        frame | {"choices": [], "usage": USAGE}, "[DONE]",
    ]  # fmt: skip
    plain = {"model": "m", "messages": TALK[1:]}
    found = client(engine).post("/v1/chat/completions", json=plain).json()
    message = {"role": "assistant", "content": "hé\u2028o", "refusal": None}
    assert found["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    assert found["object"] == "chat.completion" and found["usage"] == USAGE
    found = events(client(engine).post("/v1/completions", json={
        "model": "m", "prompt": "p", "stream": True}))  # fmt: skip
    assert [one["choices"] for one in found[:-1]] == [
        [{"index": 0, "text": "hé", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "\u2028o", "logprobs": None, "finish_reason": "stop"}],
    ]
    assert "usage" not in found[0] and found[-1] == "[DONE]"


def test_failures_use_openai_error_format(client, monkeypatch):
    request = {"model": "m", "prompt": "p"}

    def error(found, status, kind, message, param=None, code=None):
        body = found if isinstance(found, dict) else found.json()
        assert isinstance(found, dict) or found.status_code == status
        expected = {"message": message, "type": kind, "param": param, "code": code}
        assert body == {"error": expected}
        if not isinstance(found, dict):
            assert found.headers.get("retry-after") == ("1" if status in (429, 503) else None)

    broken = FixedEngine([PARTS[0], Part(count=2, end="failed", error="why", status=400)])
    post = lambda engine, body=request, **o: client(engine, **o).post(  # noqa: E731
        "/v1/completions", json=body
    )
    error(post(broken), 400, "invalid_request_error", "why")
    assert broken.cancelled == 1
    *_, last = events(post(broken, request | {"stream": True}))
    error(last, 400, "invalid_request_error", "why")
    late = "the answer took too long"
    error(post(FixedEngine([]), timeout=0.05), 503, "server_error", late, code="timeout")
    (only,) = events(post(FixedEngine([]), request | {"stream": True}, timeout=0.05))
    error(only, 503, "server_error", late, code="timeout")

    full = FixedEngine()
    full.submit = lambda *arguments: (_ for _ in ()).throw(
        RequestError("full", 429, code="queue_full")
    )
    error(post(full), 429, "rate_limit_error", "full", code="queue_full")
    wrong = FixedEngine()
    wrong.read = lambda request: 1 / 0
    error(post(wrong), 500, "server_error", "the server failed")
    message = "model is 'n': this server serves 'm'"
    expected = 404, "not_found_error", message, "model", "model_not_found"
    error(post(FixedEngine(), request | {"model": "n"}), *expected)
    error(client(FixedEngine()).get("/v1/models/n"), *expected)
    error(client(FixedEngine()).get("/v1/completions"), 405, "invalid_request_error",
          "GET /v1/completions: method not allowed")  # fmt: skip
    error(client(FixedEngine()).get("/no"), 404, "not_found_error", "GET /no: not found")
    large = client(FixedEngine(), most_bytes=20).post("/v1/completions", json=request)
    rule = "the body has more than 20 bytes, the maximum"
    error(large, 413, "invalid_request_error", rule)
    form = client(FixedEngine()).post("/v1/completions", data={"a": "b"})
    kind = "content-type is 'application/x-www-form-urlencoded': must be application/json"
    error(form, 415, "invalid_request_error", kind)
    vectors = client(FixedEngine()).post("/v1/embeddings", json={"model": "m", "input": "a"})
    rule = "'m' does not embed texts: serve the folder of a sentence encoder, with modules."
    error(vectors, 400, "invalid_request_error", rule + "json", "model")

    async def slow(request, most):
        await asyncio.sleep(9)

    monkeypatch.setattr(apps, "_body", slow)
    late = "the request took too long"
    error(post(FixedEngine(), timeout=0.05), 408, "invalid_request_error", late, code="timeout")


def test_model_and_health_routes_respond(client):
    engine = FixedEngine()
    model = {"id": "m", "object": "model", "created": 1234, "owned_by": "transformer_jax"}
    with client(engine) as open_client:
        assert open_client.get("/v1/models").json() == {"object": "list", "data": [model]}
        assert open_client.get("/v1/models/m").json() == model
        counts = {"status": "ok", "slots": 3, "running": 1, "waiting": 2}
        assert open_client.get("/health").json() == counts
        assert engine.alive
    assert not engine.alive  # stopped with the application
    found = client(engine).get("/health")
    assert (found.status_code, found.json()["error"]["code"]) == (503, "stopping")


def test_requests_must_fit_model_context():
    engine = Engine.__new__(Engine)
    engine.context, engine.answers_chats = 6, False
    read = lambda text: np.arange(len(text))  # noqa: E731
    known = lambda ids, what: ids  # noqa: E731
    engine.model = SimpleNamespace(kind="text", read=read, known=known, tokenizer=None)
    ask = lambda prompt, count, endpoint="completion": engine.read(  # noqa: E731
        TextRequest(endpoint, prompt, count)
    )
    for prompt, count, wanted in (("abc", 2, (3, 2)), ("abc", 4, (3, 4)), ("abcdef", 1, (6, 1)),
                                  ((5, 6), None, (2, 5)), ("a", None, (1, 6))):  # fmt: skip
        ids, room = ask(prompt, count)
        assert (len(ids), room) == wanted
    for prompt, count, more in (("abc", 5, " and 5 new ones are requested"), ("a" * 7, None, ""),
                                ("a" * 7, 1, " and 1 new ones are requested")):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            ask(prompt, count)
        rule = f"prompt has {len(prompt)} tokens{more}: must be at most 7 in all"
        assert (str(caught.value), caught.value.param) == (rule, "prompt")
        assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
    with pytest.raises(RequestError, match=r"^prompt has no tokens: must have at least one$"):
        ask("", 1)
    with pytest.raises(RequestError, match=r"^messages: the model has no chat template; use"):
        ask(({"role": "user", "content": "a"},), 1, "chat")
    engine.model.kind, engine.answers_chats = "chat", True
    engine.model.read_messages = lambda messages: np.arange(2)
    assert len(ask(({"role": "user", "content": "a"},), 1, "chat")[0]) == 2
    with pytest.raises(RequestError, match=r"^prompt: the model answers messages; use /v1/chat"):
        ask("a", 1)
