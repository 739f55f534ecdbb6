"""Requests are checked parameter by parameter, and answers have OpenAI's JSON form."""

import json
import random
from collections import Counter

import pytest

from tests.server.fuzz_bodies import changed_value, value
from transformer_jax.server import protocol
from transformer_jax.server.schemas import CHAT, COMPLETION, Misfit, check

HI = {"model": "m", "prompt": "hi"}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STAMP = protocol.Stamp("id-1", 1_700_000_000, "m")


def read(endpoint, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return protocol.read_request(endpoint, body, "m")


def test_request_defaults_match_openai():
    assert read("completion", HI) == protocol.TextRequest("completion", "hi", num_tokens=16)
    assert read("chat", TALK) == protocol.TextRequest("chat", ({"role": "user", "content": "hi"},))
    nulls = dict.fromkeys(CHAT["properties"].keys() - TALK.keys())
    assert read("chat", TALK | nulls) == read("chat", TALK)


def test_all_request_parameters_are_parsed():
    fields = dict(
        max_completion_tokens=7, temperature=0.5, top_p=0.25, seed=3, stop=["a", "b"], n=1,
        logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True},
        user="u", presence_penalty=0.0, tools=[], response_format={"type": "text"},
    )  # fmt: skip
    assert read("chat", TALK | fields) == protocol.TextRequest(
        "chat", ({"role": "user", "content": "hi"},), 7, 0.5, 0.25, 3, ("a", "b"), 2, True, True
    )
    fields = dict(prompt=[1, 2.0, 3], max_tokens=5, stop="x", logprobs=0, echo=False, best_of=1)
    assert read("completion", HI | fields) == protocol.TextRequest(
        "completion", (1, 2, 3), 5, stop=("x",), top=0
    )
    assert read("completion", HI | {"prompt": ["one"]}).prompt == "one"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    contents = [{"role": "system", "content": parts}, *TALK["messages"]]
    assert read("chat", TALK | {"messages": contents}).prompt[0]["content"] == "ab"
    developer = [{"role": "developer", "content": "ab"}]
    requested = TALK | {"messages": developer, "parallel_tool_calls": False}
    assert read("chat", requested).prompt == ({"role": "system", "content": "ab"},)


def test_answer_can_be_sent_back_as_assistant_message():
    """In the forms of OpenAI's client, with or without unset fields, and of other servers."""
    chat = pytest.importorskip("openai.types.chat")
    params = pytest.importorskip("openai.types.chat.completion_create_params")
    transform = pytest.importorskip("openai._utils").maybe_transform
    answered = protocol.answer(
        protocol.TextRequest("chat", "", top=1), STAMP, protocol.Part("a", TOKENS[:1], 1, "stop"), 5
    )
    read_back = chat.ChatCompletion.model_validate(answered).choices[0].message
    parsed = chat.ParsedChatCompletionMessage(role="assistant", content="a", parsed={"a": 1.5})
    sent = transform({"messages": [read_back, parsed]}, params.CompletionCreateParams)["messages"]
    assert sent[0]["refusal"] is None and sent[1]["parsed"] == {"a": 1.5}
    answer = answered["choices"][0]["message"]
    nothing = dict.fromkeys(("name", "reasoning", "tool_call_id", "parsed", "audio"))
    lists = {"tool_calls": [], "annotations": [], "reasoning_details": []}
    lists["reasoning_content"] = ""
    parts = {"content": [{"type": "text", "text": "a"}]}
    nulls = dict.fromkeys(("image_url", "input_audio", "file", "prompt_cache_breakpoint"))
    of_nulls = {"content": [parts["content"][0] | nulls | {"annotations": []}]}
    forms = [answer, read_back.model_dump(), read_back.to_dict(), parsed.model_dump(), *sent]
    for message in [*forms, answer | nothing, answer | lists, answer | parts, answer | of_nulls]:
        request = read("chat", TALK | {"messages": [*TALK["messages"], message]})
        assert request.prompt[1] == {"role": "assistant", "content": "a"}


