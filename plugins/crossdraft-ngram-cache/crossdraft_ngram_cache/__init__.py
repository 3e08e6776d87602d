"""The drafter ``ngram-cache``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    what = "what followed the last tokens most often, in all sequences so far"
    register("ngram-cache", "crossdraft_ngram_cache.drafter:NgramCache", summary=what)
