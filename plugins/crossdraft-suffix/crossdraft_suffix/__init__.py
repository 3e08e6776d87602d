"""Registration of the drafter ``suffix``."""

from crossdraft import Register, hookimpl


@hookimpl
def crossdraft_register_drafters(register: Register) -> None:
    # By reference, so that `crossdraft list` does not import PyTorch.
    summary = "what mostly followed the longest match, in the text and in earlier outputs (SuffixDecoding)"
    register("suffix", "crossdraft_suffix.drafter:Suffix", summary=summary)
