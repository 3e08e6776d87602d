"""Who may send requests, how large they may be, and that the event loop does not work on them."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import Running, arguments, serving  # noqa: E402

from crossdraft.framework.cli import serve  # noqa: E402
from crossdraft.framework.errors import UsageError  # noqa: E402
from crossdraft.framework.serve.access import AccessControl, is_loopback  # noqa: E402
from crossdraft.framework.serve.app import application  # noqa: E402
from crossdraft.framework.serve.worker import Worker  # noqa: E402
from crossdraft.framework.util.limits import BODY_BYTES  # noqa: E402

KEY = "a-key"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def name(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def running(name: str) -> Iterator[Running]:
    with serving("--target", name, "--slots", "1", "--max-new-tokens", "4") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(name: str) -> Iterator[Running]:
    with serving("--target", name, "--slots", "1", api_key=KEY) as running:
        yield running


def send(running: Running, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def refused(found: tuple[int, Any], status: int, sentence: str, **more: Any) -> None:
    """An error object of the protocol."""
    error = found[1]["error"]
    assert found[0] == status and sentence in error["message"], found
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert more.items() <= error.items()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1", "localhost.evil.example", "[", ""])
def test_other_hosts_are_refused(running: Running, host: str, path: str) -> None:
    """As in DNS rebinding: a page's own name leads to this machine."""
    refused(send(running, "GET", path, Host=host), 403, "is not this machine")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.1.2.3", "[::1]:8000"])
def test_this_machine_is_served(running: Running, host: str) -> None:
    assert send(running, "GET", "/v1/models", Host=host)[0] == 200


def test_requests_of_other_sites_are_refused(running: Running) -> None:
    body = json.dumps({"model": "any", "prompt": "w5"})
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{running.port + 1}", "http://["):
        refused(send(running, "POST", "/v1/completions", body, Origin=origin, **JSON), 403, "is another site")
    assert send(running, "GET", "/v1/models", Origin=running.url)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_only_json_is_taken(running: Running, name: str, kind: str) -> None:
    body = json.dumps({"model": name, "prompt": "w5"})
    refused(send(running, "POST", "/v1/completions", body, **{"Content-Type": kind}), 415, "send application/json")
    kinds = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert send(running, "POST", "/v1/completions", body, **kinds)[0] == 200


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"temperature": NaN}', "NaN is not a JSON value"),
        ('{"temperature": -Infinity}', "-Infinity is not a JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"model": "\\ud800"}', "there is no model"),
    ],
    ids=str,
)
def test_bodies_that_are_none(running: Running, text: str, sentence: str) -> None:
    status, answer = send(running, "POST", "/v1/completions", text, **JSON)
    assert status in (400, 404) and sentence in answer["error"]["message"], answer


def test_numbers_that_cannot_be(running: Running, name: str) -> None:
    for field, number in (("temperature", "1e999"), ("seed", "9" * 60), ("max_tokens", "1e400")):
        text = f'{{"model": {json.dumps(name)}, "prompt": "w5", "{field}": {number}}}'
        assert send(running, "POST", "/v1/completions", text, **JSON)[0] == 400


