"""Events of a run, sent to its consumers in this order: `Progress`, `Store`, `Meter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..recipe.recipe import CellConfig
from ..runs.records import CellResult
from ..runs.run_directory import PieceResult
from .plan import PlannedGroup


@dataclass(frozen=True)
class GroupStarted:
    """A group is about to be measured or reused."""

    group: PlannedGroup


@dataclass(frozen=True)
class WarmUpStarted:
    """The warm-up of a cell starts."""


@dataclass(frozen=True)
class CellStarted:
    """A cell starts to decode a piece."""

    config: CellConfig


@dataclass(frozen=True)
class StepFinished:
    """A step is finished; ``turns`` is the fraction of a turn that it generated over all rows, at one token a row."""

    turns: float


@dataclass(frozen=True)
class PromptsFinished:
    """A cell has finished a piece with these numbers of prompts and turns."""

    prompts: int
    turns: int


@dataclass(frozen=True)
class PromptsSkipped:
    """Pieces were read from disk; ``prompts`` is the number of their prompts over all cells."""

    prompts: int


@dataclass(frozen=True)
class GroupHead:
    """The conditions of a group's pieces have changed; ``restart`` to remove the pieces on disk."""

    key: str
    head: dict[str, Any]
    restart: bool = False


@dataclass(frozen=True)
class PieceFinished:
    """All cells of a group have finished piece ``number`` (from 0); their results by hash."""

    key: str
    number: int
    results: Mapping[str, PieceResult]


@dataclass(frozen=True)
class CellFailed:
    """A cell has failed."""

    result: CellResult


@dataclass(frozen=True)
class Message:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class BlocksFinished:
    """All groups have finished some blocks of a time budget; the results of their cells so far."""

    results: Sequence[CellResult]


@dataclass(frozen=True)
class GroupInterrupted:
    """A group ends before its last piece; the results of its finished pieces, and a note for readers or empty."""

    results: Sequence[CellResult]
    note: str


@dataclass(frozen=True)
class GroupsFinished:
    """Groups with these keys are finished.

    Attributes:
        results: results of their cells, measured or reused; empty for a group that was interrupted.
        complete: False if a time budget ended the groups before their last block.
    """

    keys: Sequence[str]
    results: Sequence[CellResult]
    complete: bool = True


Event = (
    GroupStarted
    | WarmUpStarted
    | CellStarted
    | StepFinished
    | PromptsFinished
    | PromptsSkipped
    | GroupHead
    | PieceFinished
    | CellFailed
    | Message
    | BlocksFinished
    | GroupInterrupted
    | GroupsFinished
)
Emit = Callable[[Event], None]
