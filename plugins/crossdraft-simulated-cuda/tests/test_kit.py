"""The contract kit on the simulated device: mistakes of third parties are named, with file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mistakes_on_device as mistakes
import pytest

from crossdraft.testing import DrafterContract, TinyModel, VerifierContract

pytestmark = pytest.mark.simulated

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
DIFFERENT = "on prompt"
#: Parts of the messages.
MISTAKES = {
    mistakes.ReadsItsDraft: "propose waits for the device at my_drafter.py:41 (item) in every step (traits.waits "
    "declares 0)",
    mistakes.ReadsScoresOfLongSequences: "observe waits for the device at my_drafter.py:41 (tolist) in 3 of 6 steps",
    mistakes.MasksOnTheHost: "mixes cuda:0 and cpu at my_drafter.py:41 (__and__)",
    mistakes.ReadsCopyTooEarly: "(see pinned copy to the host at my_drafter.py:41 in propose)",
    mistakes.KeepsStatesOfPass: "a tensor of a captured pass is kept, and the next replay overwrites it: of shape "
    "(1, 1, 16), made at my_drafter.py:41 in changed, held by my_drafter.Module.states",
    mistakes.WaitsInPass: "runs without CUDA graphs, which makes its passes slower: called a synchronizing CUDA "
    "operation at my_drafter.py:41",
    mistakes.CountsPasses: DIFFERENT,
    mistakes.ReplacesItsScale: "a replay uses memory that was freed after its capture: (16,), used at "
    "my_drafter.py:41 in changed",
    mistakes.MultipliesIntegers: '"matmul_cuda" not implemented for torch.int64 (at my_drafter.py:41 in propose)',
    mistakes.ReadsP: "verify waits for the device at my_drafter.py:41 (item) in every step",
    mistakes.IndexesByMask: "verify waits for the device at my_drafter.py:41 (index) in every step",
    mistakes.FillsOnTheHost: "mixes cuda:0 and cpu at my_drafter.py:41 (masked_fill)",
    mistakes.AddsWhatIsUninitialised: "(see empty_like at my_drafter.py:41 in verify)",
}


def contract(strategy: type[Any]) -> Any:
    if issubclass(strategy, mistakes.Verifier):
        return type("Contract", (VerifierContract,), {"verifier": strategy})()
    return type("Contract", (DrafterContract,), {"drafter": strategy, "setting": TinyModel()})()


#: Mistakes that others resemble.
SLOW = {
    mistakes.ReadsScoresOfLongSequences,
    mistakes.ReadsCopyTooEarly,
    mistakes.MultipliesIntegers,
    mistakes.IndexesByMask,
    mistakes.AddsWhatIsUninitialised,
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(mistake, marks=pytest.mark.slow if mistake in SLOW else ()) for mistake in MISTAKES],
    ids=lambda strategy: strategy.__name__,
)
def test_mistake_is_named(strategy: Any) -> None:
    with pytest.raises(AssertionError) as error:
        contract(strategy).test_on_cuda()
    message = re.sub(r"[^ ]*mistakes_on_device\.py:\d+", "my_drafter.py:41", str(error.value))
    assert MISTAKES[strategy] in message.replace("mistakes_on_device", "my_drafter")


def test_messages_of_the_docs() -> None:
    rows = re.findall(r"^\| .* \| `(.*my_drafter\.py:41.*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 6 and set(rows) <= set(MISTAKES.values())


@pytest.mark.parametrize("strategy", [mistakes.Chain, mistakes.Token])
def test_honest_strategies_pass(strategy: Any) -> None:
    contract(strategy).test_on_cuda()
