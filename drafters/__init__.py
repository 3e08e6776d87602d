"""The built-in drafters, one file each, registered through the same door as everyone else's."""

from ..framework.contracts.hookspecs import hookimpl


@hookimpl
def crossdraft_register_drafters(register):
    register("none", f"{__name__}.none:NoDrafter", summary="plain autoregressive decoding, the baseline")
    register(
        "prompt-lookup",
        f"{__name__}.retrieval.prompt_lookup:PromptLookup",
        summary="copies what followed an earlier n-gram",
    )
    register(
        "token-recycling",
        f"{__name__}.retrieval.token_recycling:TokenRecycling",
        summary="a tree of what the target itself ranked highest after each token",
    )
    register(
        "medusa",
        f"{__name__}.heads.medusa:Medusa",
        summary="heads on the target's last hidden state draft a chain or a tree",
    )
    register("eagle", f"{__name__}.heads.eagle:Eagle", summary="a head that continues the target's last features")
    register("eagle3", f"{__name__}.heads.eagle3:Eagle3", summary="a head on features of three of the target's layers")
    register(
        "dflash",
        f"{__name__}.heads.dflash:DFlash",
        summary="a few layers on the target's features draft a block in one pass, its tokens independently",
    )
    register(
        "dspark",
        f"{__name__}.heads.dspark:DSpark",
        summary="a block in one pass, each of its tokens told the one before it",
    )
    register(
        "p-eagle",
        f"{__name__}.heads.p_eagle:PEagle",
        summary="an EAGLE-3 head that drafts all its tokens in one pass",
    )
    register(
        "mlp-speculator",
        f"{__name__}.heads.mlp_speculator:MlpSpeculator",
        summary="small stages behind the target's last feature, each told the token before it",
    )
    register("mtp", f"{__name__}.heads.mtp:Mtp", summary="the target's own module of multi-token prediction")
    register(
        "early-exit",
        f"{__name__}.self_speculation.early_exit:EarlyExit",
        summary="the target's first layers draft, and verification goes on from there",
    )
    register(
        "layer-skip",
        f"{__name__}.self_speculation.layer_skip:LayerSkip",
        summary="the target drafts without some of its attention and feed-forward sublayers",
    )
    register(
        "lookahead",
        f"{__name__}.self_speculation.lookahead:Lookahead",
        summary="n-grams that the target makes up in its own passes",
    )
    register(
        "jacobi", f"{__name__}.self_speculation.jacobi:Jacobi", summary="the target's own guesses of its last pass"
    )
    register(
        "pass",
        f"{__name__}.self_speculation.pass_:Pass",
        summary="the target drafts in one pass, behind learnt look-ahead embeddings",
    )
    register(
        "draft-model",
        f"{__name__}.draft_model.draft_model:DraftModelChain",
        summary="a draft model drafts a chain of fixed length",
    )
    register(
        "online",
        f"{__name__}.draft_model.online:Online",
        summary="a draft model that learns, while requests run, what the target says where it was rejected",
    )
    register(
        "universal",
        f"{__name__}.other_tokenizer.universal:Universal",
        summary="a model with another tokenizer drafts a chain: from the tokens that both have, or as text",
    )
    register("draft-model-iid", f"{__name__}.draft_model.iid:DraftModelIid", summary="a draft model draws K sequences")
    register(
        "draft-model-tree",
        f"{__name__}.draft_model.tree:DraftModelTree",
        summary="a draft model draws a tree of a shape or a budget: without replacement, top-k or greedy siblings",
    )
    register(
        "draft-model-dynamic-tree",
        f"{__name__}.draft_model.dynamic_tree:DraftModelDynamicTree",
        summary="a draft model grows the tree of EAGLE-2",
    )


@hookimpl
def crossdraft_register_trainers(register):
    register(
        "disco",
        f"{__name__}.autoregressive.disco_training:DiscoTraining",
        summary="train the classifier that says when to stop drafting",
    )
    register(
        "draft-model",
        f"{__name__}.draft_model.training:DraftModelTraining",
        summary="distil a draft model from a few of the target's own layers",
    )
    register(
        "layer-skip",
        f"{__name__}.self_speculation.layer_skip_training:LayerSkipSearch",
        summary="search for the sublayers that the target leaves out when it drafts for itself",
    )
    register(
        "pass",
        f"{__name__}.self_speculation.pass_training:PassTraining",
        summary="train the look-ahead embeddings with which a frozen target drafts for itself",
    )
    register(
        "medusa",
        f"{__name__}.heads.medusa_training:MedusaTraining",
        summary="train Medusa heads on the target's last hidden state",
    )
    register(
        "eagle3",
        f"{__name__}.heads.eagle3_training:Eagle3Training",
        summary="train an EAGLE-3 head on features of three of the target's layers",
    )
