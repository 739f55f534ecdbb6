"""ASGI application (Starlette), which handles routes, streams, timeouts and disconnects.

The event loop only waits. A pool of threads reads prompts, and the engine's thread runs the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.decoding.structured import Matcher
from transformer_jax.server import protocol
from transformer_jax.server.embedder import Embedder
from transformer_jax.server.engine import Engine, Ticket
from transformer_jax.server.openapi import describe
from transformer_jax.server.protocol import Endpoint, Part, RequestError, Stamp, TextRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

MOST_BYTES = 2**20
"""Maximum size of a request body in bytes."""


def make_app(
    engine: Engine | Embedder, name: str, *, timeout: float = 600.0, most_bytes: int = MOST_BYTES
) -> Starlette:
    """Return the application, which stops the engine at shutdown. The caller starts the engine.

    Args:
        engine: the engine that generates text or embeds texts.
        name: the name of the model, which requests must contain.
        timeout: maximum time from the arrival of a request to the end of its answer, in seconds.
        most_bytes: maximum size of a request body in bytes.

    Raises:
        ConfigError: if Starlette is not installed, or `timeout` is not above 0.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout is {timeout}: must be above 0")
    check_installed()
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    # The API requires a creation date for the model. Use the time at which the server started.
    created = int(time.time())

    class Stream(StreamingResponse):
        """Event stream that cancels its request if the client disconnects at any time."""

        def __init__(self, engine: Engine, ticket: Ticket, events: AsyncIterator[bytes]) -> None:
            # A proxy must not store an answer, because another answer to the same request may
            # differ.
            headers = {"Cache-Control": "no-cache"}
            super().__init__(events, media_type="text/event-stream", headers=headers)
            self.engine, self.ticket = engine, ticket

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.engine.cancel(self.ticket)

    def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name, created)]})

    def one_model(request: Request) -> Response:
        requested = request.path_params["model"]
        if requested != name:
            message = f"model is {requested[:80]!r}: this server serves {name!r}"
            raise RequestError(message, 404, param="model", code="model_not_found")
        return JSONResponse(_model(name, created))

    def health(request: Request) -> Response:
        if not engine.alive:
            raise RequestError("the engine has stopped", 503, code="stopping")
        counts = {"slots": engine.slots, "running": engine.running, "waiting": engine.waiting}
        return JSONResponse({"status": "ok", **counts})

    def openapi(request: Request) -> Response:
        return JSONResponse(describe(name, embeds=isinstance(engine, Embedder)))

    def answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            until = asyncio.get_running_loop().time() + timeout
            if isinstance(engine, Embedder):
                message = f"{request.url.path}: {name!r} embeds texts; use /v1/embeddings"
                raise RequestError(message, param="model")
            try:
                async with asyncio.timeout_at(until):
                    body = await _body(request, most_bytes)
                    # Reading a long prompt or compiling a grammar must not block other clients.
                    parsed, ids, count, matcher = await asyncio.to_thread(
                        _read, engine, endpoint, body, name
                    )
            except TimeoutError:
                raise RequestError("the request took too long", 408, code="timeout") from None
            except ClientDisconnect:
                return Response(status_code=400)  # the client is gone
            prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
            stamp = Stamp(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), name)
            parts: asyncio.Queue[Part] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def deliver(part: Part) -> None:
                # An asyncio queue is not thread-safe, and this runs in the engine's thread.
                loop.call_soon_threadsafe(parts.put_nowait, part)

            ticket = engine.submit(parsed, ids, count, deliver, matcher)
            # Headers are sent with the first event, so earlier errors can set the status.
            if parsed.stream:
                return Stream(engine, ticket, _events(ticket, parts, stamp, until))
            try:
                whole = await _whole(request, parts, until)
            finally:
                engine.cancel(ticket)
            if whole is None:
                return Response(status_code=400)  # the client is gone
            return JSONResponse(protocol.answer(parsed, stamp, whole, len(ids)))

        return answer

    async def embeddings(request: Request) -> Response:
        if not isinstance(engine, Embedder):
            rule = "serve the folder of a sentence encoder, with modules.json"
            raise RequestError(f"{name!r} does not embed texts: {rule}", param="model")
        until = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(until):
                body = await _body(request, most_bytes)
        except TimeoutError:
            raise RequestError("the request took too long", 408, code="timeout") from None
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone
        parsed = protocol.read_embedding_request(body, name)
        try:
            async with asyncio.timeout_at(until):
                loop = asyncio.get_running_loop()
                vectors, count = await loop.run_in_executor(engine.threads, engine.embed, parsed)
        except TimeoutError:
            raise RequestError("the answer took too long", 503, code="timeout") from None
        return JSONResponse(protocol.embedding_answer(parsed, name, vectors, count))

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        # These errors are temporary. Clients read from this header when to send the request again.
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body(), error.status, headers)

    def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:80]}: {error.detail.lower()}"
        body = RequestError(message, error.status_code).body()
        return JSONResponse(body, error.status_code, error.headers)

    def fail(request: Request, error: Exception) -> Response:
        # The message of an unexpected error may contain internal details, which clients must not
        # see.
        return JSONResponse(RequestError("the server failed", 500).body(), 500)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        # `stop` blocks until the engine's thread ends, but the event loop must deliver the last
        # parts.
        await asyncio.to_thread(engine.stop)

    return Starlette(
        routes=[
            Route("/health", health), Route("/openapi.json", openapi), Route("/v1/models", models),
            Route("/v1/models/{model:path}", one_model),
            Route("/v1/completions", answering("completion"), methods=["POST"]),
            Route("/v1/chat/completions", answering("chat"), methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ],
        exception_handlers={RequestError: refuse, HTTPException: refuse_http, Exception: fail},
        lifespan=lifespan,
    )  # fmt: skip


def check_installed() -> None:
    """Raise ConfigError if a library that the server needs is not installed."""
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            rule = "run pip install 'transformer_jax[serve]'"
            raise ConfigError(f"serve needs {package}, which is not installed: {rule}")


def _model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "transformer_jax"}


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request; raise RequestError unless it is JSON and not too large.

    The content type must be JSON. Any web page can send forms or plain text to any address, but it
    needs permission to send JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"content-type is {kind[:80]!r}: must be application/json"
        raise RequestError(message, 415)
    # The content length may be missing or wrong, so count the bytes as they arrive.
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise RequestError(f"the body has more than {most} bytes, the maximum", 413)
    return bytes(body)


