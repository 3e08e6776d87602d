"""GGUF models, run by llama.cpp: a backend of crossdraft."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_backends(register: Register) -> None:
    register(
        "llama.cpp", "crossdraft_llamacpp.backend:LlamaCppBackend", summary="GGUF files, run by llama.cpp on a CPU"
    )
