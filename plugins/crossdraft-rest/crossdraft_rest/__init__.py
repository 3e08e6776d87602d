"""The drafter ``rest``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    what = "what mostly followed the last tokens in a datastore of texts (REST)"
    register("rest", "crossdraft_rest.drafter:Rest", summary=what)
