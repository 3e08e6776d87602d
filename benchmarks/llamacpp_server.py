"""llama.cpp's server, for one prompt at a time; used by other benchmarks."""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import Request, urlopen


class Endpoint:
    """A server that was started here, which returns token ids."""

    def __init__(self, url: str):
        self.url = url

    def answer(self, prompt: list[int], maximum: int) -> tuple[list[int], str]:
        """Tokens and finish reason of a response at temperature 0."""
        body = {"prompt": prompt, "temperature": 0, "cache_prompt": False, "n_predict": maximum, "return_tokens": True}
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}/completion", json.dumps(body).encode(), headers), timeout=600) as output:
            response = json.loads(output.read())
        return response["tokens"], "stop" if response["stop_type"] == "eos" else "length"

    def metrics(self) -> str:
        with urlopen(f"{self.url}/metrics", timeout=60) as output:
            return output.read().decode()


@contextmanager
def served(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[Endpoint]:
    """A server of ours for as long as it is needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.server, "--model", args.model, "--port", str(port), "--host", "127.0.0.1", "--metrics"]
    command += ["--parallel", "1", "--ctx-size", str(args.room), "--threads", str(args.threads), *flags]
    print(f"$ {shlex.join(command)}", file=sys.stderr)
    with args.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{port}")
        for _ in range(600):
            try:
                with urlopen(f"{endpoint.url}/health", timeout=5):
                    break
            except (URLError, OSError):
                if process.poll() is not None:
                    raise SystemExit(f"{args.server} ended with code {process.returncode}; see {args.log}") from None
                time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # on a busy machine it keeps spinning
            process.kill()
            process.wait()
