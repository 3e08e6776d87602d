"""Options of the roofline model of another machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from crossdraft import Argument
from crossdraft.commands import Options

from ..limits import MOST_BYTES, MOST_DEVICES

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
