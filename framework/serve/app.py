"""The endpoint: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/health``."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..contracts.errors import CrossdraftError
from ..contracts.limits import LINE_BYTES
from ..contracts.reading import parse_json
from ..contracts.rounds import Chunk
from ..contracts.rounds import Response as Answer
from ..decoding.outputs import Output
from .asked import Asked, Refused, asked
from .laws import Served
from .told import Telling
from .worker import Client, Failed, Full, Job, Worker

#: Seconds that clients have to fetch what there is when the server ends.
_GRACE = 3


def server(served: Served, *, most_waiting: int = 1024) -> uvicorn.Server:
    """A server of one pair; ``run(sockets=[..])`` answers until ``should_exit`` is set or a signal comes."""
    worker = Worker(served, most_waiting)
    app = application(served, worker)
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


def application(served: Served, worker: Worker) -> Starlette:
    """The endpoint as an ASGI application; its lifespan is the worker's."""

    async def health(_: HttpRequest) -> Response:
        return JSONResponse(worker.counts, 200 if worker.alive else 503)

    async def models(_: HttpRequest) -> Response:
        model = {"id": served.target.name, "object": "model", "created": 0, "owned_by": "crossdraft"}
        return JSONResponse(
            {"object": "list", "data": [{**model, "max_model_len": served.length, "pair": served.title}]}
        )

    async def chat(http: HttpRequest) -> Response:
        return await _answer(served, worker, http, chat=True)

    async def completions(http: HttpRequest) -> Response:
        return await _answer(served, worker, http, chat=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _elsewhere})


async def _elsewhere(http: HttpRequest, error: Exception) -> Response:
    """An address that there is not, or another method."""
    assert isinstance(error, HTTPException)
    offered = "/v1/models, /v1/completions, /v1/chat/completions and /health"
    asked_for = f"{http.method} {http.url.path}"
    return _error(f"{asked_for}: {error.detail.lower()}; this server answers {offered}", error.status_code)


async def _answer(served: Served, worker: Worker, http: HttpRequest, *, chat: bool) -> Response:
    client = Client(asyncio.get_running_loop())
    try:
        wanted = asked(served, await _body(http), chat=chat)
        tokenizer = served.target.tokenizer
        outputs = [Output(tokenizer, wanted.stop) for _ in wanted.requests]
        jobs = worker.submit(client, wanted.law, list(zip(wanted.requests, outputs, strict=True)))
    except Refused as error:
        return _error(str(error), error.status, error.param)
    except Full as error:
        return _error(str(error), 503)
    telling = Telling(wanted, served.target.name, tokenizer)
    if wanted.stream:
        return _Stream(_events(wanted, telling, client), worker, jobs)
    return await _whole(http, telling, client, worker, jobs)


async def _body(http: HttpRequest) -> Any:
    data = bytearray()
    async for part in http.stream():
        data += part
        if reason := LINE_BYTES.refusal(len(data)):
            raise Refused(f"the body of a request has too many bytes: {reason}", status=413)
    try:
        return parse_json(data.decode("utf-8"), "the body of the request")
    except (CrossdraftError, UnicodeDecodeError) as error:
        raise Refused(f"the body of a request is JSON in UTF-8: {error}") from None


async def _events(wanted: Asked, telling: Telling, client: Client) -> AsyncIterator[str]:
    """Server-sent events."""
    for chunk in telling.first():
        yield _event(chunk)
    responses: list[Answer] = []
    while len(responses) < len(wanted.requests):
        for choice, piece in await client.fetch():
            if isinstance(piece, Failed):
                yield _event(_error_object(str(piece), 500))
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
        return _error(str(found), 500) if isinstance(found, Failed) else JSONResponse(telling.whole(found))
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


def _error_object(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if param == "model" else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error(message: str, status: int, param: str | None = None) -> JSONResponse:
    return JSONResponse(_error_object(message, status, param), status)
