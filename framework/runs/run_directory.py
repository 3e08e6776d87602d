"""Directory of a run.

    runs/<recipe>-<hash>/README.md, recipe.json, state.json, environment.json, summary.csv, summary.md
    runs/<recipe>-<hash>/groups/<hash>/group.json, <piece>.json      while a group is being measured
    runs/<recipe>-<hash>/cells/<pair>_<hash>/config.json, steps.parquet, responses.jsonl, metrics.json, or error.txt

README.md describes the files (`runs.readme`). A cell is located by its hash, the last part of its directory's name;
older versions used only the hash. Files and cell directories are written under a temporary name and renamed, so they
are always complete. The pieces of a group become cells when all are finished.
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
from dataclasses import dataclass, field, fields
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
from .record_schema import GroupHead, Head, Provenance, check_schema, read_checked, read_numbers, read_responses
from .records import CellResult

logger = logging.getLogger(__name__)

#: Format of a cell's files. 2: tails of pieces. 3: categories of pieces. 4: limits of steps, times of each step, code
#: in the provenance, failed cells. 5: waiting times of steps. 6: components of every step. 7: names of columns.
FORMAT = 7

#: Lock held by the process that writes to a run, and the file with its identity.
LOCK, OWNER = ".lock", ".owner.json"
#: Seconds that a run waits for the lock: `state._is_locked` holds it for a moment.
_LOCK_TIMEOUT = 0.3
#: Maximum length of the title of a drafter or verifier in a directory's name.
_MAX_TITLE = 40

_TYPES = {"int": pa.int64(), "str": pa.string(), "float | None": pa.float64()}
_STEPS = pa.schema([("cell", pa.string()), *((f.name, _TYPES[str(f.type)]) for f in fields(StepRecord))])
#: Errors raised for malformed data.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


@dataclass
class PieceResult:
    """Records of one piece of the prompts by one cell.

    Attributes:
        passes: forward passes of the draft model.
        peak_memory: bytes, see `Metrics.peak_memory`.
        other_traffic, missed_graphs: see `Metrics`.
    """

    records: list[StepRecord] = field(default_factory=list)
    responses: list[dict[str, Any]] = field(default_factory=list)
    piece: Piece = field(default_factory=lambda: Piece(0, {}))
    passes: int = 0
    peak_memory: int | None = None
    other_traffic: dict[str, tuple[float, float]] = field(default_factory=dict)
    missed_graphs: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceResult:
        """Parse the records. Raises KeyError, TypeError or ValueError for malformed data."""
        records = [StepRecord(*row) for row in data["records"]]
        return cls(**{**data, "records": records, "piece": Piece.from_json(data["piece"])})

    def to_json(self) -> dict[str, Any]:
        records = [list(vars(record).values()) for record in self.records]
        return {**vars(self), "records": records, "piece": vars(self.piece)}


@dataclass(frozen=True)
class RunDirectory:
    """Files of one run."""

    path: Path

    # -- files of the run --------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against writes of other processes.

        Raises:
            UsageError: another process holds the lock; the message names it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        owner, lock = self.path / OWNER, FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT)
        except Timeout:
            process = self.read_json(OWNER)
            description = (
                f" (process {process['pid']} on {process['host']}, since {process['since']})"
                if "pid" in process
                else ""
            )
            raise UsageError(
                f"{self.path} is locked by another run{description}; wait for its end, or use another --out"
            ) from None
        except NotImplementedError:  # a file system without locks
            logger.warning("crossdraft: %s cannot be locked; do not start another run there", self.path)
        try:
            timestamp = datetime.now(UTC).isoformat(timespec="seconds")
            self.write_json(OWNER, {"pid": os.getpid(), "host": socket.gethostname(), "since": timestamp})
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run atomically and durably."""
        replace_text(self.path / name, text)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a file of the run; empty if it is missing or damaged."""
        with suppress(UsageError):
            return read_json(self.path / name, INDEX_BYTES, surrogates=True)
        return {}

    # -- groups under measurement --------------------------------------------------------------------------

    def group_head(self, group: str) -> dict[str, Any]:
        """Read the conditions of a group's pieces; empty if the group has no pieces, or the file is damaged."""
        with suppress(UsageError):
            return read_checked(self.path / f"groups/{group}/group.json", GroupHead)
        return {}

    def save_piece(self, group: str, number: int, cells: Mapping[str, PieceResult]) -> None:
        """Write the results of one piece, by cell hash."""
        content = {name: piece.to_json() for name, piece in cells.items()}
        self.write_text(f"groups/{group}/{number}.json", json.dumps(content))

    def load_piece(self, group: str, number: int) -> dict[str, PieceResult] | None:
        """Read the results of one piece; None if missing or damaged."""
        content = self.read_json(f"groups/{group}/{number}.json")
        try:
            return {name: PieceResult.from_json(cell) for name, cell in content.items()} or None
        except _UNREADABLE:
            return None

    def save_partial(self, results: Sequence[CellResult]) -> None:
        """Save the partial results of an interrupted group, until it is resumed and completed."""
        for result in results:
            RunDirectory(self.path / "groups" / result.config.group).save(result)

    def cell_paths(self) -> list[Path]:
        """Directories of all cells, those of interrupted groups last."""
        return sorted(file.parent for file in self.path.glob("cells/[!.]*/config.json")) + sorted(
            file.parent for file in self.path.glob("groups/*/cells/[!.]*/config.json")
        )

    def drop_group(self, group: str) -> None:
        shutil.rmtree(self.path / "groups" / group, ignore_errors=True)

    # -- finished cells --------------------------------------------------------------------------------------

    def cell_path(self, cell: str) -> Path | None:
        """Directory of the cell with that hash, or None."""
        return next(iter(self._paths(cell)), None)

    def _paths(self, cell: str) -> list[Path]:
        try:
            names = os.listdir(self.path / "cells")
        except OSError:
            return []
        return [self.path / "cells" / name for name in sorted(names) if name == cell or name.endswith(f"_{cell}")]

    @contextmanager
    def _replacing(self, config: CellConfig) -> Iterator[Path]:
        """A directory with an unpredictable name, which replaces that of a cell when the block ends."""
        cells = self.path / "cells"
        temporary = cells / f".{secrets.token_hex(8)}"
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in self._paths(config.hash):
                shutil.rmtree(path, ignore_errors=True)
            temporary.rename(cells / cell_name(config))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def save(self, result: CellResult) -> None:
        """Write a finished or failed cell, replacing an earlier result."""
        head = {"format": FORMAT, "hash": result.config.hash, "measured": result.measured, "error": result.error}
        if result.planned is not None:
            head |= {"planned": result.planned, "budget": result.budget}
        head |= {"provenance": result.provenance, "config": result.config.model_dump(mode="json")}
        with self._replacing(result.config) as path:
            directory = RunDirectory(path)
            directory.write_json("config.json", head)
            lines = (json.dumps(response, ensure_ascii=False) + "\n" for response in result.responses)
            directory.write_text("responses.jsonl", "".join(lines))
            if result.metrics is None:
                directory.write_text("error.txt", f"{result.error}\n\n{result.traceback}")
                return
            rows = [vars(record) | {"cell": result.config.hash} for record in result.records]
            parquet.write_table(pa.Table.from_pylist(rows, schema=_STEPS), path / "steps.parquet")
            metrics = json.dumps(result.metrics.to_json(), indent=2, ensure_ascii=False)
            pieces = ",\n".join(json.dumps(vars(piece), ensure_ascii=False) for piece in result.pieces)
            directory.write_text("metrics.json", f'{{"metrics": {metrics},\n"pieces": [\n{pieces}\n]}}\n')

    def load(self, config: CellConfig) -> CellResult | None:
        """Read the result of a cell; None if it is missing or unreadable."""
        path = self.cell_path(config.hash)
        if path is None or not (path / "config.json").is_file():
            return None
        try:
            return read_cell(path, config)
        except UsageError as error:  # of another version, or damaged
            logger.warning("crossdraft: %s is not readable and is measured again: %s", path, error)
            return None

    def adopt(self, other: RunDirectory, configs: Sequence[CellConfig]) -> None:
        """Copy cells of another run, with the labels of ``configs``; of this run, those whose labels differ."""
        for config in configs:
            source = other.cell_path(config.hash)
            assert source is not None  # the caller has loaded it
            stored = RunDirectory(source).read_json("config.json")
            head = stored | {"config": config.model_dump(mode="json")}
            if other is self and head == stored:
                continue
            refuse_special_files(source)
            with self._replacing(config) as temporary:
                shutil.copytree(source, temporary, dirs_exist_ok=True)
                RunDirectory(temporary).write_json("config.json", head)


