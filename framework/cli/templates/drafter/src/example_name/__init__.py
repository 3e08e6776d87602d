"""The drafter ``example-name``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    register("example-name", "example_name.drafter:ExampleName", summary="proposes what followed the last token before")
