"""Limits of request parameters: accepted and rejected values of each."""

from __future__ import annotations

import json

import pytest

from transformer_jax.server.protocol import (
    RequestError,
    read_embedding_request,
    read_request,
)

BODY = {"completion": {"model": "m", "prompt": "p"},
        "chat": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
        "embedding": {"model": "m", "input": "a"}}  # fmt: skip
BOTH = ("completion", "chat")
BORDERS = [
    (BOTH, "max_tokens", [1, 5.0, 2**31 - 1], [0, 2**31, 1.5, True, "1"]),
    (("chat",), "max_completion_tokens", [1, 2**31 - 1], [0, 2**31]),
    (BOTH, "temperature", [0, 2, 0.5, None], [-0.01, 2.01, True]),
    (BOTH, "top_p", [0, 1], [-0.01, 1.01]),
    (BOTH, "seed", [0, 2**32 - 1], [-1, 2**32, 0.5]),
    (BOTH, "stop", ["a", "a" * 256, ["a"] * 16, None, []], ["", "a" * 257, ["a"] * 17, [""], 3]),
    (BOTH, "stream", [True, False, None], [1, "true"]),
    (BOTH, "n", [1, None], [2, 0, True]), (BOTH, "user", ["x"], [3]),
    (BOTH, "presence_penalty", [0], [0.1]), (BOTH, "frequency_penalty", [0], [-1]),
    (BOTH, "tools", [[], None], [[{}], "x"]), (BOTH, "tool_choice", ["none"], ["auto"]),
    (BOTH, "logit_bias", [{}], [{"1": 2}]), (BOTH, "modalities", [["text"]], [["audio"], []]),
    (BOTH, "store", [False], [True]), (BOTH, "parallel_tool_calls", [True, False], ["x"]),
    (BOTH, "service_tier", ["auto", "default"], ["flex"]), (BOTH, "functions", [[]], [[{}]]),
    (BOTH, "reasoning_effort", ["none"], ["low"]), (BOTH, "verbosity", [None], ["low"]),
    (BOTH, "response_format", [{"type": "text"}, {"type": "json_object"}], [{}, {"type": "x"}]),
    (BOTH, "unknown", [], [None]),
    (("completion",), "logprobs", [0, 20, None], [-1, 21, True]),
    (("completion",), "prompt", ["", [1], [0, 2**31 - 1], ["a"]], [[], [-1], [2**31], [["a"]], 3]),
    (("completion",), "echo", [False], [True]), (("completion",), "best_of", [1], [2]),
    (("completion",), "suffix", [None], ["x"]),
    (("chat",), "logprobs", [True, False], [1]),
    (("chat",), "metadata", [{"a": "b"}, None], ["x"]),
    (("chat",), "messages", [[{"role": r, "content": [{"type": "text", "text": "a"}]}]
                             for r in ("system", "developer", "user", "assistant")],
     [[], [{"role": "tool", "content": "a"}], [{"role": "user"}], [{"content": "a"}],
      [{"role": "user", "content": [{"type": "image", "text": "a"}]}]]),
    (("embedding",), "input", ["", "a", ["a"] * 2048, [1, 2], [[1], [2, 3]], [[2**31 - 1]] * 2048],
     [[], [[]], 3, [True], ["a"] * 2049, [[1]] * 2049, [[2**31]], [-1]]),
    (("embedding",), "encoding_format", ["float", "base64", None], ["hex"]),
    (("embedding",), "dimensions", [1, 2**31 - 1], [0, 2**31, 0.5]),
]  # fmt: skip


@pytest.mark.parametrize(("endpoints", "field", "right", "wrong"), BORDERS)
def test_fields_are_accepted_up_to_their_limits(endpoints, field, right, wrong):
    for endpoint in endpoints:

        def read(value, endpoint=endpoint):
            body = json.dumps(BODY[endpoint] | {field: value}).encode()
            if endpoint == "embedding":
                return read_embedding_request(body, "m")
            return read_request(endpoint, body, "m")

        for value in right:
            read(value)
        for value in wrong:
            with pytest.raises(RequestError) as caught:
                read(value)
            assert caught.value.status == 400
            assert (caught.value.param or field).startswith(field), value
