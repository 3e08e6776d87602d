"""A server in a thread, on a port of its own, for the tests of the endpoint."""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crossdraft.framework.cli import serve
from crossdraft.framework.serve.app import server


class Running:
    """The address of a server, and what it says of its slots."""

    def __init__(self, port: int, served: Any):
        self.port, self.served = port, served
        self.url = f"http://127.0.0.1:{port}"

    def health(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            return json.load(answer)

    def idle(self, seconds: float = 20.0) -> bool:
        """Wait until nothing runs and nobody waits."""
        end = time.monotonic() + seconds
        while (now := self.health())["running"] or now["waiting"]:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@contextmanager
def serving(*words: str, most_waiting: int = 1024, api_key: str | None = None) -> Iterator[Running]:
    """``crossdraft serve`` with these options."""
    served = serve.offered(arguments("--dtype", "float32", *words))
    listening = serve.listening("127.0.0.1", 0)
    running = server(served, most_waiting=most_waiting, api_key=api_key)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Running(listening.getsockname()[1], served)
    finally:
        running.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
