"""The drafter ``suffix``, for crossdraft, which imports this module to see which names there are."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By its place: PyTorch is loaded when somebody asks for it, not with every `crossdraft list`.
    what = "what mostly followed the longest match, in the text and in earlier outputs (SuffixDecoding)"
    register("suffix", "crossdraft_suffix.drafter:Suffix", summary=what)
