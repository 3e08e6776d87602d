"""Peak vocabulary-sized memory of a step: bytes for each entry of each scored position."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peak_memory import Peak

from crossdraft.framework import plugins
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.util import tensors

B, VOCABS = 32, (1536, 3072)
TREE = {"branching": [4, 2, 2, 2]}
#: Of 60 nodes. What stays is 6: logits in bfloat16, and q in float32.
LIMITS = [
    ("draft-model-tree", TREE, "specinfer", 1.0, 6.7),
    ("draft-model-tree", TREE, "specinfer", 0.7, 6.7),
    ("draft-model-tree", TREE, "traversal", 1.0, 6.7),
    ("draft-model", {"gamma": 60}, "block", 1.0, 6.6),
    ("draft-model-iid", {"gamma": 5, "K": 12}, "multipath-block", 1.0, 6.0),
]


@pytest.mark.parametrize(
    "drafter, options, verifier, temperature, maximum",
    [row if row[2] == "block" else pytest.param(*row, marks=pytest.mark.slow) for row in LIMITS],
)
def test_step_peak_memory(
    tiny_model: Callable,
    decoder: Callable,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    options: Any,
    verifier: str,
    temperature: float,
    maximum: float,
) -> None:
    peaks = []
    for vocab in VOCABS:
        for name, share in (
            ("AT_ONCE", 110),
            ("PIECE", 220),
            ("LARGE", 883),
        ):  # distributions: what they are at V = 152k
            monkeypatch.setattr(tensors, name, share * vocab)
        target, small = (
            tiny_model("llama", vocab_size=vocab, context=200, noise=noise, copy="peak").bfloat16()
            for noise in (0.0, 0.3)
        )
        loop = decoder(
            target,
            plugins.get("drafters", drafter),
            {"model": "small", **options},
            plugins.get("verifiers", verifier),
            batch_size=B,
            drafting=small,
            temperature=temperature,
            max_length=160,
            max_new_tokens=70,
            validate="never",
        )
        for row in range(B):
            loop.start(row, [3 + row, 5], row, row)
        with Peak() as memory:
            loop.step()
        peaks.append(memory.peak)
        gc.collect()
        assert memory.held < 0.1 * memory.peak, "what a step made outlives it"
    per_entry = (peaks[1] - peaks[0]) / (VOCABS[1] - VOCABS[0]) / B / 61
    assert 5 < per_entry <= maximum


def test_allocated_memory_is_counted() -> None:
    with torch.inference_mode(), Peak() as memory:
        x = torch.zeros(100)
        y = x[10:] + 1
        assert (memory.held, memory.peak) == (760, 760)
        x.add_(1)
        del x
        assert memory.held == 360
        z = y.double()
        del y
    assert (memory.held, memory.peak) == (720, 1080) and z.sum() == 90
    del z
    assert memory.held == 0


def test_distributions_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, whatever is made at once."""
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=9, top_p=0.8)):
        whole = sampling.probs(logits)
        assert whole.dtype == torch.float32 and sampling.probs(logits.double()).dtype == torch.float64
        for maximum in (1, 80, 599):
            with monkeypatch.context() as patch:
                patch.setattr(tensors, "AT_ONCE", maximum)
                assert torch.equal(sampling.probs(logits), whole)
                assert sampling.probs(logits[:0]).shape == (0, 5, 40)


@pytest.mark.parametrize(
    "drafter, options, verifier, minimum",
    [("draft-model-iid", {"gamma": 2, "K": 2}, "multipath-block", 1), ("draft-model", {"gamma": 2}, "greedy-block", 3)],
)
def test_chunked_verification_is_equal(
    tiny_model: Callable,
    decoder: Callable,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    options: Any,
    verifier: str,
    minimum: int,
) -> None:
    """The same tokens and log P; a rule with state is evaluated on the whole batch."""
    target, small = (tiny_model("llama", vocab_size=40, noise=noise, copy="pieces") for noise in (0.0, 0.3))
    rule, widths = plugins.get("verifiers", verifier), []
    own = rule.verify
    monkeypatch.setattr(
        rule, "verify", lambda self, draft, *group: widths.append(draft.batch_size) or own(self, draft, *group)
    )
    results = []
    for large in (tensors.LARGE, 1):
        with monkeypatch.context() as patch:
            patch.setattr(tensors, "LARGE", large)
            patch.setattr(tensors, "PIECE", 2 * 5 * 40)  # of two rows
            widths.clear()
            loop = decoder(
                target,
                plugins.get("drafters", drafter),
                {"model": "small", **options},
                rule,
                batch_size=3,
                drafting=small,
                temperature=0.7,
                max_new_tokens=12,
            )
            responses = sorted(loop.run([[3], [4, 5], [6, 7, 8], [9]]), key=lambda one: one.index)
            results.append([(one.tokens, one.logprobs, one.steps) for one in responses])
            assert min(widths) == (minimum if large == 1 else 3)
    assert results[0] == results[1]
