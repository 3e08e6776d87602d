"""Registration of the drafter ``ngram-cache``."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By reference, so that `crossdraft list` does not import PyTorch.
    summary = "the most frequent continuation of the last tokens in all sequences so far"
    register("ngram-cache", "crossdraft_ngram_cache.drafter:NgramCache", summary=summary)
