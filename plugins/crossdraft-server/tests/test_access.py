"""Access control, the size limit of bodies, and parsing off the event loop."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import save_model

openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from crossdraft_server.access import AccessControl  # noqa: E402
from crossdraft_server.app import BODY_BYTES, application  # noqa: E402
from crossdraft_server.worker import Worker  # noqa: E402
from server_thread import RunningServer, serve, serving  # noqa: E402

from crossdraft.framework.errors import UsageError  # noqa: E402
from crossdraft.framework.util.loopback import is_loopback  # noqa: E402

KEY = "a-key"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def name(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def running(name: str) -> Iterator[RunningServer]:
    with serving("--target", name, "--slots", "1", "--max-new-tokens", "4") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(name: str) -> Iterator[RunningServer]:
    with serving("--target", name, "--slots", "1", api_key=KEY) as running:
        yield running


def send(running: RunningServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def assert_rejected(response: tuple[int, Any], status: int, message: str, **fields: Any) -> None:
    """Check the status and the error object of a response."""
    error = response[1]["error"]
    assert response[0] == status and message in error["message"], response
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert fields.items() <= error.items()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1", "localhost.evil.example", "[", ""])
def test_other_hosts_are_rejected(running: RunningServer, host: str, path: str) -> None:
    """As in DNS rebinding: the name of a web page resolves to this machine."""
    assert_rejected(send(running, "GET", path, Host=host), 403, "is not this machine")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.1.2.3", "[::1]:8000"])
def test_loopback_hosts_are_accepted(running: RunningServer, host: str) -> None:
    assert send(running, "GET", "/v1/models", Host=host)[0] == 200


def test_cross_site_requests_are_rejected(running: RunningServer) -> None:
    body = json.dumps({"model": "any", "prompt": "w5"})
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{running.port + 1}", "http://["):
        assert_rejected(
            send(running, "POST", "/v1/completions", body, Origin=origin, **JSON),
            403,
            "cross-site requests are rejected",
        )
    assert send(running, "GET", "/v1/models", Origin=running.url)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_other_media_types_are_rejected(running: RunningServer, name: str, kind: str) -> None:
    body = json.dumps({"model": name, "prompt": "w5"})
    assert_rejected(
        send(running, "POST", "/v1/completions", body, **{"Content-Type": kind}), 415, "send application/json"
    )
    kinds = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert send(running, "POST", "/v1/completions", body, **kinds)[0] == 200


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"temperature": NaN}', "NaN is not a JSON value"),
        ('{"temperature": -Infinity}', "-Infinity is not a JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"model": "\\ud800"}', "is not served"),
        ('{"\\ud800": 1}', "unknown field"),
    ],
    ids=str,
)
def test_invalid_bodies(running: RunningServer, text: str, message: str) -> None:
    status, answer = send(running, "POST", "/v1/completions", text, **JSON)
    assert status in (400, 404) and message in answer["error"]["message"], answer


def test_half_surrogate_pair_in_a_message(running: RunningServer, name: str) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "w5 \ud800"}]})
    answer = send(running, "POST", "/v1/chat/completions", body, **JSON)
    assert_rejected(answer, 400, "contains the character U+D800, half of a surrogate pair")


@pytest.mark.parametrize("kind", ["regex", "grammar", "choice", "json"])
def test_half_surrogate_pair_in_a_constraint(running: RunningServer, name: str, kind: str) -> None:
    value: Any = {"choice": ["\ud800"], "json": {"const": "\ud800"}}.get(kind, "\ud800")
    for fields in ({"structured_outputs": {kind: value}}, {"stop": ["\ud800"]}, {"user": "\ud800"}):
        body = json.dumps({"model": name, "prompt": "w5", **fields})
        answer = send(running, "POST", "/v1/completions", body, **JSON)
        assert_rejected(answer, 400, "valid string" if "stop" in fields else "U+D800, half of a surrogate pair")


def exchange(port: int, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection, which is never closed from this side."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_two_lengths_of_a_body(running: RunningServer) -> None:
    answer = exchange(running.port, HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b"exclude each other" in answer and b"connection: close" in answer


def test_unfinished_requests_are_closed(name: str) -> None:
    options = ("--target", name, "--slots", "1", "--max-new-tokens", "4")
    with serving(*options, request_seconds=1.0) as running:
        for parts in ([], [HEAD], [HEAD, b"Content-Length: 9\r\n\r\n{"], [HEAD, b"Transfer-Encoding: chunked\r\n\r\n"]):
            assert exchange(running.port, *parts) == b""
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert exchange(running.port, whole + whole + HEAD).count(b"HTTP/1.1 200") == 2
        assert running.idle()


def test_invalid_numbers(running: RunningServer, name: str) -> None:
    for field, number in (("temperature", "1e999"), ("seed", "9" * 60), ("max_tokens", "1e400")):
        text = f'{{"model": {json.dumps(name)}, "prompt": "w5", "{field}": {number}}}'
        assert send(running, "POST", "/v1/completions", text, **JSON)[0] == 400


def test_large_body_is_rejected_before_it_is_read(running: RunningServer) -> None:
    """By its Content-Length; without one, as soon as the limit is exceeded."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    for key, value in {**JSON, "Content-Length": str(BODY_BYTES + 1)}.items():
        connection.putheader(key, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert_rejected((answer.status, json.loads(answer.read())), 413, "has too many bytes")
    connection.close()

    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent <= BODY_BYTES:
            yield b" " * 2**16
            sent += 2**16

    assert_rejected(send(running, "POST", "/v1/completions", parts(), **JSON), 413, "has too many bytes")


def test_event_loop_neither_parses_nor_tokenizes(running: RunningServer, name: str, monkeypatch: Any) -> None:
    from crossdraft_server import app

    from crossdraft.framework.models import chat

    threads: list[str] = []

    def record(function: Any) -> Any:
        return lambda *args, **options: threads.append(threading.current_thread().name) or function(*args, **options)

    monkeypatch.setattr(app, "parse_json", record(app.parse_json))
    monkeypatch.setattr(chat, "_ids", record(chat._ids))
    body = json.dumps({"model": name, "prompt": ["w5 w6", "w7"], "max_tokens": 2})
    assert send(running, "POST", "/v1/completions", body, **JSON)[0] == 200
    assert len(threads) == 3 and all(thread.startswith("requests") for thread in threads)


@pytest.mark.parametrize("word", ["w5 ", "w5w6", "  w5\n"])
def test_text_far_beyond_limit_is_not_tokenized(running: RunningServer, name: str, monkeypatch: Any, word: str) -> None:
    from crossdraft.framework.models import chat

    read: list[int] = []
    plain = chat._ids
    monkeypatch.setattr(
        chat, "_ids", lambda tokenizer, text, **options: read.append(len(text)) or plain(tokenizer, text, **options)
    )
    long = word * 500_000
    for path, fields in (("completions", {"prompt": long}), ("chat/completions", {"messages": [message(long)]})):
        read.clear()
        status, answer = send(running, "POST", f"/v1/{path}", json.dumps({"model": name, **fields}), **JSON)
        if word == "w5w6":  # one unknown word to this tokenizer: a bound by the longest token would be wrong
            assert status == 200 and sum(read) <= 4 * len(long)
        else:
            assert status == 400 and "more than the maximum of 96 tokens" in answer["error"]["message"]
            assert sum(read) < 20_000


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_empty_texts_are_rejected(running: RunningServer, name: str) -> None:
    for path, fields in (
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": ["w5", ""]}),
        ("chat/completions", {"messages": [message("")]}),
    ):
        body = json.dumps({"model": name, **fields})
        assert_rejected(
            send(running, "POST", f"/v1/{path}", body, **JSON), 400, "is an empty text", param=next(iter(fields))
        )


def test_api_key(guarded: RunningServer, name: str) -> None:
    def client(key: str) -> Any:
        return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=30)

    assert client(KEY).completions.create(model=name, prompt="w5", max_tokens=2).usage.completion_tokens > 0
    for key in ("another", KEY + "x", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong") as caught:
            client(key).completions.create(model=name, prompt="w5")
        assert caught.value.code == "invalid_api_key"
    for header in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer \u00e9"}):
        assert_rejected(send(guarded, "GET", "/v1/models", **header), 401, "Authorization: Bearer KEY")
    assert send(guarded, "GET", "/health")[0] == 200


def test_invalid_api_keys(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_API_KEY", "of the environment")
    with pytest.raises(UsageError, match="printable ASCII without spaces"):
        serve("--target", name).run()
    with pytest.raises(UsageError, match="printable ASCII without spaces"):
        serve("--target", name, "--api-key", "").run()
    monkeypatch.setenv("CROSSDRAFT_API_KEY", "k1")
    assert serve("--target", name).checked_key() == "k1"
    assert serve("--target", name, "--api-key", "k2").checked_key() == "k2"


def test_any_host_is_accepted_beyond_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.1.1.1", "")] == [
        True, True, True, False, False, False, False
    ]  # fmt: skip
    from starlette.datastructures import Headers

    open_to_all = AccessControl(None, loopback=False, api_key=None)  # type: ignore[arg-type]
    assert open_to_all._check(Headers({"host": "box.example:8000"}), "/v1/models", "GET") is None
    foreign = Headers({"host": "box.example:8000", "origin": "https://evil.example"})
    assert open_to_all._check(foreign, "/v1/models", "GET") is not None


def test_default_sampling_parameters(tmp_path: Any, name: str) -> None:
    def sampling(model: str, *words: str) -> dict[str, Any]:
        return serve("--target", model, *words).build_pool().sampling.model_dump()

    assert sampling(name) == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    own = save_model(tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95}))
    assert sampling(own) == {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
    assert sampling(own, "--temperature", "0.9", "--top-p", "1")["temperature"] == 0.9
    assert sampling(own, "--temperature", "0") == {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_client_that_disconnects_while_sending_is_not_error(running: RunningServer) -> None:
    """No exception is raised, so no traceback is logged."""
    worker = Worker(running.pool, 1)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return parts.pop(0)

    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(application(running.pool, worker)(scope, receive, send))
    assert sent[0]["status"] == 499