def _read(
    engine: Engine, endpoint: Endpoint, body: bytes, name: str
) -> tuple[TextRequest, np.ndarray, int, Matcher | None]:
    parsed = protocol.read_request(endpoint, body, name)
    return parsed, *engine.read(parsed), engine.match(parsed)


async def _whole(request: Request, parts: asyncio.Queue[Part], until: float) -> Part | None:
    """Return a complete answer, or None if its client disconnects first."""

    async def all_parts() -> Part:
        found = [await parts.get()]
        while found[-1].end is None:
            found.append(await parts.get())
        return protocol.join_parts(found)

    async def gone() -> None:
        # Only `receive` detects a disconnect.
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(all_parts()), asyncio.create_task(gone())
    try:
        async with asyncio.timeout_at(until):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise RequestError("the answer took too long", 503, code="timeout") from None
    finally:
        for task in tasks:
            task.cancel()
    if not tasks[0].done():
        return None
    found = tasks[0].result()
    if found.end == "failed":
        raise RequestError(str(found.error), found.status)
    return found


async def _events(
    ticket: Ticket, parts: asyncio.Queue[Part], stamp: Stamp, until: float
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer."""
    first = True
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await parts.get()
        except TimeoutError:
            error = RequestError("the answer took too long", 503, code="timeout")
            yield protocol.event(error.body())
            return
        if part.end == "failed":
            yield protocol.event(RequestError(str(part.error), part.status).body())
            return
        length = len(ticket.ids)
        for one in protocol.chunks(ticket.request, stamp, part, length, first=first):
            yield protocol.event(one)
        first = False
        if part.end is not None:
            yield protocol.event("[DONE]")
            return
