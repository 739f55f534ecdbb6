"""Send malformed requests to a server: none may crash it or leave anything behind.

    python -m tests.server.fuzz_bodies --cases 10000 --seed 0

A case is a valid request with changed bytes, fields, values or headers. An accepted request must
get a valid answer, and a rejected one a 4xx status with an error in OpenAI's form. At the end all
slots must be free, and memory may have grown only slightly since a tenth of the cases.
"""

import argparse
import collections
import gc
import itertools
import json
import os
import random
import sys
from pathlib import Path

import jax

from tests.server.models import is_idle, running, tiny
from transformer_jax.server.app import make_app

PATHS = "/v1/completions", "/v1/chat/completions"
RIGHT = (
    {"model": "tiny", "prompt": "cab", "max_tokens": 3, "temperature": 0, "stop": ["x"]},
    {"model": "tiny", "messages": [{"role": "user", "content": "tab"}], "max_tokens": 3, "seed": 1},
)
NAMES = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "seed", "stop", "stream", "stream_options", "n", "logprobs", "top_logprobs", "echo", "tools",
    "response_format", "logit_bias", "user", "best_of", "role", "content", "type", "text", "", "x",
    "structured_outputs", "json", "regex", "grammar", "json_schema", "schema", "properties", "enum",
)  # fmt: skip
MOST_GROWTH = 16
"""Maximum growth of the process in MiB after a tenth of the cases."""


def value(rng: random.Random, depth: int = 3):
    """Return a random JSON value, often an edge case."""
    kinds = 7 if depth else 5
    match rng.randrange(kinds):
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.choice([0, 1, -1, 2, 61, 62, 2**31, 2**32, 2**63, -(2**70), 10**400])
        case 2:
            return rng.choice([0.0, 0.5, -0.5, 1e-300, 1e300, 2.0, float("nan"), float("inf")])
        case 3:
            letters = rng.choice(["ab", "é\u0000\U0001f600\x7f", "\ud800\udfff", "<e>{{%"])
            return "".join(rng.choices(letters, k=rng.choice([0, 1, 5, 40, 300])))
        case 4:
            return rng.choice(
                [
                    "tiny", "user", "text", "json_schema", "object", "[ab]+c|", "start: /a/", "a b",
                    "\n",
                ]
            )  # fmt: skip
        case 5:
            return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(NAMES): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def changed_value(rng: random.Random, content):
    """Return a valid value with one place changed."""
    if isinstance(content, dict) and content and rng.random() < 0.8:
        name = rng.choice([*content])
        return content | {name: changed_value(rng, content[name])}
    if isinstance(content, list) and content and rng.random() < 0.8:
        n = rng.randrange(len(content))
        return [*content[:n], changed_value(rng, content[n]), *content[n + 1 :]]
    return value(rng)


def case(rng: random.Random) -> dict:
    """Return the arguments of a request."""
    which = rng.randrange(2)
    body = dict(RIGHT[which if rng.random() < 0.9 else 1 - which])
    for _ in range(rng.randrange(3)):
        body[rng.choice(NAMES)] = value(rng)
    if rng.random() < 0.2:
        body["structured_outputs"] = {rng.choice(["json", "regex", "grammar"]): value(rng)}
    if rng.random() < 0.5:
        body = changed_value(rng, body)
    content = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        if content:
            at = rng.randrange(len(content))
            match rng.randrange(4):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    del content[at:]
                case 2:
                    content[at:at] = rng.choice([b"[" * 99, b"9" * 5000, b"\\ud800", b"\xff", b"}"])
                case 3:
                    content[at:at] = content[: rng.randrange(40)]
    kinds = ["application/json"] * 9 + ["text/plain", "", "application/json; charset=\xff"]
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "HEAD", "X"])
    return dict(
        method=method, url=PATHS[which], content=bytes(content),
        headers={"content-type": rng.choice(kinds).encode("latin-1")},
    )  # fmt: skip


def fault(response) -> str | None:
    """Return a description of the fault of a response, or None."""
    if response.status_code >= 500:
        return f"status {response.status_code}"
    if response.request.method == "HEAD":
        return None
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            return None if response.text.endswith("data: [DONE]\n\n") else "a stream without end"
        found = response.json()
        ended = found["choices"][0]["finish_reason"] == "stop"  # a form may be empty
        return None if ended or found["usage"]["completion_tokens"] else "no tokens"
    error = response.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or "secret" in response.text:
        return f"an error of another form: {error}"
    return None if "\n" not in error["message"] else "an error of several lines"


def resident() -> int:
    """Return the resident memory of the process in bytes."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def fuzz(seed: int, cases: int) -> tuple[collections.Counter, list[str]]:
    """Run cases, and return the counts of statuses and the faults."""
    from starlette.testclient import TestClient

    statuses, wrong, before = collections.Counter(), [], 0
    with running(tiny(), slots=2) as engine:
        app = make_app(engine, "tiny", most_bytes=4096)
        with TestClient(app, raise_server_exceptions=False) as client:  # one loop for all
            lengths, forms = (1, 17, 33), ({}, {"structured_outputs": {"regex": "[ab]{3}"}})
            for length, top, form in itertools.product(lengths, (0, 5), forms):
                body = RIGHT[0] | {"prompt": [99] * length, "logprobs": top} | form
                client.post(PATHS[0], json=body).raise_for_status()  # programs take memory
            for number in range(cases):
                if number == cases // 10:
                    before = resident()
                arguments = case(random.Random(f"{seed} {number}"))
                response = client.request(**arguments)
                statuses[response.status_code] += 1
                if found := fault(response):
                    wrong.append(f"seed {seed}, case {number}: {found}: {arguments}")
                    print(wrong[-1], flush=True)
            if not is_idle(engine):
                wrong.append(f"{engine.running} run and {engine.waiting} wait at the end")
            grown = (resident() - before) / 2**20
            if grown > MOST_GROWTH:
                wrong.append(f"the process has grown by {grown:.0f} MiB")
    print(f"grown by {grown:.1f} MiB after the first tenth")
    return statuses, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    statuses, wrong = fuzz(options.seed, options.cases)
    print(f"{options.cases} cases of seed {options.seed}: {len(wrong)} wrong;", dict(statuses))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
