"""Targets of several families for the contract kit: the text at temperature 0, and independence of the batch."""

import copy
from collections.abc import Callable
from typing import Any

from crossdraft.framework.runs.threads import one_thread
from crossdraft.testing import DrafterContract, TinyModel


class FamilyModel(TinyModel):
    """A tiny model of another family."""

    def __init__(self, target: Any):
        self._target = target

    def model(self, device: str = "cpu") -> Any:
        return self._target


def family_target(tiny_model: Callable, family: str) -> Any:
    """A target of four layers (Gemma: two) and 13 tokens."""
    layers = {"gpt2": {"n_layer": 4}, "gemma3": {}}.get(family, {"num_hidden_layers": 4})
    return copy.deepcopy(tiny_model(family, vocab_size=13, **layers)).requires_grad_(False)


def check_text_in_any_batch(drafter: str, options: dict[str, Any], target: Any) -> None:
    """The greedy text is the target's own, and sampled tokens and steps are the same at any batch size."""
    case = type("Case", (DrafterContract,), {"drafter": drafter, "options": options, "setting": FamilyModel(target)})()
    with one_thread():
        case.test_greedy_decoding_is_targets_own()
        batched, single = case.decode(3, 1.0), case.decode(1, 1.0)
    for i, response in batched.items():
        assert response.tokens == single[i].tokens
        assert [step.tau for step in response.steps] == [step.tau for step in single[i].steps]
    taus = {step.tau for response in batched.values() for step in response.steps}
    assert len(taus) > 1, "drafts are accepted and rejected"
