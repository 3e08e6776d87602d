"""Responses on slots of OpenVINO are those on the built-in ones, token by token and step by step."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from companions import needs_drafter
from head_checkpoints import write_heads
from test_drafters import TestDraftModel as DraftModel
from test_drafters import TestIid as TwoDrafts
from test_drafters import TestNone as Plain
from test_drafters import TestPromptLookup as PromptLookup
from test_drafters import TestTreeWithoutReplacement as Tree
from test_heads import TestEagle3 as Eagle3
from test_heads import TestEagle3DynamicTree as Eagle3DynamicTree
from test_heads import TestMedusa as Medusa
from test_heads import TestMedusaTree as MedusaTree
from tiny_architectures import tiny
from tiny_models import save_model

from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.load import load_model
from crossdraft.framework.testing import settings
from crossdraft.testing import DrafterContract

pytest.importorskip("openvino")

from crossdraft_openvino.slots import OpenVINOLM

pytestmark = pytest.mark.usefixtures("passes_by_openvino")


def case(drafter: str, base: Any = DrafterContract, remembers: bool = False, **options: Any) -> Any:
    return type(drafter, (base,), {"drafter": drafter, "options": options, "remembers": remembers})


TOKEN_RECYCLING = case("token-recycling", remembers=True, nodes=6, width=3)
EAGLE3_TREE = case("eagle3", Eagle3, **Eagle3.options, tree="static", siblings="without-replacement", branching=[2, 1])
EAGLE3_TREE.options.pop("gamma")
CASES: list[Any] = [Plain, PromptLookup, TOKEN_RECYCLING, DraftModel, Tree, TwoDrafts, Medusa, MedusaTree]
CASES += [Eagle3, EAGLE3_TREE, Eagle3DynamicTree]
#: Runs layers of the target, which OpenVINO leaves to PyTorch.
EARLY_EXIT = case("early-exit", exit_layer=2, gamma=3)
FAMILIES = """
arcee cohere cohere2 ernie4_5 gemma gemma3_text glm gpt2 gpt_neox gptj granite helium mistral mixtral olmo olmo2 olmoe
opt phi phi3 qwen2 qwen3 smollm3 stablelm starcoder2
"""


class Family(settings.TinyModel):
    """The setting `TinyModel` with another model."""

    def __init__(self, target: Any):
        self.target = target

    def model(self, device: str = "cpu") -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.target


def decoded(case: Any, setting: Any, batch_size: int, temperature: float) -> list[Any]:
    own = type("Case", (case,), {"setting": setting})  # decodes anew
    responses = own().decode(batch_size, temperature)
    return [(i, r.tokens, [step.tau for step in r.steps]) for i, r in sorted(responses.items())]


def check_same(case: Any, setting: Any, heads: Path, temperature: float) -> None:
    if hasattr(case, "use"):
        case.use(heads)
    expected = [decoded(case, setting, b, temperature) for b in (1, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "TransformersLM", OpenVINOLM)
        assert [decoded(case, setting, b, temperature) for b in (1, 4)] == expected


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Path:
    """Directories with heads of every kind."""
    root = tmp_path_factory.mktemp("heads")
    write_heads(root, settings.TinyModel.model(), target_ids=torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11]))
    return root


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=needs_drafter(getattr(one.drafter, "name", one.drafter))) for one in (*CASES, EARLY_EXIT)],
    ids=lambda case: case.__name__.removeprefix("Test"),
)
def test_llama(case: Any, temperature: float, heads: Path) -> None:
    check_same(case, settings.TinyModel(), heads, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.split())
def test_families(family: str, tmp_path: Path) -> None:
    kind = transformers.CONFIG_MAPPING[family]
    model = tiny(kind, **({"sliding_window": 128} if hasattr(kind(), "sliding_window") else {})).requires_grad_(False)
    count = model.config.num_hidden_layers
    assert OpenVINOLM(copy.deepcopy(model), 1, 128).passes_by == "OpenVINO"
    write_heads(tmp_path, model, target_ids=torch.arange(0, 97, 2))
    for case in CASES:
        options = {**case.options, "layers": [0, count, 1]} if "layers" in case.options else case.options
        for temperature in (0.0, 1.0):
            check_same(type(case.__name__, (case,), {"options": options}), Family(model), tmp_path, temperature)


@pytest.mark.parametrize(
    ("drafter", "passes"),
    [
        ("prompt-lookup", "OpenVINO"),
        pytest.param(
            "early-exit",
            "PyTorch, not OpenVINO: a drafter runs some of its layers",
            marks=needs_drafter("early-exit"),
        ),
    ],
)
def test_report_names_what_computed_the_passes(drafter: str, passes: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"question_id": "q", "category": "a", "turns": ["w5 w6 w5"]}\n')
    recipe = {"question": "by which?", "target": save_model(tmp_path / "target"), "prompts": "prompts.jsonl"}
    recipe |= {"dtype": "float32", "device": "cpu", "max_new_tokens": 4, "drafters": [drafter], "verifiers": ["token"]}
    recipe |= {"matrix": {"temperature": [1], "batch_size": [1]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    assert cli.main(["run", "recipe.yaml"]) == 0
    assert cli.main(["report", *map(str, tmp_path.glob("runs/*")), "--out", "report.md"]) == 0
    assert f"| passes | {passes} |" in " ".join((tmp_path / "report.md").read_text(encoding="utf-8").split())


# -- the contract kit ----------------------------------------------------------------------------------------------


def _slots(model: Any, *sizes: int) -> Any:
    """Slots as `model_slots` chooses them: those of OpenVINO on a CPU, built-in ones on the device without kernels."""
    return (OpenVINOLM if model.device.type == "cpu" else TransformersLM)(model, *sizes)


class _OnOpenVINO:
    """The contract kit on slots of OpenVINO."""

    setting = settings.TinyModel()

    @pytest.fixture(autouse=True, scope="class")
    def slots(self, passes_by_openvino: None) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "TransformersLM", _slots)
            yield


@pytest.mark.slow
class TestPlainKit(_OnOpenVINO, Plain):
    pass


@pytest.mark.slow
class TestTreeKit(_OnOpenVINO, Tree):
    pass


@pytest.mark.slow
class TestEagle3Kit(_OnOpenVINO, Eagle3DynamicTree):
    pass


# -- a model of the real size --------------------------------------------------------------------------------------

SMALL = {"model": "smollm2-draft-model"}
DRAFTERS: dict[str, Any] = {
    "none": {"name": "none"},
    "prompt-lookup": {"name": "prompt-lookup", "gamma": 6},
    "token-recycling": {"name": "token-recycling"},
    "draft-model": {"name": "draft-model", **SMALL, "gamma": 4},
    "draft-model-tree": {"name": "draft-model-tree", **SMALL, "branching": [2, 2, 1]},
    "draft-model-iid": {"name": "draft-model-iid", **SMALL, "gamma": 3, "K": 2},
    "medusa": {"name": "medusa", "model": "smollm2-medusa"},
    "eagle3": {"name": "eagle3", "model": "smollm2-eagle3", "gamma": 5},
    "eagle3-tree": {"name": "eagle3", "model": "smollm2-eagle3", "tree": "static", "branching": [2, 2, 1]},
    "eagle3-dynamic-tree": {"name": "eagle3", "model": "smollm2-eagle3", "tree": "dynamic", "depth": 3, "nodes": 8},
}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_smollm2(drafter: str, monkeypatch: Any) -> None:
    pytest.importorskip("crossdraft_smollm2")
    target = load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
    texts = ["The capital of France is", "1, 2, 3, 4, 5, 6,", "def add(a, b):\n    return", "Once upon a time"]
    prompts = [target.tokenizer.encode(text) for text in texts]
    for temperature in (0.0, 1.0):
        for batch_size in (1, 4):
            results = []
            for own in ("0", "1"):
                monkeypatch.setenv("CROSSDRAFT_OPENVINO", own)
                sampling = Sampling(temperature=temperature)
                options = {"sampling": sampling, "batch_size": batch_size, "max_new_tokens": 16, "seed": 7}
                decoder: Any = pair_decoder(target, DRAFTERS[drafter], None, 64, **options)
                assert decoder.target.passes_by == ("OpenVINO" if own == "1" else "")
                responses = sorted(decoder.run(prompts), key=lambda response: response.index)
                results.append([(r.tokens, [step.tau for step in r.steps]) for r in responses])
            assert results[0] == results[1], (temperature, batch_size)
