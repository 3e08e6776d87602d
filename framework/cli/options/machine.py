"""Options of the roofline model of another machine, and lists of numbers that several commands take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...contracts.command import Argument
from ...contracts.options import Options
from ...util.limits import MOST_BYTES, MOST_DEVICES, MOST_ROWS, MOST_TOKENS

#: Batch sizes and context lengths, separated by commas.
BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1), MOST_ROWS], ...], Argument("B,B,...", commas=True), Field(min_length=1)
]
Contexts = Annotated[
    tuple[Annotated[int, Field(ge=1), MOST_TOKENS], ...], Argument("C,C,...", commas=True), Field(min_length=1)
]
#: A probability, or share, from 0 to 1.
Share = Annotated[float, Field(ge=0, le=1)]

_MACHINE = "another machine"


class MachineOptions(Options):
    """Options of the roofline model; those of a command that inherits from this."""

    on: Annotated[str | None, Argument("NAME", group=_MACHINE)] = Field(
        None, description="accelerator (h100, a100-80g, ...), or a YAML file with one"
    )
    devices: Annotated[int, Argument("N", group=_MACHINE, requires="on"), MOST_DEVICES] = Field(
        1, ge=1, description="tensor-parallel devices"
    )
    weight_bytes: Annotated[float, Argument(group=_MACHINE, requires="on")] = Field(
        2, gt=0, le=MOST_BYTES, description="bytes per weight (2: bfloat16)"
    )
    cache_bytes: Annotated[float, Argument(group=_MACHINE, requires="on")] = Field(
        2, gt=0, le=MOST_BYTES, description="bytes per key or value element"
    )
    efficiency: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], Argument("M,C", group=_MACHINE, requires="on", commas=True)
    ] = Field(
        (0.8, 0.7), min_length=2, max_length=2, description="attained fractions of the peak bandwidth and FLOP rate"
    )
