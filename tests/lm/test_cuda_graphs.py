"""Passes that CUDA graphs can capture: they read no values of tensors; and graphs on CUDA, if available."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_trees import NEW, PROMPTS

from crossdraft.framework import plugins
from crossdraft.framework.lm import cuda_graphs
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.util.tensors import ancestor_mask

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.parametrize("total", [1, 4, 7, 10, 70, 140])
def test_ancestor_mask(total: int) -> None:
    """Against following the parents one by one; chains are the deepest trees there are."""
    generator = torch.Generator().manual_seed(total)
    rows = [[int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(total)] for _ in range(20)]
    parents = torch.tensor([*rows, list(range(-1, total - 1))])
    want = torch.zeros(len(parents), total, total, dtype=torch.bool)
    for row, group in enumerate(parents.tolist()):
        for node in range(total):
            at = node
            while at >= 0:
                want[row, node, at] = True
                at = group[at]
    assert torch.equal(ancestor_mask(parents, total), want)


@torch.inference_mode()
def test_pass_does_not_read_tensor_values(tiny_model: Callable, family: str) -> None:
    """Tensors on the meta device have no values, and neither can a graph capture read any."""
    lm = TransformersLM(copy.deepcopy(tiny_model(family)).to("meta"), 2, 64)
    lm.hidden_layers = (0, -1)
    tokens = torch.zeros(2, 3, dtype=torch.long, device="meta")
    for row, prompt in enumerate(PROMPTS[1:]):
        lm.start(row, prompt)
    for parents, path in ((None, None), (tokens, tokens)):
        logits, hidden = lm.forward(tokens, parents)
        assert hidden is not None and (logits.shape, hidden.shape) == ((2, 3, 97), (2, 3, 2, 32))
        lm.commit([1, 3], path)


# -- on CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize("drafter", ["none", "draft-model", "draft-model-tree", "draft-model-dynamic-tree"])
def test_graphs_on_cuda(
    tiny_model: Callable,
    decoder: Callable,
    monkeypatch: Any,
    caplog: Any,
    fresh_warnings: None,
    family: str,
    drafter: str,
) -> None:
    """Equal tokens with and without graphs; every model recorded graphs, without warnings."""
    target, drafting = (copy.deepcopy(tiny_model(family, noise=noise)).cuda() for noise in (0.0, 0.05))

    def run(switch: str) -> tuple[dict[int, list[int]], Any]:
        monkeypatch.setenv("CROSSDRAFT_CUDA_GRAPHS", switch)
        loop = decoder(
            target,
            plugins.get("drafters", drafter),
            {} if drafter == "none" else {"model": "noisy"},
            plugins.get("verifiers", "greedy"),
            batch_size=2,
            drafting=drafting,
            max_new_tokens=NEW,
        )
        return {r.index: r.tokens for r in loop.run(PROMPTS * 2)}, loop

    (plain, _), (replayed, loop) = run("0"), run("1")
    assert replayed == plain
    for lm in [loop.target] + ([loop.drafter.model.lm] if drafter != "none" else []):
        assert len(lm.graphs) > 0
    assert not [r for r in caplog.records if r.name == cuda_graphs.__name__]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pass_does_not_wait_for_device(tiny_model: Callable) -> None:
    lm = TransformersLM(copy.deepcopy(tiny_model("llama")).cuda(), 2, 64)
    for row, prompt in enumerate(PROMPTS[1:]):
        lm.start(row, prompt)
    tokens = torch.ones(2, 3, dtype=torch.long, device="cuda")
    path = torch.tensor([[0, 2], [0, 1]], device="cuda")
    parents = torch.tensor([[-1, 0, 0]] * 2, device="cuda")
    try:
        for mode in ("error", "default", "error", "error"):  # rehearsed, recorded (which waits), replayed twice
            torch.cuda.set_sync_debug_mode(mode)
            lm.forward(tokens, parents)
            lm.commit([2, 2], path)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class HoldsItself:
    def __init__(self, graph: Any):
        self.graph, self.myself = graph, self


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_in_a_reference_cycle_is_not_freed_during_a_capture() -> None:
    """A capture ends with an error if another graph is freed; Python frees cycles at any allocation."""
    recorder, x = cuda_graphs.CudaRecorder(torch.device("cuda")), torch.ones(2, device="cuda")

    def add() -> None:
        x.add_(len([[i] for i in range(100_000)]))

    HoldsItself(recorder.record(add))
    recorder.record(add)()
    assert x.tolist() == [100_001] * 2 and gc.isenabled()
