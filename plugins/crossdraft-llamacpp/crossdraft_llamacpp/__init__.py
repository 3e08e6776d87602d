"""Registration of llama.cpp: a backend for GGUF models, and its server as the engine of a recipe."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_backends(register: Register) -> None:
    register(
        "llama.cpp", "crossdraft_llamacpp.backend:LlamaCppBackend", summary="GGUF files, run by llama.cpp on a CPU"
    )


@hookimpl
def crossdraft_register_servers(register: Register) -> None:
    register("llama.cpp", "crossdraft_llamacpp.server:LlamaServer", summary="llama-server, started or running")
