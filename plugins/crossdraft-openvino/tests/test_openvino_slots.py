"""Slots of OpenVINO against transformers and the built-in ones: logits, hidden states, and what is left to PyTorch."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import disagreement
from architecture_variants import variants
from architecture_walk import TOLERANCE
from tiny_architectures import noisy, tiny

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm import attention_masks
from crossdraft.framework.lm.transformers_lm import TransformersLM, model_slots
from crossdraft.framework.runs.threads import POLICY

pytest.importorskip("openvino")

from crossdraft_openvino import graph, slots
from crossdraft_openvino.slots import OpenVINOLM, tried_classes

pytestmark = pytest.mark.usefixtures("passes_by_openvino")

WIDE = {"sliding_window": 64}
TEXTS = {0: [5, 6, 7, 8, 9, 10, 11], 1: [20, 21, 22]}


def model_of(model_type: str, **changes: Any) -> Any:
    return tiny(transformers.CONFIG_MAPPING[model_type], **changes)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "olmoe", "phi", "cohere2"])
def test_logits_match_the_model(model_type: str) -> None:
    """Ragged chains, then trees in two pieces; a slot changes hands."""
    model = model_of(model_type, **(WIDE if model_type in ("mistral", "gemma3_text", "cohere2") else {}))
    assert type(model).__name__ in tried_classes()
    lm: Any = model_slots(model, 2, 64)
    assert lm.passes_by == "OpenVINO"
    assert disagreement(model) < TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers() -> None:
    plain = model_of("llama", hidden_size=64, intermediate_size=128)
    rounded = copy.deepcopy(plain).bfloat16()
    exact = copy.deepcopy(rounded).float()
    text = [(7 * i + 3) % 97 for i in range(40)]
    try:
        lm = OpenVINOLM(rounded, 1, 64)
    except ModelError as error:
        assert str(error) == "this processor has no products in bfloat16"
        pytest.skip("needs a processor with AVX-512 BF16 or AMX")
    lm.start(0, text[:30])
    with torch.no_grad():
        expected = exact(torch.tensor([text])).logits[0, 29:]
        theirs = rounded(torch.tensor([text])).logits[0, 29:].float() - expected
    ours = lm.forward(torch.tensor([text[29:]]))[0][0].float() - expected
    assert 0 < ours.square().mean() <= 1.2 * theirs.square().mean()


def outputs(lm: Any, between: Callable[[Any], Any] = lambda lm: None) -> list[torch.Tensor]:
    """Logits and hidden states of two ragged rows: a tree in three pieces, a path of which is kept, and a chain.

    Args:
        between: called behind the first piece.
    """
    for row in TEXTS:
        lm.free(row)
    lm.prefill({row: text[:-1] for row, text in TEXTS.items()})
    results = [lm.start(row, text) for row, text in TEXTS.items()]
    results += lm.forward(torch.tensor([[11, 3], [22, 4]]))
    between(lm)
    results += lm.forward(torch.tensor([[5], [6]]), torch.tensor([[0]] * 2))
    results += lm.forward(torch.tensor([[7, 8], [9, 1]]), torch.tensor([[2, 1]] * 2))
    lm.commit([3, 1], torch.tensor([[0, 2, 3], [0, -1, -1]]))
    results += lm.forward(torch.tensor([[8, 9], [6, 7]]))
    return [tensor for tensor in results if tensor is not None]


def check_equal(ours: list[torch.Tensor], built_in: list[torch.Tensor]) -> None:
    assert len(ours) == len(built_in)
    for a, b in zip(ours, built_in, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_hidden_states_are_those_of_the_built_in_passes() -> None:
    """First none, then more: shares of the depth, negative numbers, the last layer before and after its norm."""
    model = model_of("llama", num_hidden_layers=4)
    ours, built_in = OpenVINOLM(model, 2, 64), TransformersLM(copy.deepcopy(model), 2, 64)
    for layers in ((), (0.5, -1), (0, -2, 4, 5 - 1, 1), (0.25, 0.99)):
        ours.hidden_layers = built_in.hidden_layers = layers
        check_equal(outputs(ours), outputs(built_in))
    assert ours.passes == built_in.passes and ours.passes_by == "OpenVINO"


def test_models_that_share_an_embedding_take_turns() -> None:
    """Mistake: a graph by the embedding alone, so that a draft model got the target's."""
    model = model_of("llama")
    other = noisy(model, noise=0.5)
    other.set_input_embeddings(model.get_input_embeddings())
    lms = [OpenVINOLM(one, 2, 64) for one in (model, other)]
    expected = [outputs(TransformersLM(copy.deepcopy(one), 2, 64)) for one in (model, other)]
    for _ in range(2):
        for lm, logits in zip(lms, expected, strict=True):
            check_equal(outputs(lm), logits)


