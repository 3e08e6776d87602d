"""A warm-up records every shape that may follow; nothing is recorded afterwards."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_cuda_graphs import NEW, PROMPTS, Recorder
from feature_heads import make_head
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafters.heads.feature_head import FeatureLM
from crossdraft.framework import plugins
from crossdraft.framework.api import build
from crossdraft.framework.contracts.steps import Request
from crossdraft.framework.lm import cuda_graphs, forward_pass, ragged_lm
from crossdraft.framework.lm.cuda_graphs import CaptureLimits, CudaGraphRunner, recorded_nbytes, recording
from crossdraft.framework.lm.graph_buckets import at_width, kv_lens, stepped, wider, widths
from crossdraft.framework.lm.idle import free_idle
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.usefixtures("third_party")
CPU = torch.device("cpu")


# -- shapes -------------------------------------------------------------------------------------------------


def test_steps() -> None:
    assert [stepped(n, 1) for n in (1, 2, 7, 8, 9, 10, 11, 16, 17, 33)] == [1, 2, 7, 8, 10, 10, 12, 16, 20, 40]
    assert [stepped(n, 256) for n in (1, 256, 257, 2048, 2049)] == [256, 256, 512, 2048, 2560]
    assert kv_lens(256, 3000) == [3000, 2560, 2048, 1792, 1536, 1280, 1024, 768, 512, 256]
    assert kv_lens(16, 16) == [16] and kv_lens(16, 5) == [5]


@given(st.integers(1, 100_000), st.integers(1, 300), st.integers(0, 5000))
def test_step_is_near_and_among_kv_lens(n: int, minimum: int, more: int) -> None:
    step = stepped(n, minimum)
    assert n <= step < max(n + minimum, 1.25 * n + minimum) and step % minimum == 0 and stepped(step, minimum) == step
    assert min(step, n + more) in kv_lens(minimum, n + more)


def test_widths() -> None:
    assert widths(6, 1) == widths(2, 6) == [6, 4, 2, 1] and widths(1, 1) == [1]
    assert widths(3, 12) == [12, 8, 4, 3, 2, 1]
    assert wider(2, 5) == [7, 6, 4, 3, 2] and wider(9, 0) == [9] and wider(1, 1) == [2, 1]


def test_padding() -> None:
    tensors = {"tokens": torch.ones(2, 3, dtype=torch.long), "parents": torch.zeros(2, 3, dtype=torch.long)}
    wide = at_width(tensors | {"features": torch.ones(2, 3, 4)}, 5)
    assert wide["tokens"].tolist() == [[1, 1, 1, 0, 0]] * 2 and wide["parents"].tolist() == [[0, 0, 0, -1, -1]] * 2
    assert wide["features"].shape == (2, 5, 4) and wide["features"][:, 3:].sum() == 0
    assert at_width(tensors, 2)["tokens"].shape == (2, 2)


# -- recordings ---------------------------------------------------------------------------------------------


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (2 * x,)


def test_when_shapes_are_recorded(caplog: Any) -> None:
    cuda_graphs._warn_of_missed.cache_clear()
    recorder = Recorder()
    call = CudaGraphRunner(recorder, "test")
    with recording(CaptureLimits(0, 0)):
        assert call(double, {"x": torch.ones(2)})[0].tolist() == [2, 2]
        assert (recorder.recorded, recorder.replayed, len(call)) == (1, 0, 1)
    with recording(None):
        for _ in range(3):
            for n in (2, 3, 4):
                assert call(double, {"x": torch.full((n,), n)})[0].tolist() == [2 * n] * n  # type: ignore[union-attr]
    assert (recorder.recorded, recorder.replayed, call.missed) == (1, 0, 9), "another dtype is another shape"
    assert [r.getMessage().partition(" that")[0] for r in caplog.records] == ["crossdraft: test makes a pass"]
    with recording(None):
        call(double, {"x": torch.ones(2)})
    call(double, {"x": torch.ones(3)})
    assert (recorder.recorded, recorder.replayed, call.missed) == (2, 1, 9)


@patch.object(cuda_graphs.gc, "collect", lambda: 0)  # before each of a thousand recordings, over all modules
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_recordings_share_buffers(sizes: list[int]) -> None:
    """They hold less than four times the largest inputs and outputs, and no call writes into what another returned."""
    call, result = CudaGraphRunner(Recorder(), "test"), []
    with recording(CaptureLimits(0, 0)):
        for size in sizes:
            call(double, {"x": torch.ones(size)})
    with recording(None):
        for i, size in enumerate(sizes):
            result.append((i, size, call(double, {"x": torch.full((size,), float(i))})[0]))
    assert call.missed == 0 and len(call) == len(set(sizes))
    assert all(out.tolist() == [2 * i] * size for i, size, out in result)
    assert 8 * max(sizes) <= call.nbytes(CPU) < 4 * 8 * max(sizes)
    assert call.nbytes(CPU) <= recorded_nbytes(CPU) and call.nbytes(torch.device("meta")) == 0


def test_buffers_of_recordings_are_freed() -> None:
    before = recorded_nbytes(CPU)
    call = CudaGraphRunner(Recorder(), "test")
    with recording(CaptureLimits(0, 0)):
        call(double, {"x": torch.ones(1000)})
    assert recorded_nbytes(CPU) == before + 8000
    del call
    assert recorded_nbytes(CPU) == before


# -- decoding -----------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch: Any) -> list[CudaGraphRunner]:
    """Every model that is made from now on has graphs, which are appended here."""
    results: list[CudaGraphRunner] = []
    free_idle()

    def runner(model: Any) -> CudaGraphRunner:
        results.append(CudaGraphRunner(Recorder(), type(model).__name__))
        return results[-1]

    for module in (forward_pass, ragged_lm, build):
        monkeypatch.setattr(module, "runner_for", runner)
    return results


CASES = [
    ("llama", "none", {}, (0, 0)),
    ("llama", "prompt-lookup", {}, (10, 10)),
    ("llama", "draft-model", {"model": "noisy", "gamma": 5}, (5, 5)),
    ("mistral-sliding", "draft-model-tree", {"model": "noisy", "branching": (2, 2, 1)}, (3, 10)),
    ("gpt2", "draft-model-dynamic-tree", {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 6}, (3, 6)),
    ("llama", "draft-model-iid", {"model": "noisy", "gamma": 3, "K": 2}, (3, 6)),
    ("llama", "first-layers", {"layers": (0,), "gamma": 3}, (3, 3)),
]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("family, drafter, options, maximum", CASES)
def test_no_recording_after_warm_up(
    tiny_model: Callable,
    decoder: Callable,
    recorded: list[CudaGraphRunner],
    monkeypatch: Any,
    family: str,
    drafter: str,
    options: dict,
    maximum: tuple[int, int],
) -> None:
    """Three steps of prompts that are none of those measured; then ragged rows, refilled slots, short last drafts."""
    rules = {
        "draft-model-iid": "multipath-block",
        "draft-model-tree": "traversal",
        "draft-model-dynamic-tree": "sample-match",
    }

    def make() -> Any:
        return decoder(
            tiny_model(family),
            plugins.get("drafters", drafter),
            options,
            plugins.get("verifiers", rules.get(drafter, "token")),
            batch_size=2,
            drafting=tiny_model(family, noise=0.05),
            max_new_tokens=NEW,
        )

    def answers(loop: Any) -> dict[int, list[int]]:
        return {r.index: r.tokens for r in loop.run(PROMPTS)}

    loop = make()
    with recording(CaptureLimits(*maximum)):
        steps = loop.steps(Request([3, 4, 3, 4, 3, 4], i, 99 + i) for i in range(2))
        for _ in range(3):
            next(steps)
        steps.close()
        list(loop.steps(Request([3], i, 99 + i, max_new_tokens=1) for i in range(2)))
    own = [item for item in recorded if len(item)]
    before = [len(item) for item in own]
    with recording(None):
        responses = answers(loop)
    assert [len(item) for item in own] == before and sum(item.missed for item in recorded) == 0
    assert own and all(item._recorder.replayed for item in own)  # type: ignore[union-attr]
    monkeypatch.undo()
    assert responses == answers(make())


@pytest.mark.usefixtures("small_buckets")
def test_width_between_two_is_padded_to_next(tiny_model: Callable, recorded: list[CudaGraphRunner]) -> None:
    """Logits and hidden states are those of the tokens alone, for chains, trees and trees in pieces."""
    lm = TransformersLM(tiny_model("llama"), 2, 64)
    plain = TransformersLM(tiny_model("llama"), 2, 64, graphs=CudaGraphRunner(None, "plain"))
    tree = torch.tensor([[-1, 0, 0, 1, 1], [-1, -1, 1, 2, 0]])
    for item in (lm, plain):
        item.hidden_layers = (-1,)
    with recording(CaptureLimits(7, 7)):
        for parents in (None, tree):
            lm.forward(torch.ones(2, 5, dtype=torch.long), parents)
            lm.commit([0, 0], None if parents is None else torch.tensor([[0, 1], [0, 1]]))
    runner = lm.graphs
    recordings = len(runner)
    for width in (3, 5, 6, 7):
        for parents in (None, tree[:, :3]):
            with recording(None):
                results = []
                for item in (lm, plain):
                    for row, prompt in enumerate(PROMPTS[1:]):
                        item.start(row, prompt)
                    tokens = torch.arange(2 * width).view(2, width) % 90
                    if parents is not None:
                        tokens = tokens[:, :3]
                    logits, hidden = item.forward(tokens, parents)
                    assert hidden is not None
                    results.append((logits, hidden))
                    item.commit([2, 1], None if parents is None else torch.tensor([[0, 2], [0, -1]]))
                for ours, theirs in zip(*results, strict=True):
                    assert ours.shape == theirs.shape
                    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (len(runner), runner.missed) == (recordings, 0)


@pytest.mark.usefixtures("small_buckets")
def test_no_padding_at_end_of_slot(tiny_model: Callable, recorded: list[CudaGraphRunner]) -> None:
    """A padded pass would write behind the slot: one without a recording runs as it is."""
    lm = TransformersLM(tiny_model("llama"), 1, 16)
    with recording(CaptureLimits(3, 3)):
        lm.forward(torch.ones(1, 4, dtype=torch.long))
        lm.commit([0])
    with recording(None):
        lm.start(0, list(range(1, 15)))  # 13 in the slot, room for 3
        logits, _ = lm.forward(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 3, 97) and lm.graphs.missed == 1


@pytest.mark.usefixtures("small_buckets")
def test_inputs_that_index_positions_are_padded(tiny_model: Callable, recorded: list[CudaGraphRunner]) -> None:
    """Pairs of any count are caught up with in a recorded width; logits and features are those of the pairs alone."""
    torch.manual_seed(3)
    head = make_head("eagle", tiny_model("llama")).eval()
    features = torch.randn(2, 6, 32)

    def run(lm: FeatureLM, widths: tuple[int, ...]) -> list[torch.Tensor]:
        for row in range(2):
            lm.start(row, [1, 2, 3], torch.ones(2, 32) * row)
        results = []
        for width in widths:
            tokens = torch.arange(2 * width).view(2, width) % 90
            results.append(lm.commit(tokens, features[:, :width], [width, max(1, width - 1)]))
            results.append(lm.forward(tokens[:, :1]))
            results.append(lm.forward(tokens[:, :1]))
            lm.forget()
        return results

    plain = TransformersLM(head, 2, 64, graphs=CudaGraphRunner(None, "plain"))
    expected = run(FeatureLM(head, plain, 97), (4, 1, 3, 6, 2, 5))
    ours = TransformersLM(head, 2, 64)
    with recording(CaptureLimits(5, 5)):
        run(FeatureLM(head, ours, 97), (1,))
    recordings = len(ours.graphs)
    with recording(None):
        results = run(FeatureLM(head, ours, 97), (4, 1, 3, 6, 2, 5))
    assert (len(ours.graphs), ours.graphs.missed) == (recordings, 0)
    for item, other in zip(results, expected, strict=True):
        torch.testing.assert_close(item, other, atol=1e-4, rtol=1e-4)
