"""SmolLM2's GGUF file: on 24 prompts, greedy output with every kind of draft is llama.cpp's own. Near ties are printed.

    pip install -e plugins/crossdraft-llamacpp -e plugins/crossdraft-smollm2
    pytest -n0 -s -m "slow and network" plugins/crossdraft-llamacpp/tests/test_smollm2_gguf.py

``CROSSDRAFT_GGUF=FILE`` takes another file.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from tiny_gguf import Plain

import crossdraft
from crossdraft.framework.models.chat import encode

pytestmark = [pytest.mark.slow, pytest.mark.network]

PROMPTS, NEW = 24, 32
DRAFTERS: dict[str, Any] = {
    "none": "none",
    "chain": {"name": "prompt-lookup", "gamma": 6},
    "tree": {"name": "token-recycling"},
}


@pytest.fixture(scope="module")
def target(installed: None) -> crossdraft.LoadedModel:
    return crossdraft.load_model(os.environ.get("CROSSDRAFT_GGUF", "smollm2-135m-instruct-gguf"))


@pytest.fixture(scope="module")
def prompts(target: crossdraft.LoadedModel) -> list[list[int]]:
    texts = [prompt.turns[0] for prompt in crossdraft.load_prompts("builtin")]
    return [encode(target.tokenizer, [text]) for text in texts[:: len(texts) // PROMPTS][:PROMPTS]]


@pytest.fixture(scope="module")
def own(target: crossdraft.LoadedModel, prompts: list[list[int]]) -> list[tuple[list[int], list[np.ndarray]]]:
    with Plain(target.model, max(map(len, prompts)) + NEW) as plain:
        return [plain.greedy(prompt, NEW, target.eos_token_ids) for prompt in prompts]


@pytest.fixture(scope="module")
def noise(target: crossdraft.LoadedModel, prompts: list[list[int]], own: Any) -> float:
    """RMS difference of llama.cpp's logits between tokens fed in one call and one by one."""
    moved = []
    with Plain(target.model, max(map(len, prompts)) + NEW) as plain:
        for prompt, (output, distributions) in zip(prompts, own, strict=True):
            moved.append(plain.logits(prompt + output[:-1]) - distributions[-1])
    rms = float(np.sqrt(np.square(moved).mean()))
    print(
        f"\nllama.cpp's own logits, in one call or one by one: RMS {rms:.3f}, at most {np.abs(moved).max():.3f} apart"
    )
    return rms


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_llama_cpps_own(
    target: crossdraft.LoadedModel, prompts: list[list[int]], own: Any, noise: float, drafter: str, batch_size: int
) -> None:
    assert len(prompts) == PROMPTS
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": NEW, "batch_size": batch_size}
    responses = crossdraft.generate(target, prompts, drafter=DRAFTERS[drafter], **options)
    ties = []
    for number, (response, (output, distributions)) in enumerate(zip(responses, own, strict=True)):
        if response.tokens == output:
            continue
        at = next(i for i, (a, b) in enumerate(zip(response.tokens, output, strict=False)) if a != b)
        gap = float(distributions[at][output[at]] - distributions[at][response.tokens[at]])
        ties.append((number, at, round(gap, 3)))
    steps = [step.emitted for response in responses for step in response.steps]
    print(f"\n{drafter}, B = {batch_size}: {PROMPTS - len(ties)} of {PROMPTS} identical, block efficiency "
          f"{sum(steps) / len(steps):.2f}; (prompt, token, logits apart) of the others: {ties}")  # fmt: skip
    assert all(gap <= 4 * noise for _, _, gap in ties)


def test_tokens_are_those_of_transformers(target: crossdraft.LoadedModel) -> None:
    """The tokenizer in the file against that of the same model as a directory."""
    other = crossdraft.load_tokenizer("smollm2-135m-instruct").tokenizer
    assert target.tokenizer.get_vocab() == other.get_vocab()
    for prompt in crossdraft.load_prompts("builtin"):
        text = prompt.turns[0]
        ids = target.tokenizer(text)["input_ids"]
        assert ids == other(text)["input_ids"]
        assert target.tokenizer.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)
        assert encode(target.tokenizer, [text]) == encode(other, [text])
