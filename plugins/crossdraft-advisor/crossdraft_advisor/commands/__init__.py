"""Commands of crossdraft-advisor, and what they share."""

import sys


def log(message: str) -> None:
    """Print a progress message on standard error."""
    print(f"crossdraft: {message}", file=sys.stderr, flush=True)


def right(*names: str) -> list[tuple[str, str]]:
    """Columns of a table with numbers that are written as texts."""
    return [(name, "right") for name in names]