def test_another_number_of_threads() -> None:
    model = model_of("llama", seed=7)
    before = torch.get_num_threads()
    lms = [OpenVINOLM(model, 2, 64)]
    torch.set_num_threads(3 - min(before, 2))
    try:
        lms.append(OpenVINOLM(model, 2, 64))
        for lm in lms:
            check_equal(outputs(lm), outputs(TransformersLM(copy.deepcopy(model), 2, 64)))
    finally:
        torch.set_num_threads(before)


def test_second_start_neither_converts_nor_tries(monkeypatch: Any) -> None:
    """As long as slots are no longer than those tried; a graph that changed its place is compiled again."""
    model = model_of("llama", seed=9)
    OpenVINOLM(model, 1, 32)
    graph._graphs.clear()  # as in a new process
    monkeypatch.setattr(graph, "convert", None)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "trial", None)
        assert disagreement(model, lm_class=OpenVINOLM, max_length=32) < TOLERANCE
    with pytest.raises(TypeError):  # the mistake would be seen: a trial is None
        monkeypatch.setattr(slots, "trial", None)
        OpenVINOLM(model, 1, 96)


def test_no_statistics_are_sent() -> None:
    """Each import and conversion forked this process, beside its threads."""
    from openvino.tools.ovc import telemetry_stub, telemetry_utils

    assert telemetry_utils.tm is telemetry_stub


@pytest.mark.parametrize(("setting", "policy"), [("1", "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0"), ("0", "spin")])
def test_threads_of_pytorch_sleep(setting: str, policy: str) -> None:
    """As long as this is imported before PyTorch; spinning beside OpenVINO's they made every step a disturbed one."""
    code = "import crossdraft_openvino; from crossdraft.framework.runs import threads; print(threads.wait_policy())"
    own = {name: value for name, value in os.environ.items() if name not in POLICY}
    own |= {"CROSSDRAFT_OPENVINO": setting, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=own, text=True).strip() == policy


def test_signals_are_handled_after_models_end() -> None:
    """Mistake: a core for each graph, of which the last to end left a freed stack: Ctrl-C ended the process."""
    lms = [OpenVINOLM(model_of("llama", seed=seed), 1, 32) for seed in (11, 12)]
    while lms:
        del lms[0]
        graph._graphs.clear()
        gc.collect()
    if not (child := os.fork()):
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_freed_slot_has_no_nan() -> None:
    lm = OpenVINOLM(model_of("llama"), 2, 32)
    for row in range(2):
        lm.start(row, [3, 4, 5, 6])
    for memory in lm.cache.memory.values():
        memory[0].fill_(float("nan"))
    assert lm.forward(torch.tensor([[6], [6]]))[0].isnan().any((1, 2)).tolist() == [True, False]
    lm.commit([0, 0])
    lm.free(0)
    lm.start(0, [3, 4])
    assert lm.forward(torch.tensor([[4], [6]]))[0].isfinite().all()


# -- models that are left to PyTorch -------------------------------------------------------------------------------


def longrope() -> Any:
    return model_of("phi3", **variants(transformers.Phi3Config)["rope longrope"])


def quantised() -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = model_of("llama")
    quantize_(model, Int8WeightOnlyConfig())
    return model


def without_changes() -> Any:
    with torch.inference_mode():
        return model_of("llama")


def retrained() -> Any:
    model = model_of("llama", seed=5)
    OpenVINOLM(model, 1, 16)
    model.get_output_embeddings().weight.data *= -1  # as adapters are merged: no version changes
    return model


