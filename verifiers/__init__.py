"""The built-in verifiers, one file each, registered as plug-ins register theirs."""

from ..framework.contracts.hookspecs import hookimpl

#: Name: (``module:class`` in this package, summary for ``crossdraft list``).
VERIFIERS = {
    "greedy": ("greedy:Greedy", "exact match with the target's argmax (temperature 0)"),
    "token": ("token:Token", "token verification (Leviathan et al. 2023, Chen et al. 2023)"),
    "block": ("block:Block", "block verification (Sun et al. 2024)"),
    "greedy-block": (
        "greedy_block:GreedyBlock",
        "greedy block verification with distribution modification (Sun et al. 2024)",
    ),
    "spectr": ("spectr:SpecTr", "K-SEQ on K i.i.d. sequences (Sun et al. 2023)"),
    "specinfer": ("specinfer:SpecInfer", "multi-step speculative sampling on any tree (Miao et al. 2024)"),
    "sample-match": ("sample_match:SampleMatch", "samples the target and matches the token among the children"),
    "traversal": ("traversal:Traversal", "block verification on a tree (Weng et al. 2025)"),
    "univer": ("univer:UniVer", "conditional optimal transport on greedy drafts (Weng et al. 2026)"),
    "multipath-block": (
        "multipath_block:MultipathBlock",
        "block verification of the best of K sequences (Thomas and Pal 2026)",
    ),
    "greedy-draft-optimal": (
        "greedy_draft_optimal:GreedyDraftOptimal",
        "the optimal verifier for greedy drafts (Hu et al. 2025)",
    ),
    "lenient": ("lenient:Lenient", "token verification with lenience (Leviathan et al. 2023)"),
    "typical": ("typical:Typical", "typical acceptance (Medusa, Cai et al. 2024)"),
    "top-k": ("top_k:TopK", "top-k with a tolerance (SpecDec, Xia et al. 2023)"),
    "bild": ("bild:BiLD", "rollback on surprise (BiLD, Kim et al. 2023)"),
}


@hookimpl
def crossdraft_register_verifiers(register):
    for name, (path, summary) in VERIFIERS.items():
        register(name, f"{__name__}.{path}", summary=summary)
