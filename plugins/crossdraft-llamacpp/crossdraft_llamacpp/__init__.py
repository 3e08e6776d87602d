"""Registration of llama.cpp: a backend for GGUF models, its server as an engine, and its n-gram drafter."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_backends(register: Register) -> None:
    register(
        "llama.cpp", "crossdraft_llamacpp.backend:LlamaCppBackend", summary="GGUF files, run by llama.cpp on a CPU"
    )


@hookimpl
def crossdraft_register_servers(register: Register) -> None:
    register("llama.cpp", "crossdraft_llamacpp.server:LlamaServer", summary="llama-server, started or running")


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    register("ngram-simple", "crossdraft_llamacpp.ngram_simple:NgramSimple", summary="the n-gram drafting of llama.cpp")
