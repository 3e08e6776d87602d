"""Registers the verifier ``example-name`` with crossdraft."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_verifiers(register: Register) -> None:
    # Registered by import path, so that `crossdraft list` does not import PyTorch.
    register(
        "example-name",
        "example_name.verifier:ExampleName",
        summary="samples from the target and accepts matching tokens",
    )
