"""Passes by OpenVINO against transformers' and the built-in ones: logits, hidden states, responses, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import disagreement
from architecture_variants import variants
from architecture_walk import TOLERANCE
from test_drafters import TestDraftModel as DraftModel
from test_drafters import TestNone as Plain
from test_drafters import TestPromptLookup as PromptLookup
from test_drafters import TestTreeWithoutReplacement as Tree
from test_heads import TestEagle3 as Eagle3
from test_heads import TestEagle3DynamicTree as Eagle3DynamicTree
from test_heads import TestMedusaTree as MedusaTree
from test_heads import heads  # noqa: F401  (a fixture)
from tiny_architectures import noisy, tiny

from crossdraft.framework import plugins
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM, model_slots
from crossdraft.framework.testing import settings

pytest.importorskip("openvino")

import crossdraft_openvino
from crossdraft_openvino import graph, slots
from crossdraft_openvino.slots import OpenVINOLM, tried_classes

WIDE = {"sliding_window": 64}


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: Any) -> Any:
    """Graphs of the module's models; the companion need not be installed."""
    registered = plugins.manager().has_plugin("openvino")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CROSSDRAFT_OPENVINO", "1")
        if not registered:
            plugins.manager().register(crossdraft_openvino, "openvino")
        yield
        if not registered:
            plugins.manager().unregister(name="openvino")


def model_of(model_type: str, **changes: Any) -> Any:
    return tiny(transformers.CONFIG_MAPPING[model_type], **changes)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "olmoe", "phi", "cohere2"])
def test_logits_match_the_model(model_type: str) -> None:
    """Ragged chains, then trees in two pieces; a slot changes hands."""
    model = model_of(model_type, **(WIDE if model_type in ("mistral", "gemma3_text", "cohere2") else {}))
    assert type(model).__name__ in tried_classes()
    assert isinstance(model_slots(model, 2, 64), OpenVINOLM)
    assert disagreement(model) < TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers() -> None:
    plain = model_of("llama", hidden_size=64, intermediate_size=128)
    rounded = copy.deepcopy(plain).bfloat16()
    exact = copy.deepcopy(rounded).float()
    text = [(7 * i + 3) % 97 for i in range(40)]
    if not graph.has_bfloat16():
        with pytest.raises(ModelError, match="this processor has no products in bfloat16"):
            OpenVINOLM(rounded, 1, 64)
        pytest.skip("needs a processor with AVX-512 BF16 or AMX")
    lm = OpenVINOLM(rounded, 1, 64)
    lm.start(0, text[:30])
    with torch.no_grad():
        expected = exact(torch.tensor([text])).logits[0, 29:]
        theirs = rounded(torch.tensor([text])).logits[0, 29:].float() - expected
    ours = lm.forward(torch.tensor([text[29:]]))[0][0].float() - expected
    assert 0 < ours.square().mean() <= 1.2 * theirs.square().mean()


def test_hidden_states_are_those_of_the_built_in_passes() -> None:
    """First none, then more: shares of the depth, negative numbers, the last layer before and after its norm."""
    model = model_of("llama", num_hidden_layers=4)
    lms: list[Any] = [OpenVINOLM(model, 2, 64), TransformersLM(model, 2, 64)]
    texts = {0: [5, 6, 7, 8, 9, 10, 11], 1: [20, 21, 22]}
    for layers in ((), (0.5, -1), (0, -2, 4, 5 - 1, 1)):
        results = []
        for lm in lms:
            lm.hidden_layers = layers
            for row in texts:
                lm.free(row)
            lm.prefill({row: text[:-1] for row, text in texts.items()})
            states = [lm.start(row, text) for row, text in texts.items()]
            states += lm.forward(torch.tensor([[11, 3], [22, 4]]), torch.tensor([[-1, 0]] * 2))
            states += lm.forward(torch.tensor([[5], [6]]), torch.tensor([[0]] * 2))
            lm.commit([2, 1], torch.tensor([[0, 2], [0, -1]]))
            results.append([*states, *lm.forward(torch.tensor([[8, 9], [6, 7]]))])
        for ours, built_in in zip(*results, strict=True):
            assert (ours is None) == (built_in is None) == (not layers and built_in is None)
            if ours is not None:
                torch.testing.assert_close(ours, built_in, atol=2e-5, rtol=1e-4)
    assert lms[0].passes == lms[1].passes


CASES: list[Any] = [Plain, PromptLookup, DraftModel, Tree, MedusaTree, Eagle3, Eagle3DynamicTree]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("Test"))
def test_responses_are_those_of_the_built_in_passes(
    case: Any,
    temperature: float,
    heads: Path,  # noqa: F811
    monkeypatch: Any,
) -> None:
    if hasattr(case, "use"):
        case.use(heads)

    def decoded(batch_size: int) -> list[Any]:
        own = type("Case", (case,), {"setting": settings.TinyModel()})  # decodes anew
        responses = own().decode(batch_size, temperature)
        return [(i, r.tokens, [step.tau for step in r.steps]) for i, r in sorted(responses.items())]

    expected = [decoded(1), decoded(3)]
    monkeypatch.setattr(settings, "TransformersLM", OpenVINOLM)
    assert [decoded(1), decoded(3)] == expected


