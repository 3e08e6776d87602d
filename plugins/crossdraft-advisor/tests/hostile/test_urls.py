"""``advise URL`` with slow, endless and non-HTTP servers, and invalid URLs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from crossdraft_advisor.engines import engine_log

from crossdraft.framework.util.limits import Limit


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Start a server that answers each connection with ``answer``; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(65536)
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def drip(connection: socket.socket, text: bytes) -> None:
    connection.sendall(text)
    while True:
        connection.sendall(b"ab")
        time.sleep(0.05)


@pytest.mark.parametrize("start", ["", "\r\n", "\r\n\r\n", "\r\nContent-Length: 9000\r\n\r\n"])
def test_server_that_never_ends(start: str, refused: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_log, "TIMEOUT", 1.0)
    with server(lambda connection: drip(connection, f"HTTP/1.1 200 OK{start}".encode())) as url:
        refused(["advise", url], "was not complete after 1 s")


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"", "cannot read"),
        (b"\x00\xff garbage\r\n\r\n", "cannot read"),
        (b"SSH-2.0-x\r\n", "cannot read"),
        (b"HTTP/1.1 banana\r\n\r\n", "cannot read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: banana\r\n\r\nx", "no acceptance in a known format"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nx", ""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx", "cannot read"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "cannot read"),
        (b"HTTP/1.1 302 Found\r\nLocation: /metrics\r\n\r\n", "cannot read"),
        (b"HTTP/1.1 500 No\r\n\r\n", "cannot read"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "has no acceptance"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "cannot read"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n\r\n", "cannot read"),
    ],
)
def test_answer(answer: bytes, message: str, refused: Any) -> None:
    with server(lambda connection: connection.sendall(answer)) as url:
        refused(["advise", url], message, url)


def test_answer_that_is_too_long(refused: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_log, "METRICS_BYTES", Limit(100, "for a test"))
    with server(lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200)) as url:
        refused(["advise", url], "is too large", "for a test")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/\t",
        "http://127.0.0.1:1/\x7f",
        "http://127.0.0.1:banana/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:-1/",
        "http://",
        "http:///metrics",
        "https://[::1",
        "http://[banana]/",
        "http://" + "a" * 300 + "/",
        "http://.../",
        "http://a..b/",
        "http://127.0.0.1:1/\u00e4",
        "http://\ud800/",
        "http://user:password@/",
        "http://127.0.0.1:1/%",
    ],
)
def test_invalid_urls(url: str, refused: Any) -> None:
    refused(["advise", url])
