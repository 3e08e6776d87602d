"""Registers the drafter ``example-name`` with crossdraft."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # Registered by import path, so that `crossdraft list` does not import PyTorch.
    register(
        "example-name",
        "example_name.drafter:ExampleName",
        summary="copies the tokens after the last occurrence of the current token",
    )
