"""What a pass costs, measured: seconds over W tokens in each of B rows whose caches hold C tokens.

`bench.pass_timing` measures a `CostCurve`; here are its shape, what lies between its points, and where it is kept. A
`roofline.Roofline` is a curve as well. All times are seconds.
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

#: What is measured by default.
BATCH_SIZES = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXTS = (128, 512)
REPEATS = 5


class Curve(Protocol):
    """Seconds of a pass."""

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        """One pass over ``width`` tokens in each of ``batch_size`` rows that hold ``context`` tokens each."""
        ...


class Point(NamedTuple):
    """One measured pass: where, and the median and quartiles of its seconds."""

    batch_size: int
    width: int
    context: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class CostCurve:
    """The measured passes of one model on one device, and the times between them.

    Attributes:
        model, sha256, dtype: which weights, in which dtype.
        device: what `device_identity` says of the machine.
        points: every combination of some batch sizes, widths and contexts.
        repeats: how often each was measured; ``measured``: when (ISO 8601).
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
            raise ValueError("a cost curve needs a point for every combination of batch size, width and context")
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
        """Piecewise linear in the rows (B x W) at each measured B, and linear between batch sizes and contexts.

        Below the least measured value of an axis that value counts; above the greatest, the last piece goes on.

        Raises:
            UsageError: ``batch_size`` or ``width`` is greater than the only one that was measured.
        """
        table = self._grid[3]
        for axis, at, name in ((2, context, None), (1, width, "width"), (0, batch_size, "batch size")):
            places = self._grid[axis]
            if name and len(places) == 1 and at > places[0]:
                raise UsageError(
                    f"the cost curve of {self.model} has one {name}, {places[0]}, and cannot say what {at:g} costs; "
                    f"measure it: crossdraft cost --target {self.model} --{name.replace(' ', '-')} {places[0]},{at:g}"
                )
            table = _between(at, places, table)
        return float(table)

    def covers(self, batch_sizes: Iterable[int], widths: Iterable[int], contexts: Iterable[int]) -> bool:
        """Was every combination of these measured?"""
        asked = (batch_sizes, widths, contexts)
        return all(set(values) <= set(axis) for values, axis in zip(asked, self._grid[:3], strict=True))

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "_grid"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """What `to_json` made. Raises ValueError or TypeError for anything else."""
        points = tuple(Point(*point) for point in data["points"])
        for point in points:
            if any(type(n) is not int or n < 0 for n in point[:3]) or not point.batch_size or not point.width:
                raise ValueError(f"{point[:3]} are no batch size, width and context")
            if any(type(t) not in (int, float) or not 0 <= t < math.inf for t in point[3:]) or not point.median:
                raise ValueError(f"{point[3:]} are no seconds")
        curve = cls(**{**data, "points": points})
        texts = (curve.model, curve.sha256, curve.dtype, curve.measured)
        if not all(isinstance(text, str) for text in texts) or not isinstance(curve.device, dict):
            raise ValueError("model, sha256, dtype and measured are texts, device is a mapping")
        if type(curve.repeats) is not int:
            raise ValueError("repeats is a number")
        return curve


def _between(at: float, places: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Piecewise-linear interpolation of ``values [..., n]`` along their last axis: ``[...]``."""
    if len(places) == 1 or at <= places[0]:
        return values[..., 0]
    i = min(int(np.searchsorted(places, at)), len(places) - 1)
    slope = (values[..., i] - values[..., i - 1]) / (places[i] - places[i - 1])
    if at > places[-1]:  # more work never takes less time: a falling last piece is noise
        return values[..., -1] + np.maximum(slope, 0) * (at - places[-1])
    return values[..., i - 1] + slope * (at - places[i - 1])


def curves_dir() -> Path:
    """Where curves are kept: beside the models, see `cache_dir`."""
    return cache_dir() / "costs"


def save_curve(curve: CostCurve) -> Path:
    """Keep a curve, in place of an earlier one of the same weights, dtype and device."""
    key = digest({"sha256": curve.sha256, "dtype": curve.dtype, "device": dict(curve.device)})
    path = curves_dir() / f"{key}.json"
    try:
        replace_text(path, json.dumps(curve.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot keep the cost curve in {path.parent}: {error.strerror}") from None
    return path


def stored_curves() -> list[CostCurve]:
    """Every curve that was kept; files that cannot be read are left out with a warning."""
    curves = []
    for path in sorted(curves_dir().glob("*.json")):
        try:
            curves.append(CostCurve.from_json(read_json(path, CONFIG_BYTES)))
        except Exception as error:  # whatever stands there: a run goes on without a prediction
            logger.warning("crossdraft: the cost curve %s cannot be read and is left out: %s", path, first_line(error))
    return curves


def find_curve(curves: Iterable[CostCurve], sha256: str, dtype: str, device: Mapping[str, Any]) -> CostCurve | None:
    """The curve of these weights in this dtype on a device of which ``device`` says (some of) the identity."""
    for curve in curves:
        same = all(curve.device.get(key) == value for key, value in device.items())
        if curve.sha256 == sha256 and curve.dtype == dtype and same:
            return curve
    return None
