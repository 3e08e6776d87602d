"""The files that a digest of code covers."""

from pathlib import Path

import pytest

from crossdraft.framework.runs.code_digest import _closure


@pytest.mark.parametrize(
    ("text", "covered", "left_out"),
    [
        ("from crossdraft import first_line", "framework.errors", "framework.api.generate"),
        ("from crossdraft.heads import Rotary", "drafters.heads.rotary", "framework.api.generate"),
        ("import crossdraft", "framework.api.generate", "framework.api.other"),
    ],
)
def test_digest_covers_homes_of_published_names(
    text: str, covered: str, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module := tmp_path / f"own_{covered.replace('.', '_')}.py").write_text(text + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    files = _closure([module.stem])
    assert f"crossdraft.{covered}" in files and f"crossdraft.{left_out}" not in files
