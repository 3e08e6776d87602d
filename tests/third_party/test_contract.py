"""The contract as used by third-party packages.

Strategies are those of ``strategies.py``, which imports ``crossdraft`` alone.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from tiny_models import VOCAB, save_model

import crossdraft
from crossdraft.framework.api.build import load_draft_model
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.testing import DrafterContract, TinyModel, VerifierContract

pytestmark = pytest.mark.usefixtures("third_party")


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    shuffled = {word: (i + 17) % 80 for word, i in VOCAB.items() if word != "w9"} | {"quite": 26, "other": 1}
    assert len(set(shuffled.values())) == len(shuffled)
    return {
        "target": save_model(root / "target"),
        "shuffled": save_model(root / "shuffled", seed=0, width=80, vocab=shuffled),
    }


@pytest.fixture(scope="module")
def target(models: dict[str, str]) -> crossdraft.LoadedModel:
    return crossdraft.load_model(models["target"], dtype="float32", device="cpu")


def answers(target: Any, drafter: Any, **options: Any) -> list[Any]:
    prompts = ["w5 w6 w7 w5 w6", "w9", "w20 w21 w20 w21 w20 w21"]
    return crossdraft.generate(target, prompts, drafter=drafter, max_new_tokens=16, **options)


def test_package_imports_only_crossdraft() -> None:
    tree = ast.parse(Path(strategies.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not [module for module in modules if module and module.startswith("crossdraft.")]


@pytest.mark.slow
class TestFirstLayers(DrafterContract):
    drafter = "first-layers"
    setting = TinyModel()


@pytest.mark.slow  # docs/plugins.md runs such a one
class TestSkippedLayers(DrafterContract):
    drafter = "first-layers"
    options = {"layers": (0, 2, 3), "gamma": 2}
    setting = TinyModel()


@pytest.mark.slow  # as draft-model, among the built-in ones
class TestWindow(DrafterContract):
    drafter = "window"
    setting = TinyModel()


@pytest.mark.slow  # as Medusa, among the built-in ones
class TestLinearHead(DrafterContract):
    drafter = "linear-head"
    setting = TinyModel()


class TestFrequent(DrafterContract):
    drafter = "frequent"
    remembers = True


@pytest.mark.slow
class TestWrapped(VerifierContract):
    verifier = "wrapped"
    options = {"rule": "sample-match"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fork_does_not_change_targets_cache(target: Any, temperature: float) -> None:
    """Its nodes are written into the same slots, so a fault would change the target's output."""
    drafter = {"name": "first-layers", "layers": [1], "gamma": 4}
    separate = answers(target, "none", temperature=temperature, verifier=None if temperature == 0 else "token")
    for batch_size in (1, 3):
        responses = answers(target, drafter, temperature=temperature, batch_size=batch_size, verifier="sample-match")
        if temperature == 0:
            assert [r.tokens for r in responses] == [r.tokens for r in separate]
    all_layers = {"name": "first-layers", "layers": [0, 1], "gamma": 4}
    whole = answers(target, all_layers, temperature=temperature, verifier=None)
    taus = [r.tau for response in whole for r in response.steps if r.nodes == 4 and r.emitted > r.tau]
    assert taus and set(taus) == {4}, "the whole model drafts what it says itself"


def test_fork_does_not_recompute(target: Any) -> None:
    """One pass of the fork a drafted token and none for the prompt: the target's keys and values are there."""
    events: list[Any] = []
    (response,) = crossdraft.generate(
        target, ["w5 w6 w7 w5 w6"], drafter={"name": "first-layers", "layers": [0], "gamma": 3},
        max_new_tokens=12, temperature=0, on_step=events.append,
    )  # fmt: skip
    assert len(events) == len(response.steps) and all(event.prompts == [0] for event in events)
    assert [token for event in events for token in event.emitted[0]] == response.tokens


