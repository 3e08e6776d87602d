"""The drafter ``combine``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    what = "several drafters: the first one that has something, or their trees merged"
    register("combine", "crossdraft_combine.drafter:Combine", summary=what)
