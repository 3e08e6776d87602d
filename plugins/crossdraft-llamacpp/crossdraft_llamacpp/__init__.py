"""Registration of the backend ``llama.cpp`` for GGUF models."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_backends(register: Register) -> None:
    register(
        "llama.cpp", "crossdraft_llamacpp.backend:LlamaCppBackend", summary="GGUF files, run by llama.cpp on a CPU"
    )