def test_models_that_share_an_embedding_have_graphs_of_their_own() -> None:
    model = model_of("llama")
    other = noisy(model, noise=0.5)
    other.set_input_embeddings(model.get_input_embeddings())
    assert disagreement(model) < TOLERANCE and disagreement(other) < TOLERANCE


def test_graph_follows_weights_and_threads() -> None:
    model = model_of("llama", seed=7)
    lm = OpenVINOLM(model, 1, 32)
    lm.start(0, [3, 4, 5])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    with pytest.raises(ModelError, match="weights of LlamaForCausalLM changed after OpenVINO compiled them"):
        lm.forward(torch.tensor([[5]]))
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert disagreement(model, lm_class=OpenVINOLM) < TOLERANCE
    finally:
        torch.set_num_threads(before)


def test_second_start_does_not_convert(monkeypatch: Any) -> None:
    model = model_of("llama", seed=9)
    OpenVINOLM(model, 1, 32)
    graph._graphs.clear()  # as in a new process
    monkeypatch.setattr(graph, "convert", None)
    assert disagreement(model, lm_class=OpenVINOLM) < TOLERANCE


def test_freed_slot_has_no_nan() -> None:
    lm = OpenVINOLM(model_of("llama"), 2, 32)
    for row in range(2):
        lm.start(row, [3, 4, 5, 6])
    for memory in lm.cache._memory:
        memory[:1].fill_(float("nan"))
    assert lm.forward(torch.tensor([[6], [6]]))[0].isnan().any((1, 2)).tolist() == [True, False]
    lm.commit([0, 0])
    lm.free(0)
    lm.start(0, [3, 4])
    assert lm.forward(torch.tensor([[4], [6]]))[0].isfinite().all()


def test_some_layers_alone_are_refused() -> None:
    with pytest.raises(ModelError, match="some layers of LlamaForCausalLM cannot be run alone by OpenVINO; set CROSS"):
        OpenVINOLM(model_of("llama"), 1, 32).fork([0])


def longrope() -> Any:
    return model_of("phi3", **variants(transformers.Phi3Config)["rope longrope"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model_of("llama").half(), "not all on the CPU in float32, or all in bfloat16"),
        (lambda: model_of("mistral"), "slots reach 16 tokens, more than its window of 8"),
        (longrope, "the frequencies of its longrope positions change"),
        (lambda: model_of("gemma2", **WIDE), "its attention takes softcap"),
        (lambda: model_of("deepseek_v3"), "its keys and values have different sizes"),
        (lambda: model_of("xglm"), "its layers do not each call transformers' attention function once"),
    ],
)
def test_models_that_it_cannot_compute_run_as_before(make: Any, reason: str, caplog: Any, monkeypatch: Any) -> None:
    model = make()
    monkeypatch.setattr(slots, "tried_classes", lambda: {type(model).__name__})
    slots._warn_once.cache_clear()
    assert isinstance(model_slots(model, 1, 16), TransformersLM)
    (message,) = [record.getMessage() for record in caplog.records if "OpenVINO" in record.getMessage()]
    assert message.startswith(f"crossdraft: PyTorch computes the passes of {type(model).__name__}, not OpenVINO: ")
    assert reason in message


def test_wrong_numbers_are_noticed(monkeypatch: Any) -> None:
    """Mistake: a conversion that loses the scale of attention."""
    original = graph._paged_attention
    monkeypatch.setattr(
        graph, "_paged_attention", lambda states, inputs, scale, layout: original(states, inputs, 9.0, layout)
    )
    with pytest.raises(ModelError, match="failed a trial"):
        OpenVINOLM(model_of("llama", seed=11), 1, 32)


def test_window_of_attention_functions_counts(monkeypatch: Any) -> None:
    """Mistake: a config that does not name its window."""
    monkeypatch.setattr(slots, "sliding_window", lambda config: None)
    with pytest.raises(ModelError, match="slots reach 65 tokens, more than its window of 64"):
        OpenVINOLM(model_of("mistral", **WIDE), 1, 65)


def test_only_tried_classes_and_on_request(monkeypatch: Any) -> None:
    monkeypatch.setattr(slots, "tried_classes", frozenset)
    assert isinstance(model_slots(model_of("llama"), 1, 16), TransformersLM)
    monkeypatch.undo()
    monkeypatch.setenv("CROSSDRAFT_OPENVINO", "0")
    assert isinstance(model_slots(model_of("llama"), 1, 16), TransformersLM)
