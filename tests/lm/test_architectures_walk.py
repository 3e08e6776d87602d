"""Every causal language model of transformers is decoded exactly or refused, as docs/architectures.md lists."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from architecture_checks import greedy
from architecture_walk import MULTIMODAL, NOT_MADE, PAGE, SAME, TYPES, class_name, outcome, outcomes, page
from companions import needs_recurrent_layers
from oracle_trees import NEW, PROMPTS, OracleTrees, drafter_class, verifier_class
from tiny_architectures import noisy, tiny

from crossdraft.framework.lm.architectures import BY_TRIAL, EXACT

pytestmark = [pytest.mark.slow, needs_recurrent_layers]


@pytest.mark.parametrize("model_type", [*TYPES, *MULTIMODAL])
def test_exact_or_refused(model_type: str) -> None:
    """All logits of all nodes, in all variants; `outcomes` fails for anything in between."""
    if model_type in NOT_MADE:
        pytest.skip(NOT_MADE[model_type])
    actual = outcomes(model_type)
    name = class_name(model_type)
    assert all(result == SAME or result.startswith(f"{name} ") for result in actual.values())
    assert name in BY_TRIAL or model_type in MULTIMODAL or (SAME in actual.values()) == (name in EXACT)


@pytest.mark.parametrize(
    "model_type", [model_type for model_type in TYPES if class_name(model_type) in EXACT | BY_TRIAL]
)
@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_greedy_text(decoder: Callable, model_type: str, drafter: str) -> None:
    """The whole loop, with drafts that are right now and then."""
    result = outcome(model_type, {})
    if result != SAME:
        pytest.skip(f"{result}")
    target, reference = tiny(transformers.CONFIG_MAPPING[model_type]), tiny(transformers.CONFIG_MAPPING[model_type])
    want = {tuple(prompt): greedy(reference, prompt) for prompt in PROMPTS}
    chosen: tuple[Any, dict[str, Any]] = (OracleTrees, {"answers": want})
    if drafter == "chains":
        chosen = drafter_class("draft-model"), {"model": "noisy", "gamma": 3}
    drafting = noisy(target)
    loop = decoder(target, *chosen, verifier_class("greedy"), batch_size=3, drafting=drafting, max_new_tokens=NEW)
    for response in loop.run(PROMPTS):
        assert response.tokens == want[tuple(PROMPTS[response.index])]


@pytest.mark.skipif(
    f"({transformers.__version__}:" not in PAGE.read_text(encoding="utf-8"),
    reason="the page lists another version of transformers",
)
def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page({name: outcomes(name) for name in (*TYPES, *MULTIMODAL)})
