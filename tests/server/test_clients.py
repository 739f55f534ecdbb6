"""The server over sockets: OpenAI's client, concurrent clients and disconnects."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import jax
import pytest

from tests.server.fuzz_bodies import PATHS
from tests.server.models import is_idle, running, tiny
from transformer_jax.decoding.samplers import Sample, Temperature, TopP
from transformer_jax.server import engine as engine_module
from transformer_jax.server.app import make_app
from transformer_jax.server.protocol import RequestError

uvicorn = pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]

NAME = "tiny"


@contextmanager
def serving(engine, **options):
    """Serve in a thread and yield the address."""
    app = make_app(engine, NAME, **options)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        settings = uvicorn.Config(app, log_level="error", lifespan="off")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def engine(quick_compilation):
    with running(tiny(), slots=5, steps=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(address, openai):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_openai_client_parses_answers_streams_and_errors(client, openai):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    want = tiny().generate("cab", 11)
    fields = dict(model=NAME, prompt="cab", max_tokens=11, temperature=0)
    whole = client.completions.create(**fields, logprobs=1)
    assert whole.choices[0].text == want and whole.usage.completion_tokens == 11
    assert len(whole.choices[0].logprobs.token_logprobs) == 11
    usage = {"include_usage": True}
    sent = list(client.completions.create(**fields, stream=True, stream_options=usage))
    assert "".join(one.choices[0].text for one in sent[:-1]) == want
    assert sent[-1].usage == whole.usage and len(sent) > 4
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "tab"}]
    want = tiny().chat(talk, 11)
    fields = dict(model=NAME, messages=talk, max_completion_tokens=11, temperature=0)
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == want
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    sent = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in sent) == want
    assert sent[0].choices[0].delta.role == "assistant"
    with pytest.raises(openai.BadRequestError, match="n is 2") as caught:
        client.chat.completions.create(**fields, n=2)
    assert caught.value.param == "n" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="cab")


def test_openai_client_receives_json_matching_schema(client, openai):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object", "properties": {"a": {"enum": ["b", "é"]}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    talk = [{"role": "user", "content": "tab"}]
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "it", "strict": True, "schema": schema},
    }
    fields = dict(model=NAME, messages=talk, response_format=wanted, seed=1)
    answer = client.chat.completions.create(**fields)
    assert json.loads(answer.choices[0].message.content)["a"] in ("b", "é")
    sent = client.chat.completions.create(**fields, stream=True)
    text = "".join(one.choices[0].delta.content or "" for one in sent)
    assert text == answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="unclosed") as caught:
        client.completions.create(
            model=NAME, prompt="cab", extra_body={"structured_outputs": {"regex": "("}}
        )
    assert caught.value.param == "structured_outputs.regex"


def test_openai_client_raises_error_that_occurs_during_stream(client, openai, monkeypatch):
    """The client ignores a missing [DONE], so the error must be an event."""
    pytest.importorskip("llguidance")
    read, tokens = engine_module.Matcher.read, []

    def fail_at_third(matcher, token):
        tokens.append(token)
        if len(tokens) == 3:
            raise ValueError("structured_outputs.regex: the text cannot continue: too complex")
        read(matcher, token)

    monkeypatch.setattr(engine_module.Matcher, "read", fail_at_third)
    form = {"structured_outputs": {"regex": "[ab]{9}"}}
    sent = client.completions.create(model=NAME, prompt="cab", stream=True, extra_body=form)
    # a slow reader receives both tokens in one event
    assert next(iter(sent)).choices[0].text in ("a", "b", "aa", "ab", "ba", "bb")
    with pytest.raises(openai.APIError, match="too complex"):
        list(sent)


def test_openai_streaming_helper_returns_complete_answer_or_raises(client, openai):
    pytest.importorskip("llguidance")
    form = {"structured_outputs": {"regex": "(ab){4}"}}
    fields = dict(model=NAME, messages=[{"role": "user", "content": "tab"}], extra_body=form)
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.content == "abababab"
    with pytest.raises(openai.LengthFinishReasonError):
        with client.chat.completions.stream(**fields, max_completion_tokens=3) as stream:
            stream.get_final_completion()


def test_openai_client_repeats_request_if_queue_is_full(address, engine, openai, monkeypatch):
    submit, refused = engine.submit, []

    def submit_second_time(*arguments, **options):
        if not refused:
            refused.append(1)
            raise RequestError("3 requests are waiting", 429, code="queue_full")
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", submit_second_time)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        answer = client.completions.create(model=NAME, prompt="cab", max_tokens=11, temperature=0)
    assert answer.choices[0].text == tiny().generate("cab", 11) and refused


def test_sixteen_concurrent_clients_receive_independent_answers(address, engine, openai):
    """Half of them are greedy and half seeded, with ragged prompts, over five slots."""
    requests = []
    for n in range(16):
        t, p = ((0, 1), (0.8, 0.9), (0, 0.5), (1.3, 1))[n % 4]
        prompt = "a cabbage, and so on, and so on"[: 9 + n]  # some begin as others do
        requests.append(dict(prompt=prompt, max_tokens=3 + 2 * n, temperature=t, top_p=p, seed=n))
    want = []
    for one in requests:
        how = {}
        if one["temperature"]:
            how["sampler"] = Sample(Temperature(one["temperature"]), TopP(one["top_p"]))
            how["key"] = jax.random.key(one["seed"])
        want.append(tiny().generate(one["prompt"], one["max_tokens"], **how))

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-") as client:
            ask = client.completions.create
            return await asyncio.gather(*(ask(model=NAME, **one) for one in requests * 2))

    found = asyncio.run(all_of_them())
    assert [one.choices[0].text for one in found] == want * 2
    assert len(set(want)) == 16 and is_idle(engine)
    reused = [one.usage.prompt_tokens_details.cached_tokens for one in found]
    assert max(reused) >= 16 and 0 in reused


@contextmanager
def sending(address, body, timeout):
    """Send a request, yield its connection, and close it at the end."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield connection
    finally:
        connection.close()