def read_cell_config(path: Path) -> tuple[CellConfig, dict[str, Any]]:
    """Read the config of the cell in a directory, and the whole ``config.json``.

    Raises:
        UsageError: the file is missing, damaged (with the key), or was written by another version.
    """
    file = path / "config.json"
    head = read_json(file, CONFIG_BYTES, surrogates=True)
    if head.get("format") != FORMAT:
        version = quoted(head.get("format", 1), 20)
        raise UsageError(
            f"{printable(str(file))}: written by another version: it has format {version}, this version reads format "
            f"{FORMAT}; run its recipe again"
        )
    check_schema(head, Head, file)
    try:
        return CellConfig.model_validate(head["config"]), head
    except ValidationError as error:
        key = ".".join(map(str, ("config", *error.errors()[0]["loc"])))
        subject = "the file is damaged or was written by another version; run its recipe again"
        raise UsageError(f"{printable(str(file))}: {printable(key)}: {subject}") from None


def read_cell(path: Path, config: CellConfig | None = None) -> CellResult:
    """Read the result of the cell in a directory.

    Args:
        config: config of the cell; by default that in the directory.

    Raises:
        UsageError: a file is missing, damaged (with the key), or was written by another version.
    """
    stored_config, head = read_cell_config(path)
    result = CellResult(config or stored_config, provenance=head["provenance"], measured=head["measured"], reused=True)
    if "planned" in head:
        result.planned, result.budget = head["planned"], head.get("budget", "")
    if head["error"] is not None:
        result.error = head["error"]
        if not isinstance(result.provenance.get("models"), dict):
            raise UsageError(f"{printable(str(path / 'config.json'))}: provenance.models is missing")
        return result
    check_schema(result.provenance, Provenance, path / "config.json", "provenance")
    numbers = read_numbers(path / "metrics.json")
    result.metrics, result.pieces = numbers.metrics, numbers.pieces
    result.records = _read_steps(path / "steps.parquet")
    result.responses = read_responses(path / "responses.jsonl")
    if len(result.records) != numbers.metrics.steps or len(result.responses) != numbers.metrics.sequences:
        raise UsageError(f"{printable(str(path))}: steps or responses are missing; run its recipe again")
    return result


