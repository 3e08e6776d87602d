"""The endpoint: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/health``."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..api.output_processor import Output
from ..contracts.steps import Chunk
from ..contracts.steps import Response as Answer
from ..errors import CrossdraftError, first_line
from ..util.input_files import parse_json
from ..util.limits import BODY_BYTES
from .access import AccessControl
from .decoder_pool import Served
from .errors import error_object, error_response
from .protocol import Asked, Refused, asked
from .response import Telling
from .worker import Client, Failed, Full, Job, Worker

#: Seconds that clients have to fetch what there is when the server ends.
_GRACE = 3


def server(
    served: Served, *, most_waiting: int = 1024, loopback: bool = True, api_key: str | None = None
) -> uvicorn.Server:
    """A server of one pair; ``run(sockets=[..])`` answers until ``should_exit`` is set or a signal comes.

    ``loopback``, ``api_key``: see `AccessControl`.
    """
    worker = Worker(served, most_waiting)
    app = application(served, worker, loopback=loopback, api_key=api_key)
    config = uvicorn.Config(
        app, http="h11", ws="none", loop="asyncio", log_level="warning", timeout_graceful_shutdown=_GRACE
    )
    return _Server(config, worker)


class _Server(uvicorn.Server):
    """When it ends, so do the answers under way: nobody waits for the last token."""

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.end()
        await super().shutdown(sockets)


def application(served: Served, worker: Worker, *, loopback: bool = True, api_key: str | None = None) -> Starlette:
    """The endpoint as an ASGI application; its lifespan is the worker's."""
    # Bodies are parsed and tokenized here, not in the event loop: one at a time, as tokenizers need not be thread-safe.
    parser = ThreadPoolExecutor(1, thread_name_prefix="requests")

    async def health(_: HttpRequest) -> Response:
        return JSONResponse(worker.counts, 200 if worker.alive else 503)

    async def models(_: HttpRequest) -> Response:
        model = {"id": served.target.name, "object": "model", "created": 0, "owned_by": "crossdraft"}
        return JSONResponse(
            {"object": "list", "data": [{**model, "max_model_len": served.length, "pair": served.title}]}
        )

    async def chat(http: HttpRequest) -> Response:
        return await _answer(served, worker, parser, http, chat=True)

    async def completions(http: HttpRequest) -> Response:
        return await _answer(served, worker, parser, http, chat=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        parser.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(worker.close)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    access = Middleware(AccessControl, loopback=loopback, api_key=api_key)
    handlers = {HTTPException: _elsewhere, Exception: _internal}
    return Starlette(routes=routes, lifespan=lifespan, middleware=[access], exception_handlers=handlers)


async def _elsewhere(http: HttpRequest, error: Exception) -> Response:
    """An address that there is not, or another method."""
    assert isinstance(error, HTTPException)
    offered = "/v1/models, /v1/completions, /v1/chat/completions and /health"
    asked_for = f"{http.method} {http.url.path}"
    return error_response(f"{asked_for}: {error.detail.lower()}; this server answers {offered}", error.status_code)


async def _internal(_: HttpRequest, error: Exception) -> Response:
    """A fault of the server's own; the traceback goes to its log."""
    return error_response(f"internal error: {first_line(error)}", 500)


async def _answer(
    served: Served, worker: Worker, parser: ThreadPoolExecutor, http: HttpRequest, *, chat: bool
) -> Response:
    loop = asyncio.get_running_loop()
    client = Client(loop)
    try:
        wanted = await loop.run_in_executor(parser, _parsed, served, await _body(http), chat)
        tokenizer = served.target.tokenizer
        outputs = [Output(tokenizer, wanted.stop) for _ in wanted.requests]
        jobs = worker.submit(client, wanted.law, list(zip(wanted.requests, outputs, strict=True)))
    except Refused as error:
        return error_response(str(error), error.status, error.param)
    except ClientDisconnect:
        return Response(status_code=499)  # it left while it sent; nobody is there to read it
    except Full as error:
        return error_response(str(error), 503)
    telling = Telling(wanted, served.target.name, tokenizer)
    if wanted.stream:
        return _Stream(_events(wanted, telling, client), worker, jobs)
    return await _whole(http, telling, client, worker, jobs)


async def _body(http: HttpRequest) -> bytes:
    """The body of a request, refused by its Content-Length or as soon as it is too large."""
    data, announced = bytearray(), http.headers.get("content-length", "")
    if announced.isdecimal():
        _check_size(int(announced[:20]))
    async for part in http.stream():
        data += part
        _check_size(len(data))
    return bytes(data)


def _check_size(size: int) -> None:
    if reason := BODY_BYTES.refusal(size):
        raise Refused(f"the body of a request has too many bytes: {reason}", status=413)


def _parsed(served: Served, data: bytes, chat: bool) -> Asked:
    """The request in a body. Raises `Refused`."""
    try:
        body = parse_json(data.decode("utf-8"), "the body of the request", nan=False)
    except (CrossdraftError, UnicodeDecodeError) as error:
        raise Refused(f"the body of a request is JSON in UTF-8: {error}") from None
    return asked(served, body, chat=chat)


async def _events(wanted: Asked, telling: Telling, client: Client) -> AsyncIterator[str]:
    """Server-sent events."""
    for chunk in telling.first():
        yield _event(chunk)
    responses: list[Answer] = []
    while len(responses) < len(wanted.requests):
        for choice, piece in await client.fetch():
            if isinstance(piece, Failed):
                yield _event(error_object(str(piece), 500))
                return
            if piece.response is not None:
                responses.append(piece.response)
            if (chunk := telling.part(choice, piece)) is not None:
                yield _event(chunk)
    if wanted.usage:
        yield _event(telling.usage(responses))
    yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """Events of jobs, which are given up when the client leaves, even before the first of them."""

    def __init__(self, events: AsyncIterator[str], worker: Worker, jobs: Sequence[Job]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._worker, self._jobs = worker, jobs

    async def __call__(self, *scope_receive_send: Any) -> None:
        try:
            await super().__call__(*scope_receive_send)
        finally:
            self._worker.give_up(self._jobs)


async def _whole(http: HttpRequest, telling: Telling, client: Client, worker: Worker, jobs: Sequence[Job]) -> Response:
    """All answers in one object; given up when the client leaves."""
    answers, gone = asyncio.ensure_future(_collected(client, len(jobs))), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({answers, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            return Response(status_code=499)  # nobody is there to read it
        found = answers.result()
        return error_response(str(found), 500) if isinstance(found, Failed) else JSONResponse(telling.whole(found))
    finally:
        answers.cancel()
        gone.cancel()
        worker.give_up(jobs)


async def _collected(client: Client, choices: int) -> list[Chunk] | Failed:
    """The whole answers as one piece each, or the first that failed."""
    found: dict[int, Chunk] = {}
    while len(found) < choices:
        for choice, piece in await client.fetch():
            if isinstance(piece, Failed):
                return piece
            if (one := piece.response) is not None:
                found[choice] = Chunk(piece.index, one.tokens, one.text, one.logprobs, one)
    return [found[choice] for choice in range(choices)]


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
