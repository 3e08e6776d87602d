"""``crossdraft cost``: latency of forward passes, and predicted speed-ups; crossdraft-advisor adds a roofline model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ...contracts.command import Argument, Command
from ...errors import ModelError, UsageError
from ...util.estimate import Estimate
from ...util.limits import MOST_LEVELS, MOST_NODES, MOST_POINTS, MOST_REPEATS
from ...util.table import Table
from ..options.run import JsonOptions
from ..options.sizes import BatchSizes, Contexts, Share
from ..options.trust import TrustOptions

if TYPE_CHECKING:
    from ...cost.curve import CostCurve, Curve
    from ...cost.prediction import CellStatistics

ACCEPTANCE = (0.6, 0.7, 0.8, 0.9)


_MEASURING, _PREDICTING = "measuring on this machine", "predicting"


class Cost(TrustOptions, JsonOptions, Command):
    """Latency of passes and the speed-ups that follow from it."""

    name: ClassVar[str] = "cost"

    target: str = Field(
        "", description="model to measure; with --on: its config.json or directory (weights are not loaded)"
    )
    drafter: Annotated[str, Argument("MODEL")] = Field(
        "", description="draft model; with --on: its config.json or directory"
    )
    batch_size: BatchSizes = Field((), description="batch sizes (1,2,4,8,16; --on: up to 256)")
    width: Annotated[
        tuple[Annotated[int, Field(ge=1), MOST_NODES], ...], Argument("W,W,...", group=_MEASURING, commas=True)
    ] = Field((), min_length=1, description="new tokens per row (1,2,3,5,9,17)")
    context: Contexts = Field((), description="context lengths (128,512; --on: 1024)")
    repeats: Annotated[int, Argument(group=_MEASURING), MOST_REPEATS] = Field(
        5, ge=1, description="repetitions per pass"
    )
    dtype: Annotated[str, Argument(group=_MEASURING)] = Field("auto", description="dtype of the models")
    device: Annotated[str, Argument(group=_MEASURING)] = Field("auto", description="device")
    fresh: Annotated[bool, Argument(group=_MEASURING)] = Field(
        False, description="ignore stored curves and measure again"
    )
    quiet: Annotated[bool, Argument(group=_MEASURING)] = Field(False, description="no progress bar")
    gamma: Annotated[int | None, Argument(group=_PREDICTING), MOST_LEVELS] = Field(
        None, ge=1, description="draft length of a chain (4)"
    )
    acceptance: Annotated[tuple[Share, ...], Argument("A,A,...", group=_PREDICTING, commas=True)] = Field(
        (),
        min_length=1,
        description="acceptance rate per token, for token verification of chains (0.6,0.7,0.8,0.9)",
    )
    run_: Annotated[Path | None, Argument("DIR", group=_PREDICTING)] = Field(
        None, description="use the pairs and acceptance of a finished run (runs/...)"
    )

    def run(self) -> int:
        """Raises UsageError (exit status 2) for options that cannot be combined, unknown names or missing curves."""
        self.check()
        data: dict[str, Any] = {}
        texts = []
        for values, text in self.parts():
            data |= values
            texts += [text] * bool(text)
        print(json.dumps(data, indent=2) if self.json_ else "\n\n".join(texts))
        return 0

    def parts(self) -> Parts:
        """The parts of the report."""
        return _measured(self) if self.target else _of_run(self)

    def check(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        self.trusted((self.target, self.drafter))
        if not self.target and not self.run_:
            raise UsageError("cost requires --target: a model to measure, or with --on its config.json")
        if self.run_:
            self.refuse_given(["acceptance"], "with --run, which gives the acceptance")
        if not self.target:
            self.refuse_given(
                ("drafter", "gamma", "width", "context"),
                "without --target: --run alone predicts cells as they were measured",
            )
        points = len(self.batch_size or [1]) * len(self.width or [1]) * len(self.context or [1])
        if reason := MOST_POINTS.violation(points):
            raise UsageError(f"--batch-size, --width and --context together are {points} points; {reason}")

    def chains(self, context: float) -> tuple[dict[str, CellStatistics], int, list[str]]:
        """Cells with token verification of chains for each acceptance rate, by name; gamma; remarks."""
        from ...cost.prediction import CellStatistics

        gamma = self.gamma or 4
        chains = {f"a = {a:g}": CellStatistics.chain(1, gamma, a, context) for a in self.acceptance or ACCEPTANCE}
        return chains, gamma, [f"a: acceptance rate per token, in chains of {gamma}"]

    def schedules(
        self, target: Curve, drafter: Curve | None, batch_sizes: Sequence[int], context: float
    ) -> tuple[Mapping[str, Any], str]:
        """The best draft length per batch size, by acceptance rate, as options of the length policy ``batch-size``."""
        from ...cost.prediction import schedule

        gamma = self.gamma or 4
        schedules = {
            f"a = {a:g}": [list(pair) for pair in schedule(a, gamma, target, drafter, batch_sizes, context)]
            for a in self.acceptance or ACCEPTANCE
        }
        lines = [f"{name}: policy: {{name: batch-size, lengths: {lengths}}}" for name, lengths in schedules.items()]
        title = f"best draft lengths up to {gamma}, as [from batch size, length]:"
        return {"schedule": schedules}, "\n".join([title, *lines])

    @staticmethod
    def by_batch_size(
        pairs: Mapping[str, CellStatistics],
        gamma: int,
        target: Curve,
        drafter: Curve | None,
        batch_sizes: Sequence[int],
        context: float,
    ) -> Parts:
        """Seconds per pass and speed-up of every pair by batch size, and where drafting stops paying."""
        from ...cost.prediction import predict, stops_paying

        speed_ups = {
            name: {b: predict(cell.at(b), target, drafter).speed_up for b in batch_sizes}
            for name, cell in pairs.items()
        }
        passes = {b: {width: target.seconds(b, width, context) for width in (1, gamma + 1)} for b in batch_sizes}
        steps = {b: drafter.seconds(b, 1, context) for b in batch_sizes} if drafter else None
        rows = []
        for b in batch_sizes:
            seconds = [*passes[b].values(), *([steps[b]] if steps else [])]
            values = [by_size[b] for by_size in speed_ups.values()]
            rows.append([str(b), *(f"{1e3 * s:.2f}" for s in seconds), *(f"{v:.2f}{' <' * (v < 1)}" for v in values)])
        legend = "T(W): a pass over W tokens per row, B rows. Other columns: speed-up over plain decoding; <: below 1"
        header = ["B", "T(1) ms", f"T({gamma + 1}) ms", *(["draft step ms"] if steps else []), *speed_ups]
        data = {"gamma": gamma, "target_seconds": passes, "draft_step_seconds": steps, "speed_up": speed_ups}
        yield data, f"{_table(header, rows)}\n\n{legend}"

        stops = {name: stops_paying(list(values), list(values.values())) for name, values in speed_ups.items()}
        lines = []
        for name, below in stops.items():
            if below is None:
                lines.append(f"{name} pays at all listed batch sizes")
            elif below == min(batch_sizes):
                lines.append(f"{name} does not pay at any listed batch size")
            else:
                lines.append(f"{name} stops paying at B = {below}")
        yield {"stops_paying": stops}, "\n".join(lines)

    def free(self) -> str:
        """A remark on speed-ups without the cost of drafts; empty with --drafter."""
        return "" if self.drafter else "without --drafter, speed-ups leave out the cost of drafts"


#: Parts of a report: keys of the JSON object, and a paragraph of the text.
Parts = Iterator[tuple[Mapping[str, Any], str]]


# -- this machine -----------------------------------------------------------------------------------------------


def _measured(options: Cost) -> Parts:
    """Measure the target and the draft model, or load their stored curves; add predictions if requested."""
    from ...cost.curve import BATCH_SIZES, CONTEXTS, WIDTHS

    batch_sizes: list[int] = sorted({1, *(options.batch_size or BATCH_SIZES)})
    widths: list[int] = sorted({1, *(options.width or WIDTHS), *([options.gamma + 1] if options.gamma else [])})
    contexts: list[int] = sorted(set(options.context or CONTEXTS))
    loaded = None
    curves: list[CostCurve] = []
    for name, grid in ((options.target, widths), (options.drafter, [1, 2, 4])):
        if name:
            curve, loaded = _curve(options, name, loaded, batch_sizes, grid, contexts)
            curves.append(curve)
    yield {"curves": [curve.to_json() for curve in curves]}, "\n\n".join(map(_curve_table, curves))
    target, drafter, context = curves[0], curves[1] if options.drafter else None, contexts[-1]
    if drafter:
        passes = [[1e3 * curve.seconds(b, 1, context) for curve in curves] for b in target.batch_sizes]
        rows = [
            [str(b), f"{seconds:.1f}", f"{step:.1f}", f"{step / seconds:.2f}"]
            for b, (seconds, step) in zip(target.batch_sizes, passes, strict=True)
        ]
        title = f"context {context}: a draft step relative to a target pass over one token"
        yield {}, _table(["B", "target ms", "draft step ms", "ratio"], rows, title)
    if options.run_:
        yield from _of_run(options)
    elif options.acceptance or options.gamma:
        chains, gamma, remarks = options.chains(context)
        yield {}, f"context {context}"
        yield from options.by_batch_size(chains, gamma, target, drafter, options.batch_size or batch_sizes, context)
        yield from (({}, remark) for remark in [*remarks, options.free()])
        yield options.schedules(target, drafter, options.batch_size or batch_sizes, context)


def _curve(
    options: Cost, name: str, owner: Any, batch_sizes: list[int], widths: list[int], contexts: list[int]
) -> tuple[CostCurve, Any]:
    """The stored curve of a model if it covers the grid, else a new one; and the model, if it was loaded."""
    from transformers.utils import logging

    from ...cost.curve import find_curve, save_curve, stored_curves
    from ...models.device import pick_device, pick_dtype
    from ...models.digests import model_sha256
    from ...models.load import load_model
    from ...models.resolve import resolve
    from ...models.shared_embedding import shares_embedding
    from .pass_timing import device_identity

    device = pick_device(options.device)
    dtype = str(pick_dtype(options.dtype, device)).removeprefix("torch.")
    if not options.fresh:
        sha256 = model_sha256(resolve(name))
        stored = find_curve(stored_curves(), sha256, dtype, device_identity(device))
        if stored and stored.covers(batch_sizes, widths, contexts):
            return stored, owner
        if stored:  # the new curve replaces it and must cover its points
            batch_sizes = sorted({*batch_sizes, *stored.batch_sizes})
            widths, contexts = sorted({*widths, *stored.widths}), sorted({*contexts, *stored.contexts})
    logging.disable_progress_bar()
    loading: dict[str, Any] = {"dtype": options.dtype, "device": device}
    shared = owner if owner is not None and shares_embedding(name, owner) else None
    consent = name in options.trust_remote_code
    loaded = load_model(name, share_with=shared, trust_remote_code=consent, **loading)
    curve = _measure(options, loaded, batch_sizes, widths, contexts)
    save_curve(curve)
    return curve, owner or loaded


def _measure(options: Cost, loaded: Any, batch_sizes: list[int], widths: list[int], contexts: list[int]) -> CostCurve:
    from tqdm import tqdm

    from ...bench import memory
    from .pass_timing import measure_curve

    total = len(batch_sizes) * len(widths) * len(contexts) * (options.repeats + 1)
    disable = True if options.quiet else None  # None: a bar on terminals only
    with tqdm(total=total, unit="pass", desc=loaded.name, leave=False, disable=disable) as bar:
        grid = {"batch_sizes": batch_sizes, "widths": widths, "contexts": contexts}
        try:
            return measure_curve(loaded, **grid, repeats=options.repeats, advance=bar.update)
        except (RuntimeError, MemoryError) as error:
            if not memory.exhausted(error):
                raise
            largest = f"batch size {max(batch_sizes)}, context {max(contexts)} and width {max(widths)}"
            raise ModelError(f"out of memory measuring {loaded.name} at {largest}; use smaller values") from error


def _curve_table(curve: CostCurve) -> str:
    """Medians and quartiles in milliseconds, with rows by context and B, columns by W."""
    points = {(p.batch_size, p.context, p.width): Estimate(p.median, p.low, p.high).scaled(1e3) for p in curve.points}
    rows = [
        [str(context), str(b), *(points[b, context, width] for width in curve.widths)]
        for context in curve.contexts
        for b in curve.batch_sizes
    ]
    device = ", ".join(f"{key} {value}" for key, value in curve.device.items())
    passes = f"ms per pass, median of {curve.repeats} [quartiles], {curve.measured}"
    header = ["context", "B", *(f"W = {width}" for width in curve.widths)]
    return _table(header, rows, f"{curve.model}, {curve.dtype}, {device}: {passes}", digits=1)


# -- a finished run ---------------------------------------------------------------------------------------------


def _of_run(options: Cost) -> Parts:
    """Measured and predicted throughput of every cell of a run, and speed-ups at other batch sizes."""
    from ...cost.curve import stored_curves
    from ...cost.finished_cells import curves_of, predictions, statistics
    from ...cost.load_run import read_run
    from ...cost.prediction import predict
    from ...runs.labels import verifier_title

    assert options.run_ is not None
    results, curves = read_run(options.run_).summary.results, stored_curves()
    predicted = predictions(results, curves)
    rows, cells, missing = [], [], set()
    for result in results:
        prediction = predicted.get(result.config.hash)
        if prediction is None or result.metrics is None:
            missing.add(result.config.target)
            continue
        measured, ratio = result.metrics.tokens_per_second, result.metrics.speed_up
        cell = {"cell": result.config.hash, "measured": measured, "predicted": prediction.tokens_per_second}
        cell |= {"off": prediction.tokens_per_second / measured - 1}
        cell |= {"speed_up": ratio.value if ratio else None, "predicted_speed_up": prediction.speed_up}
        speed_ups: dict[int, float] = {}
        if options.batch_size:
            target, drafter = curves_of(result, curves)
            pair = statistics(result, drafter)
            assert target is not None and pair is not None
            speed_ups = {b: predict(pair.at(b), target, drafter).speed_up for b in options.batch_size}
            cell["by_batch_size"] = speed_ups
        rates = [f"{cell['measured']:.1f}", f"{cell['predicted']:.1f}", f"{100 * cell['off']:+.0f}"]
        config = result.config
        titles = [config.drafter.title, verifier_title(result), f"{config.sampling.temperature:g}"]
        rows.append(
            [*titles, str(config.batch_size), *rates, cell["speed_up"], prediction.speed_up, *speed_ups.values()]
        )
        cells.append(cell)
    if not rows:
        names = ", ".join(sorted(missing)) or "its target"
        raise UsageError(
            f"{names} has no cost curve for the device and threads of {options.run_}; on that device, run "
            f"crossdraft cost --target {next(iter(sorted(missing)), 'MODEL')}"
        )
    header = ["drafter", "verifier", "T", "B", "tok/s", "predicted", "off %", "speed-up", "predicted"]
    yield {"cells": cells}, _table([*header, *(f"at B = {b}" for b in options.batch_size or ())], rows)
    error = 100 * median(abs(cell["off"]) for cell in cells)
    yield {}, f"median error of the predicted tok/s: {error:.0f} % over {len(cells)} cells"
    yield from (({}, f"{name} has no cost curve; run crossdraft cost --target {name}") for name in sorted(missing))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", digits: int = 2) -> str:
    return Table([(name, "right") for name in header], rows, title=title, digits=digits).text()
