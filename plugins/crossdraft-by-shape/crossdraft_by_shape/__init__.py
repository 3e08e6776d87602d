"""The verifier ``by-shape``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_verifiers(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    register("by-shape", "crossdraft_by_shape.verifier:ByShape", summary="judges each draft by the rule for its shape")
