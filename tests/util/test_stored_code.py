"""Code is loaded only from where others cannot write."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.util import compilation
from crossdraft.framework.util.stored_code import ForeignCodeError, own_directory, own_path

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    directory = own_directory(tmp_path / "cache" / "layers", "SOME_CACHE")
    file = directory / "code.pt2"
    file.touch(mode=0o600)
    return file


def test_own_code_is_accepted(code: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(code.parent.stat().st_mode) == stat.S_IMODE(code.parent.parent.stat().st_mode) == 0o700
    assert own_path(code, "SOME_CACHE") == code.resolve()
    (tmp_path / "link").symlink_to(code.parent)
    assert own_path(tmp_path / "link" / code.name, "SOME_CACHE") == code.resolve()
    sticky = tmp_path / "cache"
    sticky.chmod(0o1777)  # like /tmp: others cannot replace `layers`
    assert own_directory(code.parent, "SOME_CACHE") == code.parent.resolve()


@pytest.mark.parametrize("place", ["code.pt2", "layers", "cache"])
@pytest.mark.parametrize("flaw", [0o770, 0o707, 0o1777, "owner"])
def test_code_that_others_can_replace_is_refused(code: Path, monkeypatch: Any, place: str, flaw: Any) -> None:
    foreign = {"code.pt2": code, "layers": code.parent, "cache": code.parent.parent}[place]
    if flaw != "owner":
        foreign.chmod(flaw)
    elif os.getuid() == 0:
        os.chown(foreign, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    sticky_above = flaw == 0o1777 and place != "code.pt2"  # of a file, the bit has no meaning
    if sticky_above:
        assert own_path(code, "SOME_CACHE")
        with pytest.raises(ForeignCodeError) if place == "layers" else monkeypatch.context():
            own_directory(code.parent, "SOME_CACHE")
        return
    with pytest.raises(ForeignCodeError) as refused:
        own_path(code, "SOME_CACHE")
    assert (str(foreign) in str(refused.value) or flaw == "owner") and "SOME_CACHE" in str(refused.value)


def test_link_in_a_directory_of_others_is_refused(code: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "link").symlink_to(code.parent)
    with pytest.raises(ForeignCodeError, match="shared"):
        own_path(shared / "link" / code.name, "SOME_CACHE")


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_compiler_with_a_cache_of_others_is_refused(tmp_path: Path, monkeypatch: Any, variable: str) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv(variable, str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ForeignCodeError, match=variable):
        compilation.jit_compile(lambda x: x)
    with pytest.raises(ForeignCodeError, match=variable):
        compilation.package_program(None, tmp_path / "code.pt2")  # type: ignore[arg-type]
    (tmp_path / "shared").chmod(0o755)
    assert compilation.jit_compile(lambda x: x)
