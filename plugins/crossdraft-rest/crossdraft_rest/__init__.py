"""Registration of the drafter ``rest``."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By reference, so that `crossdraft list` does not import PyTorch.
    summary = "the most frequent continuations of the last tokens in a datastore of texts (REST)"
    register("rest", "crossdraft_rest.drafter:Rest", summary=summary)
