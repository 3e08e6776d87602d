"""Recipes: expansion to cells, and error messages."""

# ruff: noqa: E501 (whole sentences on one line can be read)

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from companions import needs_command

from crossdraft.framework import plugins
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.contracts.draft_kind import IID
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UnknownNameError, UsageError
from crossdraft.framework.recipe.builtin_recipes import builtin_recipes
from crossdraft.framework.recipe.recipe import RUN_KEYS, CellConfig, PromptSpec, Recipe, read_recipe

WRITE = Callable[[str], str]

BASE = """\
target: {models}/target
max_new_tokens: 8
drafters:
  - prompt-lookup
  - name: draft-model
    model: {models}/small
    gamma: 4
verifiers:
  - greedy
  - token
  - block
matrix:
  temperature: [0, 1.0]
  batch_size: [1, 3]
exclude:
  - verifier: [token, block]
    temperature: 0
"""
NEEDS_ZERO = (
    "verifier 'greedy' compares with the target's argmax and needs temperature 0, but the temperature is 1; "
    "use 'token' or 'block' for sampling"
)


@pytest.fixture
def base(tmp_path: Path, recipe_file: WRITE) -> str:
    """Path of `BASE`; models may be any directories until they are loaded."""
    for name in ("target", "small"):
        (tmp_path / name).mkdir()
    return recipe_file(BASE.format(models=tmp_path))


def pairs(cells: list[CellConfig]) -> list[tuple[float, int, str, str]]:
    return [(c.sampling.temperature, c.batch_size, c.drafter.label, c.verifier.label) for c in cells]