def test_probes_are_scored_and_never_judged(target: Any) -> None:
    events: list[Any] = []
    responses = answers(target, "window", temperature=0, batch_size=2, on_step=events.append)
    assert [r.tokens for r in responses] == [r.tokens for r in answers(target, "none", temperature=0)]
    for event in events:
        assert event.draft.probes == 3 and event.scores.p.shape[1] == event.draft.width + 1 == 5
        assert max(event.accepted) <= 1, "a probe was accepted"
    # The prediction after a probe equals that of a separate pass over the token.
    event = next(event for event in events if event.prompts[0] == 0)
    prompt = [3, 5, 6, 7, 5, 6, 4]  # in the chat template
    for i in range(3):
        text = torch.tensor([[*prompt, int(event.draft.tokens[0, 1 + i])]])
        expected = target.model(text).logits[0, -1]
        torch.testing.assert_close(event.scores.logits[0, 2 + i], expected, rtol=1e-4, atol=1e-4)
        assert event.scores.p[0, 2 + i].max() == 1, "at temperature 0 p is one-hot; logits are not"
    steps = [r for response in responses for r in response.steps]
    assert {r.nodes for r in steps} <= {0, 1} and {r.width for r in steps} == {4}


def test_another_tokenizer_by_map_of_ids(target: Any, models: dict[str, str]) -> None:
    """The same words under other ids; one of the target's words is missing, so it is never drafted."""
    events: list[Any] = []
    drafter = {"name": "other-words", "model": models["shuffled"]}
    responses = answers(target, drafter, temperature=1, seed=3, on_step=events.append)
    assert all(response.tokens for response in responses)
    with_law = [event.draft for event in events if event.draft.q is not None]
    assert with_law and all(bool((draft.q[..., VOCAB["w9"]] == 0).all()) for draft in with_law)
    assert all(bool((draft.q[..., 64:] == 0).all()) for draft in with_law), "no word has these ids"
    with pytest.raises(crossdraft.ModelError, match="the tokenizers differ"):
        answers(target, {"name": "draft-model", "model": models["shuffled"]})


def write_recipe(tmp_path: Path, target: str, **more: Any) -> str:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w8 w{i} w8"}) + "\n" for i in range(10, 14)))
    data = {"target": target, "prompts": str(prompts), "max_new_tokens": 8, "dtype": "float32", **more}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    return str(path)


def test_warm_up_memory_is_reset(tmp_path: Path, models: dict[str, str], monkeypatch: Any) -> None:
    recipe = load_recipe(write_recipe(tmp_path, models["target"], drafters=["frequent"], verifiers=["sample-match"]))
    warm = run(recipe, tmp_path / "warm", log=None).results[-1]
    from crossdraft.framework.bench.cells.cell_runner import Cell

    monkeypatch.setattr(Cell, "warm_up", lambda *_: None)
    cold = run(recipe, tmp_path / "cold", log=None).results[-1]
    assert warm.metrics and cold.metrics
    assert [r.tau for r in warm.records] == [r.tau for r in cold.records]
    assert warm.metrics.block_efficiency == cold.metrics.block_efficiency


def test_traits_of_verifier_follow_from_its_config(tmp_path: Path, models: dict[str, str]) -> None:
    verifiers = [{"name": "wrapped", "rule": rule} for rule in ("token", "lenient")]
    recipe = load_recipe(
        write_recipe(tmp_path, models["target"], drafters=["prompt-lookup"], verifiers=[*verifiers, "token"])
    )
    cells = expand(recipe).cells
    from crossdraft.framework.runs.labels import verifier_title
    from crossdraft.framework.runs.records import CellResult

    titles = [verifier_title(CellResult(cell)) for cell in cells if not cell.is_baseline]
    assert titles == ["wrapped rule=token (not certified)", "wrapped rule=lenient (lossy)", "token"]


def test_drafter_for_temperature_zero_is_left_out_elsewhere(tmp_path: Path, models: dict[str, str]) -> None:
    recipe = load_recipe(
        write_recipe(
            tmp_path, models["target"], drafters=["oracle"], verifiers=["token", "sample-match"],
            matrix={"temperature": [0, 1]},
        )
    )  # fmt: skip
    result = expand(recipe)
    assert {cell.sampling.temperature for cell in result.cells if cell.drafter.name == "oracle"} == {0}
    assert "drafter 'oracle' needs temperature 0, but the temperature is 1" in result.skipped


