"""A server in a thread that answers as a test scripts it, for the tests of engines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """Answers of a server.

    Attributes:
        events: JSON values of a response's events, or raw bytes to send instead; a function of the number of earlier
            completions for some that change.
        status: of a completion.
        forever: repeated after the events, every ``pause`` seconds.
        pages: bodies by path; a function of the number of completions for one that changes.
        requests: number of completions.
        key: API key, without which requests are refused.
        body: of the last completion.
    """

    events: Sequence[Any] | Callable[[int], Sequence[Any]] = ()
    status: int = 200
    forever: bytes = b""
    pause: float = 0.0
    pages: dict[str, str | Callable[[int], str]] = field(default_factory=dict)
    requests: int = 0
    key: str = ""
    body: Any = None
    url: str = ""

    def write(self, out: Any) -> None:
        for event in self.events(self.requests - 1) if callable(self.events) else self.events:
            out.write(event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n")
        while self.forever:
            out.write(self.forever)
            time.sleep(self.pause)


def steps(*tokens: Sequence[Any], finish_reason: Any = "length", **choice: Any) -> list[dict[str, Any]]:
    """Events of the OpenAI API with these tokens; the last has the finish reason."""
    ends = [*[None] * (len(tokens) - 1), finish_reason]
    return [
        {"choices": [{"token_ids": list(ids), "text": "", "finish_reason": end, **choice}]}
        for ids, end in zip(tokens, ends, strict=True)
    ]


@contextmanager
def engine_server(script: Script) -> Iterator[Script]:
    """Serve a script; it has the server's ``url`` then."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def refused(self) -> bool:
            if not script.key or self.headers["Authorization"] == f"Bearer {script.key}":
                return False
            self.send_response(401)
            self.end_headers()
            return True

        def do_GET(self) -> None:
            if self.refused():
                return
            body = {"/health": "", **script.pages}.get(self.path)
            body = body(script.requests) if callable(body) else body
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def do_POST(self) -> None:
            script.requests += 1
            script.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            self.send_response(script.status)
            self.end_headers()
            with suppress(OSError):
                script.write(self.wfile)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        script.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield script
        finally:  # or its thread would select a closed socket for ever
            server.shutdown()
