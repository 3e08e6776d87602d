"""Any server with the streaming ``/v1/completions`` of OpenAI's API that returns the tokens of each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from crossdraft import ModelError, UsageError

from ..server import UNKNOWN, EngineServer, ServerEvent, ServerOptions


class OpenAiOptions(ServerOptions):
    url: str = Field(min_length=1, description="address of a running server, with speculation")
    token_ids: bool = Field(
        default=False, description="request token ids (return_token_ids), as servers of vLLM and crossdraft support"
    )


class OpenAiServer(EngineServer):
    """A server that runs, of any engine. Speculation is its own: the drafter and verifier of the recipe name it only.

    An event must hold the tokens of one step: their number is that of ``logprobs.tokens``. Prompts are sent as token
    ids; responses come as text, which is encoded again, unless ``token_ids`` is set.
    """

    name = "openai"
    Config: ClassVar[type[ServerOptions]] = OpenAiOptions

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = self.cell.sampling
        if sampling.top_k or sampling.min_p:
            raise UsageError("engine openai: OpenAI's API has no top_k and min_p; remove them from the recipe")
        return {
            "model": self.served_model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            **({"return_token_ids": True} if self.options.token_ids else {"logprobs": 0}),
        }

    def event(self, data: Mapping[str, Any]) -> ServerEvent:
        if not data["choices"]:  # usage
            return ServerEvent()
        (choice,) = data["choices"]
        if self.options.token_ids:
            return ServerEvent(list(choice["token_ids"]), choice.get("finish_reason"))
        logprobs = choice.get("logprobs")
        if choice["text"] and logprobs is None:
            raise ModelError(
                f"the server at {self.url} does not return logprobs, by which the tokens of an event are counted; use "
                "the plug-in of its engine"
            )
        tokens = logprobs["tokens"] if logprobs else []
        return ServerEvent([UNKNOWN] * len(tokens), choice.get("finish_reason"), text=choice["text"])
