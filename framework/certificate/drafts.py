"""Drafts to certify: the labels of ``crossdraft certify --draft``, and registered drafters with options.

PyTorch is imported only when a drafter is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import UsageError

if TYPE_CHECKING:
    from ..contracts.drafter import DraftContext, Drafter
    from .table_lm import Toy


@dataclass(frozen=True)
class LabelledDrafter:
    """A draft label: a registered drafter, and its config for a draft depth gamma."""

    drafter: str
    options: Callable[[int], dict[str, Any]]
    summary: str

    #: Drafts depend on the last token only, so states with equal last tokens are merged.
    markov = True
    #: For toys with two vocabularies (`Toy.words`) only.
    translated = False

    def config(self, gamma: int) -> tuple[type[Drafter], Any]:
        """Class and validated config of the drafter."""
        drafter = plugins.get("drafters", self.drafter)
        return drafter, drafter.Config(**self.options(gamma))

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        """Build the drafter; a `crossdraft.framework.certificate.certify.DrafterFactory`."""
        drafter, config = self.config(gamma)
        return drafter(config, context)


#: ``--draft``. The model's name is arbitrary: any name loads the toy's draft model.
DRAFTS: dict[str, LabelledDrafter] = {
    "chain": LabelledDrafter(
        "draft-model", lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 1}, "a sampled chain"
    ),
    "point-mass": LabelledDrafter(
        "draft-model", lambda gamma: {"model": "toy", "gamma": gamma, "temperature": 0}, "the drafter's argmax chain"
    ),
    # The margin of 1e-9 makes a probability of 2/5 pass in spite of rounding.
    "stop-early": LabelledDrafter(
        "draft-model",
        lambda gamma: {
            "model": "toy",
            "gamma": gamma,
            "temperature": 1,
            "policy": {"name": "confidence", "threshold": 2 / 5 - 1e-9},
        },
        "a sampled chain that ends after a token drawn with probability below 2/5",
    ),
    "iid-2": LabelledDrafter("draft-model-iid", lambda gamma: _iid(gamma, 2), "two i.i.d. sequences"),
    "iid-delay-1": LabelledDrafter(
        "draft-model-iid",
        lambda gamma: _iid(gamma, 2, min(1, gamma - 1)),
        "one sampled token, then two i.i.d. sequences",
    ),
    "iid-3": LabelledDrafter("draft-model-iid", lambda gamma: _iid(gamma, 3), "three i.i.d. sequences"),
    "tree-wor-2-1": LabelledDrafter(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "without-replacement"),
        "two children of the root drawn without replacement, a chain below each",
    ),
    "tree-greedy-2-1": LabelledDrafter(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "greedy"),
        "the most probable child of the root and one drawn from the rest, a sampled chain below each",
    ),
    "tree-top-2-1": LabelledDrafter(
        "draft-model-tree",
        lambda gamma: _tree(gamma, "top-k"),
        "the two most probable children, an argmax chain below each",
    ),
    "tree-sequoia": LabelledDrafter(
        "draft-model-tree",
        lambda gamma: _grown_tree(gamma, "sequoia", {"acceptance": [0.8, 0.1], "temperature": 1}),
        "Sequoia's tree of gamma + 1 nodes, drawn without replacement: a chain, and a sibling of its first node",
    ),
    "tree-opt": LabelledDrafter(
        "draft-model-tree",
        lambda gamma: _grown_tree(gamma, "opt-tree", {"threshold": 0}),
        "OPT-Tree's tree of gamma + 1 nodes: the most probable ones, so its shape varies",
    ),
}


def _iid(gamma: int, k: int, delay: int = 0) -> dict[str, Any]:
    return {"model": "toy", "gamma": gamma, "K": k, "delay": max(delay, 0), "temperature": 1}


def _tree(gamma: int, siblings: str) -> dict[str, Any]:
    branching = [2] * min(gamma, 1) + [1] * (gamma - 1)
    return {"model": "toy", "branching": branching, "siblings": siblings, "temperature": 1}


def _grown_tree(gamma: int, growth: str, options: dict[str, Any]) -> dict[str, Any]:
    if not gamma:
        return _tree(gamma, "top-k")
    return {"model": "toy", "growth": growth, "depth": gamma, "nodes": gamma + 1, **options}


@dataclass(frozen=True)
class NamedDrafter:
    """A registered drafter with its options, which determine the draft depth. Same interface as `LabelledDrafter`."""

    label: str
    cls: type[Drafter]
    options: Any
    translated: bool = False
    #: Results of `rows` that do not depend on the verifier, by toy and sampling parameters.
    memory: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    markov = False

    @property
    def drafter(self) -> str:
        return self.cls.name

    def config(self, gamma: int) -> tuple[type[Drafter], Any]:
        return self.cls, self.options

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        return self.cls(self.options, context)


AnyDrafter = LabelledDrafter | NamedDrafter


def named_drafter(text: str, settings: Iterable[str] = ()) -> NamedDrafter:
    """Parse ``--drafter``: a name, or a mapping with ``name`` and options as in recipes; ``key=value`` adds options.

    Required model options default to the toy.

    Raises:
        UsageError: malformed text, an invalid option, or a drafter that requires more of its target than a table of
            probabilities.
        UnknownNameError: the name is not registered.
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
    drafter = NamedDrafter(strategy.title, cls, config)
    return replace(drafter, translated=_translates(drafter))


def _translates(drafter: NamedDrafter) -> bool:
    """True if the drafter needs a model with another vocabulary. Raises UsageError if it needs a real model."""
    from .toys import built_in_toys, toys_of_two_vocabularies

    if not (reason := refusal(drafter, built_in_toys()[0])):
        return False
    if not refusal(drafter, toys_of_two_vocabularies()[0]):
        return True
    raise UsageError(
        f"drafter '{drafter.drafter}' cannot be enumerated on targets that are tables of probabilities: {reason}; test "
        "it by crossdraft.testing.DrafterContract with setting = TinyModel()"
    )


def refusal(drafter: NamedDrafter, toy: Toy) -> str:
    """Return the reason why a drafter cannot be built for a table target; empty if it can."""
    import torch

    from ..contracts.sampling import Sampling
    from ..errors import CrossdraftError
    from .table_lm import ToyContext

    sampling = Sampling()
    reason = ""
    try:
        if plugins.traits_of("drafters", drafter.cls, drafter.options, sampling).hidden_layers:
            reason = "it reads the target's hidden states"
        else:
            with torch.inference_mode():
                drafter.build(ToyContext(toy.target, toy.drafter, sampling, 1, token_texts=toy.token_texts), 1)
    except CrossdraftError as error:
        reason = str(error)
    except Exception as error:  # third-party code may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return reason
