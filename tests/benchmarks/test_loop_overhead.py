"""``benchmarks/loop_overhead.py`` decomposes a step completely; times are not checked."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.drafters.none import NoDrafter
from crossdraft.verifiers.token import Token

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loop_overhead.py"
PROMPTS = [[3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("drafter, options", [(NoDrafter, {}), (DraftModelChain, {"model": "m", "gamma": 2})])
def test_parts_are_whole(tiny_model: Any, decoder: Any, drafter: Any, options: Any) -> None:
    script = runpy.run_path(str(SCRIPT))
    target, small = tiny_model("llama", copy="overhead"), tiny_model("llama", seed=1, copy="overhead")
    loop = decoder(target, drafter, options, Token, batch_size=2, drafting=small, temperature=1.0, max_new_tokens=4)
    result = script["measure"](loop, PROMPTS, 1)
    # With one measured step the shares are not medians of different steps, so they sum to 1.
    parts = [result[key] for key in ("target pass", "draft pass", *script["PHASES"])]
    assert sum(parts) == pytest.approx(100)
    assert sum(parts[2:]) == pytest.approx(result["outside"])
    assert result["target pass"] > 0 and (result["draft pass"] > 0) == bool(options)
    assert loop.batch_steps == 1 + script["WARM_UP"]
    assert loop.occupied == 0  # stopped in the middle of sequences, the slots are clean
