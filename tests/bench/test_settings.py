"""Settings files of drafters: part of the provenance, measured again after changes."""

import json
from pathlib import Path

import pytest

from crossdraft.framework.api.build import TargetContext
from crossdraft.framework.bench.provenance import changes, models_used
from crossdraft.framework.contracts.drafter import DraftContext
from crossdraft.framework.errors import UsageError


def context() -> TargetContext:
    instance = object.__new__(TargetContext)  # nothing else is used
    instance.used = {}
    return instance


@pytest.mark.parametrize("in_a_directory", [True, False])
def test_file_that_has_changed_is_found(tmp_path: Path, in_a_directory: bool) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"kind": "layer-skip"}')
    target_context = context()
    name = str(tmp_path if in_a_directory else file)
    assert target_context.load_settings(name) == {"kind": "layer-skip"}
    before = {"models": json.loads(json.dumps(models_used(target_context.used)))}
    assert target_context.used[name]["file"] == str(file.resolve()) and changes(before, {}) == []
    file.write_text('{"kind": "something else"}')
    assert changes(before, {}) == [f"the weights of {name}"]
    file.unlink()
    assert changes(before, {}) == [f"the model {name}, which is missing"]


def test_missing_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the settings .*settings\.json"):
        context().load_settings(str(tmp_path))
    assert DraftContext.load_settings is not TargetContext.load_settings
