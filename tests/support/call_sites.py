"""Calls between this repository and given packages that each test makes, in the folder that an environment names.

``CROSSDRAFT_CALL_SITES=FOLDER:PACKAGE,PACKAGE`` has every test append one line to a file of its process there: its
 name, seconds of processor time and calls. `.ci/covering` chooses tests that make all of them.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

FOLDER, _, _PACKAGES = os.environ.pop("CROSSDRAFT_CALL_SITES", "").partition(":")  # not for processes that tests start
PACKAGES = tuple(_PACKAGES.split(","))
ROOT = Path(__file__).parents[2]
_SKIPPED = (str(ROOT / "tests"), str(ROOT / ".venv"), str(ROOT / "venv"))
_TORCH = f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py"
_owners: dict[str, str] = {}


def owner(file: str) -> str:
    """``"ours"``, one of `PACKAGES`, ``"torch"`` for the call of a module, or nothing."""
    if file not in _owners:
        parts = file.split(f"{os.sep}site-packages{os.sep}")[-1].split(os.sep)
        inside = file.startswith(f"{ROOT}{os.sep}") and not file.startswith(_SKIPPED)
        ours = inside and f"{os.sep}tests{os.sep}" not in file
        package = parts[0] if "site-packages" in file and parts[0] in PACKAGES else ""
        _owners[file] = package or ("torch" if file.endswith(_TORCH) else "ours" * ours)
    return _owners[file]


class Recorder:
    """Calls of one test, as (line of the caller or its function, called function)."""

    def __init__(self) -> None:
        self.sites: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call, if it goes from this repository into a package or back; ``sys.setprofile`` calls this."""
        if event != "call" or not (callee := owner(frame.f_code.co_filename)) or callee == "torch":
            return
        caller = frame.f_back
        while caller is not None and owner(caller.f_code.co_filename) == "torch":
            caller = caller.f_back
        origin = owner(caller.f_code.co_filename) if caller is not None else ""
        if caller is None or not origin or (origin == "ours") == (callee == "ours"):
            return
        place = str(caller.f_lineno) if origin == "ours" else caller.f_code.co_qualname
        file = Path(caller.f_code.co_filename).name
        self.sites.add((f"{file}:{place}", f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Record the calls of set-up, test and teardown."""
    if not FOLDER:
        return (yield)  # type: ignore[return-value]
    recorder, before = Recorder(), time.process_time()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        result: Any = yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    line = [item.nodeid, round(time.process_time() - before, 3), sorted(recorder.sites)]
    with (Path(FOLDER) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return result
