"""vLLM's OpenAI-compatible server as the engine of a recipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from crossdraft_advisor import EngineServer, ServerEvent, ServerOptions
from pydantic import Field

from crossdraft import UsageError

#: OpenMP library that vLLM's CPU build needs preloaded, relative to the environment.
_OPENMP = Path("lib/libiomp5.so")


class VllmOptions(ServerOptions):
    python: str = Field(default="", description="Python of vLLM's environment; by default this one")
    per_request: bool = Field(
        default=True, description="request the accepted tokens of every step, which vLLM 0.32 and later report"
    )


class VllmServer(EngineServer):
    """A vLLM server; its steps are the events of the stream, and its own records of drafted and accepted tokens."""

    name = "vllm"
    settings = "vllm"
    executable = "python"
    harmless = EngineServer.harmless | {"per_request"}
    Config: ClassVar[type[ServerOptions]] = VllmOptions

    def command(self, port: int) -> list[str]:
        cell, options = self.cell, self.options
        command = [
            self._python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            options.model or str(cell.target),
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(cell.batch_size)]
        command += ["--dtype", cell.dtype, "--max-model-len", str(cell.length), "--seed", str(cell.seed)]
        if options.per_request and cell.gamma:
            command += ["--enable-per-request-metrics", "--per-request-spec-decode-metrics", "detailed"]
        return [*command, *self._flags, *options.args]

    def environment(self) -> dict[str, str]:
        openmp = Path(self._python).parents[1] / _OPENMP
        return {"LD_PRELOAD": str(openmp)} if openmp.exists() and "LD_PRELOAD" not in os.environ else {}

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = self.cell.sampling
        return {
            "model": self.served_model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def event(self, data: Mapping[str, Any]) -> ServerEvent:
        event = ServerEvent()
        if data["choices"]:
            (choice,) = data["choices"]
            event.tokens, event.finish_reason = list(choice["token_ids"] or ()), choice["finish_reason"]
        if speculation := (data.get("metrics") or {}).get("speculative_decoding"):
            event.drafted = speculation.get("per_step_drafted") or []
            event.accepted = speculation.get("per_step_accepted") or []
        return event

    @property
    def _flags(self) -> Sequence[str]:
        """Speculative options."""
        return self.cell.flags

    @property
    def _python(self) -> str:
        python = self.options.python or sys.executable
        if shutil.which(python) is None:
            raise UsageError(
                f"engine vllm: python {python}: is not an executable; give the Python of vLLM's environment"
            )
        return str(Path(python).absolute())


class VllmCrossdraftServer(VllmServer):
    """A vLLM server with crossdraft's drafter and verifier, which are selected by an environment variable."""

    name = "vllm-crossdraft"
    settings = "vllm-crossdraft"

    def environment(self) -> dict[str, str]:
        """The variable of the settings, ``export NAME=VALUE``, beside those of `VllmServer`."""
        variable = dict([self.cell.flags[1].split("=", 1)]) if self.cell.flags else {}
        return super().environment() | variable

    @property
    def _flags(self) -> Sequence[str]:
        return self.cell.flags[2:]
