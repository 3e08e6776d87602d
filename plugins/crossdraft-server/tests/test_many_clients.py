"""A hundred clients, slow readers and dropped connections: no slot leaks, and readers do not block the server."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import save_model

from crossdraft.framework.engine.decoder import Decoder

openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import RunningServer, serving  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = "w5 w6 w7 w5 w6"


def connect(running: RunningServer, name: str, **options: Any) -> socket.socket:
    """Send a request and return the connection, whose response is not read."""
    body = json.dumps({"model": name, "prompt": PROMPT, "ignore_eos": True, "max_tokens": 80, **options}).encode()
    connection = socket.create_connection(("127.0.0.1", running.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    return connection


def test_hundred_clients_of_all_kinds(tmp_path: Any) -> None:
    name = save_model(tmp_path / "target")
    with serving("--target", name, "--temperature", "0", "--slots", "4", "--max-new-tokens", "80") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120)
        plain = client.completions.create(model=name, prompt=PROMPT, max_tokens=12).choices[0].text

        def send(i: int) -> Any:
            if i % 5 == 0:  # disconnects at once, streaming or not
                connect(running, name, stream=i % 2 == 0).close()
            elif i % 5 == 1:  # disconnects in the middle
                connection = connect(running, name, stream=True)
                connection.recv(64)
                connection.close()
            elif i % 5 == 2:  # reads after all others
                return connect(running, name, stream=True, logprobs=0)
            else:
                return client.completions.create(model=name, prompt=PROMPT, max_tokens=12).choices[0].text
            return None

        with ThreadPoolExecutor(100) as pool:
            results = list(pool.map(send, range(100)))
        assert [text for i, text in enumerate(results) if i % 5 > 2] == [plain] * 40
        assert running.idle(60), running.health()
        assert running.health() == {"slots": 4, "running": 0, "waiting": 0}
        assert running.pool.decoder.occupied == 0
        for reader in results[2::5]:
            with reader, reader.makefile("rb") as file:
                assert b"data: [DONE]" in file.read()
        assert client.completions.create(model=name, prompt=PROMPT, max_tokens=12).choices[0].text == plain


def test_full_queue_rejects_requests(tmp_path: Any, monkeypatch: Any) -> None:
    name, step, rejected = save_model(tmp_path / "target"), Decoder.step, threading.Event()
    monkeypatch.setattr(Decoder, "step", lambda decoder: rejected.wait(60) and step(decoder))
    with serving("--target", name, "--slots", "1", "--max-new-tokens", "80", max_waiting=2) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        connections = [connect(running, name) for _ in range(3)]
        for _ in range(4000):
            if running.health()["waiting"] == 2:
                break
            time.sleep(0.005)
        with pytest.raises(openai.InternalServerError, match="of at most 2 requests wait; retry later"):
            client.completions.create(model=name, prompt=["w5", "w6"])
        rejected.set()
        for connection in connections:
            connection.close()
        assert running.idle()


def test_command_stops_cleanly(tmp_path: Any) -> None:
    """Ctrl-C while a response is running."""
    name = save_model(tmp_path / "target", context=2048)
    command = [sys.executable, "-m", "crossdraft", "serve", "--target", name, "--port", "0", "--max-new-tokens", "1900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert "For evaluation, not for production" in lines[1]
        address = re.search(r"http://127.0.0.1:(\d+)/v1", lines[2])
        assert address
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        server: Any = type("Server", (), {"port": int(address[1])})
        with connect(server, name, max_tokens=1900, stream=True) as connection:
            connection.recv(64)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "server stopped" in rest and "Traceback" not in errors, errors
