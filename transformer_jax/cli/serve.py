"""Serve a trained run or a published model over HTTP, to clients of OpenAI's API.

python -m transformer_jax serve --model FOLDER_OR_ID_OR_RUN --port 8000
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.cli.command import Parser, load_named, run
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.server.embedder import Embedder
    from transformer_jax.server.engine import Engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _serve)


def _serve(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"port is {arguments.port}: must be from 0 to {2**16 - 1}")
    from transformer_jax.server.app import check_installed, make_app

    check_installed()
    import uvicorn

    engine = _embedder(arguments) or _engine(arguments)
    name = arguments.name
    if name is None:
        path = Path(arguments.model)
        name = path.resolve().name if path.exists() else arguments.model
    app = make_app(engine, name, timeout=arguments.timeout)
    with socket.create_server((arguments.host, arguments.port)) as listening:
        print(f"serve: compiling for {engine.slots} slots of {engine.context} tokens", flush=True)
        engine.start()
        host, port = listening.getsockname()[:2]
        print(f"serve: {name} at http://{host}:{port}/v1 (Ctrl-C ends it)", flush=True)
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(settings).run(sockets=[listening])
    print("serve: stopped", file=sys.stderr)


def _engine(arguments: argparse.Namespace) -> Engine:
    from transformer_jax.server.engine import Engine

    return Engine(
        load_named(arguments), slots=arguments.slots, context=arguments.context,
        queue=arguments.queue, steps=arguments.steps or 4, cache_dtype=arguments.cache_dtype,
    )  # fmt: skip


def _embedder(arguments: argparse.Namespace) -> Embedder | None:
    """Return what makes vectors if the model is a folder of sentence-transformers, else None."""
    from transformer_jax.pretrained.sentences import load_sentence_encoder
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.server.embedder import Embedder
    from transformer_jax.text.text_model import is_run, published_tokenizer

    if arguments.model is None or is_run(arguments.model):
        return None
    folder = open_weights(arguments.model)
    if folder.read_json("modules.json") is None:
        return None
    for name in ("checkpoint", "context", "steps", "cache_dtype", "weights"):
        if (value := getattr(arguments, name)) is not None:
            raise ConfigError(f"{name} is {value!r}: a sentence encoder has none")
    encoder = load_sentence_encoder(folder.path, dtype=arguments.dtype)
    return Embedder(
        encoder, published_tokenizer(folder), slots=arguments.slots, queue=arguments.queue
    )


def _parser() -> Parser:
    about = (
        "Serve a model to clients of OpenAI's API: /v1/completions and /v1/chat/completions, or "
        "/v1/embeddings of a sentence encoder."
    )
    parser = Parser("serve", about)
    add = parser.add_argument
    parser.add_loaded()
    add("--name", metavar="NAME", help="what requests call the model; default: the folder's name")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="default: this machine alone")
    add("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    add("--slots", type=int, default=8, metavar="N", help="texts side by side; default: 8")
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait; default: 64")
    add(
        "--steps", type=int, metavar="N",
        help="most tokens between two looks at the queue; default: 4",
    )  # fmt: skip
    add(
        "--timeout", type=float, default=600.0, metavar="SECONDS",
        help="from a request's arrival to the end of its answer; default: 600",
    )  # fmt: skip
    parser.add_cache_dtype()
    return parser
