"""Registration of the verifier ``by-shape``."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_verifiers(register: Register) -> None:
    # By reference, so that `crossdraft list` does not import PyTorch.
    register("by-shape", "crossdraft_by_shape.verifier:ByShape", summary="selects the verifier by the kind of draft")
