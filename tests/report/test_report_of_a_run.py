"""``crossdraft report`` on a run of tiny models."""

from pathlib import Path
from typing import Any

from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.cli import main as cli

RECIPE = """\
question: does it run?
target: {target}
prompts: {prompts}
dtype: float32
device: cpu
max_new_tokens: 8
drafters:
  - prompt-lookup
  - {{name: draft-model, model: {same}, gamma: 3}}
verifiers: [token, block]
matrix: {{temperature: [1], batch_size: [2]}}
"""


def test_run_and_its_page(
    tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any, capsys: Any
) -> None:
    recipe = recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))
    assert cli.main(["run", recipe, "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    (directory,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    assert cli.main(["report", str(directory)]) == 0
    page = capsys.readouterr().out.splitlines()
    summary = (directory / "summary.md").read_text(encoding="utf-8").splitlines()
    tables = [line for line in summary if line.startswith("| ")]
    assert len(tables) >= 6 and set(tables) <= set(page)  # a header and five cells
    (prompts,) = [line for line in page if line.startswith("| prompts ")]
    assert prompts.split("|")[2].strip() == "6 of prompts.jsonl"
    assert "| command " in "".join(page) and "`crossdraft run recipe.yaml`" in "".join(page)
    # The stored recipe reproduces the run.
    assert directory.name.endswith(expand(load_recipe(directory / "recipe.json")).hash)
