"""Recordings: what is recorded and when, what fails with one warning, which models get graphs, and replayed passes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossdraft_simulated_cuda import device
from feature_heads import make_head
from oracle_trees import NEW, PROMPTS

from crossdraft.drafters.heads.feature_head import FeatureLM
from crossdraft.framework import plugins
from crossdraft.framework.contracts.steps import Request
from crossdraft.framework.lm import cuda_graphs, graph_buckets, ragged_lm
from crossdraft.framework.lm.cuda_graphs import (
    CaptureLimits,
    CudaGraphRunner,
    CudaRecorder,
    missed_passes,
    recorded_nbytes,
    recording,
    runner_for,
)
from crossdraft.framework.lm.idle import free_idle
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("small_buckets", "third_party")]
CUDA = torch.device("cuda", 0)


def runner() -> CudaGraphRunner:
    return CudaGraphRunner(CudaRecorder(CUDA), "test")


def ones(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(shape, device=CUDA)}


def double(constant: int, x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return 2 * x + constant, y


# -- recordings ---------------------------------------------------------------------------------------------


def test_called_shape_is_recorded() -> None:
    """The first call runs without a graph; a constant, a shape or an absent tensor needs a graph of its own."""
    call = runner()
    with device.counting() as counts:
        events = []
        for i in range(4):
            out, nothing = call(double, {"x": torch.full((2,), i, device=CUDA)}, 1)
            assert out.tolist() == [2 * i + 1] * 2 and nothing is None
            events.append((counts.captures, counts.replays))
        assert events == [(1, 0), (1, 1), (1, 2), (1, 3)]
        assert call(double, ones(2), 3)[0].tolist() == [5, 5] and counts.captures == 2
        assert call(double, ones(3), 3)[0].tolist() == [5] * 3 and counts.captures == 3
        assert call(double, {**ones(3), "y": torch.ones(1, device=CUDA)}, 3)[1].tolist() == [1]
    assert counts.captures == len(call) == 4


def test_inputs_may_be_expanded_views() -> None:
    call, x = runner(), torch.arange(2).to(CUDA)
    for i in range(3):
        assert call(double, {"x": (x + i).expand(3, 2)}, 0)[0].tolist() == [[2 * i, 2 * i + 2]] * 3


def test_recordings_are_kept() -> None:
    """Neither another warm-up nor other calls take their place; what is missed is counted, with one warning."""
    call, missed = runner(), missed_passes()
    for sizes in ((1, 2, 3), (3, 4, 5, 6)):
        with recording(CaptureLimits(depth=1, nodes=1)):
            for size in sizes:
                call(double, ones(size), 0)
    for size in range(7, 100):
        call(double, ones(size), 0)
    assert len(call) == 99
    with recording(None):
        for size in range(1, 100):
            assert call(double, ones(size), 0)[0].tolist() == [2] * size
        assert missed_passes() == missed
        call(double, ones(100), 0)
    assert missed_passes() == missed + 1
    del call
    assert missed_passes() == missed + 1


def test_shapes_that_are_missed(caplog: Any) -> None:
    cuda_graphs._warn_of_missed.cache_clear()
    call, missed = runner(), missed_passes()
    with recording(CaptureLimits(0, 0)):
        call(double, ones(2), 0)
    with recording(None):
        for _ in range(3):
            for n in (2, 3, 4):
                assert call(double, {"x": torch.full((n,), n, device=CUDA)}, 0)[0].tolist() == [2 * n] * n
    assert (len(call), missed_passes()) == (1, missed + 9), "another dtype is another shape"
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        "crossdraft: test runs a pass without a CUDA graph"
    ]
    call(double, ones(3), 0)
    assert (len(call), missed_passes()) == (2, missed + 9)


def test_recordings_share_buffers() -> None:
    """They hold less than four times the largest inputs and outputs, and no call writes into what another returned."""
    before, sizes, result = recorded_nbytes(CUDA), [7, 200, 3, 199, 64, 1, 65, 130], []
    call, missed = runner(), missed_passes()
    with recording(CaptureLimits(0, 0)):
        for size in sizes:
            call(double, ones(size), 0)
    with recording(None):
        for i, size in enumerate(sizes):
            result.append((i, size, call(double, {"x": torch.full((size,), float(i), device=CUDA)}, 0)[0]))
    assert missed_passes() == missed and len(call) == len(sizes)
    assert all(out.tolist() == [2 * i] * size for i, size, out in result)
    assert 8 * max(sizes) <= recorded_nbytes(CUDA) - before < 4 * 8 * max(sizes)
    assert recorded_nbytes(torch.device("meta")) == 0
    del call
    assert recorded_nbytes(CUDA) == before


@pytest.mark.parametrize("when", ["warm_up", "record"])
def test_failed_recording_warns_once(
    tiny_model: Callable, decoder: Callable, caplog: Any, fresh_warnings: None, monkeypatch: Any, when: str
) -> None:
    refused = []

    def refuse(recorder: CudaRecorder, run: Callable) -> Any:
        refused.append(recorder)
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def run() -> list:
        small, greedy = plugins.get("drafters", "draft-model"), plugins.get("verifiers", "greedy")
        target, drafting = (copy.deepcopy(tiny_model("llama", noise=noise)).to(CUDA) for noise in (0, 0.05))
        options = {"batch_size": 3, "max_new_tokens": NEW, "drafting": drafting}
        loop = decoder(target, small, {"model": "noisy", "gamma": 3}, greedy, **options)
        return sorted((r.index, r.tokens) for r in loop.run(PROMPTS))

    want = run()
    monkeypatch.setattr(CudaRecorder, when, refuse)
    with caplog.at_level(logging.WARNING):
        assert run() == want
    assert len(refused) == len(set(refused)) == 2, "one attempt each of target and drafter"
    assert [r.getMessage() for r in caplog.records if r.name == cuda_graphs.__name__] == [
        "crossdraft: LlamaForCausalLM runs without CUDA graphs, which makes its passes slower: "
        "operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("times", [1, 3])
def test_function_that_waits_only_when_it_is_first_called_is_recorded(times: int, caplog: Any) -> None:
    """Compiling waits for the device; what is compiled does not."""
    call, calls = runner(), []

    def waits(x: torch.Tensor) -> tuple[torch.Tensor]:
        if len(calls) < times:
            calls.append(x.tolist())
        return (2 * x,)

    with device.counting() as counts:
        assert all(call(waits, ones(2))[0].tolist() == [2, 2] for _ in range(4))
    assert (counts.captures, counts.replays) == ((1, 3) if times == 1 else (0, 0)), caplog.text


class SomeModel:
    def __init__(self, place: str, **attributes: Any):
        self.device = torch.device(place)
        self.weights: list[Any] = []
        vars(self).update(attributes)

    def parameters(self) -> list[Any]:
        return self.weights


def test_models_with_graphs(monkeypatch: Any, caplog: Any, fresh_warnings: None) -> None:
    monkeypatch.delenv("CROSSDRAFT_CUDA_GRAPHS", raising=False)
    assert not runner_for(SomeModel("cpu")).records
    assert runner_for(SomeModel("cuda")).records
    assert runner_for(SomeModel("cuda", hf_device_map={"": 0})).records
    assert not caplog.records
    assert not runner_for(SomeModel("cuda", hf_device_map={"model.layers.0": 0, "model.layers.1": 1})).records
    assert "SomeModel runs without CUDA graphs" in caplog.text and "spread over 2 devices" in caplog.text
    assert not runner_for(SomeModel("cuda", weights=[SimpleNamespace(placements=())])).records
    monkeypatch.setenv("CROSSDRAFT_CUDA_GRAPHS", "0")
    assert not runner_for(SomeModel("cuda")).records
    assert len(caplog.records) == 2 and "split over several processes" in caplog.text


# -- passes -------------------------------------------------------------------------------------------------


def slots(model: Any, place: str, batch_size: int = 2, max_length: int = 64) -> TransformersLM:
    free_idle()
    return TransformersLM(copy.deepcopy(model).to(place), batch_size, max_length)


def agree(run: Callable[[TransformersLM, str], list[torch.Tensor]], model: Any) -> TransformersLM:
    """Run on both devices, with graphs and without, and compare the tensors."""
    recorded = slots(model, "cuda")
    for ours, plain in zip(run(recorded, "cuda"), run(slots(model, "cpu"), "cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), plain, atol=1e-4, rtol=1e-4)
    return recorded


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2"])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2]])
def test_outputs_are_not_overwritten(tiny_model: Callable, family: str, parents: list[int] | None) -> None:
    """Logits and hidden states of all steps, kept until the end, are those of a model without graphs."""

    def run(lm: TransformersLM, place: str) -> list[torch.Tensor]:
        tree = None if parents is None else torch.tensor([parents, parents]).to(place)
        path = None if parents is None else torch.tensor([[0, 2, 4], [0, 1, -1]]).to(place)
        lm.hidden_layers = (0, -1)
        for row, prompt in enumerate(PROMPTS[1:]):
            lm.start(row, prompt)
        results = []
        for i in range(6):
            tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]).to(place) + i
            logits, hidden = lm.forward(tokens, tree)
            assert hidden is not None
            results += [logits, hidden]
            lm.commit([3, 2], path)
        return results

    with device.counting() as counts:
        agree(run, tiny_model(family))
    assert counts.replays > 2


def test_tree_grown_in_pieces_is_replayed(tiny_model: Callable) -> None:
    """A chain first, then branches, then a chain behind the last node: each piece reads the tree of those before."""
    pieces = [([[3], [4]], None), ([[5, 6], [7, 8]], [[0, 0], [0, -1]]), ([[9], [1]], None)]

    def run(lm: TransformersLM, place: str) -> list[torch.Tensor]:
        results = []
        for _ in range(4):
            for row, prompt in enumerate(PROMPTS[1:]):
                lm.start(row, prompt)
            for tokens, parents in pieces:
                group = None if parents is None else torch.tensor(parents).to(place)
                results.append(lm.forward(torch.tensor(tokens).to(place), group)[0])
            lm.commit([0, 0])
        return results

    assert len(agree(run, tiny_model("llama")).graphs) == len(pieces)


def test_hidden_layers_may_change_between_passes(tiny_model: Callable) -> None:
    """A target is shared by drafters that read different layers: what one recorded is not replayed for another."""
    lm = slots(tiny_model("llama"), "cuda", 1)
    for layers, count in [((), 0), ((-1,), 1), ((0, 1, -1), 3)] * 3:
        lm.hidden_layers = layers
        hidden = lm.forward(torch.tensor([[3, 1]]).to(CUDA))[1]
        assert (0 if hidden is None else hidden.shape[2]) == count
        lm.commit([0])
    assert len(lm.graphs) == 3


def test_large_passes_are_not_recorded(tiny_model: Callable, monkeypatch: Any) -> None:
    for module in (graph_buckets, ragged_lm):
        monkeypatch.setattr(module, "MOST_GRAPHED", 4)
    lm = slots(tiny_model("llama"), "cuda")
    for _ in range(4):
        lm.forward(torch.ones(2, 3, dtype=torch.long, device=CUDA))
        lm.commit([0, 0])
    assert len(lm.graphs) == 0


# -- warm-ups -----------------------------------------------------------------------------------------------

#: Families and a drafter of target layers, beside those of `test_measured_graphs`; depth and nodes of the drafts.
CASES = [
    ("llama", "prompt-lookup", {}, "token", (10, 10)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("mistral-sliding", "draft-model-tree", {"model": "noisy", "branching": (2, 2, 1)}, "traversal", (3, 10)),
            ("gpt2", "draft-model-dynamic-tree", {"model": "noisy", "depth": 3, "nodes": 6}, "sample-match", (3, 6)),
            ("llama", "first-layers", {"layers": (0,), "gamma": 3}, "token", (3, 3)),
        )
    ),
]


@pytest.mark.parametrize("family, drafter, options, verifier, maximum", CASES)
def test_no_capture_after_warm_up(
    tiny_model: Callable,
    decoder: Callable,
    family: str,
    drafter: str,
    options: dict,
    verifier: str,
    maximum: tuple[int, int],
) -> None:
    """Three steps of prompts that are none of those measured; then ragged rows, refilled slots, short last drafts."""

    def make(place: str) -> Any:
        target, drafting = (copy.deepcopy(tiny_model(family, noise=noise)).to(place) for noise in (0, 0.05))
        strategies = plugins.get("drafters", drafter), options, plugins.get("verifiers", verifier)
        return decoder(target, *strategies, batch_size=2, drafting=drafting, max_new_tokens=NEW)

    def answers(loop: Any) -> dict[int, list[int]]:
        return {r.index: r.tokens for r in loop.run(PROMPTS)}

    free_idle()
    loop, missed = make("cuda"), missed_passes()
    with recording(CaptureLimits(*maximum)):
        steps = loop.steps(Request([3, 4, 3, 4, 3, 4], i, 99 + i) for i in range(2))
        for _ in range(3):
            next(steps)
        steps.close()
        list(loop.steps(Request([3], i, 99 + i, max_new_tokens=1) for i in range(2)))
    with recording(None), device.counting() as counts:
        responses = answers(loop)
    assert counts.captures == 0 and counts.replays and missed_passes() == missed
    assert responses == answers(make("cpu"))


def test_width_between_two_is_padded_to_next(tiny_model: Callable) -> None:
    """Logits and hidden states are those of the tokens alone, for chains, trees and trees in pieces."""
    lm, plain = (slots(tiny_model("llama"), place) for place in ("cuda", "cpu"))
    tree = torch.tensor([[-1, 0, 0, 1, 1], [-1, -1, 1, 2, 0]])
    lm.hidden_layers = plain.hidden_layers = (-1,)
    with recording(CaptureLimits(7, 7)):
        for parents in (None, tree.to(CUDA)):
            lm.forward(torch.ones(2, 5, dtype=torch.long, device=CUDA), parents)
            lm.commit([0, 0], None if parents is None else torch.tensor([[0, 1], [0, 1]]).to(CUDA))
    recordings, missed = len(lm.graphs), missed_passes()
    for width in (3, 5, 6, 7):
        for parents in (None, tree[:, :3]):
            results = []
            for item, place in ((lm, "cuda"), (plain, "cpu")):
                with recording(None):
                    for row, prompt in enumerate(PROMPTS[1:]):
                        item.start(row, prompt)
                    tokens = (torch.arange(2 * width).view(2, width) % 90).to(place)
                    if parents is not None:
                        tokens = tokens[:, :3]
                    logits, hidden = item.forward(tokens, None if parents is None else parents.to(place))
                    assert hidden is not None
                    results.append((logits, hidden))
                    item.commit([2, 1], None if parents is None else torch.tensor([[0, 2], [0, -1]]).to(place))
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)
    assert (len(lm.graphs), missed_passes()) == (recordings, missed)


def test_no_padding_at_end_of_slot(tiny_model: Callable) -> None:
    """A padded pass would write behind the slot: one without a recording runs as it is."""
    lm, missed = slots(tiny_model("llama"), "cuda", 1, 16), missed_passes()
    with recording(CaptureLimits(3, 3)):
        lm.forward(torch.ones(1, 4, dtype=torch.long, device=CUDA))
        lm.commit([0])
    with recording(None):
        lm.start(0, list(range(1, 15)))  # 13 in the slot, room for 3
        logits, _ = lm.forward(torch.tensor([[1, 2, 3]]).to(CUDA))
    assert logits.shape == (1, 3, 97) and missed_passes() == missed + 1


def test_inputs_that_index_positions_are_padded(tiny_model: Callable) -> None:
    """Pairs of any count are caught up with in a recorded width; logits and features are those of the pairs alone."""
    torch.manual_seed(3)
    head, features = make_head("eagle", tiny_model("llama")).eval(), torch.randn(2, 6, 32)

    def run(lm: TransformersLM, place: str, widths: tuple[int, ...] = (4, 1, 3, 6, 2, 5)) -> list[torch.Tensor]:
        pairs = FeatureLM(lm.model, lm, 97)
        for row in range(2):
            pairs.start(row, [1, 2, 3], torch.ones(2, 32, device=place) * row)
        results = []
        for width in widths:
            tokens = (torch.arange(2 * width).view(2, width) % 90).to(place)
            results.append(pairs.commit(tokens, features[:, :width].to(place), [width, max(1, width - 1)]))
            results.append(pairs.forward(tokens[:, :1]))
            results.append(pairs.forward(tokens[:, :1]))
            pairs.forget()
        return results

    ours = slots(head, "cuda")
    with recording(CaptureLimits(5, 5)):
        run(ours, "cuda", (1,))
    recordings, missed = len(ours.graphs), missed_passes()
    with recording(None):
        results = run(ours, "cuda")
    assert (len(ours.graphs), missed_passes()) == (recordings, missed)
    for item, other in zip(results, run(slots(head, "cpu"), "cpu"), strict=True):
        torch.testing.assert_close(item.cpu(), other, atol=1e-4, rtol=1e-4)
