"""Directories of cells: readable names, lookup by hash, and those of older versions."""

from pathlib import Path

import pytest
from html_runs import SMALL, finished_run

from crossdraft.framework.recipe.recipe import CellConfig
from crossdraft.framework.runs.records import CellResult
from crossdraft.framework.runs.run_directory import RunDirectory, cell_name


@pytest.fixture
def results(tmp_path: Path) -> list[CellResult]:
    return finished_run(tmp_path / "made", SMALL, tokens=12).summary.results


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in (run.path / "cells").iterdir())


def test_names_of_cells() -> None:
    drafter = {"name": "draft-model", "label": "../ä b: gamma=4\u202e" + "x" * 60}
    arguments = {
        "target": "t",
        "drafter": drafter,
        "verifier": "token",
        "batch_size": 8,
        "sampling": {"temperature": 0.6},
    }
    config = CellConfig.model_validate(arguments)
    name = cell_name(config)
    assert name == f"b-gamma=4-{'x' * 27}_token_T0.6_B8_{config.hash}" and len(name) < 100
    dots = CellConfig.model_validate(arguments | {"drafter": {"name": "d", "label": "..."}})
    assert cell_name(dots) == f"unnamed_token_T0.6_B8_{dots.hash}"


def test_cells_of_older_versions(tmp_path: Path, results: list[CellResult]) -> None:
    """Directories named by the hash only are read, copied and replaced like others."""
    old, new, result = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new"), results[1]
    config = result.config
    old.save(result)
    assert names(old) == [cell_name(config)] == [f"prompt-lookup_token_T1_B1_{config.hash}"]
    (old.path / "cells" / cell_name(config)).rename(old.path / "cells" / config.hash)
    assert old.cell_path(config.hash) == old.path / "cells" / config.hash
    read = old.load(config)
    assert read is not None and read.metrics == result.metrics and read.records == result.records
    new.adopt(old, [config])
    assert names(new) == [cell_name(config)] and new.load(config) is not None
    old.save(result)  # measured again
    assert names(old) == [cell_name(config)]


def test_another_label_is_same_cell(tmp_path: Path, results: list[CellResult]) -> None:
    run, result = RunDirectory(tmp_path / "run"), results[1]
    run.save(result)
    drafter = result.config.drafter.model_copy(update={"label": "mine"})
    result.config = result.config.model_copy(update={"drafter": drafter})
    assert run.load(result.config) is not None
    run.save(result)
    assert names(run) == [f"mine_token_T1_B1_{result.config.hash}"]
    assert run.cell_path("0" * 12) is None and RunDirectory(tmp_path / "gone").cell_path("0" * 12) is None
