"""The interface and families of models: equal on the CPU and on the simulated device or a real one."""

from __future__ import annotations

import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from crossdraft_simulated_cuda import installed
from on_both_devices import on_both_devices
from oracle_trees import PROMPTS
from text_models import SCHEMA, save_text_model
from tiny_architectures import tiny
from tiny_models import save_model
from transformers import CONFIG_MAPPING, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from crossdraft import LoadedModel, generate, load_model, stream
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run as run_recipe
from crossdraft.framework.lm import cuda_graphs

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the simulated device or a real one"),
    pytest.mark.usefixtures("small_buckets"),
]

TEXTS = ["w5 w6 w7 w5 w6 w7 w5", "w9", "w20 w21 w20 w21 w20 w21", "w5 w9 w5", "w11 w30 w12"]
WARPED = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    pytest.importorskip("llguidance", reason="constraints need the extra constrain")
    names = {name: save_model(root / name, seed) for seed, name in enumerate(("target", "small"))}
    return names | {f"text-{seed}": save_text_model(root / f"text-{seed}", seed) for seed in (0, 1)}


def loaded(name: str, place: str) -> LoadedModel:
    return load_model(name, dtype="float32", device=place)


def drafters(name: str) -> dict[str, dict[str, Any]]:
    return {
        "chain": {"name": "draft-model", "model": name, "gamma": 3},
        "tree": {"name": "draft-model-tree", "model": name, "branching": (2, 2)},
        "prompt-lookup": {"name": "prompt-lookup"},
    }


# -- the interface ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter, sampling, masked",
    [
        ("chain", {"temperature": 0}, True),
        ("tree", WARPED, True),
        pytest.param("tree", {}, False, marks=pytest.mark.slow),
        ("prompt-lookup", {}, True),
    ],
)
def test_constraints(models: dict[str, str], drafter: str, sampling: dict[str, Any], masked: bool) -> None:
    def run(place: str) -> list[str]:
        constraint = {"json_schema": SCHEMA, "mask_drafts": masked}
        options = {"drafter": drafters(models["text-1"])[drafter], "max_new_tokens": 40, "batch_size": 2}
        inputs = ["a cat?", "a", "a dog?"]
        responses = generate(loaded(models["text-0"], place), inputs, constraint=constraint, **options, **sampling)
        return [response.text for response in responses]

    on_both_devices(run)


@pytest.mark.parametrize(
    "drafter, sampling", [("tree", {"temperature": 0}), pytest.param("chain", WARPED, marks=pytest.mark.slow)]
)
def test_logits_processors(models: dict[str, str], drafter: str, sampling: dict[str, Any]) -> None:
    def run(place: str) -> list[list[int]]:
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
        options = {"drafter": drafters(models["small"])[drafter], "max_new_tokens": 10, "batch_size": 2}
        target = loaded(models["target"], place)
        return [r.tokens for r in generate(target, TEXTS, logits_processor=processors, **options, **sampling)]

    on_both_devices(run)


def test_stream(models: dict[str, str]) -> None:
    def run(place: str) -> list[Any]:
        options = {"drafter": drafters(models["small"])["chain"], "max_new_tokens": 10, **WARPED}
        chunks = stream(loaded(models["target"], place), TEXTS, batch_size=4, **options)
        return [(chunk.index, chunk.tokens) for chunk in chunks]

    on_both_devices(run)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 7, "temperature": 0.8, "seed": 4}]
)
def test_custom_generate(models: dict[str, str], options: dict[str, Any]) -> None:
    def run(place: str) -> list[list[int]]:
        model = loaded(models["target"], place).model
        ids = torch.tensor([[9, 8, 7, 9, 8, 7, 9], [3, 4, 5, 6, 3, 4, 5]]).to(place)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        output = model.generate(
            ids, attention_mask=mask, custom_generate=custom_generate, max_new_tokens=9, pad_token_id=2, **options
        )
        assert output.device.type == place
        return output.tolist()

    on_both_devices(run)


