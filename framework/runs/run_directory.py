"""What a run leaves on disk, and how it is found again.

    runs/<recipe>-<hash>/README.md, recipe.json, state.json, environment.json, summary.csv, summary.md
    runs/<recipe>-<hash>/groups/<hash>/group.json, <piece>.json      while a group is being measured
    runs/<recipe>-<hash>/cells/<pair>_<hash>/config.json, steps.parquet, responses.jsonl, metrics.json, or error.txt

README.md says what each of them is (`runs.readme`). A cell is found by its hash, which its directory's name ends with;
older versions named it by the hash alone. Every file is written aside and renamed when it is whole, and so is a cell's
directory: what is there is complete. The pieces of a group become its cells when all are there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import parquet
from pydantic import ValidationError

from ..errors import UsageError, first_line, printable, quoted
from ..metrics.cell_metrics import StepRecord
from ..metrics.pieces import Piece
from ..recipe.recipe import CellConfig
from ..util.input_files import open_file, read_json, refuse_special_files
from ..util.limits import CONFIG_BYTES, INDEX_BYTES, TABLE_BYTES
from ..util.output_files import replace_text
from .record_schema import Head, Provenance, check, read_numbers, read_responses
from .records import CellResult

logger = logging.getLogger(__name__)

#: Of a cell's files. 2: pieces keep their tail apart. 3: they have a category, metrics tell more of each. 4: steps
#: have a limit, pieces the time of each step, the provenance the code; cells that failed are kept. 5: pieces have what
#: their steps waited. 6: pieces have the components of every step. 7: names of columns.
FORMAT = 7

#: Held by the process that writes to a run, and who that is.
LOCK, OWNER = ".lock", ".owner.json"
#: Seconds that a run waits for the lock: those who look whether it is held have it for a moment.
_PATIENCE = 0.3
#: Most characters of a drafter or verifier in a directory's name.
_NAMED = 40

_STEPS = pa.schema(
    [
        ("cell", pa.string()),
        ("prompt", pa.int64()),
        ("question_id", pa.string()),
        ("category", pa.string()),
        ("turn", pa.int64()),
        ("step", pa.int64()),
        ("tau", pa.int64()),
        ("emitted", pa.int64()),
        ("nodes", pa.int64()),
        ("width", pa.int64()),
        ("limit", pa.int64()),
        ("survival", pa.float64()),
    ]
)
#: Raised for data of another shape.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


@dataclass
class PieceResult:
    """What one cell did with one piece of the prompts.

    Attributes:
        passes: forward passes of the draft model.
        peak_memory: bytes, see `Metrics.peak_memory`.
    """

    records: list[StepRecord] = field(default_factory=list)
    responses: list[dict[str, Any]] = field(default_factory=list)
    piece: Piece = field(default_factory=lambda: Piece(0, {}))
    passes: int = 0
    peak_memory: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceResult:
        """Raises KeyError, TypeError or ValueError for data of another shape."""
        records = [StepRecord(*row) for row in data["records"]]
        return cls(**{**data, "records": records, "piece": Piece.from_json(data["piece"])})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "records": [list(asdict(record).values()) for record in self.records]}


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path):
        self.path = path

    # -- files of the run --------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory, so that no other process writes there.

        Raises:
            UsageError: another one holds it; says which.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        owner, lock = self.path / OWNER, FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            who = self.read_json(OWNER)
            known = f" (process {who['pid']} on {who['host']}, since {who['since']})" if "pid" in who else ""
            raise UsageError(
                f"another run writes to {self.path}{known}; wait until it is over, or choose another --out"
            ) from None
        except NotImplementedError:  # a file system without locks
            logger.warning("crossdraft: %s cannot be locked; start no second run there", self.path)
        try:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.write_json(OWNER, {"pid": os.getpid(), "host": socket.gethostname(), "since": now})
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, _json(value))

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run, replacing it in one step; it is on the disk when this returns."""
        replace_text(self.path / name, text)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of the run, empty if it is not there or damaged."""
        with suppress(UsageError):
            return read_json(self.path / name, INDEX_BYTES, surrogates=True)
        return {}

    # -- a group while it is measured ----------------------------------------------------------------------

    def begin_group(self, group: str, head: dict[str, Any]) -> None:
        """Start over with the pieces of a group; ``head`` says what they belong to."""
        self.drop_group(group)
        self.write_json(f"groups/{group}/group.json", head)

    def group_head(self, group: str) -> dict[str, Any]:
        """What was given to `begin_group`, empty if there is no such group."""
        return self.read_json(f"groups/{group}/group.json")

    def save_head(self, group: str, head: dict[str, Any]) -> None:
        self.write_json(f"groups/{group}/group.json", head)

    def save_piece(self, group: str, number: int, cells: Mapping[str, PieceResult]) -> None:
        """Write what every cell of a group did with one piece."""
        found = {name: piece.to_json() for name, piece in cells.items()}
        self.write_text(f"groups/{group}/{number}.json", json.dumps(found))

    def load_piece(self, group: str, number: int) -> dict[str, PieceResult] | None:
        """What was saved for a piece, None if it is not there or damaged."""
        found = self.read_json(f"groups/{group}/{number}.json")
        try:
            return {name: PieceResult.from_json(cell) for name, cell in found.items()} or None
        except _UNREADABLE:
            return None

    def save_partial(self, results: Sequence[CellResult]) -> None:
        """Keep what the finished pieces of a group that was cut short come to, until the group goes on to its end."""
        for result in results:
            RunDirectory(self.path / "groups" / result.config.group).save(result)

    def found_cells(self) -> list[Path]:
        """The directories of all cells, those of groups that were cut short included."""
        return sorted(file.parent for file in self.path.glob("cells/[!.]*/config.json")) + sorted(
            file.parent for file in self.path.glob("groups/*/cells/[!.]*/config.json")
        )

    def drop_group(self, group: str) -> None:
        shutil.rmtree(self.path / "groups" / group, ignore_errors=True)

    # -- finished cells --------------------------------------------------------------------------------------

    def cell_path(self, cell: str) -> Path | None:
        """The directory of the cell of that hash, None if there is none."""
        return next(iter(self._paths(cell)), None)

    def _paths(self, cell: str) -> list[Path]:
        try:
            names = os.listdir(self.path / "cells")
        except OSError:
            return []
        return [self.path / "cells" / name for name in sorted(names) if name == cell or name.endswith(f"_{cell}")]

    def _replace(self, cell: str, aside: Path, name: str) -> None:
        """Put a directory that is whole in the place of what there is of a cell, whatever that is called."""
        for path in self._paths(cell):
            shutil.rmtree(path, ignore_errors=True)
        aside.rename(self.path / "cells" / name)

    def save(self, result: CellResult) -> None:
        """Write a cell that is finished or has failed, in place of an earlier one."""
        name, cells = cell_name(result.config), self.path / "cells"
        aside = _aside(cells)
        inside = RunDirectory(aside)
        try:
            head = {"format": FORMAT, "hash": result.config.hash, "measured": result.measured, "error": result.error}
            if result.planned is not None:
                head |= {"planned": result.planned, "budget": result.budget}
            head |= {"provenance": result.provenance, "config": result.config.model_dump(mode="json")}
            inside.write_json("config.json", head)
            if result.metrics is None:
                inside.write_text("error.txt", f"{result.error}\n\n{result.traceback}")
            else:
                self._save_numbers(aside, result)
            self._replace(result.config.hash, aside, name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _save_numbers(self, aside: Path, result: CellResult) -> None:
        inside = RunDirectory(aside)
        assert result.metrics is not None
        rows = [asdict(record) | {"cell": result.config.hash} for record in result.records]
        parquet.write_table(pa.Table.from_pylist(rows, schema=_STEPS), aside / "steps.parquet")
        lines = (json.dumps(response, ensure_ascii=False) + "\n" for response in result.responses)
        inside.write_text("responses.jsonl", "".join(lines))
        metrics = json.dumps(result.metrics.to_json(), indent=2, ensure_ascii=False)
        pieces = ",\n".join(json.dumps(asdict(piece), ensure_ascii=False) for piece in result.pieces)
        inside.write_text("metrics.json", f'{{"metrics": {metrics},\n"pieces": [\n{pieces}\n]}}\n')

    def load(self, config: CellConfig) -> CellResult | None:
        """A cell that was measured before, or None if it is not there or cannot be read."""
        path = self.cell_path(config.hash)
        if path is None or not (path / "config.json").is_file():
            return None
        try:
            return read_cell(path, config)
        except UsageError as error:  # another version's, or damaged
            logger.warning("crossdraft: %s cannot be read and is measured again: %s", path, error)
            return None

    def adopt(self, other: RunDirectory, configs: Sequence[CellConfig]) -> None:
        """Copy cells of another run."""
        for config in configs:
            found = other.cell_path(config.hash)
            assert found is not None  # it was loaded from there
            refuse_special_files(found)
            aside = _aside(self.path / "cells")
            try:
                shutil.copytree(found, aside, dirs_exist_ok=True)
                self._replace(config.hash, aside, cell_name(config))
            finally:
                shutil.rmtree(aside, ignore_errors=True)


def read_config(path: Path) -> tuple[CellConfig, dict[str, Any]]:
    """The config of the cell in a directory, and its ``config.json``.

    Raises:
        UsageError: it is not there, is damaged (names the key), or another version wrote it.
    """
    file = path / "config.json"
    head = read_json(file, CONFIG_BYTES, surrogates=True)
    if head.get("format") != FORMAT:
        found = quoted(head.get("format", 1), 20)
        raise UsageError(
            f"{printable(str(file))}: it was written by another version: it has format {found}, this version reads "
            f"{FORMAT}; run its recipe again"
        )
    check(head, Head, file)
    try:
        return CellConfig.model_validate(head["config"]), head
    except ValidationError as error:
        key = ".".join(map(str, ("config", *error.errors()[0]["loc"])))
        what = "it is damaged, or another version wrote it: run its recipe again"
        raise UsageError(f"{printable(str(file))}: {printable(key)}: {what}") from None


def read_cell(path: Path, config: CellConfig | None = None) -> CellResult:
    """The cell in a directory.

    Args:
        config: of the cell, if it is known.

    Raises:
        UsageError: a file is missing or damaged (names it, and the key), or another version wrote it.
    """
    own, head = read_config(path)
    result = CellResult(config or own, provenance=head["provenance"], measured=head["measured"], reused=True)
    if "planned" in head:
        result.planned, result.budget = head["planned"], head.get("budget", "")
    if head["error"] is not None:
        result.error = head["error"]
        if not isinstance(result.provenance.get("models"), dict):
            raise UsageError(f"{printable(str(path / 'config.json'))}: provenance.models is missing")
        return result
    check(result.provenance, Provenance, path / "config.json", "provenance")
    numbers = read_numbers(path / "metrics.json")
    result.metrics, result.pieces = numbers.metrics, numbers.pieces
    result.records = _read_steps(path / "steps.parquet")
    result.responses = read_responses(path / "responses.jsonl")
    if len(result.records) != numbers.metrics.steps or len(result.responses) != numbers.metrics.sequences:
        raise UsageError(f"{printable(str(path))}: steps or responses are missing; run its recipe again")
    return result


def _read_steps(file: Path) -> list[StepRecord]:
    """The steps of a cell. Raises UsageError."""
    about = printable(str(file))
    with open_file(file, TABLE_BYTES) as opened:
        try:
            table = parquet.read_table(opened)
            if not table.schema.equals(_STEPS) or any(
                table[name].null_count for name in _STEPS.names if name != "survival"
            ):
                raise UsageError(f"{about}: it has other columns, or empty places; run its recipe again")
            rows = table.drop_columns(["cell"]).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(f"{about}: it is damaged: {first_line(error)}; run its recipe again") from None
    if any(row["emitted"] < 1 or min(row["tau"], row["nodes"], row["width"]) < 0 for row in rows):
        raise UsageError(f"{about}: a step has a count that no step has; run its recipe again")
    return [StepRecord(**row) for row in rows]


def cell_name(config: CellConfig) -> str:
    """What a cell's directory is called: drafter, verifier, temperature and batch size for people, then the hash."""
    pair = [config.drafter.title, config.verifier.title]
    named = [re.sub(r"[^A-Za-z0-9.=+]+", "-", part)[:_NAMED].strip("-.") or "unnamed" for part in pair]
    setting = [f"T{config.sampling.temperature:g}", f"B{config.batch_size}"]
    return "_".join([*named, *setting, config.hash])


def _aside(folder: Path) -> Path:
    """A new directory of an unpredictable name, for what is to be renamed once it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{secrets.token_hex(8)}"
    made.mkdir()
    return made


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
