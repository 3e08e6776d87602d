"""The built-in drafters, registered as plug-ins register theirs."""

from ..framework.contracts.hookspecs import hookimpl

#: Name: (``module:class`` in this package, summary for ``crossdraft list``).
DRAFTERS = {
    "none": ("none:NoDrafter", "plain autoregressive decoding, the baseline"),
    "grammar": ("grammar:GrammarDrafter", "the tokens that a constraint leaves no choice about"),
    "prompt-lookup": ("retrieval.prompt_lookup:PromptLookup", "copies the continuation of an earlier n-gram"),
    "medusa": ("heads.medusa.drafter:Medusa", "heads on the target's last hidden state draft a chain or a tree"),
    "eagle": ("heads.eagle:Eagle", "an autoregressive head on the target's last features"),
    "eagle3": ("heads.eagle3:Eagle3", "an autoregressive head on features of three of the target's layers"),
    "draft-model": ("draft_model.draft_model:DraftModelChain", "a draft model drafts a chain under a length policy"),
    "draft-model-iid": ("draft_model.iid:DraftModelIid", "a draft model draws K independent sequences"),
    "draft-model-tree": (
        "draft_model.tree:DraftModelTree",
        "a draft model draws a tree of a shape or a budget: without replacement, top-k or greedy siblings",
    ),
    "draft-model-dynamic-tree": ("draft_model.dynamic_tree:DraftModelDynamicTree", "the dynamic tree of EAGLE-2"),
}


@hookimpl
def crossdraft_register_drafters(register):
    for name, (path, summary) in DRAFTERS.items():
        register(name, f"{__name__}.{path}", summary=summary)
