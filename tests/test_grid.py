"""Identity of the grid of drafters, verifiers and samplings: tokens, accepted lengths and the bits of p.

``CROSSDRAFT_GRID=FILE pytest -n0 -m slow tests/test_grid.py`` writes a digest of each cell to FILE, or names the cells
that differ if FILE is there: run it in two checkouts with one environment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from crossdraft.framework.api.build import build_decoder
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import StepEvent
from crossdraft.framework.plugins import entries
from crossdraft.testing import DrafterContract, TinyModel

pytestmark = [pytest.mark.slow, pytest.mark.companions]

FILE = os.environ.get("CROSSDRAFT_GRID", "")
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.8, top_k=6, top_p=0.9), Sampling())


def digest(contract: DrafterContract, verifier: Any, sampling: Sampling, batch_size: int, seed: int) -> str:
    """A digest of all responses, their steps, and p at the root and the valid nodes of every step, bit by bit."""
    state = hashlib.sha256()

    def record(event: StepEvent) -> None:
        occupied = torch.tensor([prompt is not None for prompt in event.prompts])
        scored = functional.pad(event.draft.valid, (1, 0), value=True) & occupied[:, None]
        state.update(repr((event.accepted, event.emitted)).encode())
        state.update(event.scores.p[scored].numpy().tobytes())

    context = contract.setting.context(batch_size, sampling)
    loop: dict[str, Any] = {"rng": CounterRng(seed), "validate": "never", "max_new_tokens": 8, "on_step": record}
    decoder = build_decoder(context, contract.make, verifier(verifier.Config()), **loop)
    for response in decoder.run(contract.setting.prompts):
        state.update(repr((response.index, response.tokens, response.finish_reason)).encode())
    return state.hexdigest()[:16]


def grid(heads: Path, seed: int = 7) -> Iterator[tuple[str, str]]:
    """Each cell and its digest."""
    from drafter_cases import contracts

    for name, contract in sorted(contracts().items()):
        if hasattr(contract, "use"):
            contract.use(heads)
        for sampling, batch_size in product(SAMPLINGS, (1, 3)):
            for verifier in contract.rules(sampling, entries("verifiers")):
                cell = f"{name} {verifier.name} T={sampling.temperature:g} B={batch_size}"
                yield cell, digest(contract, verifier, sampling, batch_size, seed)


def test_grid_is_that_of_the_file(tmp_path: Path) -> None:
    from drafter_cases import write_all_heads

    heads = write_all_heads(tmp_path, TinyModel.model())
    cells = dict(grid(heads))
    assert len(cells) > 500
    assert any(value != cells[cell] for cell, value in grid(heads, seed=8))
    file = Path(FILE)
    if FILE and not file.exists():
        file.write_text("".join(f"{cell}\t{value}\n" for cell, value in cells.items()), encoding="utf-8")
    before = (
        dict(line.split("\t") for line in file.read_text("utf-8").splitlines())
        if FILE
        else dict(islice(grid(heads), 200))
    )
    differing = [cell for cell in before if cells.get(cell) != before[cell]]
    assert not differing, f"{len(differing)} of {len(before)} cells differ: {', '.join(differing[:20])}"
