"""SmolLM2-135M-Instruct and three drafters for it, as models of crossdraft."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_models(register: Register) -> None:
    register(
        "smollm2-135m-instruct",
        "crossdraft_smollm2.sources:INSTRUCT",
        summary="SmolLM2-135M-Instruct (Q4_1), a chat model of 135 million parameters; fetched once, 93 MB",
    )
    register(
        "smollm2-135m-instruct-gguf",
        "crossdraft_smollm2.sources:GGUF",
        summary="the same as the GGUF file that it is, for the backend llama.cpp (plugins/crossdraft-llamacpp)",
    )
    register(
        "smollm2-draft-model",
        "crossdraft_smollm2.sources:DRAFT_MODEL",
        summary="a draft model distilled from smollm2-135m-instruct to draft for it; shares its embedding",
    )
    register(
        "smollm2-medusa",
        "crossdraft_smollm2.sources:MEDUSA",
        summary="five Medusa heads for smollm2-135m-instruct; they share its head",
    )
    register(
        "smollm2-eagle3",
        "crossdraft_smollm2.sources:EAGLE3",
        summary="an EAGLE-3 head for smollm2-135m-instruct with a vocabulary of 8192 tokens",
    )
