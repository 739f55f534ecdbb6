"""The server with a small model: answers match the model's own, and errors are clear."""

import concurrent.futures
import functools
import json
import threading
import time

import jax
import numpy as np
import pytest

from tests.server.models import is_idle, running, tiny
from transformer_jax.config import ConfigError
from transformer_jax.decoding.samplers import Sample, Temperature, TopP
from transformer_jax.decoding.step import make_step
from transformer_jax.decoding.structured import Grammar
from transformer_jax.models.factory import build
from transformer_jax.server import app as app_module
from transformer_jax.server import engine as engine_module
from transformer_jax.server.app import make_app
from transformer_jax.server.engine import Engine
from transformer_jax.server.protocol import RequestError, TextRequest

pytest.importorskip("starlette")
pytestmark = pytest.mark.usefixtures("quick_compilation")

NAME = "tiny"
TALK = [{"role": "user", "content": "tab"}]


@pytest.fixture(scope="module")
def engine(quick_compilation):
    with running(tiny(), slots=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    return client_of(engine, most_bytes=3000)


def client_of(engine, *, raising=True, **options):
    from starlette.testclient import TestClient

    app = make_app(engine, NAME, **options)
    return TestClient(app, raise_server_exceptions=raising)


@functools.cache
def whole_text():
    model = tiny()
    return jax.jit(lambda ids: build(model.config).apply({"params": model.params}, ids)[0][0])


def likeliest(ids, count, matcher=None) -> str:
    """Return greedy tokens that are allowed, each from a full forward pass."""
    model, new = tiny(), []
    known = np.arange(model.config.vocab_size) < model.tokenizer.vocab_size
    while len(new) < count and not (matcher is not None and matcher.ended):
        text = np.array([*ids, *new], np.int32)
        row = np.pad(text, (0, model.config.max_len - len(text)))[None]
        logits = np.asarray(whole_text()(row))[len(text) - 1]
        allowed = known if matcher is None else matcher.allowed
        token = int(np.where(allowed, logits, -np.inf).argmax())
        if token in model.model.stop_ids:
            break
        new.append(token)
        if matcher is not None:
            matcher.read(token)
    return model.tokenizer.to_bytes(new).decode("utf-8", "replace")


def complete(client, **fields):
    body = {"model": NAME, "prompt": "cab", "temperature": 0, "max_tokens": 11} | fields
    return client.post("/v1/completions", json=body)


def answer(client, **fields):
    body = {"model": NAME, "messages": TALK, "temperature": 0, "max_tokens": 11} | fields
    return client.post("/v1/chat/completions", json=body)


def events(response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_greedy_answer_matches_model_without_cache(client, engine):
    for prompt in ("cab", "", "grab a cab, é"):
        got = complete(client, prompt=prompt).json()
        want = likeliest(tiny().read(prompt), 11)
        assert got["choices"][0]["text"] == want and len(want) > 3
        assert got["usage"]["prompt_tokens"] == len(tiny().read(prompt))
        sent = events(complete(client, prompt=prompt, stream=True))
        assert "".join(one["choices"][0]["text"] for one in sent) == want and len(sent) > 2
    ids = tiny().read("cab").tolist()
    assert complete(client, prompt=ids).json()["choices"][0]["text"] == likeliest(ids, 11)
    got, want = answer(client).json()["choices"][0], likeliest(tiny().read_messages(TALK), 11)
    assert got["message"]["content"] == want and got["finish_reason"] == "length"
    sent = events(answer(client, stream=True))
    deltas = [one["choices"][0]["delta"].get("content", "") for one in sent]
    assert "".join(deltas) == want
    assert is_idle(engine)


def test_prompt_and_answer_may_fill_entire_context():
    """The last token is not read, so one more than the context fits."""
    engine, ids = Engine(tiny(), context=9), tuple(tiny().read("cab").tolist())
    room = 9 + 1 - len(ids)
    assert engine.read(TextRequest("completion", ids, room))[1] == room
    assert engine.read(TextRequest("completion", ids))[1] == room
    with pytest.raises(RequestError, match=f"and {room + 1} new ones are requested"):
        engine.read(TextRequest("completion", ids, room + 1))


@pytest.mark.slow
def test_seeded_answer_matches_generate_with_same_key(client):
    for seed, t, p in ((3, 1.0, 1.0), (2**32 - 1, 0.7, 0.9)):
        sampler = Sample(Temperature(t), TopP(p))
        want = tiny().generate("cab", 11, sampler=sampler, key=jax.random.key(seed))
        got = complete(client, seed=seed, temperature=t, top_p=p).json()
        assert got["choices"][0]["text"] == want
    drawn = {complete(client, temperature=2).json()["choices"][0]["text"] for _ in range(4)}
    assert len(drawn) == 4, "without a seed each request draws its own"


@pytest.mark.slow
def test_shared_prefix_of_prompt_is_reused(client):
    """Answers to the next turn of a chat, and to a diverging text, do not change."""
    talk = [{"role": "user", "content": "tab bad dab a cab"}]
    assert answer(client, messages=talk).status_code == 200
    for content, most in (("da", 10), ("bat", 10), (" ", 2)):
        more = [*talk, {"role": "assistant", "content": "ab"}, {"role": "user", "content": content}]
        got = answer(client, messages=more, max_tokens=most).json()
        assert got["choices"][0]["message"]["content"] == tiny().chat(more, most)
        shared = got["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(tiny().read_messages(talk)) <= shared < got["usage"]["prompt_tokens"]
    got = complete(client, prompt="tab bad dab a cab and others", seed=5, temperature=1).json()
    want = tiny().generate(
        "tab bad dab a cab and others", 11, sampler=Sample(Temperature(1.0)), key=jax.random.key(5)
    )
    assert got["choices"][0]["text"] == want
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "chats begin with u"


def test_stop_string_ends_answer_before_it(client, engine):
    whole = likeliest(tiny().read("cab"), 40)
    stop = whole[5:7]
    got = complete(client, stop=["\x00never", stop], max_tokens=40).json()
    want = whole[: whole.index(stop)]
    assert got["choices"][0] | {"logprobs": 0} == {
        "index": 0, "text": want, "logprobs": 0, "finish_reason": "stop"
    }  # fmt: skip
    assert 0 < got["usage"]["completion_tokens"] < 40
    want = likeliest(tiny().read("cab"), 11)
    got = complete(client, stop=want[-1] + "\x00").json()["choices"][0]
    assert got["text"] == want and got["finish_reason"] == "length", (
        "constrained back, then decided"
    )
    assert is_idle(engine)


@pytest.mark.slow
def test_log_probabilities_match_full_forward(client):
    got = answer(client, logprobs=True, top_logprobs=3).json()["choices"][0]
    tokens = got["logprobs"]["content"]
    ids = {(n,): n for n in range(256)} | {tuple(b"ab"): 256}
    prompt, new = tiny().read_messages(TALK), [ids[tuple(one["bytes"])] for one in tokens]
    whole = np.array([*prompt, *new])
    logits = build(tiny().config).apply({"params": tiny().params}, whole[None])[0]
    x = np.asarray(logits, np.float64)[0, len(prompt) - 1 : -1]
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    assert len(new) == 11 and len(set(new)) > 4
    want = np.take_along_axis(log_p, np.array(new)[:, None], 1)[:, 0]
    np.testing.assert_allclose([one["logprob"] for one in tokens], want, atol=2e-4)
    tops = [[top["logprob"] for top in one["top_logprobs"]] for one in tokens]
    np.testing.assert_allclose(tops, -np.sort(-log_p, axis=-1)[:, :3], atol=2e-4)
    alone = complete(client, logprobs=2).json()["choices"][0]
    sent = [one["choices"][0] for one in events(complete(client, logprobs=2, stream=True))]
    joined = [p for one in sent if one["logprobs"] for p in one["logprobs"]["token_logprobs"]]
    assert joined == alone["logprobs"]["token_logprobs"]
    offsets = alone["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(offsets) == 11
    assert len(set(offsets)) > 5


@pytest.mark.parametrize(
    ("status", "why", "send"),
    [
        (400, "not JSON", dict(content=b"{", headers={"content-type": "application/json"})),
        (415, "must be application/json", dict(content=b"{}")),
        (415, "must be application/json", dict(data={"model": NAME})),
        (413, "more than 3000 bytes", dict(json={"model": NAME, "prompt": "a" * 4000})),
        (404, "this server serves 'tiny'", dict(json={"model": "gpt-4", "prompt": "a"})),
        (400, "must be at most 62 in all", dict(json={"model": NAME, "prompt": "a " * 99})),
        (400, "at most 62", dict(json={"model": NAME, "prompt": "a", "max_tokens": 62})),
        (400, "contains ID 9999", dict(json={"model": NAME, "prompt": [9999]})),
        (400, "n is 2", dict(json={"model": NAME, "prompt": "a", "n": 2})),
    ],
)
def test_invalid_requests_return_openai_errors(client, status, why, send):
    response = client.post("/v1/completions", **send)
    error = response.json()["error"]
    assert response.status_code == status and why in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in response.text and "home" not in response.text


def of_schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "é"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


LARK = 'start: "[" start "]" | "abc"'


@pytest.fixture
def forms():
    pytest.importorskip("llguidance")


def matcher_of(form, content):
    model = tiny()
    known = model.tokenizer, model.config.vocab_size, model.model.stop_ids
    return Grammar(form, content, *known).start()


def test_concurrent_structured_and_free_answers_match_model(client, engine, forms):
    """Four forms and two free requests share three slots, complete and as streams."""
    requests = [
        (dict(response_format=of_schema(SCHEMA)), ("schema", SCHEMA)),
        (dict(structured_outputs={"json": SCHEMA}), ("schema", SCHEMA)),
        (dict(structured_outputs={"regex": "[ab]{3}é+"}), ("regex", "[ab]{3}é+")),
        (dict(structured_outputs={"grammar": LARK}), ("grammar", LARK)), ({}, None), ({}, None),
    ]  # fmt: skip

    def send(n):
        return complete(client, prompt="cab", max_tokens=50, stream=n % 2 == 1, **requests[n][0])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(send, range(6)))
    for n, (response, (_, form)) in enumerate(zip(found, requests, strict=True)):
        want = likeliest(tiny().read("cab"), 50, None if form is None else matcher_of(*form))
        if n % 2:
            sent = events(response)
            got = "".join(one["choices"][0]["text"] for one in sent)
            end = sent[-1]["choices"][0]["finish_reason"]
        else:
            got, end = (response.json()["choices"][0][key] for key in ("text", "finish_reason"))
        assert got == want and len(got) > 3, form
        if n < 2:
            parsed = json.loads(got)
            assert parsed["a"] in ("b", "é") and parsed["n"] in range(1, 10) and end == "stop"
    assert is_idle(engine)


@pytest.mark.slow
def test_structured_answer_ends_at_schema_stop_string_or_limit(client, engine, forms):
    fields = dict(messages=TALK, response_format=of_schema(SCHEMA))
    whole = answer(client, **fields, max_tokens=40).json()["choices"][0]
    assert whole["finish_reason"] == "stop" and json.loads(whole["message"]["content"])
    cut = answer(client, **fields, max_tokens=5).json()
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 5
    assert whole["message"]["content"].startswith(cut["choices"][0]["message"]["content"])
    stopped = answer(client, **fields, max_tokens=40, stop='"a').json()["choices"][0]
    text = whole["message"]["content"]
    assert stopped["message"]["content"] == text[: text.index('"a')]
    assert stopped["finish_reason"] == "stop"
    loose = answer(client, response_format={"type": "json_object"}, max_tokens=5)
    assert loose.json()["choices"][0]["message"]["content"].startswith("{")
    spaced = answer(client, structured_outputs={"regex": " [ab]{3}"}).json()["choices"][0]
    assert spaced["message"]["content"].startswith(" ") and len(spaced["message"]["content"]) == 4
    nothing = complete(client, structured_outputs={"regex": ""}).json()
    assert nothing["choices"][0]["text"] == "" and nothing["usage"]["completion_tokens"] == 0
    drawn = complete(client, structured_outputs={"regex": "[ab]{9}"}, seed=3, temperature=1).json()
    sampler = Sample(Temperature(1.0), TopP(1.0))
    want = tiny().generate("cab", 11, regex="[ab]{9}", sampler=sampler, key=jax.random.key(3))
    assert drawn["choices"][0]["text"] == want and len(want) == 9
    assert is_idle(engine)


@pytest.mark.slow
def test_structured_log_probabilities_include_all_tokens(client, forms):
    """The likeliest token is not allowed, but it is listed before the chosen one."""
    free = complete(client, logprobs=3, max_tokens=1).json()["choices"][0]["logprobs"]
    constrained = complete(
        client, logprobs=3, max_tokens=1, structured_outputs={"regex": "[0-9]{3}"}
    )
    constrained = constrained.json()["choices"][0]["logprobs"]
    assert constrained["top_logprobs"] == free["top_logprobs"]
    assert constrained["tokens"][0] in "0123456789" and free["tokens"][0] not in "0123456789"
    assert constrained["token_logprobs"][0] < min(free["top_logprobs"][0].values())


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        (dict(response_format=of_schema({"type": "objec"})), "response_format.json_schema.schema",
         "Invalid type: objec"),
        (dict(structured_outputs={"regex": "("}), "structured_outputs.regex", "unclosed group"),
        (dict(structured_outputs={"grammar": "start: x"}), "structured_outputs.grammar",
         "unknown name"),
        (dict(structured_outputs={"regex": "a(b&&c)[a&&b]"}), "structured_outputs.regex",
         "no text matches it"),
        (dict(structured_outputs={"json": {"properties": {"a": {"nullable": True}}}}),
         "structured_outputs.json", "json.properties.a.nullable is not JSON Schema but OpenAPI"),
        (dict(structured_outputs={"json": {"const": 9007199254740993}}), "structured_outputs.json",
         "const is 9007199254740993: must be from"),
    ],
)  # fmt: skip
def test_invalid_response_format_error_names_parameter(client, forms, fields, param, why):
    for response in (complete(client, **fields), answer(client, stream=True, **fields)):
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param
        assert error["message"].startswith(param) and why in error["message"]


@pytest.mark.slow
def test_constraint_failure_ends_only_affected_request(client, engine, forms, monkeypatch):
    def fail(matcher, token):
        raise ValueError("structured_outputs.regex: the text cannot go on: too complex")

    monkeypatch.setattr(engine_module.Matcher, "read", fail)
    response = complete(client, structured_outputs={"regex": "[ab]{9}"})
    assert response.status_code == 400 and "too complex" in response.json()["error"]["message"]
    sent = complete(client, structured_outputs={"regex": "[ab]{9}"}, stream=True).text
    assert "too complex" in sent and '"invalid_request_error"' in sent
    assert complete(client).json()["choices"][0]["text"] == tiny().generate("cab", 11)
    assert is_idle(engine)


def test_chat_rejected_by_template_does_not_leak_path(client, engine):
    for messages in ([{"role": "user", "content": ""}], [{"role": "assistant", "content": "a"}],
                     [{"role": "user", "content": "<e>"}]):  # fmt: skip
        response = answer(client, messages=messages)
        assert response.status_code == 400 and "messages" in response.json()["error"]["message"]
    plain = Engine(tiny(template=False), slots=1)
    with pytest.raises(RequestError, match="no chat template") as caught:
        plain.read(TextRequest("chat", tuple(TALK)))
    assert "secret" not in str(caught.value)


def test_metadata_routes_describe_model(client):
    assert client.get("/health").json() == dict(status="ok", slots=3, running=0, waiting=0)
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == NAME and client.get(f"/v1/models/{NAME}").json() == model
    for method, path, status in (
        ("GET", "/v1/models/gpt-4", 404), ("GET", "/nothing", 404), ("DELETE", "/health", 405),
        ("GET", "/v1/completions", 405),
    ):  # fmt: skip
        response = client.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]
    described = client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    responses = described["paths"]["/v1/completions"]["post"]["responses"]
    for body, media in ("{}", "application/json"), ("{}", "text/plain"):
        response = client.post("/v1/completions", content=body, headers={"content-type": media})
        assert response.status_code >= 400 and str(response.status_code) in responses


