"""llama.cpp's server as the engine of a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from crossdraft_advisor import EngineServer, ServerEvent, ServerOptions
from pydantic import Field

from crossdraft import UsageError


class LlamaServerOptions(ServerOptions):
    executable: str = Field(default="llama-server", description="path of llama-server")
    draft_model: str = Field(
        default="", description="GGUF file of the draft model; by default the model of the drafter"
    )


class LlamaServer(EngineServer):
    """A llama.cpp server. It streams single tokens; steps follow from their arrival and the totals of a response."""

    name = "llama.cpp"
    settings = "llama.cpp"
    Config: ClassVar[type[ServerOptions]] = LlamaServerOptions
    path = "/completion"
    tokens_per_event = True
    executable = "executable"
    harmless = EngineServer.harmless | {"draft_model"}

    def command(self, port: int) -> list[str]:
        cell, options = self.cell, self.options
        if shutil.which(options.executable) is None:
            raise UsageError(
                f"engine llama.cpp: executable {options.executable}: is not an executable; build llama-server"
            )
        model = options.model or str(cell.target)
        if not model.endswith(".gguf"):
            raise UsageError(f"engine llama.cpp: model {model}: is not a GGUF file; give the target as one (model)")
        flags = list(cell.flags)
        if options.draft_model and "--model-draft" in flags:
            flags[flags.index("--model-draft") + 1] = options.draft_model
        command = [options.executable, "--model", model, "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        command += ["--parallel", str(cell.batch_size), "--ctx-size", str(cell.length * cell.batch_size)]
        return [*command, "--seed", str(cell.seed), *flags, *options.args]

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = self.cell.sampling
        return {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # the order of transformers
            "repeat_penalty": 1.0,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }

    def event(self, data: Mapping[str, Any]) -> ServerEvent:
        event = ServerEvent(self._completed(list(data["tokens"]), data.get("content", "")))
        if data["stop"]:
            event.finish_reason = "stop" if data["stop_type"] == "eos" else "length"
            event.total = data.get("tokens_predicted")
            if (timings := data.get("timings")) and "draft_n" in timings:
                event.totals = timings["draft_n"], timings["draft_n_accepted"]
        return event

    def _completed(self, tokens: list[int], text: str) -> list[int]:
        """All tokens of ``text``: of a character of several tokens, llama.cpp sends the last one only."""
        if not tokens or text.isascii():
            return tokens
        # Behind a line break, since some tokenizers put a space before a text.
        before, both = (
            list(self.cell.tokenizer(part, add_special_tokens=False)["input_ids"]) for part in ("\n", f"\n{text}")
        )
        complete = both[len(before) :]
        return complete if complete[-len(tokens) :] == tokens and both[: len(before)] == before else tokens
