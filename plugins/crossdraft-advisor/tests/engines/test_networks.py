"""Proxies, private certificates and API keys of remote servers, by a CONNECT proxy and a TLS server in threads."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.engines.builtin.openai import OpenAiOptions, OpenAiServer
from crossdraft_advisor.engines.engine_log import read_source
from crossdraft_advisor.engines.http_response import CERTIFICATES, HEADERS, proxy_of, redacted
from crossdraft_advisor.engines.server import ServedCell, cause_of
from engine_server import Script, engine_server, steps

from crossdraft import Sampling
from crossdraft.framework.errors import ModelError, UsageError

HOST, KEY = "gpu.example.com", "sk-0123456789"
CELL = ServedCell(Path(), "float32", Sampling(temperature=0), 0, 1, 64, 4, (), (2,), None, 50)
VARIABLES = [name for stem in ("HTTP", "HTTPS", "ALL", "NO") for name in (f"{stem}_PROXY", f"{stem}_PROXY".lower())]
COUNTERS = "".join(f"vllm:spec_decode_num_{name}_total 5\n" for name in ("drafts", "draft_tokens", "accepted_tokens"))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *CERTIFICATES, HEADERS):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def listening(answer: Any) -> Iterator[int]:
    """Answer every connection in a thread of its own; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def guarded(connection: socket.socket) -> None:
            with connection, suppress(OSError, ValueError):
                answer(connection)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=guarded, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def head(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
        data += part
    return data.decode()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of `HOST` that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of the test")
    file, key = (tmp_path_factory.mktemp("tls") / name for name in ("authority.pem", "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    command += ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file, key


@contextmanager
def remote(certificate: tuple[Path, Path], answer: str) -> Iterator[tuple[str, list[str]]]:
    """A TLS server behind a CONNECT proxy: the proxy's address, and the heads of all requests of both."""
    heads: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            heads.append(head(secure))
            secure.sendall(answer.encode())

    def relay(connection: socket.socket) -> None:
        heads.append(head(connection))
        with socket.create_connection(("127.0.0.1", port)) as server:
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=copy, args=(server, connection))
            back.start()
            copy(connection, server)
            back.join()

    with listening(serve) as port, listening(relay) as proxy:
        yield f"http://user:password@127.0.0.1:{proxy}", heads


def copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def ok(body: str) -> str:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("authority", CERTIFICATES)
def test_https_through_a_proxy(
    variable: str, authority: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key reaches the server only, the proxy gets its own password, and the private certificate is checked."""
    with remote(certificate, ok(COUNTERS)) as (proxy, heads):
        monkeypatch.setenv(variable, proxy)
        monkeypatch.setenv(HEADERS, json.dumps({f"https://{HOST}": {"Authorization": f"Bearer {KEY}"}}))
        with pytest.raises(UsageError, match=r"VERIFY_FAILED.*SSL_CERT_FILE.*through the proxy 127") as error:
            read_source(f"https://{HOST}/metrics")
        assert "password" not in str(error.value)
        monkeypatch.setenv(authority, str(certificate[0]))
        heads.clear()
        assert read_source(f"https://{HOST}/metrics").text == COUNTERS
        connect, request = heads
        assert connect.startswith(f"CONNECT {HOST}:443 ") and KEY not in connect and "Proxy-Authorization" in connect
        assert f"Authorization: Bearer {KEY}" in request and "Proxy-" not in request.title()
        monkeypatch.setenv(authority, f"{certificate[0]}.none")
        with pytest.raises(UsageError, match=f"{authority} is '.*none', which has no readable certificates"):
            read_source(f"https://{HOST}/metrics")


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            f"HTTP/1.1 401 No\r\n\r\ninvalid key {KEY}, {'x' * 400}",
            r"status 401: invalid key \*\*\*.*CROSSDRAFT_HEADERS",
        ),
        (f"HTTP/1.1 302 Found\r\nLocation: https://other.example.com/?k={KEY}\r\n\r\n", "redirects to 'https://other"),
        (f"HTTP/1.1 500 {KEY}\r\n\r\n{KEY}", "status 500"),
        (f"HTTP/1.1 {KEY}\r\n\r\n", "cannot read"),
    ],
)
def test_key_is_neither_printed_nor_redirected(
    answer: str, message: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote(certificate, answer) as (proxy, heads):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        monkeypatch.setenv(HEADERS, json.dumps({f"https://{HOST}": {"Authorization": f"Bearer {KEY}"}}))
        with pytest.raises(UsageError, match=message) as error:
            read_source(f"https://{HOST}/metrics")
        assert KEY not in str(error.value) and len(heads) == 2
        server = OpenAiServer(OpenAiOptions(url=f"https://{HOST}"), CELL, Path())
        with pytest.raises(UsageError, match="is not ready") as error:
            server.start()
        assert KEY not in str(error.value)


SECRETS = {"Authorization": "Bearer sk-0123/4567", "Cookie": "session=abc123def; theme=9f8e7d", "X-Team": "blue-0042"}
PARTS = ["sk-0123/4567", "sk-0123%2F4567", "sk-0123\\/4567", "abc123def", "9f8e7d", "blue-0042", "dXNlcjpodW50ZXIy"]
PARTS += ["hunter2"]
ECHO = " ".join([*PARTS, SECRETS["Cookie"]])


@pytest.mark.parametrize(
    "script",
    [
        Script(status=401, events=[ECHO.encode()]),
        Script(status=500, events=[b"x" * 280 + ECHO.encode()]),
        Script([{"error": ECHO}]),
        Script([{"error": {"message": ECHO, ECHO: 1}}]),
        Script([f"data: {json.dumps(ECHO)}\n\n".encode()]),
        Script([f"data: {ECHO}\n\n".encode()]),
        Script([f'data: {{"choices": [{{"{ECHO}": 1}}]}}\n\n'.replace("\\/", "").encode()]),
        Script(steps([1], [2], finish_reason=ECHO)),
        Script(steps([ECHO])),
        Script([*steps([1]), {"choices": [], "model": ECHO}]),
        Script(pages={"/v1/models": json.dumps({"data": [{ECHO: ECHO}]})}),
        Script(pages={"/v1/models": json.dumps({"data": [{"id": ECHO}]})}, status=400, events=[ECHO.encode()]),
    ],
)
def test_no_part_of_a_header_in_messages(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_server(script):
        headers = {script.url: SECRETS, "https://other.example.com": {"Authorization": "Basic dXNlcjpodW50ZXIy"}}
        monkeypatch.setenv(HEADERS, json.dumps(headers))
        server = OpenAiServer(OpenAiOptions(url=script.url, token_ids=True), CELL, Path())
        server.start()
        with pytest.raises(ModelError) as error:
            server.complete([5, 6], 8)
    text = "".join(traceback.format_exception(error.value))
    assert not [part for part in PARTS if part in text], text


def test_no_part_of_a_header_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(pages={"/metrics": f'{COUNTERS}echo{{header="{ECHO}"}} 1\n', "/v1/models": ECHO})
    with engine_server(script):
        monkeypatch.setenv(
            HEADERS, json.dumps({script.url: SECRETS | {"Proxy-Authorization": "Basic dXNlcjpodW50ZXIy"}})
        )
        server = OpenAiServer(OpenAiOptions(url=script.url), CELL, tmp_path)
        server.start()
        texts = [server.scrape(), read_source(f"{script.url}/metrics").text, server.get("/v1/models")[1]]
    assert all("***" in text and not [part for part in PARTS if part in text] for text in texts)
    log = tmp_path / "server.log"
    log.write_text(f"error: {ECHO}\n")
    assert not [part for part in PARTS if part in cause_of(log)]


def test_short_words_that_are_not_credentials_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, json.dumps({"https://a": {"X-Route": "vllm", "Authorization": "Bearer abcd"}}))
    assert redacted("vllm:x 1, Bearer abcd") == "vllm:x 1, Bearer ***"
    monkeypatch.setenv(HEADERS, "[" * 100_000)
    assert redacted("vllm") == "vllm"
    with pytest.raises(UsageError, match=f"{HEADERS} must be JSON"):
        read_source("http://127.0.0.1:1/metrics")


@pytest.mark.parametrize(
    "url, settings, proxy",
    [
        ("https://gpu.example.com/x", {}, ""),
        ("https://gpu.example.com/x", {"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ("http://gpu.example.com/x", {"HTTPS_PROXY": "proxy:3128"}, ""),
        ("http://gpu.example.com/x", {"http_proxy": "http://proxy:1"}, "http://proxy:1"),
        ("http://gpu.example.com/x", {"ALL_PROXY": "proxy:1", "HTTP_PROXY": "proxy:2"}, "http://proxy:2"),
        *(
            ("https://gpu.example.com:8443/", {"ALL_PROXY": "p", "NO_PROXY": f"a, {name}"}, "")
            for name in ("*", "gpu.example.com", "example.com", ".example.com", "*.example.com", "GPU.example.com:8443")
        ),
        ("https://gpu.example.com/", {"ALL_PROXY": "p", "NO_PROXY": "ample.com,gpu.example.com:8443"}, "http://p"),
        ("http://10.1.2.3:8000", {"ALL_PROXY": "p", "no_proxy": "10.0.0.0/8"}, ""),
        ("http://11.1.2.3:8000", {"ALL_PROXY": "p", "no_proxy": "10.0.0.0/8"}, "http://p"),
        *((f"http://{host}:8000/", {"ALL_PROXY": "p"}, "") for host in ("localhost", "127.0.0.1", "[::1]")),
    ],
)
def test_choice_of_the_proxy(url: str, settings: dict[str, str], proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in NO_PROXY excepts its subdomains, too; servers of this machine have no proxy."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


@pytest.mark.parametrize("proxy", ["socks5://user:password@proxy:1080", "https://proxy:3128", "http://:3128", "a:b:c"])
def test_other_proxies_are_refused(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UsageError, match=r"ALL_PROXY is not the address of an HTTP proxy.*NO_PROXY") as error:
        read_source("https://gpu.example.com/metrics")
    assert "password" not in str(error.value)


def test_password_in_an_address_is_not_printed() -> None:
    with pytest.raises(
        UsageError, match=f"http://h:1/metrics is given with a user name or a password; set {HEADERS}"
    ) as e:
        read_source("http://user:password@h:1/metrics")
    assert "password@" not in str(e.value)
    with pytest.raises(ValueError, match="is not the address of a server: it has a user name or a password"):
        OpenAiOptions(url="http://user:secret@h:1")
