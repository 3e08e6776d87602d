"""The functions of the core that a block of code enters."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crossdraft

ROOT = Path(crossdraft.__file__).parent


@contextmanager
def entered_functions() -> Iterator[set[tuple[str, str]]]:
    """Set of file and qualified name of each function of the core, filled in the block.

    Comprehensions are not counted: they are functions before Python 3.12 only.
    """
    entered = set[tuple[str, str]]()
    environment = [sys.prefix] if Path(sys.prefix).is_relative_to(ROOT) else []  # inside the checkout
    root, excluded = str(ROOT), (str(ROOT / "tests"), str(ROOT / "plugins"), *environment)

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        own = code.co_filename.startswith(root) and not code.co_filename.startswith(excluded)
        if event == "call" and own and not code.co_name.endswith(("comp>", "genexpr>")):
            entered.add((code.co_filename, code.co_qualname))

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        yield entered
    finally:
        sys.setprofile(previous)
