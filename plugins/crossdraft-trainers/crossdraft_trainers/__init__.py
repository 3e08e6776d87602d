"""Training drafters against a frozen target, as the command ``crossdraft train``."""

from crossdraft import hookimpl

TRAINERS = {
    "disco": ("disco:DiscoTraining", "train the stop classifier of the policy disco"),
    "draft-model": ("draft_model:DraftModelTraining", "distil a draft model from a few of the target's layers"),
    "layer-skip": (
        "layer_skip:LayerSkipSearch",
        "search for the sublayers to skip when the target drafts for itself",
    ),
    "pass": ("look_ahead:PassTraining", "train look-ahead embeddings for a frozen target"),
    "medusa": ("medusa:MedusaTraining", "train Medusa heads on the target's last hidden state"),
    "eagle3": ("eagle3:Eagle3Training", "train an EAGLE-3 head on features of three of the target's layers"),
}


@hookimpl
def crossdraft_register_trainers(register):
    for name, (place, summary) in TRAINERS.items():
        register(name, f"{__name__}.trainees.{place}", summary=summary)


@hookimpl
def crossdraft_register_commands(register):
    summary = "train a drafter for a target, or export one for serving engines"
    register("train", f"{__name__}.command:Train", summary, heading="Extend")