FORM = {"structured_outputs": {"regex": "[a-z ]{999}"}}


@pytest.mark.parametrize(
    ("stream", "form"), [(True, {}), (False, {}), (True, FORM)],
    ids=["a stream", "a whole answer", "a stream of a form"],
)  # fmt: skip
def test_disconnected_client_frees_its_slot(engine, address, stream, form, monkeypatch):
    if form:
        pytest.importorskip("llguidance")
        with sending(address, {"model": NAME, "prompt": "a"} | form, timeout=60) as connection:
            assert connection.getresponse().status == 200  # compiled
    turns, turn = [], engine.batcher.turn

    def slowly():
        turns.append(time.monotonic())
        time.sleep(0.1)
        yield from turn()

    monkeypatch.setattr(engine.batcher, "turn", slowly)
    body = {"model": NAME, "prompt": "a", "max_tokens": 57, "temperature": 0, "stream": stream}
    body |= form
    with sending(address, body, timeout=20 if stream else 0.5) as connection:
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
            assert engine.running == 1
        else:
            with pytest.raises(TimeoutError):
                connection.getresponse()
    assert is_idle(engine, 2) and 2 <= len(turns) < 20, "29 turns would be the whole answer"


def test_requests_from_disconnected_queued_clients_are_never_decoded(engine, address, monkeypatch):
    turn, go = engine.batcher.turn, threading.Event()
    monkeypatch.setattr(engine.batcher, "turn", lambda: go.wait(60) and turn())
    body = {"model": NAME, "prompt": "a", "max_tokens": 5}
    for _ in range(7):
        with sending(address, body, timeout=0.3) as connection, pytest.raises(TimeoutError):
            connection.getresponse()
    until = time.monotonic() + 5
    while engine.waiting and time.monotonic() < until:
        time.sleep(0.01)
    admitted = engine.batcher.number
    go.set()
    assert is_idle(engine) and engine.batcher.number == admitted


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_server_conforms_to_its_openapi_schema(address, engine, mode):
    """schemathesis generates valid and invalid requests from /openapi.json."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    kept = [
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance, checks.negative_data_rejection,
        checks.unsupported_method,
    ]  # fmt: skip
    schema, statuses = schemathesis.openapi.from_url(f"{address}/openapi.json"), {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "NEGATIVE" and operation.method == "get":
            continue

        @settings(
            max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        def agree(case):
            response = case.call()
            statuses.setdefault(case.operation.path, set()).add(response.status_code)
            case.validate_response(response, checks=kept)

        agree()
    wanted = 200 if mode == "POSITIVE" else 400
    for path in PATHS:
        assert wanted in statuses[path], statuses
    assert len(statuses) == (5 if mode == "POSITIVE" else 2) and is_idle(engine)
