"""The HTTP server: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/health``."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from crossdraft import Chunk, CrossdraftError, Limit, first_line
from crossdraft import Response as DecodedResponse
from crossdraft.commands import MOST_NESTING, parse_json
from crossdraft.framework.api.output_processor import Output
from crossdraft.framework.contracts.steps import Request
from crossdraft.framework.util.input_files import nested_too_deeply

from .access import AccessControl
from .constraint_compiler import ConstraintCompiler
from .decoder_pool import DecoderPool
from .errors import error_object, error_response
from .protocol import CompletionRequest, InvalidRequestError, parse_request
from .response import ResponseBuilder
from .worker import ChunkQueue, Job, RequestFailedError, UnavailableError, Worker

BODY_BYTES = Limit(10 * 2**20, "the body of a request is kept in memory")

#: Seconds that open connections have to finish at shutdown.
_SHUTDOWN_SECONDS = 3
#: nginx's status for a client that closed the connection; the client does not receive it.
_CLIENT_CLOSED = 499


def server(
    pool: DecoderPool,
    *,
    max_waiting: int = 1024,
    loopback: bool = True,
    api_key: str | None = None,
    request_seconds: float = 60,
) -> uvicorn.Server:
    """A server of a decoder pool; ``run(sockets=[..])`` returns when ``should_exit`` is set or at a signal.

    ``loopback``, ``api_key``: see `AccessControl`; ``request_seconds``: see `request_protocol`.
    """
    worker = Worker(pool, max_waiting)
    app = application(pool, worker, loopback=loopback, api_key=api_key)
    config = uvicorn.Config(
        app,
        http=request_protocol(request_seconds),
        ws="none",
        use_colors=False,
        loop="asyncio",
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    return _Server(config, worker)


def request_protocol(seconds: float) -> type[H11Protocol]:
    """HTTP connections that are closed if a request is not complete, body included, within ``seconds``.

    uvicorn has a limit for idle connections after a response only.
    """

    class RequestProtocol(H11Protocol):
        _unfinished: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._unfinished = self.loop.call_later(seconds, transport.close)

        def handle_events(self) -> None:
            super().handle_events()
            if self._unfinished is not None and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._unfinished.cancel()
                self._unfinished = None
            elif self._unfinished is None and (self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]):
                self._unfinished = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._unfinished is not None:
                self._unfinished.cancel()
            super().connection_lost(exc)

    return RequestProtocol


class _Server(uvicorn.Server):
    """A server that aborts running responses at shutdown."""

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.stop()
        await super().shutdown(sockets)


def application(pool: DecoderPool, worker: Worker, *, loopback: bool = True, api_key: str | None = None) -> Starlette:
    """The ASGI application; its lifespan starts and closes the worker."""
    # Bodies are parsed and tokenized off the event loop, in one thread: tokenizers may not be thread-safe.
    parser = ThreadPoolExecutor(1, thread_name_prefix="requests")
    compiler = ConstraintCompiler(pool.target, pool.decoder.target.vocab_size)

    async def health(_: HttpRequest) -> Response:
        return JSONResponse(worker.stats, 200 if worker.alive else 503)

    async def models(_: HttpRequest) -> Response:
        model = {"id": pool.target.name, "object": "model", "created": 0, "owned_by": "crossdraft"}
        return JSONResponse(
            {"object": "list", "data": [{**model, "max_model_len": pool.max_length, "pair": pool.title}]}
        )

    async def chat(http: HttpRequest) -> Response:
        return await _complete(pool, worker, parser, compiler, http, chat=True)

    async def completions(http: HttpRequest) -> Response:
        return await _complete(pool, worker, parser, compiler, http, chat=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        parser.shutdown(wait=False, cancel_futures=True)
        compiler.close()
        await asyncio.to_thread(worker.close)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    access = Middleware(AccessControl, loopback=loopback, api_key=api_key)
    handlers = {HTTPException: _not_found, Exception: _internal_error}
    return Starlette(routes=routes, lifespan=lifespan, middleware=[access], exception_handlers=handlers)


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    """The response to an unknown path or a method that it does not allow."""
    assert isinstance(error, HTTPException)
    paths = "/v1/models, /v1/completions, /v1/chat/completions and /health"
    message = f"{http.method} {http.url.path}: {error.detail.lower()}; the endpoints are {paths}"
    return error_response(message, error.status_code)


async def _internal_error(_: HttpRequest, error: Exception) -> Response:
    return error_response(f"internal error: {first_line(error)}", 500)  # the traceback is in the server's log


async def _complete(
    pool: DecoderPool,
    worker: Worker,
    parser: ThreadPoolExecutor,
    compiler: ConstraintCompiler,
    http: HttpRequest,
    *,
    chat: bool,
) -> Response:
    loop = asyncio.get_running_loop()
    queue = ChunkQueue(loop)
    try:
        request = await loop.run_in_executor(parser, _parse, pool, await _read_body(http), chat)
        if len(request.prompts) > worker.max_waiting:
            raise InvalidRequestError(
                f"{len(request.prompts)} prompts do not fit into the queue of at most {worker.max_waiting} requests; "
                "send fewer at a time",
                "prompt",
            )
        prompts = await _constrained(compiler, request)
        tokenizer = pool.target.tokenizer
        special = request.call_format is not None
        outputs = [Output(tokenizer, request.body.stop, special=special) for _ in prompts]
        jobs = worker.submit(queue, request.sampling, list(zip(prompts, outputs, strict=True)))
    except InvalidRequestError as error:
        return error_response(str(error), error.status, error.param)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_CLOSED)
    except UnavailableError as error:
        return error_response(str(error), 503)
    builder = ResponseBuilder(request, pool.target.name, tokenizer)
    if request.body.stream:
        return _EventStream(_events(request, builder, queue), worker, jobs)
    return await _complete_response(http, builder, queue, worker, jobs)


async def _read_body(http: HttpRequest) -> bytes:
    """Read the body; raise `InvalidRequestError` as soon as its Content-Length or its size exceeds the limit."""
    data, length = bytearray(), http.headers.get("content-length", "")
    if length.isdecimal():
        _check_size(int(length[:20]))
    async for part in http.stream():
        data += part
        _check_size(len(data))
    return bytes(data)


def _check_size(size: int) -> None:
    if reason := BODY_BYTES.violation(size):
        raise InvalidRequestError(f"the request body has too many bytes: {reason}", status=413)


def _parse(pool: DecoderPool, data: bytes, chat: bool) -> CompletionRequest:
    try:
        body = parse_json(data.decode("utf-8"), "the request body", nan=False)
    except (CrossdraftError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request body must be JSON in UTF-8: {error}") from None
    if nested_too_deeply(body):
        raise InvalidRequestError(f"the request body is nested more than {int(MOST_NESTING)} deep")
    request = parse_request(pool, body, chat=chat)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise InvalidRequestError(
            f"the request body contains the character {half}, half of a surrogate pair; send the whole character"
        ) from None
    return request


async def _constrained(compiler: ConstraintCompiler, request: CompletionRequest) -> list[Request]:
    """The prompts with their compiled constraint."""
    if request.constraint is None:
        return request.prompts
    name, constraint = request.constraint
    try:
        grammar = await compiler.compile(constraint)
    except CrossdraftError as error:
        raise InvalidRequestError(f"{name}: {error}", name) from None
    return [prompt._replace(constraint=grammar) for prompt in request.prompts]


async def _events(request: CompletionRequest, builder: ResponseBuilder, queue: ChunkQueue) -> AsyncIterator[str]:
    """Server-sent events."""
    for event in builder.role_chunks():
        yield _event(event)
    responses: list[DecodedResponse] = []
    while len(responses) < len(request.prompts):
        for choice, chunk in await queue.get():
            if isinstance(chunk, RequestFailedError):
                yield _event(error_object(str(chunk), 500))
                return
            if chunk.response is not None:
                responses.append(chunk.response)
            if (event := builder.chunk(choice, chunk)) is not None:
                yield _event(event)
    if request.body.stream_options.include_usage:
        yield _event(builder.usage_chunk(responses))
    yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """A stream of events whose jobs are aborted when the client disconnects, even before the first event."""

    def __init__(self, events: AsyncIterator[str], worker: Worker, jobs: Sequence[Job]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._worker, self._jobs = worker, jobs

    async def __call__(self, *scope_receive_send: Any) -> None:
        try:
            await super().__call__(*scope_receive_send)
        finally:
            self._worker.abort(self._jobs)


async def _complete_response(
    http: HttpRequest, builder: ResponseBuilder, queue: ChunkQueue, worker: Worker, jobs: Sequence[Job]
) -> Response:
    """All choices in one object; the jobs are aborted when the client disconnects."""
    collected, disconnected = (
        asyncio.ensure_future(_collect(queue, len(jobs))),
        asyncio.ensure_future(_disconnect(http)),
    )
    try:
        await asyncio.wait({collected, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            return Response(status_code=_CLIENT_CLOSED)
        chunks = collected.result()
        if isinstance(chunks, RequestFailedError):
            return error_response(str(chunks), 500)
        return JSONResponse(builder.complete(chunks))
    finally:
        collected.cancel()
        disconnected.cancel()
        worker.abort(jobs)


async def _collect(queue: ChunkQueue, choices: int) -> list[Chunk] | RequestFailedError:
    """Each choice as one chunk, or the first failure."""
    chunks: dict[int, Chunk] = {}
    while len(chunks) < choices:
        for choice, chunk in await queue.get():
            if isinstance(chunk, RequestFailedError):
                return chunk
            if (response := chunk.response) is not None:
                chunks[choice] = Chunk(chunk.index, response.tokens, response.text, response.logprobs, response)
    return [chunks[choice] for choice in range(choices)]


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