def test_response_format_is_parsed_from_each_parameter():
    schema = {"type": "array"}
    of_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, want in (
        ({"response_format": of_schema}, ("schema", schema, "response_format.json_schema.schema")),
        ({"response_format": {"type": "json_object"}},
         ("schema", {"type": "object"}, "response_format")),
        ({"structured_outputs": {"json": schema}}, ("schema", schema, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a", "grammar": None}},
         ("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"grammar": "start: x"}},
         ("grammar", "start: x", "structured_outputs.grammar")),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None),
    ):  # fmt: skip
        assert read("chat", TALK | fields).form == want == read("completion", HI | fields).form


WRONG = {
    "not JSON": ("completion", b"{", "not JSON", None),
    "no text": ("completion", b"\xff\xfe", "not JSON", None),
    "half a pair": ("completion", b'{"model": "m", "prompt": "\\ud800"}', "surrogate", None),
    "infinite": ("completion", b'{"temperature": 1e999}', "not a finite number", None),
    "a huge number": ("completion", b'{"seed": ' + b"9" * 9999 + b"}", "not JSON", None),
    "twice": ("completion", b'{"n": 1, "n": 1}', "appears twice", None),
    "too deep": ("completion", b"[" * 99, "nested more than 64 levels deep", None),
    "a list": ("completion", [], r"the body is \[\]: must be an object", None),
    "no prompt": ("completion", {"model": "m"}, "prompt is missing", "prompt"),
    "many prompts": ("completion", HI | {"prompt": ["a", "b"]}, "has 2 strings", "prompt"),
    "no tokens": ("completion", HI | {"prompt": []}, "prompt has 0 items", "prompt"),
    "a true token": ("completion", HI | {"prompt": [1, True]}, "must be an integer", "prompt[1]"),
    "another model": ("completion", HI | {"model": "x"}, "this server serves 'm'", "model"),
    "unknown": ("completion", HI | {"temprature": 1}, "temperature", "temprature"),
    "a text": ("completion", HI | {"temperature": "1"}, "must be a number", "temperature"),
    "true": ("completion", HI | {"max_tokens": True}, "must be an integer", "max_tokens"),
    "half": ("completion", HI | {"max_tokens": 0.5}, "must be an integer", "max_tokens"),
    "hot": ("completion", HI | {"temperature": 2.1}, "from 0 to 2", "temperature"),
    "negative": ("completion", HI | {"top_p": -0.1}, "from 0 to 1", "top_p"),
    "no new tokens": ("completion", HI | {"max_tokens": 0}, "from 1 to", "max_tokens"),
    "seed": ("completion", HI | {"seed": -1}, "from 0 to 4294967295", "seed"),
    "no stop": ("completion", HI | {"stop": ["a", ""]}, "at least 1", "stop[1]"),
    "a long stop": ("completion", HI | {"stop": "a" * 257}, "at most 256", "stop"),
    "echo": ("completion", HI | {"echo": True}, "must be false", "echo"),
    "two": ("chat", TALK | {"n": 2}, "must be 1", "n"),
    "true is not 1": ("chat", TALK | {"n": True}, "must be 1", "n"),
    "a penalty": ("chat", TALK | {"presence_penalty": 0.5}, "must be 0", "presence_penalty"),
    "bias": ("chat", TALK | {"logit_bias": {"5": 1}}, "logit_bias is not supp", "logit_bias"),
    "tools": ("chat", TALK | {"tools": [{}]}, "tools are not supported by this server", "tools"),
    "tools of a text": ("completion", HI | {"tools": [{}]}, "tools are not supported", "tools"),
    "a choice of tools": ("chat", TALK | {"tool_choice": "auto"}, "is not supp", "tool_choice"),
    "sound": ("chat", TALK | {"modalities": ["text", "audio"]}, "are not supp", "modalities"),
    "stored": ("chat", TALK | {"store": True}, "store is not supported by this", "store"),
    "one is not true": ("chat", TALK | {"store": 0}, "store is not supported by this", "store"),
    "a call of a tool": (
        "chat", TALK | {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "tool_calls are not supported by this server", "messages[0].tool_calls",
    ),
    "a name": ("chat", TALK | {"messages": [{"role": "user", "content": "hi", "name": "ann"}]},
               "name is not supported by this server", "messages[0].name"),
    "no schema": ("chat", TALK | {"response_format": {"type": "json_schema", "json_schema": {}}},
                  "schema is missing", "response_format.json_schema.schema"),
    "nothing of a schema": ("chat", TALK | {"response_format": {"type": "json_schema"}},
                            "json_schema is missing", "response_format.json_schema"),
    "a schema without its type": (
        "completion", HI | {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        "needs type 'json_schema'", "response_format.json_schema",
    ),
    "two forms": (
        "chat", TALK | {"response_format": {"type": "json_object"},
                        "structured_outputs": {"json": None, "regex": "a"}},
        "pass only one of response_format and", "structured_outputs.regex",
    ),
    "a schema as text": ("completion", HI | {"structured_outputs": {"json": "{}"}},
                         "must be an object or null", "structured_outputs.json"),
    "a choice": ("completion", HI | {"structured_outputs": {"choice": ["a"]}},
                 "not a parameter", "structured_outputs.choice"),
    "an image": (
        "chat", TALK | {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
        ]},
        "image_url is not supported by this server", "messages[0].content[0].image_url",
    ),
    "no role": ("chat", TALK | {"messages": [{"role": "cat", "content": "hi"}]}, "or 'assistant'",
                "messages[0].role"),
    "two limits": ("chat", TALK | {"max_tokens": 1, "max_completion_tokens": 1}, "only one of",
                   "max_tokens"),
    "top alone": ("chat", TALK | {"top_logprobs": 1}, "needs logprobs", "top_logprobs"),
    "usage alone": ("chat", TALK | {"stream_options": {}}, "needs stream", "stream_options"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_request_raises_one_line_error(name):
    endpoint, body, why, param = WRONG[name]
    with pytest.raises(protocol.RequestError, match=why) as caught:
        read(endpoint, body)
    error = caught.value.body()["error"]
    assert caught.value.status == (404 if name == "another model" else 400)
    assert error["param"] == param and error["type"] and "\n" not in error["message"]
    assert error["message"] == str(caught.value) and len(error["message"]) < 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["completion", "chat"])
def test_request_validation_matches_json_schema_validator(name):
    """Requests have some parameters changed at random."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    schema, right = (COMPLETION, HI) if name == "completion" else (CHAT, TALK)
    theirs, rng, seen = jsonschema_rs.validator_for(schema), random.Random(7), Counter()
    for _ in range(4000):
        changes = {rng.choice([*schema["properties"]]): value(rng) for _ in range(2)}
        fields = changed_value(rng, right) if rng.random() < 0.5 else right | changes
        try:
            json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
            wanted = theirs.is_valid(fields)
        except (ValueError, OverflowError):  # not JSON
            continue
        try:
            check(fields, schema)
            mine = True
        except Misfit:
            mine = False
        assert mine == wanted, fields
        seen[mine] += 1
    assert seen[True] > 100 and seen[False] > 1000


def test_server_sent_event_is_one_line_for_every_parser():
    text = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é\U0001f600"
    assert len(text.splitlines()) == 11
    refused = protocol.RequestError(text).body()
    (chunk, *_) = protocol.chunks(
        protocol.TextRequest("completion", ""), STAMP, protocol.Part(text), 5, first=True
    )
    for data in (chunk, refused):
        sent = protocol.event(data).decode()
        assert sent.splitlines() == [sent[:-2], ""] and "é\U0001f600" in sent
        assert json.loads(sent.removeprefix("data: ")) == data


def test_top_tokens_with_same_text_are_all_listed():
    top = ((b"a", -1.0), (b"", -2.0), (b"a", -3.0), (b"", -4.0), (b"a #2", -5.0), (b"a", -6.0))
    request = protocol.TextRequest("completion", "", top=6)
    (choice,) = protocol.answer(
        request, STAMP, protocol.Part("a", (protocol.Token(b"a", -1.0, 0, top),)), 1
    )["choices"]
    named = {"a": -1.0, "": -2.0, "a #2": -3.0, " #2": -4.0, "a #2 #2": -5.0, "a #3": -6.0}
    assert choice["logprobs"]["top_logprobs"] == [named]


PARTS = (b"\xc3", -1), (b"\xe6\xbc", -2)  # two parts of characters
TOKENS = (
    protocol.Token(b"a", -0.5, 0, ((b"a", -0.5), (b"b", -2.0))),
    protocol.Token(b"\xc3", -1.0, 1, PARTS),
)


def test_stream_parts_join_to_whole_answer():
    parts = protocol.Part("a", TOKENS[:1], 1), protocol.Part("é", TOKENS[1:], 3, "length")
    for endpoint in ("completion", "chat"):
        request = protocol.TextRequest(endpoint, "", top=2, stream=True, include_usage=True)
        whole = protocol.answer(request, STAMP, protocol.join_parts(parts), 5)
        (choice,) = whole["choices"]
        sent = [
            chunk
            for n, part in enumerate(parts)
            for chunk in protocol.chunks(request, STAMP, part, 5, first=n == 0)
        ]
        chosen = [chunk["choices"][0] for chunk in sent[:-1]]
        assert sent[-1]["choices"] == [] and sent[-1]["usage"] == whole["usage"]
        details = {"cached_tokens": 0}
        assert whole["usage"] == dict(
            prompt_tokens=5, completion_tokens=3, total_tokens=8, prompt_tokens_details=details
        )
        assert [c["finish_reason"] for c in chosen] == [None] * (len(chosen) - 1) + ["length"]
        assert choice["finish_reason"] == "length"
        if endpoint == "chat":
            assert chosen[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in chosen)
            assert text == choice["message"]["content"] == "aé"
            contents = [one for c in chosen if c["logprobs"] for one in c["logprobs"]["content"]]
            assert contents == choice["logprobs"]["content"]
            assert contents[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.5, "bytes": [97]}
            assert contents[1]["bytes"] == [0xC3]
        else:
            assert "".join(c["text"] for c in chosen) == choice["text"] == "aé"
            assert choice["logprobs"]["text_offset"] == [0, 1]
            assert choice["logprobs"]["tokens"] == ["a", r"bytes:\xc3"]
            likely = choice["logprobs"]["top_logprobs"]
            assert likely == [{"a": -0.5, "b": -2.0}, {r"bytes:\xc3": -1, r"bytes:\xe6\xbc": -2}]
        assert protocol.event(sent[0]).startswith(b"data: {") and all(
            b"\n" not in protocol.event(chunk)[:-2] for chunk in sent
        )


def test_responses_validate_against_openai_types():
    types = pytest.importorskip("openai.types")
    chat = pytest.importorskip("openai.types.chat")
    part = protocol.Part("a", TOKENS[:1], 1, "stop")
    for endpoint, whole, chunk in (
        ("completion", types.Completion, types.Completion),
        ("chat", chat.ChatCompletion, chat.ChatCompletionChunk),
    ):
        request = protocol.TextRequest(endpoint, "", top=1)
        whole.model_validate(protocol.answer(request, STAMP, part, 5), strict=True)
        for sent in protocol.chunks(request, STAMP, part, 5, first=True):
            chunk.model_validate(sent, strict=True)
