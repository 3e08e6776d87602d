"""Size of a run: the functions of crossdraft that `crossdraft run` enters, once imports and certificates are done."""

import sys
from pathlib import Path
from typing import Any

from tiny_runs import ONE_GROUP

import crossdraft

ROOT = str(Path(crossdraft.__file__).parent)
#: Most functions of a run of one pair and its baseline on six prompts; the goal is 500.
FUNCTIONS = 100


def test_run_enters_few_functions(bench: Any) -> None:
    """Comprehensions are not counted: they are functions before Python 3.12 only."""
    settings = [*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]"]
    assert bench(*settings)[0] == 0
    entered = set()

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.endswith(("comp>", "genexpr>")):
            entered.add((code.co_filename, code.co_qualname))

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        assert bench(*settings, flags=["--fresh"])[0] == 0
    finally:
        sys.setprofile(previous)
    own = {(file, name) for file, name in entered if "/tests/" not in file}
    assert len(own) <= FUNCTIONS, (len(own), sorted(own))
