"""Regular expressions of users and files. Matching may take exponential time, so it has a time limit.

Python's own module cannot be interrupted, therefore ``regex``, which transformers requires, takes the same syntax.
"""

from __future__ import annotations

from typing import Any

import regex

from ..errors import first_line
from .limits import MOST_PATTERN

#: Maximum time of all matches in a text.
SECONDS = 5


def compile_pattern(text: str, *, lines: bool = False) -> Any:
    """Compile an expression to a ``regex.Pattern``; pass ``timeout=SECONDS`` to its methods, which raise TimeoutError.

    Args:
        lines: ``.`` matches line breaks, and ``^`` and ``$`` match at each line.

    Raises:
        ValueError: it is not valid, too long or nested too deeply; the message is the reason.
    """
    if reason := MOST_PATTERN.violation(text):
        raise ValueError(f"it has {len(text)} characters; {reason}")
    try:
        return regex.compile(text, regex.DOTALL | regex.MULTILINE if lines else 0)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # regex.error, and ValueError, OverflowError and MemoryError for some texts
        raise ValueError(str(error) if isinstance(error, regex.error) else first_line(error)) from None
