"""A server in a thread, on a free port, for the tests of the endpoint."""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crossdraft_server.app import server
from crossdraft_server.command import Serve, listen
from crossdraft_server.decoder_pool import DecoderPool

from crossdraft.framework.contracts.command import parsed


class RunningServer:
    """A running server: its address, its decoder pool and its counts."""

    def __init__(self, port: int, pool: DecoderPool):
        self.port, self.pool = port, pool
        self.url = f"http://127.0.0.1:{port}"

    def health(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            return json.load(answer)

    def idle(self, seconds: float = 20.0) -> bool:
        """Wait until no request runs or is queued; False after ``seconds``."""
        end = time.monotonic() + seconds
        while (now := self.health())["running"] or now["waiting"]:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def serve(*words: str) -> Serve:
    """The command with these options."""
    parser = argparse.ArgumentParser()
    Serve.add_arguments(parser)
    return parsed(Serve, vars(parser.parse_args(words)))


@contextmanager
def serving(*words: str, **options: Any) -> Iterator[RunningServer]:
    """``crossdraft serve`` with these options, and those of `crossdraft_server.app.server`."""
    pool = serve("--dtype", "float32", *words).build_pool()
    listener = listen("127.0.0.1", 0)
    running = server(pool, **options)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield RunningServer(listener.getsockname()[1], pool)
    finally:
        running.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
