"""Load test of the server: answers equal to `generate`, different or lost."""

import asyncio
import json
import random

import jax
import jax.numpy as jnp
import pytest

from benchmarks import serve_load
from transformer_jax.config import ModelConfig
from transformer_jax.loading import TextModel
from transformer_jax.models.factory import build, init_params
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.trained import ByteTokenizer

WANTED = {"ab": "first", "cd": "second", "ef": "third"}


def stream(texts, tokens, *, end=True, reason="length"):
    """Return the events of one answer in the format of OpenAI's completions."""
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
    events.append({"choices": [{"text": "", "finish_reason": reason}]})
    events.append({"choices": [], "usage": {"completion_tokens": tokens}})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if end else "")


FULL = serve_load.TOKENS
ANSWERS = [
    ("200 OK", stream(["fir", "st"], FULL)),
    ("200 OK", stream(["fir", "rst"], FULL)),
    ("200 OK", stream(["fi"], 2, reason="stop")),
    ("200 OK", stream(["first"], FULL - 1)),
    ("200 OK", stream(["first"], FULL, end=False)),
    ("500 Internal Server Error", stream(["first"], FULL)),
]


def test_server_answers_are_counted_as_equal_different_or_lost():
    """Answer six requests: one correctly, two with other texts, three incompletely."""
    bodies, requests = iter(ANSWERS), []

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        requests.append(json.loads(await reader.readexactly(length)))
        status, body = next(bodies)
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async def load():
        taken = serve_load.Taken()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for _ in ANSWERS:
                await serve_load.ask(port, random.Random(0), taken, ["ab"])
        return taken

    taken = asyncio.run(load())
    assert all(body["prompt"] == "ab" and body["temperature"] == 0 for body in requests)
    equal, different = serve_load.compare(taken.answers, WANTED)
    assert (equal, different) == (1, [("ab", "firrst"), ("ab", "fi")])
    assert len(taken.lost) == 3


def test_answer_to_another_prompt_counts_as_different():
    answers = [("ab", "first"), ("cd", "first"), ("ef", "third")]
    assert serve_load.compare(answers, WANTED) == (2, [("cd", "first")])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_difference_report_includes_two_most_likely_log_probabilities():
    config = ModelConfig(vocab_size=256, d_model=12, num_layers=1, num_heads=2, max_len=16)
    params = init_params(config, jax.random.key(1))
    model = LanguageModel(TextModel(config, params, ByteTokenizer()), "random")
    line = serve_load.difference(model, "ab", "cdef", "cdxf")
    tokens = jnp.array([list(b"abcd")])
    logits, _ = jax.jit(build(config).apply)({"params": params}, tokens)
    best, second = sorted(jax.nn.log_softmax(logits[0, -1]).tolist())[:-3:-1]
    assert line.startswith("'ab': 'cdxf' is not 'cdef': after 2 characters")
    assert f"{best:.6f}, the next {second:.6f}" in line
