"""Built-in recipes: each expands without changes to the expected cells."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crossdraft_combine
import crossdraft_drafters
import crossdraft_ngram_cache
import crossdraft_suffix
import pytest
import yaml

import crossdraft.recipes
from crossdraft.framework import plugins
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.errors import UnknownNameError, UsageError
from crossdraft.framework.recipe.builtin_recipes import builtin_recipes, summary_of

FOLDER = Path(crossdraft.recipes.__file__).parent
#: Cells, baselines included, and groups.
PAPER = {
    "coder": (
        45,
        6,
    ),  # 3 batch sizes x (1 + 5 drafters at temperature 0, 1 + 4 + 3 rules + two drafts at temperature 1)
    "coder-lengths": (6, 1),
    "model-free": (24, 4),  # 2 temperatures x 2 batch sizes x (1 + 5 drafters)
    "paper/block-table1-gamma": (21, 3),  # 3 seeds x (1 + 3 gammas x 2 rules)
    "paper/block-table2": (9, 3),  # 3 temperatures x (1 + 2 rules)
    "paper/block-table4": (4, 1),  # 1 + 3 rules
    "paper/block-table5": (12, 2),  # 2 batch sizes x (1 + 2 rules for one draft + 3 for two)
    "paper/dynamic-speculation": (8, 2),  # 2 targets x (1 + 3 drafters)
    "paper/dynamic-speculation-code": (8, 2),
    "quantized": (12, 2),  # 2 temperatures x (1 + 5 drafters)
    "smollm2-drafters": (8, 2),  # 2 temperatures x (1 + 3 drafters)
    "smollm2-gamma": (7, 1),
    "smollm2-table5": (12, 2),
    "trees": (10, 2),  # 2 temperatures x (1 + 4 drafters)
}
SHIPPED = sorted(builtin_recipes())


@pytest.fixture(autouse=True)
def smollm2() -> Any:
    """Names of the SmolLM2 pack and of the drafters of four packages, which need not be installed.

    A model is only a name until it is loaded.
    """
    packages = {"ngram-cache": crossdraft_ngram_cache, "suffix": crossdraft_suffix, "jacobi": crossdraft_drafters}
    packages["combine"] = crossdraft_combine
    missing = [package for name, package in packages.items() if name not in plugins.entries("drafters")]
    pack = {"smollm2-135m-instruct", "smollm2-draft-model", "smollm2-medusa", "smollm2-eagle3"}
    names = pack - plugins.entries("models").keys()

    def register_models(register: Any) -> None:
        for name in names:
            register(name, "nothing:nothing")

    plugin = SimpleNamespace(crossdraft_register_models=hookimpl(register_models))
    for item in (plugin, *missing):
        plugins.manager().register(item)
    yield
    for item in (plugin, *missing):
        plugins.manager().unregister(item)


def test_every_file_is_named_by_its_path() -> None:
    files = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")}
    assert files == set(SHIPPED) and PAPER.keys() <= files
    for name in SHIPPED:
        assert builtin_recipes()[name] == FOLDER / f"{name}.yaml"
        assert summary_of(builtin_recipes()[name]), f"{name} has no first comment line"


def test_they_are_listed(capsys: Any) -> None:
    assert cli.main(["list", "recipes"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in SHIPPED)


def test_name_that_is_nearly_right() -> None:
    with pytest.raises(
        UnknownNameError, match=r"there is no recipe named 'paper/table2'; did you mean 'paper/block-table2'\?"
    ):
        load_recipe("paper/table2")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_can_be_planned(name: str) -> None:
    recipe = load_recipe(name, {"prompts": "builtin"})
    result = expand(recipe)
    assert result.skipped == []
    assert recipe.question and recipe.description
    for group in result.groups.values():
        assert group[0].is_baseline and len(group) > 1
    if name in PAPER:
        assert (len(result.cells), len(result.groups)) == PAPER[name]


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("paper/")])
def test_paper_recipes_use_papers_prompts(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A missing prompt file is an error with the line in the recipe; built-in prompts are not used instead."""
    monkeypatch.chdir(tmp_path)
    source = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["prompts"]
    if str(source).startswith("hf:"):
        assert load_recipe(name).prompts.source == source
        return
    with pytest.raises(UsageError, match=rf"{name}\.yaml:\d+: prompt file question\.jsonl does not exist"):
        load_recipe(name)
    Path("question.jsonl").touch()
    assert load_recipe(name).prompts.source == "question.jsonl"


def test_table2_has_settings_of_paper() -> None:
    recipe = load_recipe("paper/block-table2", {"prompts": "builtin"})
    cells = [cell for cell in expand(recipe).cells if not cell.is_baseline]
    assert {cell.target for cell in cells} == {"lmsys/vicuna-7b-v1.3"}
    assert {(cell.drafter.config["model"], cell.drafter.config["gamma"]) for cell in cells} == {
        ("double7/vicuna-68m", 8)
    }
    assert {(cell.batch_size, cell.max_new_tokens) for cell in cells} == {(1, 1024)}
    rules = [(cell.sampling.temperature, cell.verifier.name) for cell in cells]
    assert rules == [(t, rule) for t in (0.2, 0.6, 1) for rule in ("token", "block")]


def test_two_drafts_meet_only_rules_for_two() -> None:
    for name in ("paper/block-table5", "smollm2-table5"):
        cells = expand(load_recipe(name)).cells
        pairs = [(c.drafter.name, c.drafter.config.get("K"), c.verifier.name) for c in cells if c.batch_size == 8][1:]
        assert pairs == [
            ("draft-model", None, "token"),
            ("draft-model", None, "block"),
            ("draft-model-iid", 2, "spectr"),
            ("draft-model-iid", 2, "specinfer"),
            ("draft-model-iid", 2, "traversal"),
        ]


def test_drafting_models_belong_to_their_targets() -> None:
    for name in ("paper/dynamic-speculation", "paper/dynamic-speculation-code"):
        cells = expand(load_recipe(name, {"prompts": "builtin"})).cells
        assert len({cell.target for cell in cells}) == 2
        for cell in cells:
            organisation = cell.target.partition("/")[0]
            assert cell.is_baseline or cell.drafter.config["model"].startswith(f"{organisation}/")
