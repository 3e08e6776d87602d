"""Waits for the device a step, to the number, under conditions that drafters do not declare.

A step waits once, in a bench too; constraints and logits processors read the draft, once, unless it was made on the
host; a masked draft model reads the tokens of each of its passes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crossdraft_simulated_cuda import device
from token_automata import Automaton
from torch import Tensor

from crossdraft.framework.api.build import build_decoder
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import StepEvent
from crossdraft.framework.engine.logits_processors import LogitsProcessors
from crossdraft.framework.plugins import get
from crossdraft.testing import TinyModel

pytestmark = pytest.mark.simulated

#: A quarter of the tokens is not permitted, another one after each token.
TRANSITIONS = {state: {t: t % 4 for t in range(13) if (t + state) % 4} for state in range(4)}


class Masked(Automaton):
    mask_drafts = True


def penalty(ids: Tensor, logits: Tensor) -> Tensor:
    return logits.scatter_add(1, ids, logits.new_full(ids.shape, -0.5))


#: Options of the decoder, by title.
LOOPS: dict[str, dict[str, Any]] = {
    "bench": {},
    "constraint": {"constraint": Automaton(TRANSITIONS, 13)},
    "masked drafts": {"constraint": Masked(TRANSITIONS, 13)},
    "processors": {"processors": LogitsProcessors(lambda _: [penalty, penalty])},
}
LOOPS["constraint and processors"] = LOOPS["constraint"] | LOOPS["processors"]
#: Drafter, verifier, and passes of the draft model in a step.
PAIRS = [
    ({"name": "prompt-lookup"}, "token", 0),
    ({"name": "draft-model", "model": "small", "gamma": 3}, "block", 3),
    ({"name": "draft-model-tree", "model": "small", "branching": (2, 2)}, "traversal", 2),
]


def decode(place: str, drafter: dict[str, Any], verifier: str, sampling: Sampling, batch_size: int, **loop: Any) -> Any:
    """Tokens and accepted drafts of each response, and the waits of each step."""
    steps: list[Counter[str]] = []

    def count(_: StepEvent) -> None:
        steps.append(counts.waits.copy())
        counts.waits.clear()

    setting, (kind, rule) = TinyModel(), (get("drafters", drafter["name"]), get("verifiers", verifier))
    options = {key: value for key, value in drafter.items() if key != "name"}
    decoder = build_decoder(
        setting.context(batch_size, sampling, place),
        (kind, kind.Config(**options)),
        (rule, rule.Config()),
        **{"rng": CounterRng(7), "validate": "never", "max_new_tokens": 8, "on_step": count, **loop},
    )
    decoder.timings = []
    with device.counting() as counts:
        prompts = setting.prompts[: batch_size + (batch_size > 1)]
        responses = {r.index: (r.tokens, [step.tau for step in r.steps]) for r in decoder.run(prompts)}
        assert len(decoder.timings) == len(steps)
        decoder.stopwatch.wait()
    assert all(sum(timing.seconds.values()) > 0 for timing in decoder.timings)
    return responses, steps


@pytest.mark.parametrize("temperature, batch_size", [(1.0, 3), pytest.param(0.0, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter, verifier, passes", PAIRS, ids=[drafter["name"] for drafter, *_ in PAIRS])
def test_waits_of_step(
    drafter: Any, verifier: str, passes: int, loop: str, temperature: float, batch_size: int
) -> None:
    arguments = drafter, verifier, Sampling(temperature=temperature), batch_size
    (expected, _), (results, steps) = (decode(place, *arguments, **LOOPS[loop]) for place in ("cpu", "cuda"))
    assert results == expected
    largest = max(steps, key=Counter.total)
    assert largest.total() == 1 + further(passes, loop), largest


def further(passes: int, loop: str) -> int:
    """Waits beyond the one of the loop; a drafter without passes drafts on the host."""
    return 0 if loop == "bench" or not passes else 1 + passes * (loop == "masked drafts")


def test_table_of_waits_is_that_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "internals.md").read_text(encoding="utf-8")
    _, *titles = LOOPS
    assert f"| drafter | {' | '.join(titles)} |" in text
    for drafter, _, passes in PAIRS:
        options = [f"{key}: {value}" for key, value in drafter.items() if key not in ("name", "model")]
        numbers = [str(further(passes, title)) for title in titles]
        title = ", ".join([f"`{drafter['name']}`", *options])
        row = f"| {' | '.join([title, *numbers])} |"
        assert row in text, row
