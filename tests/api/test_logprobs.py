"""The loop's log P of emitted tokens: equal to the target's, at one gather per step and no additional transfer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from torch.utils._python_dispatch import TorchDispatchMode

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import DenseScores, Draft, Verdict
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.engine.step import to_host
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = [[5, 6, 7], [9, 8], [3], [1, 2, 1, 2]]


@pytest.mark.parametrize(
    "drafter, options, verifier, sampling",
    [
        ("draft-model", {"gamma": 3}, "block", Sampling(temperature=0.8, top_p=0.9)),
        ("draft-model-tree", {"branching": [2, 2]}, "traversal", Sampling()),
        ("draft-model-iid", {"gamma": 2, "K": 3}, "specinfer", Sampling(top_k=5)),
        ("none", {}, "token", Sampling()),
    ],
)
def test_they_are_targets_own(
    tiny_model: Callable, drafter: str, options: Any, verifier: str, sampling: Sampling
) -> None:
    target, small = (tiny_model("llama", vocab_size=13, noise=noise, copy="logprobs") for noise in (0.0, 0.4))
    drafting = plugins.get("drafters", drafter)
    lm = TransformersLM(target, 2, 64)
    context = GivenContext(lm, sampling, 64, load_lm=lambda name: TransformersLM(small, 2, 64))
    config = drafting.Config(**options, **({} if drafter == "none" else {"model": "small"}))
    rule = plugins.get("verifiers", verifier)()
    loop = Decoder(lm, drafting(config, context), rule, sampling=sampling, max_new_tokens=8, eos=[4])
    responses = list(loop.run(PROMPTS))
    assert any(r.tau for response in responses for r in response.steps) or drafter == "none"
    for response in responses:
        ids = torch.tensor([[*PROMPTS[response.index], *response.tokens]])
        with torch.no_grad():
            distribution = sampling.probs(target(ids).logits[0, len(PROMPTS[response.index]) - 1 : -1])
        expected = distribution[torch.arange(len(response.tokens)), ids[0, len(PROMPTS[response.index]) :]].log()
        assert response.logprobs is not None
        assert torch.tensor(response.logprobs) == pytest.approx(expected, abs=1e-4)


def test_no_logprobs_at_temperature_zero(tiny_model: Callable, decoder: Callable) -> None:
    none = plugins.get("drafters", "none")
    loop = decoder(tiny_model("llama"), none, {}, plugins.get("verifiers", "greedy"), batch_size=1, max_new_tokens=3)
    assert [response.logprobs for response in loop.run([[5, 6]])] == [None]


class Counted(TorchDispatchMode):
    """Counts operations on tensors, and those that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.waits += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chain", [True, False])
def test_step_makes_few_operations_more_and_waits_as_often(chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    b, n, v = 2, 3, 7
    torch.manual_seed(0)
    p = torch.rand(b, n + 1, v).softmax(-1)
    draft = Draft.chain(torch.randint(v, (b, n)), torch.full((b,), n))
    path = None if chain else torch.tensor([[0, 1, -1], [2, -1, -1]])
    verdict, scores = Verdict(torch.tensor([2, 1]), torch.tensor([3, 6]), path), DenseScores(p, p)
    finite, transfers = torch.ones(b).bool(), []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(1) or own(tensor))
    to_host(draft, draft, scores, finite, verdict)  # what a draft computes once
    transfers.clear()
    counts, result = [], []
    for target_value in (False, True):
        with Counted() as counted:
            result.append(to_host(draft, draft, scores, finite, verdict, logprobs=target_value))
        counts.append(counted)
    assert counts[1].operations - counts[0].operations <= 12
    assert counts[0].waits == counts[1].waits == 0 and len(transfers) == 2
    assert [row.tokens for row in result[0]] == [row.tokens for row in result[1]]
    for row, (tau, nodes) in enumerate(((2, [0, 1, 2]), (1, [0, 1] if chain else [0, 3]))):
        expected = [float(p[row, node, token].log()) for node, token in zip(nodes, result[1][row].tokens, strict=False)]
        assert result[1][row].logprobs[: tau + 1] == pytest.approx(expected)