def untried() -> Any:
    model = model_of("llama")
    model.__class__ = type("OwnForCausalLM", (type(model),), {})
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model_of("llama").half(), "not all on the CPU in float32, or all in bfloat16"),
        (quantised, "not all on the CPU in float32, or all in bfloat16"),
        (without_changes, "its weights were made in inference mode, so their changes would not be seen"),
        (retrained, "its weights changed after OpenVINO converted it"),
        (untried, "in a clone: python plugins/crossdraft-openvino/tests/try_classes.py llama"),
        (lambda: model_of("mistral"), "slots reach 16 tokens, more than its window of 8"),
        (longrope, "the frequencies of its longrope positions change"),
        (lambda: model_of("gemma2", **WIDE), "its attention takes softcap"),
        (lambda: model_of("gpt_oss", **WIDE), "its attention takes s_aux"),
        (lambda: model_of("deepseek_v3"), "its keys and values have different sizes"),
        (lambda: model_of("xglm"), "its layers do not each call transformers' attention function once"),
    ],
)
def test_models_that_it_cannot_compute_run_as_before(make: Any, reason: str, caplog: Any, monkeypatch: Any) -> None:
    model = make()
    known = {type(model).__name__} - {"OwnForCausalLM"}
    monkeypatch.setattr(slots, "tried_classes", lambda: known)
    lm: Any = model_slots(model, 1, 16)
    assert type(lm) is TransformersLM
    (message,) = [record.getMessage() for record in caplog.records if "OpenVINO" in record.getMessage()]
    assert message.startswith(f"crossdraft: PyTorch computes the passes of {type(model).__name__}, not OpenVINO: ")
    assert reason in message and reason in lm.passes_by


def test_models_that_fill_the_memory_are_left(monkeypatch: Any) -> None:
    monkeypatch.setattr(slots, "total_memory", lambda device: 10**5)
    with pytest.raises(ModelError, match="its weights in float32 would take 0 of 0 GB of memory"):
        OpenVINOLM(model_of("llama"), 1, 16)


def test_window_beyond_the_slots_does_not_matter() -> None:
    assert isinstance(model_slots(model_of("mistral", **WIDE), 1, 64), OpenVINOLM)
    assert isinstance(model_slots(model_of("qwen2", use_sliding_window=False), 1, 64), OpenVINOLM)


def test_window_of_attention_functions_counts(monkeypatch: Any) -> None:
    """Mistake: a config that does not name its window."""
    monkeypatch.setattr(attention_masks, "sliding_window", lambda config: None)
    with pytest.raises(ModelError, match="slots reach 65 tokens, more than its window of 64"):
        OpenVINOLM(model_of("mistral", **WIDE), 1, 65)


