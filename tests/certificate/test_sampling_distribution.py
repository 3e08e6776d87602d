"""Sampling distribution: outputs of generator, loop and verifiers on a real model follow the target's distribution.

Enumeration proves the rules; it cannot see a generator that gives two decisions the same number, nor a cache
that serves the wrong context. A chi-square of the joint distribution of four tokens, two to four steps long, can. It
only counts because mistakes made on purpose fail it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.rng import CounterRng, CounterStepRng
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.thorough

VOCAB, LENGTH, GAMMA = 6, 4, 2
#: Repeats itself, so that prompt lookup drafts.
PROMPT = [0, 1, 2, 0, 1, 2, 0]
MODEL = dict(
    vocab_size=VOCAB,
    context=32,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    initializer_range=0.7,
)
#: Sequences sampled: for block verification and its mistake, for other rules and theirs, and by the slow tests.
CONTROL, FEW, MANY = 3_500, 2_500, 200_000

DRAFTERS = {
    "draft-model": {"name": "draft-model", "model": "noisy"},
    "confidence": {"name": "draft-model", "model": "noisy", "policy": {"name": "confidence", "threshold": 0.4}},
    "heuristic": {"name": "draft-model", "model": "noisy", "policy": {"name": "heuristic", "start_length": 1}},
    "prompt-lookup": {"name": "prompt-lookup"},
}


class SamePrompt(TransformersLM):
    """Prefills the one prompt once, into every slot: refilled, a slot still holds its keys and values."""

    ready = False

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int]) -> None:
        if not self.ready:
            super().start(row, prompt)
            layers: Any = self.cache.layers
            for layer in layers:
                for buffer in (layer.keys, layer.values):
                    buffer[:] = buffer[row].clone()
            self.ready = True
        self.lengths[row] = len(prompt) - 1

    def free(self, row: int) -> None:
        self.lengths[row] = 0  # and the prompt stays where it is


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", **MODEL)


@pytest.fixture(scope="module")
def exact_law(target: Any) -> np.ndarray:
    """Probability of each of the V**4 continuations of the prompt, by plain forward passes."""
    probs = np.ones(1)
    for n in range(LENGTH):
        contexts = torch.tensor([[*PROMPT, *tokens] for tokens in itertools.product(range(VOCAB), repeat=n)])
        with torch.inference_mode():
            p = target(contexts).logits[:, -1].double().softmax(-1).numpy()
        probs = (probs[:, None] * p).ravel()
    return probs


@pytest.fixture(scope="module")
def sample(decoder: Callable, target: Any, tiny_model: Callable) -> Callable[..., np.ndarray]:
    """``sample(drafter, verifier, n, gamma=2, rng=...)``: how often each continuation came out."""

    def run(drafter: str, verifier: Any, n: int, rng: Any = None, gamma: int = GAMMA) -> np.ndarray:
        options = {**DRAFTERS[drafter], "gamma": gamma}
        loop = decoder(
            target,
            plugins.get("drafters", options.pop("name")),
            options,
            verifier,
            drafting=tiny_model("llama", **MODEL, noise=0.5),
            lm=SamePrompt,
            temperature=1.0,
            batch_size=2500,
            max_length=32,
            max_new_tokens=LENGTH,
            rng=rng or CounterRng(2024),
        )
        counts = np.zeros(VOCAB**LENGTH)
        steps = drafted = 0
        for response in loop.run([PROMPT] * n):
            counts[int(np.ravel_multi_index(response.tokens, (VOCAB,) * LENGTH))] += 1
            steps += len(response.steps)
            drafted += sum(r.nodes > 0 for r in response.steps)
        assert steps > 1.5 * n, "most sequences must take two steps or more"
        assert drafted > 0.5 * n
        return counts

    return run


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square; continuations expected fewer than five times share one cell."""
    want = probs * counts.sum() / probs.sum()
    rare = want < 5
    if counts[want == 0].any():
        return 0.0
    observed, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, want))
    used = expected > 0
    return float(chisquare(observed[used], expected[used]).pvalue)


@pytest.mark.parametrize(
    "drafter, verifier, n",
    [
        ("heuristic", "token", FEW),
        ("prompt-lookup", "token", FEW),
        ("draft-model", "block", CONTROL),
        *[
            pytest.param(drafter, verifier, MANY, marks=pytest.mark.slow)
            for drafter in DRAFTERS
            for verifier in ("token", "block")
        ],
    ],
)
def test_samples_follow_target(
    sample: Callable, exact_law: np.ndarray, record_property: Callable, drafter: str, verifier: str, n: int
) -> None:
    p = p_value(sample(drafter, plugins.get("verifiers", verifier), n), exact_law)
    record_property("p", p)
    assert p > 1e-3


# -- negative controls ----------------------------------------------------------------------------------


def careless(rule: str) -> type:
    """A rule that draws its correction from P_tau itself: the residual without subtracting Q."""
    base = plugins.get("verifiers", rule)

    class Careless(base):
        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            verdict = super().verify(draft, p, WithoutResidual(rng))
            verdict.token = rng.draw(p[torch.arange(draft.batch_size), verdict.length])
            return verdict

    return Careless


class WithoutResidual:
    """Tosses the coins and draws nothing."""

    def __init__(self, rng: Any):
        self.accept = rng.accept

    def draw(self, weights: torch.Tensor, purpose: str = "residual", index: int = 0) -> torch.Tensor:
        return weights.argmax(-1)


@pytest.mark.parametrize(
    "drafter, verifier",
    [
        ("draft-model", "token"),
        pytest.param("confidence", "block", marks=pytest.mark.slow),
        pytest.param("prompt-lookup", "token", marks=pytest.mark.slow),
    ],
)
def test_residual_without_q_is_seen(sample: Callable, exact_law: np.ndarray, drafter: str, verifier: str) -> None:
    assert p_value(sample(drafter, careless(verifier), FEW), exact_law) < 1e-6


class AbsoluteRng(CounterRng):
    """Keys each number by the token's own position: a position drafted again reuses its numbers."""

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> CounterStepRng:
        return AbsoluteStepRng(self.key, stream, position, device)


class AbsoluteStepRng(CounterStepRng):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._steps: dict[int, CounterStepRng] = {}

    def uniform(self, purpose: str, index: int, n: int) -> torch.Tensor:
        none = torch.empty(self._where.shape[1], 0, dtype=torch.float64)
        return torch.cat([none, *(self._later(index + i).uniform(purpose, 0, 1) for i in range(n))], 1)

    def _later(self, steps: int) -> CounterStepRng:
        if steps not in self._steps:
            stream, position = self._where
            self._steps[steps] = CounterStepRng(self._key, stream, position + np.uint64(steps), torch.device("cpu"))
        return self._steps[steps]


def test_numbers_reused_by_next_step_are_seen(sample: Callable, exact_law: np.ndarray) -> None:
    """The trap that no enumeration can see: block verification looks at coins beyond the accepted prefix."""
    block = plugins.get("verifiers", "block")
    assert p_value(sample("draft-model", block, CONTROL, AbsoluteRng(2024), gamma=3), exact_law) < 1e-6
