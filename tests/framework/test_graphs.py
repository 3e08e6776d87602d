"""What CUDA graphs replay: tested on a CPU with a recorder that stands for a graph, and on CUDA where there is one.

A graph repeats device work on fixed buffers and knows nothing of what Python would decide by now. So does the recorder
here: it runs the recorded call again while the host's books of the model are out of reach, into the same outputs.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from crossdraft.drafters import medusa
from crossdraft.drafters._features import FeatureLM
from crossdraft.drafters._medusa_weights import MedusaHeads, save_heads
from crossdraft.drafters.medusa import Medusa
from crossdraft.drafters.mtp import MtpHead
from crossdraft.framework import plugins
from crossdraft.framework.decoding import attention, graphs
from crossdraft.framework.decoding import lm as lm_module
from crossdraft.framework.decoding.graphs import Graphs, graphs_for
from crossdraft.framework.decoding.lm import TransformersLM, extend_tree
from crossdraft.framework.decoding.sampling import Sampling
from crossdraft.framework.draft import Sequences
from crossdraft.framework.drafter import DraftContext
from crossdraft.framework.rng import CounterRng

PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
NEW = 18
#: What a recorded call may not look at, because a graph would repeat what it saw.
BOOKS = ("lengths", "hidden_layers", "_grown", "_tree", "passes")


class Recorder:
    """Stands for `CudaRecorder`."""

    def __init__(self, lm: TransformersLM | None = None):
        self.lm, self.recorded, self.replayed = lm, 0, 0

    def rehearse(self, run: Callable) -> tuple:
        return run()

    def record(self, run: Callable) -> tuple:
        self.recorded += 1
        outputs = run()
        first: list | None = [None if output is None else output.clone() for output in outputs]
        for output in outputs:
            if output is not None:  # recording computes nothing: this work counts as that of the first replay
                output.fill_(torch.nan if output.is_floating_point() else 0)

        def replay() -> None:
            nonlocal first
            self.replayed += 1
            books = {name: vars(self.lm).pop(name) for name in BOOKS} if self.lm else {}
            for output, new in zip(outputs, run() if first is None else first, strict=True):
                if output is not None:
                    output.copy_(new)
            first = None
            if self.lm:
                vars(self.lm).update(books)

        return outputs, replay


class ReplayingLM(TransformersLM):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.recorder = Recorder(self)
        self._graphs = Graphs(self.recorder, "test")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: Any) -> None:
    monkeypatch.setattr(lm_module, "BUCKET", 16)


# -- passes -------------------------------------------------------------------------------------------------


CHAIN = {"model": "noisy", "gamma": 3}
TREE = {"model": "noisy", "branching": (2, 2, 1)}
DYNAMIC = {"model": "noisy", "depth": 3, "top_k": 2, "nodes": 6}


@pytest.mark.parametrize(
    "family, drafter, options",
    [
        ("llama", "none", {}),
        *[(family, "small-lm", CHAIN) for family in ("llama", "gemma3", "gpt2")],
        *[(family, "small-lm-tree", TREE) for family in ("llama", "mistral-sliding", "opt")],
        ("gemma3", "small-lm-dynamic-tree", DYNAMIC),
    ],
)
def test_replayed_passes_give_the_same_tokens(
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
    models = [loop.target] + ([loop.drafter.lm] if drafter != "none" else [])
    for lm in models:
        assert lm.recorder.replayed > lm.recorder.recorded > 1, "a shape was not replayed, or there was but one bucket"


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2"])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2]])
def test_what_a_pass_returned_is_not_overwritten(tiny_model: Callable, family: str, parents: list[int] | None) -> None:
    """Logits and hidden states of all rounds, kept until the end, are those of a model without graphs."""
    tree = None if parents is None else torch.tensor([parents, parents])
    path = None if parents is None else torch.tensor([[0, 2, 4], [0, 1, -1]])

    def run(lm: TransformersLM) -> list[torch.Tensor]:
        for row, prompt in enumerate(PROMPTS[1:]):
            lm.begin(row, prompt)
        found = []
        for i in range(6):
            tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]) + i
            logits, hidden = lm.grow(tokens, tree)
            assert hidden is not None
            found += [logits, hidden]
            lm.keep([3, 2], path)
        return found

    replaying = ReplayingLM(tiny_model(family), 2, 64, (0, -1))
    for ours, plain in zip(run(replaying), run(TransformersLM(tiny_model(family), 2, 64, (0, -1))), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert replaying.recorder.replayed > 2


def test_a_tree_grown_in_pieces_is_replayed(tiny_model: Callable) -> None:
    """A chain first, then branches, then a chain behind the last node: each piece reads the tree of those before."""
    pieces = [([[3], [4]], None), ([[5, 6], [7, 8]], [[0, 0], [0, -1]]), ([[9], [1]], None)]

    def run(lm: TransformersLM) -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            for row, prompt in enumerate(PROMPTS[1:]):
                lm.begin(row, prompt)
            for tokens, parents in pieces:
                of = None if parents is None else torch.tensor(parents)
                found.append(lm.grow(torch.tensor(tokens), of)[0])
            lm.keep([0, 0])
        return found

    replaying = ReplayingLM(tiny_model("llama"), 2, 64)
    for ours, plain in zip(run(replaying), run(TransformersLM(tiny_model("llama"), 2, 64)), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert replaying.recorder.recorded == len(pieces)


def test_heads_over_features_are_replayed(tiny_model: Callable, monkeypatch: Any) -> None:
    """Their features and the positions whose logits are kept are inputs of the recorded pass like the tokens."""
    torch.manual_seed(3)
    head = MtpHead(tiny_model("llama")).eval()
    features = torch.randn(6, 2, 4, 32)

    def run(lm: FeatureLM) -> list[torch.Tensor]:
        for row in range(2):
            lm.begin(row, [1, 2, 3], torch.ones(2, 32) * row)
        found = []
        for i in range(6):
            tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]) + i
            found.append(lm.commit(tokens, features[i], [1 + i % 4, 4 - i % 3]))
            found.append(lm.grow(tokens[:, :1]))
            found.append(lm.grow(tokens[:, :2], torch.tensor([[0, -1], [0, 0]])))
            lm.forget()
        return found

    plain = run(FeatureLM(head, 2, 64, 97))
    recorder = Recorder()
    monkeypatch.setattr(lm_module, "graphs_for", lambda model: Graphs(recorder, "test"))
    for ours, other in zip(run(FeatureLM(head, 2, 64, 97)), plain, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    assert recorder.replayed > 6


@pytest.mark.parametrize("shape", [{}, {"choices": [[0], [1], [0, 0], [0, 0, 0]]}])
def test_medusa_heads_are_replayed(tiny_model: Callable, tmp_path: Any, monkeypatch: Any, shape: dict) -> None:
    """Drafts of all rounds, kept until the end, are those without graphs; a row near its end asks fewer heads."""
    target = tiny_model("llama")
    torch.manual_seed(3)
    heads = MedusaHeads(32, 3, vocab_size=97)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    save_heads(tmp_path, heads, {})
    context = DraftContext(
        Sampling(temperature=1.0), 2, 64, 97, target.device, load_lm=lambda name: None, target_model=target
    )
    features, ones = torch.randn(9, 2, 1, 32), torch.ones(2, 64, dtype=torch.long)

    def run() -> list[Any]:
        drafter, drafts = Medusa(Medusa.Config(model=str(tmp_path), **shape), context), []
        for i, hidden in enumerate(features):
            for row in range(2):
                drafter.begin(row, [1, 1], hidden[row : row + 1])
            sequences = Sequences([[1, 1]] * 2, ones, [3 - i % 2, 2], [0, 1])
            drafts.append(drafter.propose(sequences, CounterRng().round([0, 1], [i, i], target.device)))
        return drafts

    plain, recorder = run(), Recorder()
    monkeypatch.setattr(medusa, "graphs_for", lambda model: Graphs(recorder, "test"))
    for ours, other in zip(run(), plain, strict=True):
        assert torch.equal(ours.tokens, other.tokens)
        if not shape:
            torch.testing.assert_close(ours.q, other.q)
    assert (recorder.recorded, recorder.replayed) == (2, 7), "nine rounds, of which the first of two shapes rehearse"


def test_hidden_states_may_be_asked_for_between_passes(tiny_model: Callable) -> None:
    """A target is shared by drafters that read different layers: what one recorded is not replayed for another."""
    lm = ReplayingLM(tiny_model("llama"), 1, 64)
    tokens = torch.tensor([[3, 1]])
    for layers, count in [((), 0), ((-1,), 1), ((0, 1, -1), 3)] * 3:
        lm.hidden_layers = layers
        hidden = lm.grow(tokens)[1]
        assert (0 if hidden is None else hidden.shape[2]) == count
        lm.keep([0])


def test_large_passes_are_not_recorded(tiny_model: Callable, monkeypatch: Any) -> None:
    monkeypatch.setattr(lm_module, "MOST_GRAPHED", 4)
    lm = ReplayingLM(tiny_model("llama"), 2, 64)
    for _ in range(4):
        lm.grow(torch.ones(2, 3, dtype=torch.long))
        lm.keep([0, 0])
    assert lm.recorder.recorded == 0


@pytest.mark.parametrize("grown, width", [(0, 1), (0, 7), (3, 1), (4, 6)])
def test_a_tree_is_extended_by_its_parents(grown: int, width: int) -> None:
    """Against following the parents one by one; chains are the deepest trees there are."""
    total, generator = grown + width, torch.Generator().manual_seed(grown + width)
    rows = [[int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(total)] for _ in range(20)]
    parents = torch.tensor([*rows, list(range(-1, total - 1))])
    want = torch.zeros(len(parents), total, total, dtype=torch.bool)
    for row, of in enumerate(parents.tolist()):
        for node in range(total):
            at = node
            while at >= 0:
                want[row, node, at] = True
                at = of[at]
    assert torch.equal(extend_tree(want[:, :grown, :grown], parents[:, grown:]), want)


@torch.inference_mode()
def test_a_pass_never_looks_at_what_a_tensor_holds(tiny_model: Callable, family: str) -> None:
    """On the meta device there is nothing to look at. A graph could not have looked either: it would not know."""
    lm = TransformersLM(copy.deepcopy(tiny_model(family)).to("meta"), 2, 64, (0, -1))
    tokens = torch.zeros(2, 3, dtype=torch.long, device="meta")
    for row, prompt in enumerate(PROMPTS[1:]):
        lm.begin(row, prompt)
    for parents, path in ((None, None), (tokens, tokens)):
        logits, hidden = lm.grow(tokens, parents)
        assert hidden is not None and (logits.shape, hidden.shape) == ((2, 3, 97), (2, 3, 2, 32))
        lm.keep([1, 3], path)


# -- recordings ---------------------------------------------------------------------------------------------


def double(constant: int, x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return 2 * x + constant, y


def test_a_shape_is_recorded_when_it_comes_again() -> None:
    recorder = Recorder()
    call = Graphs(recorder, "test")
    seen = []
    for i in range(4):
        out, nothing = call(double, {"x": torch.full((2,), i)}, 1)
        assert out.tolist() == [2 * i + 1] * 2 and nothing is None
        seen.append((recorder.recorded, recorder.replayed, len(call)))
    assert seen == [(0, 0, 0), (1, 1, 1), (1, 2, 1), (1, 3, 1)]
    # Another constant, shape, dtype or set of tensors is another recording.
    x = torch.zeros(2, dtype=torch.long)
    for tensors, constant in (({"x": x}, 2), ({"x": x[:1]}, 1), ({"x": x.float()}, 1), ({"x": x, "y": x}, 1)):
        call(double, tensors, constant)
    assert (recorder.recorded, recorder.replayed) == (1, 3)


def test_inputs_may_be_expanded_views() -> None:
    call, x = Graphs(Recorder(), "test"), torch.arange(2)
    for i in range(3):
        assert call(double, {"x": (x + i).expand(3, 2)}, 0)[0].tolist() == [[2 * i, 2 * i + 2]] * 3  # type: ignore[union-attr]


def test_the_least_recently_used_recording_makes_way(monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    recorder = Recorder()
    call = Graphs(recorder, "test")
    for size in (1, 1, 2, 2, 1, 3, 3):  # 3 takes the place of 2
        assert call(double, {"x": torch.ones(size)}, 0)[0].tolist() == [2] * size  # type: ignore[union-attr]
    assert (recorder.recorded, len(call)) == (3, 2)
    call(double, {"x": torch.ones(1)}, 0)
    assert (recorder.recorded, recorder.replayed) == (3, 5)
    call(double, {"x": torch.ones(2)}, 0)
    assert (recorder.recorded, len(call)) == (3, 1), "2 was still known"


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    graphs._warn_once.cache_clear()
    yield
    graphs._warn_once.cache_clear()


@pytest.mark.parametrize("when", ["rehearse", "record"])
def test_where_recording_fails_there_is_one_warning(
    tiny_model: Callable, decoder: Callable, caplog: Any, fresh_warnings: None, when: str
) -> None:
    refused = []

    class Refusing(Recorder):
        def refuse(self, run: Callable) -> Any:
            refused.append(self)
            run()
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    setattr(Refusing, when, Refusing.refuse)

    class RefusedLM(TransformersLM):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            self._graphs = Graphs(Refusing(), "LlamaForCausalLM")

    def run(lm: type[TransformersLM]) -> list:
        small, greedy = plugins.get("drafters", "small-lm"), plugins.get("verifiers", "greedy")
        options = {"model": "noisy", "gamma": 3}
        models: Any = dict(drafting=tiny_model("llama", noise=0.05), lm=lm)
        loop = decoder(tiny_model("llama"), small, options, greedy, batch_size=3, max_new_tokens=NEW, **models)
        return sorted((r.index, r.tokens) for r in loop.run(PROMPTS))

    with caplog.at_level(logging.WARNING):
        assert run(RefusedLM) == run(TransformersLM)
    assert len(refused) == len(set(refused)) == 2, "target and drafter are asked once each"
    assert [r.getMessage() for r in caplog.records if r.name == graphs.__name__] == [
        "crossdraft: LlamaForCausalLM runs without CUDA graphs, which makes its passes slower: "
        "operation not permitted when stream is capturing"
    ]


class SomeModel:
    def __init__(self, device: str, **attributes: Any):
        self.device = torch.device(device)
        vars(self).update(attributes)


def test_which_models_get_graphs(monkeypatch: Any, caplog: Any, fresh_warnings: None) -> None:
    monkeypatch.delenv("CROSSDRAFT_CUDA_GRAPHS", raising=False)
    assert graphs_for(SomeModel("cpu")) is None
    assert isinstance(graphs_for(SomeModel("cuda")), Graphs)
    assert isinstance(graphs_for(SomeModel("cuda", hf_device_map={"": 0})), Graphs)
    assert not caplog.records
    assert graphs_for(SomeModel("cuda", hf_device_map={"model.layers.0": 0, "model.layers.1": 1})) is None
    assert "SomeModel runs without CUDA graphs" in caplog.text and "spread over 2 devices" in caplog.text
    monkeypatch.setenv("CROSSDRAFT_CUDA_GRAPHS", "0")
    assert graphs_for(SomeModel("cuda")) is None
    assert len(caplog.records) == 1


# -- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("shared", [6, 3, 1])
def test_grouped_attention_equals_transformers(width: int, shared: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, width, 6, 8).transpose(1, 2)
    key, value = torch.randn(2, shared, 11, 8), torch.randn(2, shared, 11, 4)
    mask = torch.zeros(2, 1, width, 11).masked_fill(torch.rand(2, 1, width, 11) < 0.5, torch.finfo().min)
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // shared  # type: ignore[assignment]
    want, _ = attention.sdpa_attention_forward(module, query, key, value, mask, scaling=0.4)
    ours, weights = attention.grouped_sdpa(module, query, key, value, mask, scaling=0.4)
    assert weights is None and ours.is_contiguous()
    torch.testing.assert_close(ours, want, atol=1e-6, rtol=1e-5)


def test_keys_and_values_are_not_copied_for_every_head(monkeypatch: Any) -> None:
    shapes = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.append((tuple(query.shape), key.data_ptr(), value.data_ptr()))
        return original(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    key, value = torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    attention.grouped_sdpa(torch.nn.Module(), torch.randn(1, 6, 5, 8), key, value, torch.zeros(1, 1, 5, 11))
    assert shapes == [((1, 2, 15, 8), key.data_ptr(), value.data_ptr())]


def test_grouped_attention_is_left_behind_nowhere(tiny_model: Callable, monkeypatch: Any) -> None:
    """The model is the user's: after a pass, and after one that failed, transformers finds its own function."""
    calls = []

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return attention.sdpa_attention_forward(*arguments, **options)

    monkeypatch.setattr(attention, "grouped_sdpa", spy)
    model, ids = tiny_model("llama"), torch.tensor([[1, 2]])
    TransformersLM(model, 1, 16).grow(ids)
    assert len(calls) == 2  # layers
    with pytest.raises(RuntimeError), attention.grouped_attention():
        raise RuntimeError
    model(ids)
    assert len(calls) == 2
    assert attention.ALL_ATTENTION_FUNCTIONS["sdpa"] is attention.sdpa_attention_forward


