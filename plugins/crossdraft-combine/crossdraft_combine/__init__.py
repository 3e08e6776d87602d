"""Registration of the drafter ``combine``."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By reference, so that `crossdraft list` does not import PyTorch.
    summary = "several drafters: the first one with a draft, or their trees merged"
    register("combine", "crossdraft_combine.drafter:Combine", summary=summary)
