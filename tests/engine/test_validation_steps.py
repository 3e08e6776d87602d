"""Checks of every step, the choice of validated steps, and the checks of a wide chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_trees import verifier_class
from scripted_strategies import KINDS, B, Seeded, at, decoder, honest
from torch.overrides import TorchFunctionMode

from crossdraft.framework.certificate.table_lm import TableLM, ToyContext
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.rng import inverse_cdf
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine import decoder as loop_module
from crossdraft.framework.engine.decoder import EVERY, FIRST, Decoder
from crossdraft.framework.errors import NumericalError


@pytest.mark.parametrize("rule", ["token", "block", "sample-match", "traversal", "specinfer"])
@pytest.mark.parametrize("vocabulary", [2048, 3000])
def test_drafter_of_nan_never_outputs_token(rule: str, vocabulary: int) -> None:
    """Not in steps that are not validated either, nor where the vocabulary is not a multiple of a block."""
    kind = "wor" if rule in ("traversal", "specinfer") else "chain"
    probs = torch.full((vocabulary,), 1 / vocabulary)
    context = ToyContext(probs, probs, Sampling(), B)
    spoil = at("q", slice(None), torch.nan)
    drafter = Seeded(Seeded.Config(kind=kind, vocabulary=vocabulary, change=spoil), context)
    loop = Decoder(TableLM(probs, B), drafter, verifier_class(rule)(), sampling=Sampling(), validate="never")
    ended = list(loop.run([[1], [2]], on_error="finish"))
    assert [(response.finish_reason, response.tokens) for response in ended] == [("error", [])] * 2
    assert all(str(response.error).startswith("drafter 'seeded' reported a q that is NaN") for response in ended)


@pytest.mark.parametrize("value", [torch.nan, 0.0])
@pytest.mark.parametrize("vocabulary", [3, 1024, 1025, 2048, 3000])
def test_draw_stays_inside_vocabulary(vocabulary: int, value: float) -> None:
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    drawn = inverse_cdf(torch.full((3, vocabulary), value), uniform, uniform)
    assert drawn.min() >= 0 and drawn.max() < vocabulary


def steps_that_are_validated(validate: str, steps: int, monkeypatch: Any) -> list[int]:
    loop = decoder("chain", validate=validate, max_new_tokens=10**6)
    events: list[int] = []
    monkeypatch.setattr(loop_module, "validate_draft", lambda *_, **__: events.append(loop.batch_steps))
    for row in range(B):
        loop.start(row, [1], row, row)
    monkeypatch.setattr(loop.sequences, "tokens", torch.zeros(B, 2 * steps + 1, dtype=torch.long))
    for _ in range(steps):
        loop.step()
    return events


def test_validated_step_numbers(monkeypatch: Any) -> None:
    expected = [*range(FIRST), EVERY, 2 * EVERY]
    assert steps_that_are_validated("sampled", 2 * EVERY + 2, monkeypatch) == expected
    assert steps_that_are_validated("always", 12, monkeypatch) == list(range(12))
    assert steps_that_are_validated("never", 12, monkeypatch) == []


def test_mistake_after_first_steps_is_found() -> None:
    """A mistake that starts late is detected in a sampled step."""
    steps = 0

    def late(draft: Draft, _: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > FIRST and draft.q is not None:
            draft.q *= 2

    loop = decoder("chain", draft=late, max_new_tokens=200)
    with pytest.raises(NumericalError, match="sums to 2, not 1"):
        list(loop.run([[1], [2]]))
    assert steps == EVERY + 1


def test_chain_is_not_wider_than_widest_row() -> None:
    """The target evaluates every column for every row: those that no row has room for are cut."""
    widths: list[tuple[int, int]] = []
    loop = decoder("chain", on_step=lambda event: widths.append((event.draft.width, event.scores.p.shape[1])))
    for row in range(B):
        loop.start(row, [1], row, row)
    loop.drafter.config = Seeded.Config(  # a third token that no row has room for, and that does not count
        kind="chain", change=lambda draft, _: replace(draft, valid=draft.valid & (torch.arange(3) < 2))
    )
    loop.sequences.limit[:] = [2, 2]
    loop.step()
    assert widths == [(2, 3)] and loop.target_rows == B * 3
    assert Draft.chain(torch.ones(2, 5, dtype=torch.long), [1, 3]).tokens.shape == (2, 3)
    assert Draft.chain(torch.ones(2, 5, dtype=torch.long), [0, 0]).width == 0


class Looks(TorchFunctionMode):
    """Notes what reads the values of a tensor on the host."""

    READS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in self.READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("validate, transfers", [("never", 1), ("always", 3)])
def test_step_has_one_transfer(kind: str, validate: str, transfers: int) -> None:
    """Checks of every step travel with the accepted lengths; a validated step needs two more transfers."""
    loop = decoder(kind, validate=validate)
    draft = honest(kind)  # Draft.iid looks once itself
    loop.drafter.config = Seeded.Config(kind="chain", change=lambda *_: draft)
    for row in range(B):
        loop.start(row, [10 + row], row, row)
    with Looks() as looks:
        loop.step()
    assert looks.seen == ["tolist"] * transfers