class PausedTurns:
    """Block the engine between two turns, so that requests wait."""

    def __init__(self, engine, monkeypatch):
        self.turn, self.go = engine.batcher.turn, threading.Event()
        monkeypatch.setattr(engine.batcher, "turn", self.wait)

    def wait(self):
        self.go.wait(60)
        yield from self.turn()


def test_engine_applies_edits_and_disables_prefix_sharing():
    edited = tiny().edited({"logits": lambda logits: logits})
    assert Engine(edited, slots=1)._step == make_step(edited.module)
    assert Engine(tiny(), slots=1)._shares and not Engine(edited, slots=1)._shares


@pytest.mark.slow
def test_engine_serves_edited_model(quick_compilation):
    """Each token is the one that the edit prefers, also after the prefix of another request."""
    model = tiny().edited({"logits": lambda logits: logits.at[..., ord("B")].add(1e4)})
    with running(model, slots=1) as engine:
        client = client_of(engine)
        for prompt in ("cab" * 9, "cab" * 9 + "d"):
            [choice] = complete(client, prompt=prompt, max_tokens=3).json()["choices"]
            assert choice["text"] == "BBB"


@pytest.mark.slow
def test_engine_serves_model_whose_states_cannot_be_rewound(quick_compilation):
    """The second prompt starts with the first, but is read from its first token."""
    model = tiny(states=True)
    with running(model, slots=1) as engine:
        client = client_of(engine)
        for prompt in ("cab" * 5, "cab" * 5 + "d"):
            [choice] = complete(client, prompt=prompt).json()["choices"]
            assert choice["text"] == model.generate(prompt, 11) != ""


