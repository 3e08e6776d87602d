"""llama.cpp's server, or any with ``/v1/completions``, for one prompt at a time; used by other benchmarks."""

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
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen


@dataclass
class Answer:
    """One response: its tokens, and the seconds that decoding took, without those of the prompt where that is known."""

    tokens: list[int]
    finish_reason: str
    seconds: float
    decoded: int


class Endpoint:
    """A server: one started here, which returns token ids, or any ``/v1/completions``."""

    def __init__(self, url: str, native: bool, tokenizer: Any, ends: Sequence[int]):
        self.url, self.native, self.tokenizer, self.ends = url.rstrip("/"), native, tokenizer, ends

    def answer(self, prompt: list[int], maximum: int) -> Answer:
        body = {"prompt": prompt, "temperature": 0, "cache_prompt": False}
        start = time.perf_counter()
        if self.native:
            output = self._post("/completion", body | {"n_predict": maximum, "return_tokens": True})
            tokens, finish_reason = output["tokens"], "stop" if output["stop_type"] == "eos" else "length"
        else:
            output = self._post("/v1/completions", body | {"max_tokens": maximum})
            choice = output["choices"][0]
            tokens, finish_reason = (
                self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"],
                choice["finish_reason"],
            )
            if finish_reason == "stop" and (not tokens or tokens[-1] not in self.ends):
                tokens = [*tokens, self.ends[0]]
        wall = time.perf_counter() - start
        timings = output.get("timings")
        if timings is None:
            return Answer(tokens, finish_reason, wall, len(tokens))
        return Answer(tokens, finish_reason, timings["predicted_ms"] / 1000, timings["predicted_n"])

    def metrics(self) -> str:
        with urlopen(f"{self.url}/metrics", timeout=60) as output:
            return output.read().decode()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, json.dumps(body).encode(), headers), timeout=600) as output:
            return json.loads(output.read())


@contextmanager
def served(args: argparse.Namespace, flags: Sequence[str], tokenizer: Any, ends: Sequence[int]) -> Iterator[Endpoint]:
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
        endpoint = Endpoint(f"http://127.0.0.1:{port}", True, tokenizer, ends)
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
