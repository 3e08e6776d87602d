"""MLP speculators: published tensor names, computation, and unchanged output."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import random, written
from crossdraft_drafters.heads.mlp_speculator import MlpSpeculator, read_speculator
from draft_contexts import GivenContext
from feature_heads import taus_of
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

H, INNER, V, STAGES = 32, 20, 97, 3
CONFIG: dict[str, Any] = dict(
    model_type="mlp_speculator", n_predict=STAGES, emb_dim=H, inner_dim=INNER, vocab_size=V, tie_weights=False,
    scale_input=True, top_k_tokens_per_head=[5, 4, 3], n_candidates=5,
)  # fmt: skip


def tensors(stages: int = STAGES) -> dict[str, Tensor]:
    torch.manual_seed(2)
    out = {}
    for i in range(stages):
        out |= {f"emb.{i}.weight": random(V, INNER), f"head.{i}.weight": 2 * random(V, INNER)}
        out |= {f"proj.{i}.weight": random(INNER, INNER if i else H)}
        out |= {f"ln.{i}.weight": 1 + random(INNER), f"ln.{i}.bias": random(INNER)}
    return {f"speculator.{key}": tensor for key, tensor in out.items()}


def tied() -> dict[str, Tensor]:
    """Parameters shared by the stages are stored once."""
    later = ("emb.1", "emb.2", "head.1", "head.2", "ln.1", "ln.2", "proj.2")
    return {k: t for k, t in tensors().items() if not any(name in k for name in later)}


def plain(t: dict[str, Tensor], config: dict[str, Any], hidden: Tensor, tokens: list[int]) -> list[Tensor]:
    """Logits after each of ``tokens``, from the formulas."""

    def rms(x: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    def getter(name: str, stage: int, subject: str = "weight") -> Tensor:
        own = f"speculator.{name}.{stage}.{subject}"
        return t[own] if own in t else t[f"speculator.{name}.{1 if name == 'proj' else 0}.{subject}"]

    state, out = rms(hidden) / math.sqrt(2) if config["scale_input"] else hidden, []
    kept = 0.5 ** (0.5 / STAGES)
    a = math.sqrt((1 - kept**2) * (INNER / 2)) / kept
    for i, token in enumerate(tokens):
        y = rms(getter("proj", i) @ state + a * getter("emb", i)[token]) * getter("ln", i) + getter("ln", i, "bias")
        state = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        out.append(getter("head", i) @ state)
    return out


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", seed=2, num_hidden_layers=4)


@pytest.mark.parametrize(
    "tensors_of, change", [(tensors, {}), (tensors, {"scale_input": False}), (tied, {"tie_weights": True})]
)
def test_draft_probs_match_plain_computation(
    heads_decoder: Callable, target: Any, tmp_path: Path, tensors_of: Callable, change: dict[str, Any]
) -> None:
    """Over steps with any outcome; each token is conditioned on the earlier ones."""
    config = {**CONFIG, **change}
    model, temperature = written(tmp_path / "speculator", config, tensors_of()), 8.0
    loop = heads_decoder(
        target, "mlp-speculator", {"model": model}, "token",
        batch_size=3, sampling=Sampling(temperature=temperature), max_new_tokens=40,
    )  # fmt: skip
    propose, checked = loop.drafter.propose, 0

    def watched(sequences: Any, rng: Any) -> Draft:
        nonlocal checked
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            n = int(draft.valid[row].sum())
            assert n == (STAGES if len(history) > 1 else 0)
            if not n:
                continue
            states = target(torch.tensor([history]), output_hidden_states=True).hidden_states
            inputs = [history[-1], *draft.tokens[row, : n - 1].tolist()]
            for i, logits in enumerate(plain(tensors_of(), config, states[-1][0, -2], inputs)):
                probs = (logits / temperature).softmax(-1)
                torch.testing.assert_close(draft.q[row, i], probs, atol=1e-5, rtol=1e-3)
                checked += 1
        return draft

    loop.drafter.propose = watched
    taus = taus_of(loop, 4)
    assert checked >= 4 * 2 * 3 and 0 in taus and max(taus) > 0


@torch.inference_mode()
def test_vocabulary_that_grew_or_was_cut() -> None:
    """New tokens are never drafted, and rows that the target lacks are left out."""
    stored, hidden, tokens = tensors(), torch.randn(H), [5, 41, 7]
    checkpoint = Checkpoint("heads", Path("somewhere"), CONFIG, stored, "somewhere", "")
    for rows in (V + 9, V - 9):
        speculator = read_speculator(checkpoint, rows, H)
        state = speculator.first(hidden[None])
        for stage, (token, expected) in enumerate(zip(tokens, plain(stored, CONFIG, hidden, tokens), strict=True)):
            state, logits = speculator(stage, state, torch.tensor([token]))
            grown = torch.full((max(rows - V, 0),), -torch.inf)
            torch.testing.assert_close(logits[0], torch.cat([expected[:rows], grown]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "stored, config, options, sentence",
    [
        ({k: t for k, t in tensors().items() if "ln.1.bias" not in k}, CONFIG, {}, r"missing ln.1.bias \[20\]"),
        ({**tensors(), "speculator.cell.weight": random(2)}, CONFIG, {}, r"unexpected cell.weight \[2\]"),
        ({"x": random(2)}, CONFIG, {}, "they are not an MLP speculator"),
        (tensors(), {**CONFIG, "n_predict": 2}, {}, "has 2 for n_predict, the number of stages, not 3"),
        (tensors(), {**CONFIG, "n_predict": "3"}, {}, "has '3' for n_predict"),
        (tensors(), CONFIG, {"gamma": 4}, "they have 3 stages, one per token, but gamma is 4"),
        (
            {**tensors(), "speculator.emb.0.weight": random(9, INNER)},
            CONFIG,
            {},
            r"emb.0.weight is \[9, 20\], not \[97, 20\]",
        ),
    ],
)
def test_mismatched_heads_raise(target: Any, stored: Any, config: Any, options: Any, sentence: str) -> None:
    def heads(name: str) -> Checkpoint:
        return Checkpoint(name, Path("somewhere"), config, dict(stored), "somewhere", "")

    context = GivenContext(TransformersLM(target, 1, 64), Sampling(), 64, target_model=target, load_heads=heads)
    with pytest.raises(ModelError, match=sentence):
        MlpSpeculator(MlpSpeculator.Config(model="heads", **options), context)