@pytest.mark.slow
def test_requests_beyond_queue_capacity_are_rejected(monkeypatch):
    with running(tiny(), slots=1, queue=2) as engine:
        paused = PausedTurns(engine, monkeypatch)
        client = client_of(engine)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(complete, client) for _ in range(6)]
            until = time.monotonic() + 20
            while sum(one.done() for one in futures) < 4 and time.monotonic() < until:
                time.sleep(0.01)
            paused.go.set()
            found = [future.result() for future in futures]
    statuses = sorted(one.status_code for one in found)
    assert statuses == [200, 200, 429, 429, 429, 429]
    refused = next(one for one in found if one.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"]


@pytest.mark.slow
def test_answer_past_time_limit_is_cancelled(engine, monkeypatch):
    paused = PausedTurns(engine, monkeypatch)
    client = client_of(engine, timeout=0.5)
    response = complete(client)
    assert response.status_code == 503 and response.json()["error"]["code"] == "timeout"
    assert '"code": "timeout"' in complete(client, stream=True).text
    paused.go.set()
    assert is_idle(engine)


@pytest.mark.slow
def test_device_failure_ends_only_current_requests(monkeypatch, capsys):
    with running(tiny(), slots=2) as engine:
        client = client_of(engine, raising=False)

        failing = engine.batcher

        def fail():
            next(failing.requests)
            raise RuntimeError("RESOURCE_EXHAUSTED: /home/somebody")
            yield

        monkeypatch.setattr(failing, "turn", fail)
        first = complete(client)
        assert first.status_code == 500 and first.json()["error"]["type"] == "server_error"
        assert "somebody" not in first.text
        assert "RESOURCE_EXHAUSTED" in capsys.readouterr().err
        assert complete(client).json()["choices"][0]["text"] == tiny().generate("cab", 11)
        assert engine.batcher is not failing
        engine.stop()
        assert complete(client).status_code == 503 == client.get("/health").status_code


def test_counts_and_time_of_a_server_must_be_positive(engine):
    for name in ("slots", "queue", "steps"):
        with pytest.raises(ValueError, match=f"{name} is 0: must be an integer of at least 1"):
            Engine(tiny(), **{name: 0})
    with pytest.raises(ConfigError, match="timeout is 0: must be above 0"):
        make_app(engine, NAME, timeout=0)


def test_error_names_missing_dependency(monkeypatch, engine):
    monkeypatch.setattr(app_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs starlette.*pip install 'transformer_jax\[serve"):
        make_app(engine, NAME)