def error(name: str, *settings: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(name, settings)
    return str(caught.value)


# -- expansion -----------------------------------------------------------------------------------------------


def test_matrix_is_expanded_and_every_group_gets_its_baseline(base: str) -> None:
    recipe = load_recipe(base)
    result = expand(recipe)
    zero = [("none", "greedy"), ("prompt-lookup", "greedy"), ("draft-model", "greedy")]
    one = [("none", "token")] + [(d, v) for d in ("prompt-lookup", "draft-model") for v in ("token", "block")]
    expected = [(t, b, *pair) for t, group in ((0.0, zero), (1.0, one)) for b in (1, 3) for pair in group]
    assert sorted(pairs(result.cells)) == sorted(expected)
    assert [len(group) for group in result.groups.values()] == [3, 5, 3, 5]
    assert all(group[0].is_baseline for group in result.groups.values())
    assert result.skipped == [NEEDS_ZERO]
    assert (recipe.name, expand(recipe).cells) == ("recipe", result.cells)


def test_configs_are_resolved_with_their_defaults(base: str) -> None:
    cell = next(c for c in expand(load_recipe(base)).cells if c.drafter.name == "prompt-lookup")
    assert cell.drafter.config == {"gamma": 10, "max_ngram": 3, "min_ngram": 1, "match": "latest"}
    assert (cell.max_new_tokens, cell.prompts.source) == (8, "builtin")


def test_matrix_key_applies_to_all_supporting_strategies(base: str) -> None:
    cells = expand(load_recipe(base, {"matrix.gamma": [2, 4], "matrix.max_ngram": [3], "matrix.batch_size": 1})).cells
    labels = sorted({c.drafter.label for c in cells})
    assert labels == [
        "draft-model gamma=2",
        "draft-model gamma=4",
        "none",
        "prompt-lookup gamma=2",
        "prompt-lookup gamma=4",
    ]
    assert len(cells) == 2 + 2 * 2 + 2 * 2 * 2


def test_sampling_key_in_matrix_is_runs(base: str) -> None:
    """The draft model has its own temperature; only its own entry sets it."""
    cells = expand(load_recipe(base, ["drafters.1.temperature=0.5"])).cells
    assert {c.drafter.config["temperature"] for c in cells if c.drafter.name == "draft-model"} == {0.5}
    assert {c.sampling.temperature for c in cells} == {0, 1}


def test_run_keys_in_matrix(base: str) -> None:
    settings = ["matrix={seed: [0, 1], max_new_tokens: [4, 8], dtype: [float32]}", "sampling.temperature=0"]
    groups = expand(load_recipe(base, settings)).groups.values()
    assert [(g[0].seed, g[0].max_new_tokens, g[0].dtype) for g in groups] == [
        (0, 4, "float32"), (0, 8, "float32"), (1, 4, "float32"), (1, 8, "float32")
    ]  # fmt: skip


def test_labels(base: str) -> None:
    drafters = "drafters=[{name: prompt-lookup, label: copy}, {name: prompt-lookup, gamma: 3}, {name: prompt-lookup, gamma: 5}]"
    labels = {c.drafter.label for c in expand(load_recipe(base, [drafters])).cells}
    assert labels == {"none", "copy", "prompt-lookup gamma=3", "prompt-lookup gamma=5"}
    # What a variant leaves open is not in its label.
    tree = f"name: draft-model-tree, model: {Path(base).parent / 'small'}"
    trees = f"drafters=[{{{tree}, growth: opt-tree, nodes: 15}}, {{{tree}, branching: [3, 2]}}]"
    labels = {c.drafter.label for c in expand(load_recipe(base, [trees, "verifiers=[traversal]", "exclude=[]"])).cells}
    assert labels == {"none", "draft-model-tree growth=opt-tree nodes=15", "draft-model-tree branching=[3, 2]"}


@needs_command("verify-engine")
def test_labels_of_engines(base: str) -> None:
    """Tables of costs and series over batch sizes keep engines by their label, which is not part of a hash."""
    urls = [f"http://127.0.0.1:{port}/v1" for port in (1, 2)]

    def cells(*engines: str) -> list[CellConfig]:
        options = [f"{{name: openai, baseline_url: {urls[0]}, {engine}}}" for engine in engines]
        return expand(load_recipe(base, [f"matrix.engine=[{', '.join(options)}]"])).cells

    both = cells(*(f"url: {url}" for url in urls))
    assert {c.engine.title for c in both} == {f"openai url={url}" for url in urls}
    assert both[0].engine.title.endswith(urls[0])
    assert both[0].hash == cells(f"url: {urls[0]}")[0].hash == cells(f"url: {urls[0]}, label: mine")[0].hash


def test_exclude(base: str) -> None:
    def left(entry: str) -> int:
        return len(
            expand(load_recipe(base, [f"exclude=[{{temperature: 0, verifier: [token, block]}}, {entry}]"])).cells
        )

    assert left("{batch_size: 3}") == 8
    assert left("{drafter: draft-model, batch_size: [1, 3], temperature: 1}") == 12
    assert left("{gamma: 4}") == 10
    assert left("{drafter: prompt-lookup}") == 10


def test_fully_excluded_point_has_no_baseline(base: str) -> None:
    cells = expand(load_recipe(base, ["exclude.0={temperature: 0}", "verifiers=[token]"])).cells
    assert {c.sampling.temperature for c in cells} == {1}


def test_exclude_of_values_that_a_setting_removed(base: str, tmp_path: Path) -> None:
    """The file's entries for them exclude nothing, silently; an entry of ``--set`` that excludes nothing is an error."""
    data = yaml.safe_load(Path(base).read_text(encoding="utf-8"))
    file = tmp_path / "excluding.yaml"
    file.write_text(yaml.safe_dump(data | {"exclude": [{"batch_size": 3}]}), encoding="utf-8")
    assert {cell.batch_size for cell in expand(load_recipe(str(file), ["matrix.batch_size=[1]"])).cells} == {1}
    copies = [{"name": "prompt-lookup", "label": "copies"}]
    file.write_text(yaml.safe_dump(data | {"drafters": copies, "exclude": [{"drafter": "copies"}]}), encoding="utf-8")
    setting = "drafters=[prompt-lookup]"
    assert {cell.drafter.label for cell in expand(load_recipe(str(file), [setting])).cells} == {"none", "prompt-lookup"}
    with pytest.raises(UsageError, match="no drafter named 'copies'"):
        load_recipe(str(file), [setting, "exclude=[{drafter: copies}]"])
    with pytest.raises(UsageError, match="matches no cell"):
        expand(load_recipe(str(file), ["matrix.batch_size=[1]", "exclude=[{batch_size: 3}]"]))


def test_recipe_of_baselines(base: str) -> None:
    def cells(exclude: str) -> int:
        return len(expand(load_recipe(base, ["drafters=[none]", "verifiers=[token]", f"exclude={exclude}"])).cells)

    assert cells("[]") == 4
    assert cells("[{temperature: 0}]") == cells("[{drafter: none, batch_size: 3}]") == 2
    assert cells("[{verifier: token}]") == 4  # of pairs, which this recipe does not have


def test_hashes(base: str, tmp_path: Path) -> None:
    first, repeat = expand(load_recipe(base)), expand(load_recipe(base))
    assert first.hash == repeat.hash and re.fullmatch("[0-9a-f]{12}", first.hash)
    hashes = [c.hash for c in first.cells]
    assert len(set(hashes)) == len(hashes)
    assert expand(load_recipe(base, ["question=why", "drafters.1.label=s"])).hash == first.hash
    for change in ("seed=1", "limit=3", "drafters.1.gamma=5", "max_new_tokens=9", "prompts.limit=2"):
        assert expand(load_recipe(base, [change])).hash != first.hash


def test_hash_does_not_change_between_versions() -> None:
    """A changed hash would invalidate all results on disk."""
    cell = CellConfig.model_validate({"target": "org/model", "drafter": "none", "verifier": "token"})
    assert cell.hash == "07809d63ba5d"


def test_resolved_recipe_can_be_loaded_again(base: str) -> None:
    recipe = load_recipe(base, ["drafters.0={name: prompt-lookup, label: copy}"])
    assert expand(Recipe.model_validate(recipe.model_dump(mode="json"))).hash == expand(recipe).hash


# -- --set ---------------------------------------------------------------------------------------------------


def test_set(base: str) -> None:
    settings = [
        "matrix.batch_size=[2]",
        "sampling.top_k=5",
        "drafters.0.gamma=3",
        "prompts.limit=4",
        "limit=2",
    ]
    recipe = load_recipe(base, settings)
    cells = expand(recipe).cells
    assert {(c.batch_size, c.sampling.top_k, c.prompts.limit) for c in cells} == {(2, 5, 2)}
    assert {c.drafter.config["gamma"] for c in cells if c.drafter.name == "prompt-lookup"} == {3}


@pytest.mark.parametrize(
    "setting, sentence",
    [
        ("limit", "write --set key=value, as in --set matrix.batch_size=[1,4]"),
        ("limit=@", "the value is not YAML: found character '@' that cannot start any token; it may need quotes for the shell"),
        ("limit=0", "limit: should be greater than or equal to 1, not 0"),
        ("max_new_token=3", "unknown key 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("temperature=1", "unknown key 'temperature'; put it under sampling, or under matrix with a list of values"),
        ("drafters.5.gamma=1", "drafters is a list; 5 is not one of 0 to 1"),
        ("device=[1]", "device: must be a device, or a mapping of modules to devices, not [1]"),
        ("device={a: true}", "device: must be a device, or a mapping of modules to devices, not {'a': True}"),
        ("max_new_tokens.x=1", "max_new_tokens is 8, which has no key 'x'"),
        ("matrix.temperature=[warm]", "matrix.temperature[0]: should be a valid number, not 'warm'"),
        ("drafters.1.gamma=-1", "drafters[1].gamma: should be greater than or equal to 0, not -1"),
    ],
)  # fmt: skip
def test_bad_set_names_itself(base: str, setting: str, sentence: str) -> None:
    assert error(base, setting) == f"--set {setting}: {sentence}"


def test_set_in_empty_list(base: str) -> None:
    setting = "exclude.0.drafter=medusa"
    assert error(base, "exclude=[]", setting) == f"--set {setting}: exclude is an empty list; set exclude=[...] instead"


# -- errors --------------------------------------------------------------------------------------------------

EDITS = {
    "temprature: [0]": ("temperature: [0, 1.0]", 13, "unknown key 'temprature' in matrix: no drafter or verifier of this recipe has this option; did you mean 'temperature'?"),
    "gama: 4": ("gamma: 4", 7, "unknown key 'gama' in drafter 'draft-model'; did you mean 'gamma'?"),
    "gamma: four": ("gamma: 4", 7, "drafters[1].gamma: should be a valid integer, not 'four'"),
    "name: draft-modl": ("name: draft-model", 5, "there is no drafter named 'draft-modl'; did you mean 'draft-model'? Installed: DRAFTERS."),
    "- tokn": ("- token", 10, "there is no verifier named 'tokn'; did you mean 'token'? Installed: VERIFIERS."),
    "max_new_tokens: many": ("max_new_tokens: 8", 2, "max_new_tokens: should be a valid integer, not 'many'"),
    "max_token: 8": ("max_new_tokens: 8", 2, "unknown key 'max_token'; did you mean 'max_new_tokens'?"),
    "batch_size: [1, 0]": ("batch_size: [1, 3]", 14, "matrix.batch_size[1]: should be greater than or equal to 1, not 0"),
    "batch_size: []": ("batch_size: [1, 3]", 14, "matrix.batch_size is an empty list; add a value or remove the key"),
    "temperatur: 0": ("temperature: 0\n", 17, "unknown key 'temperatur' in exclude; did you mean 'temperature'?"),
    "- verifier: [tokens, block]": ("- verifier: [token, block]", 16, "there is no verifier named 'tokens'; did you mean 'token'? Installed: VERIFIERS."),
    "- constraint: {regexp: a}": ("- verifier: [token, block]", 16, "exclude[0].constraint.regexp: is unknown; did you mean 'regex'?"),
    "max_new_tokens: 8\nmax_new_tokens: 9": ("max_new_tokens: 8", 3, "the key 'max_new_tokens' is given twice; remove one of them"),
    "max_new_tokens: 8\nprompts: bultin": ("max_new_tokens: 8", 3, "there is no prompt source named 'bultin'; did you mean 'builtin'? Installed: PROMPTS. Or give a JSONL file, a directory, or hf:org/name."),
    "max_new_tokens: 8\nprompts: {name: a, path: b}": ("max_new_tokens: 8", 3, "prompts: give either the name of the prompts or the path of a file"),
    "max_new_tokens: 8\nsampling: {topk: 3}": ("max_new_tokens: 8", 3, "unknown key 'topk' in sampling; did you mean 'top_k'?"),
    "max_new_tokens: 8\ndtype: int8": ("max_new_tokens: 8", 3, "unknown dtype 'int8'; use auto, float32, bfloat16 or float16"),
    "  - 7": ("  - prompt-lookup", 4, "drafters[0]: must be a name, or a mapping of keys to values, not 7"),
    "  - {name: prompt-lookup, label: draft-model}": ("  - prompt-lookup", 5, "drafters[1] has the same name in tables as drafters[0], drafter 'prompt-lookup': 'draft-model'; change its label"),
    "  - {label: x}": ("  - prompt-lookup", 4, "drafters[0] needs the key 'name'"),
    "  - draft-model": ("  - prompt-lookup", 4, "drafter 'draft-model' needs the key 'model'"),
}  # fmt: skip


@pytest.mark.parametrize("new", EDITS)
def test_error_names_file_line_and_suggestion(base: str, recipe_file: WRITE, new: str) -> None:
    old, line, sentence = EDITS[new]
    text = Path(base).read_text(encoding="utf-8")
    assert old in text
    for kind in ("drafters", "verifiers", "prompts"):
        sentence = sentence.replace(kind.upper(), ", ".join(sorted(plugins.entries(kind))))
    assert error(recipe_file(text.replace(old, new, 1))) == f"{base}:{line}: {sentence}"


def test_drafter_of_missing_companion_is_named(base: str, recipe_file: WRITE, monkeypatch: Any) -> None:
    monkeypatch.setitem(plugins.COMPANIONS, ("drafters", "fleet"), "crossdraft-fleet")
    text = Path(base).read_text(encoding="utf-8").replace("  - prompt-lookup", "  - fleet", 1)
    sentence = "the drafter 'fleet' is part of crossdraft-fleet; in a clone of crossdraft: pip install plugins/crossdraft-fleet"
    assert error(recipe_file(text)) == f"{base}:4: {sentence}"


def test_every_error_is_reported(base: str) -> None:
    assert error(base, "limit=0", "seeds=1") == (
        "--set limit=0: limit: should be greater than or equal to 1, not 0\n"
        "--set seeds=1: unknown key 'seeds'; did you mean 'seed'?"
    )


def test_missing_keys_and_invalid_files(recipe_file: WRITE, tmp_path: Path) -> None:
    path = recipe_file("target: x/y\nverifiers: [token]\n")
    assert error(path) == f"{path}: the recipe needs the key 'drafters'"
    assert (
        error(recipe_file("- a\n"))
        == f"{path}: a recipe must be a mapping of keys to values (target: ..., drafters: ...)"
    )
    assert (
        error(recipe_file("")) == f"{path}: a recipe must be a mapping of keys to values (target: ..., drafters: ...)"
    )
    assert error(recipe_file("a: 1\nb: [\n")).startswith(f"{path}:3: this is not YAML: ")
    Path(path).write_bytes(b"\xff\xfe\x00")
    assert error(path) == f"cannot read the recipe {path}: it is not UTF-8 text but UTF-16; save it as UTF-8"
    Path(path).write_bytes(b"target: x\n\xff")
    assert error(path) == f"cannot read the recipe {path}: it is not UTF-8 text (line 2)"


def test_missing_recipe_is_reported(tmp_path: Path) -> None:
    known = ", ".join(sorted(builtin_recipes()))
    assert error("missing.yaml") == f"the recipe file missing.yaml does not exist; recipes by name: {known}"
    assert error(f"{tmp_path}/") == f"the recipe file {tmp_path}/ is a directory; recipes by name: {known}"
    with pytest.raises(UnknownNameError, match="there is no recipe named 'nothing-like-it'"):
        load_recipe("nothing-like-it")


def test_recipes_by_name() -> None:
    assert read_recipe("quickstart").model_dump() == read_recipe(builtin_recipes()["quickstart"]).model_dump()


def test_models_that_cannot_be(base: str, tmp_path: Path) -> None:
    assert error(base, "target=/no/where") == "--set target=/no/where: model directory /no/where does not exist"
    result = error(base, "drafters.1.model=nowhere")
    assert result.startswith("--set drafters.1.model=nowhere: there is no model named 'nowhere'")
    assert result.endswith("Or give a directory, or a Hub id (org/name).")
    load_recipe(base, ["target=org/name"])  # whether it can be had is known when it is loaded


def test_pairs_that_cannot_run(base: str) -> None:
    assert (
        error(base, "matrix.temperature=[1]") == f"{base}:9: verifier 'greedy' has no compatible partner: {NEEDS_ZERO}"
    )
    result = error(base, "verifiers=[greedy]", "exclude=[]")
    assert result == f"--set verifiers=[greedy]: {NEEDS_ZERO}, or exclude these cells"
    assert error(base, "exclude=[{temperature: [0, 1]}]").endswith("exclude matches every cell; no cell is left to run")
    load_recipe(base, ["matrix.temperature=[0]"])  # token and block are excluded there, which is a choice


def test_drafter_that_no_verifier_takes(base: str, install: Any) -> None:
    from crossdraft.framework.contracts.drafter import Drafter, DraftTraits

    class Tree(Drafter):
        name = "tree"

        @classmethod
        def traits(cls, config: Any, sampling: Any) -> DraftTraits:
            return DraftTraits(kind=IID, point_mass=False, nodes=16)

        def propose(self, sequences: Any, rng: Any) -> Any: ...

    install("drafters", ("tree", Tree))
    assert error(base, "drafters.0=tree", "verifiers=[token, block]", "exclude=[]") == (
        "--set drafters.0=tree: drafter 'tree' has no compatible partner: drafter 'tree' makes 'iid' drafts, but verifier 'token' "
        "accepts only: chain; see crossdraft list drafters tree for compatible verifiers"
    )
    skipped = expand(load_recipe(base, ["drafters.0=tree"])).skipped
    assert any("drafter 'tree' makes 'iid' drafts" in reason for reason in skipped)
    assert any("'greedy' compares" in reason and "use 'traversal' or 'specinfer'" in reason for reason in skipped)


def test_prompt_file_relative_to_recipe(base: str, tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"turns": ["x"]}\n', encoding="utf-8")
    assert load_recipe(base, ["prompts=my.jsonl"]).prompts.source == str(tmp_path / "my.jsonl")
    assert error(base, "prompts=your.jsonl").startswith(
        "--set prompts=your.jsonl: prompt file your.jsonl does not exist"
    )


def test_recipe_errors_precede_pytorch_import(tmp_path: Path) -> None:
    """Typing mistakes are reported before PyTorch is imported, which takes seconds."""
    right = "drafters: [prompt-lookup]"
    cases = [
        ("drafers: [prompt-lookup]", [], "0.yaml:2: unknown key 'drafers'; did you mean 'drafters'?"),
        ("drafters: [prompt-lookup", [], "this is not YAML"),
        (right, ["batch_sise=4"], "--set batch_sise=4: unknown key 'batch_sise'"),
        (right, ["sampling.temprature=1"], "did you mean 'temperature'?"),
        (right, ["max_new_tokens=many"], "max_new_tokens"),
    ]
    commands = []
    for i, (text, settings, _) in enumerate(cases):
        (tmp_path / f"{i}.yaml").write_text(f"target: x\n{text}\nverifiers: [token]\n", encoding="utf-8")
        commands.append(["run", f"{i}.yaml", *(word for setting in settings for word in ("--set", setting))])
    code = (
        "import sys\n"
        "from crossdraft.framework.cli.main import main\n"
        f"for command in {commands!r}:\n"
        "    assert main(command) == 2, command\n"
        "    assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), command"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    before, *errors = done.stderr.split("crossdraft: error: ")
    assert not before and len(errors) == len(cases), done.stderr
    for error, (_, _, words) in zip(errors, cases, strict=True):
        assert words in error


def test_page_about_recipes_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    example = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert len(Recipe.model_validate({"name": "page", **example}).drafters) == 3
    keys = {*Recipe.model_fields, *Sampling.model_fields, *PromptSpec.model_fields, *RUN_KEYS}
    assert not [key for key in sorted(keys) if f"`{key}`" not in page]
    defaults = {"max_new_tokens": "128", "batch_size": "1", "seed": "0", "dtype": "`auto`", "device": "`auto`"}
    for key, shown in defaults.items():
        assert f"| `{key}` | {shown} |" in page and str(Recipe.model_fields[key].default) == shown.strip("`")
