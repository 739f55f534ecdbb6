"""How many tokens per second does the server generate for many clients, and how soon is the first?

    python -m benchmarks.serve_load --clients 1,4,16 --seconds 10
    python -m benchmarks.serve_load --model runs/book --clients 16 --seconds 60
    python -m benchmarks.serve_load --model FILE.gguf --clients 64 --seconds 300 --check 64

One process serves a model, by default with random weights, and this process runs the clients. Each
client sends a streaming request with a prompt of 8 to 64 bytes as soon as its last answer has
ended. An answer is lost, and the command fails, if the status is not 200, if the stream has no end,
or if tokens are missing although the model did not end the text. First, one prompt of each compiled
length is sent without timing. The time to the first token is measured from sending the request to
the first event with text.

With `--check N`, the clients draw from N prompts and request greedy decoding. After the load test,
each answer is compared with the answer of `generate` for the same prompt in this process. If an
answer differs, the command fails and prints how close the first different token was to the most
likely token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing

QUESTION = "the server under load: tokens a second, and seconds to the first token"
TOKENS = 32
"""Length of each answer, unless the model ends it earlier."""
LENGTHS = 16, 32, 64
"""Buckets of the prompt lengths."""


@dataclass
class Taken:
    """Answers that the clients received."""

    first: list[float] = field(default_factory=list)
    """Time to the first token of each answer, in seconds."""
    tokens: int = 0
    lost: list[str] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a prompt and an answer, if answers are compared."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.serve:
        _serve(options)
        return
    before = timing.environment()
    print(timing.headline(before), flush=True)
    own = [sys.executable, "-m", "benchmarks.serve_load", "--serve", "--slots", str(options.slots)]
    own += ["--model", options.model] if options.model else []
    prompts = [_prompt(random.Random(n)) for n in range(options.check)]
    server = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        rows, answers = [], []
        for length in LENGTHS:
            asyncio.run(ask(port, random.Random(0), Taken(), length=length))
        for clients in options.clients:
            taken, seconds = asyncio.run(measure(port, clients, options.seconds, prompts))
            rows.append(report(clients, taken, seconds))
            answers.append(taken.answers)
    finally:
        server.terminate()
        server.wait()
    header = ["clients", "answers", "tokens/s", "first p50 ms", "first p95 ms", "lost"]
    keys = ["clients", "answers", "tokens_per_second", "first_p50_ms", "first_p95_ms", "lost"]
    if prompts:
        model = _model(options)
        wanted = {prompt: model.generate(prompt, TOKENS) for prompt in prompts}
        for row, given in zip(rows, answers, strict=True):
            row["equal"], different = compare(given, wanted)
            row["different"] = len(different)
            for prompt, text in dict.fromkeys(different):
                print(difference(model, prompt, wanted[prompt], text), flush=True)
        header, keys = [*header, "equal", "different"], [*keys, "equal", "different"]
    print(timing.table(header, [[f"{row[key]:.0f}" for key in keys] for row in rows]))
    if options.out is not None:
        before["limits"] = timing.limits("float32")
        timing.write(options.out, QUESTION, before, {"slots": options.slots, "rows": rows})
    if any(row["lost"] or row.get("different") for row in rows):
        sys.exit(1)


def report(clients: int, taken: Taken, seconds: float) -> dict[str, Any]:
    """Return the results for a number of clients."""
    for why in taken.lost[:3]:
        print(f"lost: {why}", flush=True)
    p50, p95 = np.percentile(1e3 * np.array(taken.first or [np.nan]), [50, 95])
    return dict(
        clients=clients, answers=len(taken.first), tokens_per_second=taken.tokens / seconds,
        first_p50_ms=float(p50), first_p95_ms=float(p95), lost=len(taken.lost),
    )  # fmt: skip


def compare(
    answers: Sequence[tuple[str, str]], wanted: Mapping[str, str]
) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of equal answers and the pairs (prompt, text) that differ."""
    different = [(prompt, text) for prompt, text in answers if text != wanted[prompt]]
    return len(answers) - len(different), different


