"""vLLM as the engine of a recipe, crossdraft's strategies inside it, and the drafter ``recorded-responses``."""

from typing import Any

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    summary = "the recorded response of each prompt: an upper bound for drafters in an engine"
    register("recorded-responses", "crossdraft_vllm.recorded:RecordedResponses", summary=summary)


@hookimpl
def crossdraft_register_servers(register: Register) -> None:
    register("vllm", "crossdraft_vllm.server:VllmServer", summary="vLLM's server, started or running")
    summary = "vLLM's server with crossdraft's drafter and verifier inside"
    register("vllm-crossdraft", "crossdraft_vllm.server:VllmCrossdraftServer", summary=summary)


@hookimpl
def crossdraft_register_engines(register: Register) -> None:
    summary = "vLLM with crossdraft's drafter and verifier inside"
    register("vllm-crossdraft", "crossdraft_vllm.engine:VllmCrossdraft", summary=summary)


def __getattr__(name: str) -> Any:
    """Import ``Proposer``, the class that vLLM's ``custom_class`` loads, on first use: it imports PyTorch."""
    if name != "Proposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .proposer import Proposer

    return Proposer
