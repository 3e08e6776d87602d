"""No verifier waits for the device: none looks at what a tensor holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_trees import PAIRS, RULES, random_draft
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.verifier import Verifier
from crossdraft.framework.testing.verifier_contract import NoMask


def without_values(draft: Draft) -> Draft:
    """The draft on the meta device, where looking at a value, or at a shape that depends on values, raises."""
    tensors = {name: getattr(draft, name) for name in ("tokens", "parents", "valid", "q", "q_index", "sequences")}
    away = {name: None if tensor is None else tensor.to("meta") for name, tensor in tensors.items()}
    return Draft(**away, kind=draft.kind, levels=draft.levels, children=draft.children)


def judge_without_values(verifier: Verifier, shape: str) -> None:
    for row in range(3):
        verifier.start(row)
    for position, depth in enumerate((4, 4, 0)):
        draft, p = random_draft(shape, 4 + 3 * position, 3, depth, 9)
        rng = CounterRng(0).for_step(range(3), [position] * 3, torch.device("meta"))
        with NoMask():
            verdict = verifier.verify(without_values(draft), p.to("meta"), rng)
        assert verdict.length.shape == verdict.token.shape == (3,)
        assert verdict.length.device.type == verdict.token.device.type == "meta"
        verifier.observe([min(int(count), 1 + position) for count in draft.count], draft.count.tolist())


@pytest.mark.slow  # the contract of each rule looks, too
@pytest.mark.parametrize("name, shape", PAIRS)
def test_no_verifier_waits_for_device(name: str, shape: str) -> None:
    judge_without_values(RULES[name](), shape)


@pytest.mark.parametrize(
    "look",
    [
        lambda p: bool((p > 0.5).any()),
        lambda p: p.sum().item(),
        lambda p: int(p.argmax()),
        lambda p: float(p.max()),
        lambda p: [0] * 1000 and list(range(1000))[p.argmax()],
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: p.cpu(),
        lambda p: (p > 0.5).nonzero(),
        lambda p: torch.where(p > 0.5),
        lambda p: p[p > 0.5],
        lambda p: p.masked_select(p > 0.5),
        lambda p: p.clone().__setitem__(p > 0.5, p[0, 0, :1]),
        lambda p: p.unique(),
        lambda p: torch.equal(p, p),
        lambda p: p.repeat_interleave((p[0, 0] > 0).long(), -1),
    ],
    ids=range(16),
)
def test_verifier_that_waits_is_caught(look: Callable) -> None:
    class Waits(RULES["token"]):
        def verify(self, draft: Draft, p: Tensor, rng: Any) -> Verdict:
            look(p)
            return super().verify(draft, p, rng)

    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)) as caught:
        judge_without_values(Waits(), "chain")
    assert "meta" in str(caught.value).lower(), caught.value
