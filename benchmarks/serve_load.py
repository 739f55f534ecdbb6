"""How many tokens a second does the server give to many clients, and how soon the first one?

    python -m benchmarks.serve_load --clients 1,4,16 --seconds 10
    python -m benchmarks.serve_load --model runs/book --clients 16 --seconds 60

A process serves a model, of random weights unless one is named, and this one has the clients: each
sends a streaming request as soon as its last answer has ended, with a prompt of 8 to 64 bytes. An
answer is lost, and the command fails, where the status is not 200, the stream has no end, or tokens
are missing though the model did not end the text. A prompt of each length that is compiled for
itself comes first, untimed; the time to the first token is from sending to the first event with
text.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing

QUESTION = "the server under load: tokens a second, and seconds to the first token"
TOKENS = 32
"""The length of each answer, unless the model ends it before."""
LENGTHS = 16, 32, 64
"""The buckets of the prompts' lengths."""


@dataclass
class Taken:
    """Hold what the clients received."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each answer."""
    tokens: int = 0
    lost: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.serve:
        _serve(options)
        return
    before = timing.environment()
    print(timing.headline(before), flush=True)
    own = [sys.executable, "-m", "benchmarks.serve_load", "--serve", "--slots", str(options.slots)]
    own += ["--model", options.model] if options.model else []
    server = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        rows = []
        for length in LENGTHS:
            asyncio.run(ask(port, random.Random(0), Taken(), length))
        for clients in options.clients:
            rows.append(report(clients, *asyncio.run(measure(port, clients, options.seconds))))
        header = "clients", "answers", "tokens/s", "first p50 ms", "first p95 ms", "lost"
        keys = "clients", "answers", "tokens_per_second", "first_p50_ms", "first_p95_ms", "lost"
        print(timing.table(header, [[f"{row[key]:.0f}" for key in keys] for row in rows]))
    finally:
        server.terminate()
        server.wait()
    if options.out is not None:
        before["limits"] = timing.limits("float32")
        timing.write(options.out, QUESTION, before, {"slots": options.slots, "rows": rows})
    if any(row["lost"] for row in rows):
        sys.exit(1)


def report(clients: int, taken: Taken, seconds: float) -> dict[str, Any]:
    """The figures of a count of clients."""
    for why in taken.lost[:3]:
        print(f"lost: {why}", flush=True)
    p50, p95 = np.percentile(1e3 * np.array(taken.first or [np.nan]), [50, 95])
    return dict(
        clients=clients, answers=len(taken.first), tokens_per_second=taken.tokens / seconds,
        first_p50_ms=float(p50), first_p95_ms=float(p95), lost=len(taken.lost),
    )  # fmt: skip


async def measure(port: int, clients: int, seconds: float) -> tuple[Taken, float]:
    """Let clients ask until the time is over and their last answers have ended."""
    taken, start = Taken(), time.perf_counter()

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() - start < seconds:
            await ask(port, rng, taken)

    await asyncio.gather(*map(client, range(clients)))
    spent = time.perf_counter() - start
    status, body = await get(port, "/health")
    left = json.loads(body)
    if status != 200 or left["running"] or left["waiting"]:
        taken.lost.append(f"at the end {body}")
    return taken, spent


async def ask(port: int, rng: random.Random, taken: Taken, length: int | None = None) -> None:
    """Send one request, and read its stream to the end."""
    prompt = "".join(rng.choices("abcdefgh ", k=length or rng.randrange(8, 65)))
    body = json.dumps(dict(
        model="load", prompt=prompt, max_tokens=TOKENS, seed=rng.randrange(2**32), stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    start, first, got, ended, reason = time.perf_counter(), None, 0, False, None
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
                    if first is None and one["text"]:
                        first = time.perf_counter() - start
                got = (event.get("usage") or {}).get("completion_tokens", got)
    finally:
        writer.close()
    if not (ended and b" 200 " in status and (got == TOKENS or reason == "stop")):
        taken.lost.append(f"{status!r}, {got} tokens, ended: {ended}, {reason}")
        return
    if first is not None:  # a text may end before it has begun
        taken.first.append(first)
    taken.tokens += got


async def get(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of an address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


def _serve(options: argparse.Namespace) -> None:
    """Serve on a free port, which is printed."""
    import jax
    import uvicorn

    import transformer_jax as tj
    from transformer_jax.server.app import make_app
    from transformer_jax.server.engine import Engine
    from transformer_jax.text.text_model import TextModel
    from transformer_jax.tokenizers.trained import ByteTokenizer
    from transformer_jax.use.language_model import LanguageModel

    if options.model:
        model = tj.load(options.model)
    else:
        config = tj.ModelConfig(
            vocab_size=256, d_model=256, num_layers=4, num_heads=4, max_len=128, positions="rope"
        )
        params = tj.init_params(config, jax.random.key(0))
        model = LanguageModel(TextModel(config, params, ByteTokenizer()), "random")
    engine = Engine(model, slots=options.slots)
    engine.start()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        print(listening.getsockname()[1], flush=True)
        settings = uvicorn.Config(make_app(engine, "load"), log_level="warning")
        uvicorn.Server(settings).run(sockets=[listening])


def _counts(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--clients", type=_counts, default=[1, 4, 16], help="counts: 1,4,16")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each count")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", help="a run or a published model; default: random weights")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