def test_two_threads(models: dict[str, str]) -> None:
    """Captures of one thread and waits of the other do not meet."""

    def run(place: str) -> list[list[int]]:
        target = loaded(models["target"], place)

        def one(i: int) -> list[list[int]]:
            drafter = drafters(models["small"])[("chain", "tree")[i]]
            return [r.tokens for r in generate(target, TEXTS, drafter=drafter, max_new_tokens=12, batch_size=2)]

        with ThreadPoolExecutor(2) as pool:
            return [tokens for results in pool.map(one, range(2)) for tokens in results]

    on_both_devices(run)


def test_warm_ups_and_captures_do_not_affect_other_threads(recwarn: Any) -> None:
    recorder, x = cuda_graphs.CudaRecorder(torch.device("cuda")), torch.ones(2, device="cuda")
    with ThreadPoolExecutor(4) as pool:

        def warm_up() -> Any:
            assert pool.submit(x.tolist).result(10) == [1, 1]  # another thread waits
            return ()

        assert recorder.warm_up(warm_up) == ()
        with pytest.raises(RuntimeError, match=r"called a synchronizing CUDA operation at .*test_cases\.py:\d+"):
            recorder.warm_up(lambda: (warm_up(), x.tolist())[0])
        assert torch.cuda.get_sync_debug_mode() == 0 and not recwarn.list

        def capture(_: int) -> Any:  # the device refuses a second one beside it
            return cuda_graphs.CudaRecorder(torch.device("cuda")).record(lambda: time.sleep(0.02))

        list(pool.map(capture, range(4)))


# -- families of models -------------------------------------------------------------------------------------

_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 6.0,
         "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding window": ("mistral", {"sliding_window": 8}),
    "alternating windows": ("gemma3_text", {}),
    "experts": ("mixtral", {}),
    "sinks": ("gpt_oss", {}),
    "longrope": ("phi3", {"rope_parameters": _LONG}),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "learnt positions": ("gpt2", {}),
}


@pytest.mark.parametrize(
    "family, tree",
    [pytest.param(family, tree, marks=pytest.mark.slow if tree != (number % 2 == 0) else ()) for number, family in
     enumerate(FAMILIES) for tree in (True, False)],
)  # fmt: skip
def test_families(family: str, tree: bool) -> None:
    kind, changes = FAMILIES[family]
    model = tiny(CONFIG_MAPPING[kind], **changes)

    def run(place: str) -> list[list[int]]:
        target = LoadedModel(copy.deepcopy(model).to(place), None, family, "", "0" * 64, (), 96)  # type: ignore[arg-type]
        chosen = {"name": "token-recycling", "nodes": 6} if tree else {"name": "prompt-lookup"}
        return [r.tokens for r in generate(target, PROMPTS * 2, drafter=chosen, max_new_tokens=16, batch_size=3)]

    # On a GPU, products of experts in float32 wait, and so does longrope of transformers before 5.24.
    waits = not installed() and family in ("experts", "sinks", "longrope")
    on_both_devices(run, "synchronizing" if waits else "modeling_rope_utils" if family == "dynamic rope" else "")


# -- commands -----------------------------------------------------------------------------------------------


def test_run(models: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def run(place: str) -> list[Any]:
        data = {"target": models["target"], "prompts": str(prompts), "max_new_tokens": 8, "dtype": "float32"}
        pairs = {
            "drafters": [drafters(models["small"])[name] for name in ("chain", "tree")],
            "verifiers": ["traversal"],
        }
        recipe = tmp_path / f"{place}.yaml"
        recipe.write_text(json.dumps(data | pairs | {"device": place, "matrix": {"batch_size": [1, 4]}}))
        results = run_recipe(load_recipe(str(recipe)), tmp_path / place, log=None).results
        return [[record.tau for record in result.records] for result in results]

    on_both_devices(run)