def bigram(tmp_path: Path) -> str:
    words = ["<end>", "a", "b", "c", "d"]
    follows = {"a": {"b": 3, "c": 1}, "b": {"c": 2, "a": 1}, "c": {"d": 2, "a": 1}, "d": {"a": 3}, "<end>": {"a": 1}}
    path = tmp_path / "letters.bigram"
    path.write_text(json.dumps({"words": words, "follows": follows}))
    return str(path)


def test_target_of_another_backend(tmp_path: Path) -> None:
    loaded = crossdraft.load_model(bigram(tmp_path))
    assert loaded.backend == "bigram" and loaded.source.startswith("file ")
    plain = crossdraft.generate(loaded, ["a b c"], drafter="none", temperature=0, max_new_tokens=8)
    assert plain[0].text == "d a b c d a b c"
    for drafter in ("prompt-lookup", {"name": "draft-model", "model": loaded.name, "gamma": 3}):
        responses = crossdraft.generate(loaded, ["a b c"], drafter=drafter, temperature=0, max_new_tokens=8)
        assert responses[0].text == plain[0].text
    separate = crossdraft.load_tokenizer(loaded.name)
    assert separate.tokenizer.get_vocab() == loaded.tokenizer.get_vocab() and separate.eos_token_ids == (0,)
    with pytest.raises(crossdraft.ModelError, match="not a transformers model"):
        crossdraft.generate(loaded, ["a b c"], drafter={"name": "medusa", "model": "nowhere"})
    with pytest.raises(crossdraft.UsageError, match="runs on a CPU in float32"):
        crossdraft.load_model(loaded.name, dtype="bfloat16")


def test_other_backend_drafts_in_own_precision(tmp_path: Path, models: dict[str, str]) -> None:
    """The dtype and device of a transformers target do not apply to it, nor the reverse."""
    target = crossdraft.load_model(models["target"], dtype="bfloat16")
    assert load_draft_model(bigram(tmp_path), target).backend == "bigram"
    assert load_draft_model(models["target"], target).model.dtype == torch.bfloat16
    other = load_draft_model(models["target"], crossdraft.load_model(bigram(tmp_path)))
    assert other.model.dtype == crossdraft.load_model(models["target"]).model.dtype


def test_recipe_on_another_backend(tmp_path: Path) -> None:
    path = bigram(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"a b {x}"}) + "\n" for x in "abcd"))
    recipe = tmp_path / "recipe.yaml"
    drafters = ["prompt-lookup", {"name": "draft-model", "model": path, "gamma": 2}]
    data = {"target": path, "prompts": str(prompts), "max_new_tokens": 6, "drafters": drafters, "batch_size": 2}
    recipe.write_text(json.dumps(data | {"verifiers": ["token", "block"], "sampling": {"temperature": 0}}))
    outcome = run(load_recipe(str(recipe)), tmp_path / "runs", log=None)
    assert not outcome.failed
    assert [r.metrics.same_as_baseline for r in outcome.results if r.metrics] == [1.0] * 5


def test_preparation_changes_passes_only(models: dict[str, str]) -> None:
    target = crossdraft.load_model(models["target"], dtype="float32", device="cpu")
    plain = answers(target, "none")
    banned = plain[0].tokens[0]
    target.model.config.banned_token = banned
    ids = torch.tensor([[5, 6, 7]])
    before = target.model(ids).logits
    for drafter in ("none", "prompt-lookup"):
        assert all(banned not in response.tokens for response in answers(target, drafter))
    assert torch.equal(target.model(ids).logits, before)


def test_preparation_that_fails_is_named(target: crossdraft.LoadedModel, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies.BannedToken, "prepare", classmethod(lambda cls, model: 1 / 0))
    with pytest.raises(crossdraft.ContractError, match=r"'banned-token'.*prepare.*ZeroDivisionError"):
        answers(target, "none")
