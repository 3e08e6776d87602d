"""The built-in verification rules, one file each, registered through the same door as everyone else's."""

from ..framework.contracts.hookspecs import hookimpl


@hookimpl
def crossdraft_register_verifiers(register):
    register("greedy", f"{__name__}.greedy:Greedy", summary="exact match with the target's argmax (temperature 0)")
    register(
        "token",
        f"{__name__}.token:Token",
        summary="token verification (Leviathan et al. 2023, Chen et al. 2023)",
    )
    register("block", f"{__name__}.block:Block", summary="block verification (Sun et al. 2024)")
    register(
        "greedy-block",
        f"{__name__}.greedy_block:GreedyBlock",
        summary="greedy block verification with distribution modification (Sun et al. 2024)",
    )
    register("spectr", f"{__name__}.spectr:SpecTr", summary="K-SEQ on K i.i.d. sequences (Sun et al. 2023)")
    register(
        "specinfer",
        f"{__name__}.specinfer:SpecInfer",
        summary="multi-step speculative sampling on any tree (Miao et al. 2024)",
    )
    register(
        "sample-match",
        f"{__name__}.sample_match:SampleMatch",
        summary="samples the target and looks for the token among the children",
    )
    register("traversal", f"{__name__}.traversal:Traversal", summary="block verification on a tree (Weng et al. 2025)")
    register(
        "multipath-block",
        f"{__name__}.multipath_block:MultipathBlock",
        summary="block verification of the best of K sequences (Thomas and Pal 2026)",
    )
    register(
        "greedy-draft-optimal",
        f"{__name__}.greedy_draft_optimal:GreedyDraftOptimal",
        summary="the optimal rule for greedy drafts (Hu et al. 2025)",
    )
    register(
        "lenient",
        f"{__name__}.lenient:Lenient",
        summary="token verification with lenience (Leviathan et al. 2023)",
    )
    register("typical", f"{__name__}.typical:Typical", summary="typical acceptance (Medusa, Cai et al. 2024)")
    register("top-k", f"{__name__}.top_k:TopK", summary="top-k with a tolerance (SpecDec, Xia et al. 2023)")
    register("bild", f"{__name__}.bild:BiLD", summary="rollback on surprise (BiLD, Kim et al. 2023)")
