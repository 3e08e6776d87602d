"""The model and the engine of a source, as far as it records them: two sources are to be of one server."""

from __future__ import annotations

import re
from collections.abc import Iterator

from crossdraft.framework.errors import quoted

from ..engines.acceptance import Acceptance

#: A label of counters, an argument in the log of a start, or a key of responses.
_MODEL = re.compile(r"""\bmodel_name=["']([^"']+)|\bserved_model_name=["']?([^"',\s)]+)|"model"\s*:\s*"([^"]+)""")
#: Characters of a source in which the model is looked for.
_SEARCHED = 2**20


def served_model(text: str) -> str:
    """The first name of a model in a source; empty if it does not record one."""
    match = _MODEL.search(text, 0, _SEARCHED)
    return next(filter(None, match.groups()), "") if match else ""


def engine_of(acceptance: Acceptance) -> str:
    """The name of the format that an acceptance was read in."""
    return acceptance.format.partition(":")[0]


def differences(first: tuple[str, str, str], second: tuple[str, str, str]) -> Iterator[str]:
    """Yield what shows that two sources, each a name, a model and an engine, are not of one server."""
    for word, one, other in zip(("model", "engine"), first[1:], second[1:], strict=True):
        if one and other and one != other:
            yield (
                f"{first[0]} is of the {word} {quoted(one)}, {second[0]} of {quoted(other)}: if they are of two "
                "servers, their difference is not a fault"
            )