def test_a_body_is_refused_before_it_is_read(running: Running) -> None:
    """By its length, which nothing of it follows; and while it is sent without one."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.putrequest("POST", "/v1/completions")
    for key, value in {**JSON, "Content-Length": str(BODY_BYTES + 1)}.items():
        connection.putheader(key, value)
    connection.endheaders()
    answer = connection.getresponse()
    refused((answer.status, json.loads(answer.read())), 413, "has too many bytes")
    connection.close()

    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent <= BODY_BYTES:
            yield b" " * 2**16
            sent += 2**16

    refused(send(running, "POST", "/v1/completions", parts(), **JSON), 413, "has too many bytes")


def test_the_event_loop_neither_parses_nor_tokenizes(running: Running, name: str, monkeypatch: Any) -> None:
    from crossdraft.framework.models import chat
    from crossdraft.framework.serve import app

    threads: list[str] = []

    def noting(function: Any) -> Any:
        return lambda *args, **options: threads.append(threading.current_thread().name) or function(*args, **options)

    monkeypatch.setattr(app, "parse_json", noting(app.parse_json))
    monkeypatch.setattr(chat, "_ids", noting(chat._ids))
    body = json.dumps({"model": name, "prompt": ["w5 w6", "w7"], "max_tokens": 2})
    assert send(running, "POST", "/v1/completions", body, **JSON)[0] == 200
    assert len(threads) == 3 and all(thread.startswith("requests") for thread in threads)


@pytest.mark.parametrize("word", ["w5 ", "w5w6", "  w5\n"])
def test_a_text_that_is_far_too_long_is_not_tokenized(running: Running, name: str, monkeypatch: Any, word: str) -> None:
    from crossdraft.framework.models import chat

    read: list[int] = []
    plain = chat._ids
    monkeypatch.setattr(
        chat, "_ids", lambda tokenizer, text, **options: read.append(len(text)) or plain(tokenizer, text, **options)
    )
    long = word * 500_000
    for path, asks in (("completions", {"prompt": long}), ("chat/completions", {"messages": [message(long)]})):
        read.clear()
        status, answer = send(running, "POST", f"/v1/{path}", json.dumps({"model": name, **asks}), **JSON)
        if word == "w5w6":  # one unknown word to this tokenizer: a bound by the longest token would be wrong
            assert status == 200 and sum(read) <= 4 * len(long)
        else:
            assert status == 400 and "more than the 96 tokens that fit" in answer["error"]["message"]
            assert sum(read) < 20_000


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_empty_texts_are_refused(running: Running, name: str) -> None:
    for path, asks in (
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": ["w5", ""]}),
        ("chat/completions", {"messages": [message("")]}),
    ):
        body = json.dumps({"model": name, **asks})
        refused(send(running, "POST", f"/v1/{path}", body, **JSON), 400, "is an empty text", param=next(iter(asks)))


def test_an_api_key(guarded: Running, name: str) -> None:
    def client(key: str) -> Any:
        return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=30)

    assert client(KEY).completions.create(model=name, prompt="w5", max_tokens=2).usage.completion_tokens > 0
    for key in ("another", KEY + "x", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong") as caught:
            client(key).completions.create(model=name, prompt="w5")
        assert caught.value.code == "invalid_api_key"
    for header in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer \u00e9"}):
        refused(send(guarded, "GET", "/v1/models", **header), 401, "Authorization: Bearer KEY")
    assert send(guarded, "GET", "/health")[0] == 200


def test_api_keys_that_cannot_be(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_API_KEY", "of the environment")
    with pytest.raises(UsageError, match="printable ASCII without blanks"):
        serve.main(arguments("--target", name))
    with pytest.raises(UsageError, match="printable ASCII without blanks"):
        serve.main(arguments("--target", name, "--api-key", ""))
    monkeypatch.setenv("CROSSDRAFT_API_KEY", "k1")
    assert serve.api_key(arguments("--target", name)) == "k1"
    assert serve.api_key(arguments("--target", name, "--api-key", "k2")) == "k2"


def test_beyond_loopback_any_host_is_right() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.1.1.1", "")] == [
        True, True, True, False, False, False, False
    ]  # fmt: skip
    from starlette.datastructures import Headers

    open_to_all = AccessControl(None, loopback=False, api_key=None)  # type: ignore[arg-type]
    assert open_to_all._refusal(Headers({"host": "box.example:8000"}), "/v1/models", "GET") is None
    foreign = Headers({"host": "box.example:8000", "origin": "https://evil.example"})
    assert open_to_all._refusal(foreign, "/v1/models", "GET") is not None


def test_defaults_are_the_models_own_and_then_the_protocols(tmp_path: Any, name: str) -> None:
    def sampling(model: str, *words: str) -> dict[str, Any]:
        return serve.offered(arguments("--target", model, *words)).sampling.model_dump()

    assert sampling(name) == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    own = save_model(tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95}))
    assert sampling(own) == {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "min_p": 0.0}
    assert sampling(own, "--temperature", "0.9", "--top-p", "1")["temperature"] == 0.9
    assert sampling(own, "--temperature", "0") == {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_a_client_that_leaves_while_it_sends_is_no_error(running: Running) -> None:
    """It raises nothing, so that the log does not grow by a traceback for each of them."""
    worker = Worker(running.served, 1)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return parts.pop(0)

    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(application(running.served, worker)(scope, receive, send))
    assert sent[0]["status"] == 499
