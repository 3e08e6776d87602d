"""Measured cost of passes: seconds for W tokens in each of B rows with C tokens in their caches.

`cli.cost.pass_timing` measures a `CostCurve`; this module interpolates and stores it. Times are in seconds.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError, first_line
from ..recipe.recipe import digest
from ..util.input_files import read_json
from ..util.limits import CONFIG_BYTES
from ..util.output_files import cache_dir, replace_text

logger = logging.getLogger(__name__)

#: Points measured by default.
BATCH_SIZES = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXTS = (128, 512)
REPEATS = 5


class Curve(Protocol):
    """Protocol for the seconds of a pass."""

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """Seconds of a pass over ``width`` tokens in each of ``batch_size`` rows with ``context`` tokens each."""
        ...


#: Greatest time of a pass over that of a larger one: one row is slow in some libraries, and times are noisy.
MOST_EXCESS = 2.0


class Point(NamedTuple):
    """A measured pass: its size, and median and quartiles of its seconds."""

    batch_size: int
    width: int
    context: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class CostCurve:
    """Measured passes of a model on a device, with interpolation.

    Attributes:
        model, sha256, dtype: the weights and their dtype.
        device: see `device_identity`.
        points: one point for each combination of batch size, width and context.
        repeats: repetitions of each point.
        measured: time of the measurement (ISO 8601).
    """

    model: str
    sha256: str
    dtype: str
    device: Mapping[str, Any]
    points: tuple[Point, ...]
    repeats: int = REPEATS
    measured: str = ""
    _grid: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = [sorted(set(values)) for values in zip(*(p[:3] for p in self.points), strict=True)]
        medians = {p[:3]: p.median for p in self.points}
        if len(axes) != 3 or set(medians) != set(product(*axes)):
            raise ValueError("a cost curve must have a point for each combination of batch size, width and context")
        table = np.array([medians[key] for key in product(*axes)]).reshape([len(axis) for axis in axes])
        object.__setattr__(self, "_grid", (*axes, table))

    @property
    def batch_sizes(self) -> list[int]:
        return self._grid[0]

    @property
    def widths(self) -> list[int]:
        return self._grid[1]

    @property
    def contexts(self) -> list[int]:
        return self._grid[2]

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """Interpolate linearly along context, width and batch size.

        Constant below the smallest measured value of an axis; the last segment is extrapolated above the largest.

        Raises:
            UsageError: ``batch_size`` or ``width`` exceeds the only measured value.
        """
        table = self._grid[3]
        for axis, at, name in ((2, context, None), (1, width, "width"), (0, batch_size, "batch size")):
            places = self._grid[axis]
            if name and len(places) == 1 and at > places[0]:
                raise UsageError(
                    f"the cost curve of {self.model} has a single {name}, {places[0]}, and does not extend to {at:g}; "
                    f"measure it: crossdraft cost --target {self.model} --{name.replace(' ', '-')} {places[0]},{at:g}"
                )
            table = _between(at, places, table)
        return float(table)

    @property
    def implausible(self) -> str:
        """The reason why the passes were disturbed while they were measured: one took twice as long as a larger one."""
        for axis, name in ((0, "rows"), (1, "tokens a row"), (2, "tokens of context")):
            table = np.moveaxis(self._grid[3], axis, 0)
            fastest = np.minimum.accumulate(table[::-1])[::-1]  # of this and all larger values
            if (excess := float((table / fastest).max())) > MOST_EXCESS:
                return f"a pass over fewer {name} took up to {excess:.1f} times as long as one over more"
        return ""

    def covers(self, batch_sizes: Iterable[int], widths: Iterable[int], contexts: Iterable[int]) -> bool:
        """Return True if all combinations of these values were measured."""
        requested = (batch_sizes, widths, contexts)
        return all(set(values) <= set(axis) for values, axis in zip(requested, self._grid[:3], strict=True))

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "_grid"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """Parse the result of `to_json`. Raises ValueError or TypeError if it is malformed."""
        points = tuple(Point(*point) for point in data["points"])
        for point in points:
            if any(type(n) is not int or n < 0 for n in point[:3]) or not point.batch_size or not point.width:
                raise ValueError(f"{point[:3]} are not a valid batch size, width and context")
            if any(type(t) not in (int, float) or not 0 <= t < math.inf for t in point[3:]) or not point.median:
                raise ValueError(f"{point[3:]} are not valid seconds")
        curve = cls(**{**data, "points": points})
        texts = (curve.model, curve.sha256, curve.dtype, curve.measured)
        if not all(isinstance(text, str) for text in texts) or not isinstance(curve.device, dict):
            raise ValueError("model, sha256, dtype and measured must be texts, device must be a mapping")
        if type(curve.repeats) is not int:
            raise ValueError("repeats must be an integer")
        return curve


def _between(at: float, places: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Interpolate ``values [..., n]`` linearly along the last axis. Returns ``[...]``."""
    if len(places) == 1 or at <= places[0]:
        return values[..., 0]
    i = min(int(np.searchsorted(places, at)), len(places) - 1)
    slope = (values[..., i] - values[..., i - 1]) / (places[i] - places[i - 1])
    if at > places[-1]:  # a negative slope is noise: more work does not take less time
        return values[..., -1] + np.maximum(slope, 0) * (at - places[-1])
    return values[..., i - 1] + slope * (at - places[i - 1])


def curves_dir() -> Path:
    """Directory of stored curves, see `cache_dir`."""
    return cache_dir() / "costs"


def save_curve(curve: CostCurve) -> Path:
    """Store a curve, replacing an earlier one of the same weights, dtype and device."""
    key = digest({"sha256": curve.sha256, "dtype": curve.dtype, "device": dict(curve.device)})
    path = curves_dir() / f"{key}.json"
    try:
        replace_text(path, json.dumps(curve.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the cost curve to {path.parent}: {error.strerror}") from None
    return path


def stored_curves() -> list[CostCurve]:
    """Read all stored curves; unreadable files are skipped with a warning."""
    curves = []
    for path in sorted(curves_dir().glob("*.json")):
        try:
            curves.append(CostCurve.from_json(read_json(path, CONFIG_BYTES)))
        except Exception as error:  # any content: a run continues without a prediction
            logger.warning("crossdraft: skipped the unreadable cost curve %s: %s", path, first_line(error))
    return curves


def find_curve(curves: Iterable[CostCurve], sha256: str, dtype: str, device: Mapping[str, Any]) -> CostCurve | None:
    """Find the curve of these weights and dtype on a device that matches all keys of ``device``; or None."""
    for curve in curves:
        matches = all(curve.device.get(key) == value for key, value in device.items())
        if curve.sha256 == sha256 and curve.dtype == dtype and matches:
            return curve
    return None