def _read_steps(file: Path) -> list[StepRecord]:
    """Read the steps of a cell. Raises UsageError."""
    about = printable(str(file))
    with open_file(file, TABLE_BYTES) as opened:
        try:
            table = parquet.read_table(opened)
            if not table.schema.equals(_STEPS) or any(
                table[name].null_count for name in _STEPS.names if name != "survival"
            ):
                raise UsageError(f"{about}: unexpected columns or empty fields; run its recipe again")
            rows = table.drop_columns(["cell"]).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(f"{about}: the file is damaged: {first_line(error)}; run its recipe again") from None
    if any(row["emitted"] < 1 or min(row["tau"], row["nodes"], row["width"]) < 0 for row in rows):
        raise UsageError(f"{about}: a step has an impossible count; run its recipe again")
    return [StepRecord(**row) for row in rows]


def cell_name(config: CellConfig) -> str:
    """Name of a cell's directory: drafter, verifier, temperature and batch size for readers, then the hash."""
    pair = [config.drafter.title, config.verifier.title]
    titles = [re.sub(r"[^A-Za-z0-9.=+]+", "-", part)[:_MAX_TITLE].strip("-.") or "unnamed" for part in pair]
    setting = [f"T{config.sampling.temperature:g}", f"B{config.batch_size}"]
    return "_".join([*titles, *setting, config.hash])