@pytest.mark.parametrize(
    ("setting", "smallest", "kind"),
    [("0", 1, TransformersLM), ("", 1, OpenVINOLM), ("", slots.LEAST_WEIGHTS, TransformersLM)],
)
def test_unless_switched_off_or_small(setting: str, smallest: int, kind: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_OPENVINO", setting)
    monkeypatch.setattr(slots, "LEAST_WEIGHTS", smallest)
    assert type(model_slots(model_of("llama"), 1, 16)) is kind and not caplog.records


def test_logits_stay_while_others_are_computed() -> None:
    """A pass writes them to memory of its own, without a copy."""
    lm: Any = OpenVINOLM(model_of("llama"), 1, 16)
    lm.start(0, [3, 4])
    first = lm.forward(torch.tensor([[4, 5]]))[0]
    assert first.data_ptr() == lm.forward_pass._request.get_output_tensor(0).data.ctypes.data
    before = first.clone()
    lm.commit([1])
    assert not torch.equal(lm.forward(torch.tensor([[6, 7]]))[0], before) and torch.equal(first, before)


# -- trials --------------------------------------------------------------------------------------------------------


def test_lost_scale_fails_the_trial(monkeypatch: Any) -> None:
    original = graph._paged_attention
    monkeypatch.setattr(
        graph, "_paged_attention", lambda states, inputs, scale, layout: original(states, inputs, 9.0, layout)
    )
    with pytest.raises(ModelError, match="failed a trial"):
        OpenVINOLM(model_of("llama", seed=11), 1, 32)


def test_unknown_window_fails_the_trial(monkeypatch: Any) -> None:
    """It is right for short texts."""
    monkeypatch.setattr(slots, "check", lambda model, max_length, window=0: 96)
    with pytest.raises(ModelError, match="it failed a trial of a text of 96 tokens that ends at position 96"):
        OpenVINOLM(model_of("mistral", sliding_window=40), 1, 90)


def test_wrong_late_positions_fail_the_trial(monkeypatch: Any) -> None:
    """Only the last positions of slots are wrong, beyond the length of the text."""
    original = graph._Flat.forward
    monkeypatch.setattr(
        graph._Flat,
        "forward",
        lambda self, ids, positions, chosen: original(self, ids, positions.clamp(max=80), chosen),
    )
    monkeypatch.setattr(slots, "LONG_TEXT", 16)
    with pytest.raises(ModelError, match="it failed a trial of a text of 16 tokens that ends at position 96"):
        OpenVINOLM(model_of("llama", seed=13), 1, 90)


# -- slots that are left to PyTorch --------------------------------------------------------------------------------


def train(lm: Any) -> None:
    with torch.no_grad():
        lm.model.get_output_embeddings().weight.mul_(-1)


def adapt(lm: Any) -> None:
    projection = lm.model.get_decoder().layers[1].mlp.up_proj
    lm.model.get_decoder().layers[1].mlp.up_proj = torch.nn.Sequential(projection, torch.nn.Softsign())


def hook(lm: Any) -> None:
    lm.model.get_decoder().layers[0].register_forward_hook(lambda module, args, output: -output)


def fork(lm: Any) -> None:
    lm.between = lm.fork([0])


def read_another_layer(lm: Any) -> None:
    lm.hidden_layers = (1,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (train, "its weights or modules changed after OpenVINO compiled them"),
        (adapt, "its weights or modules changed after OpenVINO compiled them"),
        (hook, "its weights or modules changed after OpenVINO compiled them"),
        (fork, "a drafter runs some of its layers"),
        (read_another_layer, "no memory"),
    ],
)
def test_slots_go_on_in_pytorch(change: Any, reason: str, caplog: Any, monkeypatch: Any) -> None:
    """In the middle of a tree: keys and values stay."""
    model = model_of("llama", seed=3)
    lms: list[Any] = [kind(copy.deepcopy(model), 2, 64) for kind in (OpenVINOLM, TransformersLM)]
    original = graph._compile

    def failing(path: Any, dtype: Any, numbers: Any, threads: int) -> Any:
        if len(numbers) > 1:
            raise ModelError("no memory")
        return original(path, dtype, numbers, threads)

    monkeypatch.setattr(graph, "_compile", failing)
    check_equal(*(outputs(lm, change) for lm in lms))
    assert lms[0].passes_by == f"PyTorch, not OpenVINO: {reason}"
    assert len([record for record in caplog.records if reason in record.getMessage()]) == 1
    check_equal(*(outputs(lm) for lm in lms))


def test_inputs_beside_tokens() -> None:
    """Mistake: they were ignored."""
    model = model_of("llama", seed=3)
    lms: list[Any] = [kind(copy.deepcopy(model), 1, 64) for kind in (OpenVINOLM, TransformersLM)]
    for lm in lms:
        lm.start(0, [5, 6, 7])
    scores = [lm.forward(torch.tensor([[7, 8]]), output_attentions=torch.tensor(False))[0] for lm in lms]
    check_equal(*([score] for score in scores))
    assert lms[0].passes_by == "PyTorch, not OpenVINO: a drafter gives it output_attentions beside tokens"


def test_forks_run_and_resume() -> None:
    model = model_of("llama", num_hidden_layers=4)
    pair = []
    for kind in (OpenVINOLM, TransformersLM):
        lm: Any = kind(copy.deepcopy(model), 2, 64)
        early = lm.fork([0, 1])
        for row, text in TEXTS.items():
            lm.start(row, text)
        results = [early.forward(torch.tensor([[11], [22]]))[0], early.forward(torch.tensor([[3], [4]]))[0]]
        results.append(lm.forward(torch.tensor([[11, 3, 5], [22, 4, 6]]), resume_from=early)[0])
        pair.append(results)
    check_equal(*pair)
