"""Serve a run or a published model over HTTP, with OpenAI's API.

python -m transformer_jax serve --model FOLDER_OR_ID_OR_RUN --port 8000
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformer_jax.cli.command import TypedModelOptions, run
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.server.embedder import Embedder
    from transformer_jax.server.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Serve(TypedModelOptions):
    """Command-line options."""

    context: int | None = None
    """Maximum number of tokens in a prompt and its answer, not counting the last token, which is
    never read; default: the model's maximum, up to 2048."""
    name: str | None = None
    """Name of the model in requests; default: the name of the folder."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts only local connections."""
    port: int = 8000
    """Port to listen on, where 0 selects a free port."""
    slots: int = 8
    """Number of texts to generate at the same time."""
    queue: int = 64
    """Maximum number of waiting requests."""
    steps: int | None = None
    """Maximum number of tokens per text between checks of the queue; default: 4."""
    timeout: float = 600.0
    """Maximum time from the arrival of a request to the end of its answer, in seconds."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the key/value cache; default: the compute dtype. int8 needs a quarter of the memory
    of float32."""
    invariant: bool = False
    """Give each answer the same bits whatever other requests are in the batch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Serve, argv, serve)


def serve(options: Serve) -> None:
    """Serve the model until a signal arrives."""
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"port is {options.port}: must be from 0 to {2**16 - 1}")
    from transformer_jax.server.app import check_installed, make_app

    check_installed()
    import uvicorn

    from transformer_jax.loading import is_run, published_tokenizer
    from transformer_jax.pretrained.sentences import load_sentence_encoder
    from transformer_jax.pretrained.weights import open_weights

    engine: Engine | Embedder
    folder = None if is_run(options.model) else open_weights(options.model)
    # only sentence-transformers folders have modules.json
    if folder is not None and folder.read_json("modules.json") is not None:
        from transformer_jax.server.embedder import Embedder

        for field in ("checkpoint", "init_from", "context", "steps", "cache_dtype", "weights"):
            if (value := getattr(options, field)) is not None:
                raise ConfigError(f"{field} is {value!r}: a sentence encoder does not support it")
        if options.invariant:
            raise ConfigError("invariant is True: a sentence encoder does not support it")
        encoder = load_sentence_encoder(folder.path, dtype=options.dtype)
        tokenizer = published_tokenizer(folder)
        engine = Embedder(encoder, tokenizer, slots=options.slots, queue=options.queue)
    else:
        from transformer_jax.server.engine import Engine

        engine = Engine(
            options.load(
                dtype=options.dtype, weights=options.weights, invariant=options.invariant
            ),
            slots=options.slots, context=options.context, queue=options.queue,
            steps=options.steps or 4, cache_dtype=options.cache_dtype,
        )  # fmt: skip
    name = options.name
    if name is None:
        path = Path(options.model)
        name = path.resolve().name if path.exists() else options.model
    app = make_app(engine, name, timeout=options.timeout)
    # Bind the port before compiling, so that an error for a port in use occurs immediately.
    with socket.create_server((options.host, options.port)) as listening:
        print(f"serve: compiling for {engine.slots} slots of {engine.context} tokens", flush=True)
        engine.start()
        host, port = listening.getsockname()[:2]
        print(f"serve: {name} at http://{host}:{port}/v1 (press Ctrl-C to stop)", flush=True)
        # The timeout lets the process end after Ctrl-C despite open streams.
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(settings).run(sockets=[listening])
    print("serve: stopped", file=sys.stderr)
