"""Lists of numbers that several commands take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...contracts.command import Argument
from ...util.limits import MOST_ROWS, MOST_TOKENS

#: Batch sizes and context lengths, separated by commas.
BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1), MOST_ROWS], ...], Argument("B,B,...", commas=True), Field(min_length=1)
]
Contexts = Annotated[
    tuple[Annotated[int, Field(ge=1), MOST_TOKENS], ...], Argument("C,C,...", commas=True), Field(min_length=1)
]
#: A probability, or share, from 0 to 1.
Share = Annotated[float, Field(ge=0, le=1)]