def difference(model: Any, prompt: str, want: str, text: str) -> str:
    """Return the two largest log-probabilities at the first difference between two answers.

    The preceding text is tokenized again, so its tokens may differ from the generated tokens.
    """
    import jax

    from transformer_jax.models.factory import build

    pairs = enumerate(zip(want, text, strict=False))
    same = next((n for n, (one, two) in pairs if one != two), min(len(want), len(text)))
    ids = model.tokenizer.encode(prompt + want[:same])
    logits, _ = jax.jit(build(model.config).apply)({"params": model.params}, ids[None])
    best, second = np.sort(np.asarray(jax.nn.log_softmax(logits[0, -1])))[:-3:-1]
    said = f"{prompt!r}: {text!r} is not {want!r}: after {same} characters the likeliest token has"
    return f"{said} {best:.6f}, the next {second:.6f}"


async def measure(
    port: int, clients: int, seconds: float, prompts: Sequence[str] = ()
) -> tuple[Taken, float]:
    """Run clients until the time has elapsed and their last answers have ended."""
    taken, start = Taken(), time.perf_counter()

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() - start < seconds:
            await ask(port, rng, taken, prompts)

    await asyncio.gather(*map(client, range(clients)))
    spent = time.perf_counter() - start
    status, body = await get(port, "/health")
    left = json.loads(body)
    if status != 200 or left["running"] or left["waiting"]:
        taken.lost.append(f"at the end {body}")
    return taken, spent


async def ask(
    port: int,
    rng: random.Random,
    taken: Taken,
    prompts: Sequence[str] = (),
    *,
    length: int | None = None,
) -> None:
    """Send one request and read its stream to the end."""
    prompt = rng.choice(prompts) if prompts else _prompt(rng, length)
    drawn: dict[str, float] = {"temperature": 0} if prompts else {"seed": rng.randrange(2**32)}
    body = json.dumps(dict(
        model="load", prompt=prompt, max_tokens=TOKENS, stream=True,
        stream_options={"include_usage": True}, **drawn,
    ))  # fmt: skip
    start, first, got, ended, reason = time.perf_counter(), None, 0, False, None
    text = ""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        writer.write((head + body).encode())
        status = await reader.readline()
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                for one in event.get("choices", ()):
                    reason = one["finish_reason"] or reason
                    text += one["text"]
                    if first is None and one["text"]:
                        first = time.perf_counter() - start
                got = (event.get("usage") or {}).get("completion_tokens", got)
    finally:
        writer.close()
    if not (ended and b" 200 " in status and (got == TOKENS or reason == "stop")):
        taken.lost.append(f"{status!r}, {got} tokens, ended: {ended}, {reason}")
        return
    if first is not None:  # an answer may be empty
        taken.first.append(first)
    taken.tokens += got
    if prompts:
        taken.answers.append((prompt, text))


def _prompt(rng: random.Random, length: int | None = None) -> str:
    return "".join(rng.choices("abcdefgh ", k=length or rng.randrange(8, 65)))


async def get(port: int, path: str) -> tuple[int, str]:
    """Fetch a URL and return the status and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


def _serve(options: argparse.Namespace) -> None:
    """Serve on a free port and print the port."""
    import uvicorn

    from transformer_jax.server.app import make_app
    from transformer_jax.server.engine import Engine

    engine = Engine(_model(options), slots=options.slots)
    engine.start()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        print(listening.getsockname()[1], flush=True)
        settings = uvicorn.Config(make_app(engine, "load"), log_level="warning")
        uvicorn.Server(settings).run(sockets=[listening])


def _model(options: argparse.Namespace) -> Any:
    """Load the named model, or create one with random weights."""
    import jax

    import transformer_jax as tj
    from transformer_jax.loading import TextModel
    from transformer_jax.text.language_model import LanguageModel
    from transformer_jax.tokenizers.trained import ByteTokenizer

    if options.model:
        return tj.load(options.model)
    config = tj.ModelConfig(
        vocab_size=256, d_model=256, num_layers=4, num_heads=4, max_len=128, positions="rope"
    )
    params = tj.init_params(config, jax.random.key(0))
    return LanguageModel(TextModel(config, params, ByteTokenizer()), "random")


def _counts(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--clients", type=_counts, default=[1, 4, 16], help="counts: 1,4,16")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each count")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", help="a run or a published model; default: random weights")
    parser.add_argument("--check", type=int, default=0, help="prompts whose answers are compared")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
