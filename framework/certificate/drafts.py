"""What is certified: the draft labels of ``crossdraft certify``, and registered drafters as somebody configured them.

Nothing here imports PyTorch before a drafter is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import UsageError

if TYPE_CHECKING:
    from ..contracts.drafter import DraftContext, Drafter
    from .table_lm import Toy


@dataclass(frozen=True)
class DraftKind:
    """What a draft label stands for: a registered drafter and its config, given the draft's depth gamma."""

    drafter: str
    options: Callable[[int], dict[str, Any]]
    summary: str
    #: Its drafts follow from the last token, so that states which end alike are enumerated once.
    markov: bool = True
    #: It is for toys whose drafter has tokens of its own (`Toy.words`), and for no others.
    translated: bool = False

    def config(self, gamma: int) -> tuple[type[Drafter], Any]:
        """The drafter's class and its validated config."""
        found = plugins.get("drafters", self.drafter)
        return found, found.Config(**self.options(gamma))

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        """Make the drafter; a `crossdraft.framework.certificate.certify.DrafterFactory`."""
        found, config = self.config(gamma)
        return found(config, context)


#: ``--draft``. The model's name is free: whatever a drafter loads is the toy's drafter model.
DRAFTS: dict[str, DraftKind] = {
    "chain": DraftKind(
        "draft-model",
        lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 1},
        "a chain that is sampled",
    ),
    "point-mass": DraftKind(
        "draft-model",
        lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 0},
        "the drafter's argmax chain",
    ),
    # Less 1e-9, so that the rounding of a probability equal to 2/5 does not decide.
    "stop-early": DraftKind(
        "draft-model",
        lambda gamma: {
            "model": "toy",
            "gamma": gamma,
            "temperature": 1,
            "policy": {"name": "confidence", "threshold": 2 / 5 - 1e-9},
        },
        "a sampled chain that ends after a token drawn with probability below 2/5",
    ),
    "iid-2": DraftKind("draft-model-iid", lambda gamma: _iid(gamma, 2), "two sequences, drawn independently"),
    "iid-3": DraftKind("draft-model-iid", lambda gamma: _iid(gamma, 3), "three of them"),
    "tree-wor-2-1": DraftKind(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "without-replacement"),
        "two children of the root drawn without replacement, a chain below each",
    ),
    "tree-greedy-2-1": DraftKind(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "greedy"),
        "the most probable child of the root and one drawn from the rest, a sampled chain below each",
    ),
    "tree-top-2-1": DraftKind(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "top-k"),
        "the two most probable children, an argmax chain below each",
    ),
    "tree-sequoia": DraftKind(
        "draft-model-tree",
        lambda gamma: _grown(gamma, "sequoia", {"acceptance": [0.8, 0.1], "temperature": 1}),
        "Sequoia's tree of one node more than a chain, drawn without replacement: a chain, and a leaf beside its first "
        "node",
    ),
    "tree-opt": DraftKind(
        "draft-model-tree",
        lambda gamma: _grown(gamma, "opt-tree", {"threshold": 0}),
        "OPT-Tree's of as many nodes: those that the drafter finds most probable, so that its shape varies",
    ),
}


#: ``--draft`` for toys whose drafter has tokens of its own.
TRANSLATED: dict[str, DraftKind] = {
    "tli": DraftKind(
        "universal",
        lambda gamma: {"model": "toy", "mode": "tli", "gamma": gamma, "temperature": 1},
        "a chain that is sampled by a drafter with other tokens, from those that target and drafter share",
        markov=False,
        translated=True,
    ),
    "slem": DraftKind(
        "universal",
        lambda gamma: {"model": "toy", "mode": "slem", "gamma": gamma},
        "the most probable text of a drafter with other tokens, in the target's",
        markov=False,
        translated=True,
    ),
}


def _iid(gamma: int, k: int) -> dict[str, Any]:
    return {"model": "toy", "gamma": gamma, "K": k, "temperature": 1}


def _tree(gamma: int, siblings: str) -> dict[str, Any]:
    branching = [2] * min(gamma, 1) + [1] * (gamma - 1)
    return {"model": "toy", "branching": branching, "siblings": siblings, "temperature": 1}


def _grown(gamma: int, growth: str, options: dict[str, Any]) -> dict[str, Any]:
    if not gamma:
        return _tree(gamma, "top-k")
    return {"model": "toy", "growth": growth, "depth": gamma, "nodes": gamma + 1, **options}


@dataclass(frozen=True)
class NamedDrafter:
    """A registered drafter with its options; how deep its drafts are is its own business. Like `DraftKind`."""

    label: str
    cls: type[Drafter]
    options: Any
    translated: bool = False

    markov = False

    @property
    def drafter(self) -> str:
        return self.cls.name

    def config(self, gamma: int) -> tuple[type[Drafter], Any]:
        return self.cls, self.options

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        return self.cls(self.options, context)


def named_drafter(text: str, settings: Iterable[str] = ()) -> NamedDrafter:
    """``--drafter``: a name, or a mapping with ``name`` and options as recipes have it; ``key=value`` adds options.

    Options that name a model and were left out name the toy.

    Raises:
        UsageError: what cannot be read, a key or value that does not fit, or a drafter that cannot be enumerated,
            because it needs more of its target than a table of probabilities has; says what.
        UnknownNameError: a name nobody registered.
    """
    from ..api.build import configured
    from ..recipe.recipe import Strategy
    from ..recipe.yaml_values import yaml_value

    options = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--drafter-option {setting}: write key=value, as in --drafter-option gamma=4")
        options[key.strip()] = yaml_value(value, lambda line, setting=setting: f"--drafter-option {setting}")
    strategy = Strategy.parse(text, "--drafter", options)
    fields = plugins.get("drafters", strategy.name).Config.model_fields
    models = {key: "toy" for key, field in fields.items() if field.is_required() and field.annotation is str}
    cls, config = configured("drafters", {**models, **strategy.config, "name": strategy.name})
    found = NamedDrafter(strategy.title, cls, config)
    return replace(found, translated=_translates(found))


def _translates(found: NamedDrafter) -> bool:
    """Whether a drafter asks for a model with tokens of its own. UsageError if none can be built for a table."""
    from .toys import built_in_toys, toys_of_two_vocabularies

    if not (reason := refusal(found, built_in_toys()[0])):
        return False
    if not refusal(found, toys_of_two_vocabularies()[0]):
        return True
    raise UsageError(
        f"drafter '{found.drafter}' cannot be enumerated, because the targets here are tables of probabilities: "
        f"{reason}; crossdraft.testing.DrafterContract tries it with setting = TinyModel()"
    )


def refusal(found: NamedDrafter, toy: Toy) -> str:
    """Why a drafter cannot be built for a target that is a table."""
    import torch

    from ..contracts.sampling import Sampling
    from ..errors import CrossdraftError
    from .table_lm import ToyContext

    sampling = Sampling()
    reason = ""
    try:
        if found.cls.traits(found.options, sampling).hidden_layers:
            reason = "it reads the target's hidden states"
        else:
            with torch.inference_mode():
                found.build(ToyContext(toy.target, toy.drafter, sampling, 1, words=toy.words), 1)
    except CrossdraftError as error:
        reason = str(error)
    except Exception as error:  # whatever a third party's drafter may raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return reason