# -- on CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize("drafter", ["none", "small-lm", "small-lm-tree", "small-lm-dynamic-tree"])
def test_graphs_on_cuda(
    tiny_model: Callable,
    decoder: Callable,
    monkeypatch: Any,
    caplog: Any,
    fresh_warnings: None,
    family: str,
    drafter: str,
) -> None:
    """With and without graphs the same tokens; every model recorded something, and no warning says otherwise."""
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
    for lm in [loop.target] + ([loop.drafter.lm] if drafter != "none" else []):
        assert len(lm._graphs) > 0
    assert not [r for r in caplog.records if r.name == graphs.__name__]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pass_does_not_wait_for_the_device(tiny_model: Callable) -> None:
    lm = TransformersLM(copy.deepcopy(tiny_model("llama")).cuda(), 2, 64)
    for row, prompt in enumerate(PROMPTS[1:]):
        lm.begin(row, prompt)
    tokens = torch.ones(2, 3, dtype=torch.long, device="cuda")
    path = torch.tensor([[0, 2], [0, 1]], device="cuda")
    parents = torch.tensor([[-1, 0, 0]] * 2, device="cuda")
    try:
        for mode in ("error", "default", "error", "error"):  # rehearsed, recorded (which waits), replayed twice
            torch.cuda.set_sync_debug_mode(mode)
            lm.grow(tokens, parents)
            lm.keep([2, 2], path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
