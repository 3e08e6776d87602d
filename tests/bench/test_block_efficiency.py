"""Block efficiency is independent of the token limit."""

from itertools import accumulate
from typing import Any

import pytest

from crossdraft.framework.api.build import build_decoder, configured
from crossdraft.framework.certificate.table_lm import ToyContext
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.metrics.cell_metrics import Metrics, StepRecord, measure
from crossdraft.framework.metrics.pieces import Piece

GAMMA = 8


def measured(toy: Any, max_new_tokens: int, starts: list[int], roots: list[int] | None = None) -> Metrics:
    """One single-token prompt for each of ``starts``; ``roots`` collects the root tokens of steps."""
    slots = 32
    context = ToyContext(toy.target, toy.drafter, Sampling(), slots, max_length=max_new_tokens + 2 * GAMMA)
    drafter = configured("drafters", {"name": "draft-model", "model": "toy", "gamma": GAMMA})
    decoder = build_decoder(
        context, drafter, configured("verifiers", "block"), max_new_tokens=max_new_tokens, rng=CounterRng(1)
    )
    records = []
    for response in decoder.run([[start] for start in starts]):
        ends = list(accumulate(r.emitted for r in response.steps))
        if roots is not None:
            roots += [response.tokens[end - 1] for end in ends]
        name = str(response.index)
        for i, r in enumerate(response.steps):
            counts = (r.tau, r.emitted, r.nodes, r.width, r.limit)
            records.append(StepRecord(response.index, name, "", 0, i, *counts))
    return measure(records, [Piece(sum(r.emitted for r in records), {"target": 1.0})], gamma=GAMMA, depth=GAMMA)


@pytest.mark.parametrize("tokens", [16, 64])
def test_it_does_not_depend_on_limit(toys: Any, tokens: int) -> None:
    """The ratio over all steps is 4.77 at 12 tokens and 6.27 at 512 on this toy, because it includes cut steps."""
    roots: list[int] = []
    toy = toys["T0"]
    long = measured(toy, 512, [i % toy.vocab_size for i in range(32)], roots)
    # Prompts that end as steps end: what follows a prompt may be easier than what follows that.
    short = measured(toy, tokens, roots[:: len(roots) // 256][:256])
    assert long.block_efficiency is not None and short.block_efficiency is not None
    assert short.block_efficiency.low is not None and short.block_efficiency.high is not None
    truth = long.block_efficiency.value
    assert short.block_efficiency.low <= truth <= short.block_efficiency.high
    assert short.block_efficiency.high - short.block_efficiency.low < 0.12 * truth
    assert short.block_efficiency_all_steps < 0.97 * truth and short.steps_cut > 0
    assert short.acceptance[-1] == pytest.approx(long.acceptance[-1], abs=0.05)
    assert long.steps_cut < 0.05 * long.steps


def test_no_block_efficiency_without_untruncated_step(toys: Any) -> None:
    assert measured(toys["T0"], GAMMA, [0] * 8).all_cut
    result = measured(toys["T0"], GAMMA + 1, [0] * 8)
    assert result.block_efficiency is not None and result.steps - result.steps_cut == 8
