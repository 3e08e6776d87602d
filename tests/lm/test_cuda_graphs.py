"""Replayed passes: on a CPU with a recorder that stands for a graph, and on CUDA if available.

A graph repeats device work on fixed buffers. The recorder runs the recorded call again, on the same inputs and into the
same outputs.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from fake_cuda_graphs import NEW, PROMPTS, Recorder, ReplayingLM
from feature_heads import make_head

from crossdraft.drafters.heads.feature_head import FeatureLM
from crossdraft.drafters.heads.medusa.drafter import Medusa
from crossdraft.drafters.heads.medusa.weights import MedusaHeads, save_heads
from crossdraft.framework import plugins
from crossdraft.framework.api import build
from crossdraft.framework.contracts.draft import Sequences
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.lm import cuda_graphs, graph_buckets, ragged_lm
from crossdraft.framework.lm.cuda_graphs import CudaGraphRunner
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.util.tensors import ancestor_mask

pytestmark = pytest.mark.usefixtures("small_buckets")


# -- passes -------------------------------------------------------------------------------------------------


CHAIN = {"model": "noisy", "gamma": 3}
TREE = {"model": "noisy", "branching": (2, 2, 1)}
DYNAMIC = {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 6}


@pytest.mark.parametrize(
    "family, drafter, options",
    [
        ("llama", "none", {}),
        *[(family, "draft-model", CHAIN) for family in ("llama", "gemma3", "gpt2")],
        *[(family, "draft-model-tree", TREE) for family in ("llama", "mistral-sliding", "opt")],
        ("gemma3", "draft-model-dynamic-tree", DYNAMIC),
    ],
)
def test_replayed_passes_give_same_tokens(
    tiny_model: Callable, decoder: Callable, family: str, drafter: str, options: dict
) -> None:
    """Ragged rows, a prompt of one token, slots that finish and are refilled, sequences that outgrow buckets."""

    def run(lm: type[TransformersLM]) -> tuple[dict[int, list[int]], Any]:
        loop = decoder(
            tiny_model(family),
            plugins.get("drafters", drafter),
            options,
            plugins.get("verifiers", "greedy"),
            batch_size=2,
            drafting=tiny_model(family, noise=0.05),
            max_new_tokens=NEW,
            lm=lm,
        )
        return {r.index: r.tokens for r in loop.run(PROMPTS)}, loop

    (plain, _), (replayed, loop) = run(TransformersLM), run(ReplayingLM)
    assert replayed == plain
    models = [loop.target] + ([loop.drafter.model.lm] if drafter != "none" else [])
    for lm in models:
        assert lm.recorder.replayed > lm.recorder.recorded > 1, "a shape was not replayed, or there was but one bucket"


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2"])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2]])
def test_outputs_are_not_overwritten(tiny_model: Callable, family: str, parents: list[int] | None) -> None:
    """Logits and hidden states of all steps, kept until the end, are those of a model without graphs."""
    tree = None if parents is None else torch.tensor([parents, parents])
    path = None if parents is None else torch.tensor([[0, 2, 4], [0, 1, -1]])

    def run(lm: TransformersLM) -> list[torch.Tensor]:
        lm.hidden_layers = (0, -1)
        for row, prompt in enumerate(PROMPTS[1:]):
            lm.start(row, prompt)
        results = []
        for i in range(6):
            tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]) + i
            logits, hidden = lm.forward(tokens, tree)
            assert hidden is not None
            results += [logits, hidden]
            lm.commit([3, 2], path)
        return results

    replaying = ReplayingLM(tiny_model(family), 2, 64)
    for ours, plain in zip(run(replaying), run(TransformersLM(tiny_model(family), 2, 64)), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert replaying.recorder.replayed > 2


def test_tree_grown_in_pieces_is_replayed(tiny_model: Callable) -> None:
    """A chain first, then branches, then a chain behind the last node: each piece reads the tree of those before."""
    pieces = [([[3], [4]], None), ([[5, 6], [7, 8]], [[0, 0], [0, -1]]), ([[9], [1]], None)]

    def run(lm: TransformersLM) -> list[torch.Tensor]:
        results = []
        for _ in range(4):
            for row, prompt in enumerate(PROMPTS[1:]):
                lm.start(row, prompt)
            for tokens, parents in pieces:
                group = None if parents is None else torch.tensor(parents)
                results.append(lm.forward(torch.tensor(tokens), group)[0])
            lm.commit([0, 0])
        return results

    replaying = ReplayingLM(tiny_model("llama"), 2, 64)
    for ours, plain in zip(run(replaying), run(TransformersLM(tiny_model("llama"), 2, 64)), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert replaying.recorder.recorded == len(pieces)


def test_heads_over_features_are_replayed(tiny_model: Callable, monkeypatch: Any) -> None:
    """Their features and the positions whose logits are kept are inputs of the recorded pass like the tokens."""
    torch.manual_seed(3)
    head = make_head("eagle", tiny_model("llama")).eval()
    features = torch.randn(6, 2, 4, 32)

    def run() -> list[torch.Tensor]:
        lm = FeatureLM(head, TransformersLM(head, 2, 64), 97)
        for row in range(2):
            lm.start(row, [1, 2, 3], torch.ones(2, 32) * row)
        results = []
        for i in range(6):
            tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]) + i
            results.append(lm.commit(tokens, features[i], [1 + i % 4, 4 - i % 3]))
            results.append(lm.forward(tokens[:, :1]))
            results.append(lm.forward(tokens[:, :2], torch.tensor([[0, -1], [0, 0]])))
            lm.forget()
        return results

    plain, recorder = run(), Recorder()
    monkeypatch.setattr(ragged_lm, "runner_for", lambda model: CudaGraphRunner(recorder, "test"))
    for ours, other in zip(run(), plain, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    assert recorder.replayed > 6


@pytest.mark.parametrize("shape", [{}, {"choices": [[0], [1], [0, 0], [0, 0, 0]]}])
def test_medusa_heads_are_replayed(tiny_model: Callable, tmp_path: Any, monkeypatch: Any, shape: dict) -> None:
    """Drafts of all steps, kept until the end, are those without graphs; near its end a row reads fewer heads."""
    target = tiny_model("llama")
    torch.manual_seed(3)
    heads = MedusaHeads(32, 3, vocab_size=97)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    save_heads(tmp_path, heads, {})
    context = GivenContext(TransformersLM(target, 2, 64), Sampling(temperature=1.0), 64, target_model=target)
    features, ones = torch.randn(9, 2, 1, 32), torch.ones(2, 64, dtype=torch.long)

    def run() -> list[Any]:
        drafter, drafts = Medusa(Medusa.Config(model=str(tmp_path), **shape), context), []
        for i, hidden in enumerate(features):
            for row in range(2):
                drafter.start(row, [1, 1], hidden[row : row + 1])
            sequences = Sequences([[1, 1]] * 2, ones, [3 - i % 2, 2], [0, 1])
            drafts.append(drafter.propose(sequences, CounterRng().for_step([0, 1], [i, i], target.device)))
        return drafts

    plain, recorder = run(), Recorder()
    monkeypatch.setattr(build, "runner_for", lambda model: CudaGraphRunner(recorder, "test"))
    for ours, other in zip(run(), plain, strict=True):
        assert torch.equal(ours.tokens, other.tokens)
        if not shape:
            torch.testing.assert_close(ours.q, other.q)
    assert (recorder.recorded, recorder.replayed) == (1, 8), "nine steps of one shape, the first of which rehearses"


def test_hidden_layers_may_change_between_passes(tiny_model: Callable) -> None:
    """A target is shared by drafters that read different layers: what one recorded is not replayed for another."""
    lm = ReplayingLM(tiny_model("llama"), 1, 64)
    tokens = torch.tensor([[3, 1]])
    for layers, count in [((), 0), ((-1,), 1), ((0, 1, -1), 3)] * 3:
        lm.hidden_layers = layers
        hidden = lm.forward(tokens)[1]
        assert (0 if hidden is None else hidden.shape[2]) == count
        lm.commit([0])


def test_large_passes_are_not_recorded(tiny_model: Callable, monkeypatch: Any) -> None:
    for module in (graph_buckets, ragged_lm):
        monkeypatch.setattr(module, "MOST_GRAPHED", 4)
    lm = ReplayingLM(tiny_model("llama"), 2, 64)
    for _ in range(4):
        lm.forward(torch.ones(2, 3, dtype=torch.long))
        lm.commit([0, 0])
    assert lm.recorder.recorded == 0


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


# -- recordings ---------------------------------------------------------------------------------------------


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
