"""``crossdraft gate BASELINE CURRENT``: fail a build whose acceptance length dropped."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...util.input_files import kind_of
from ..cost.options import number

if TYPE_CHECKING:
    from ...metrics.gate import GateCheck
    from ...report.load_run import FinishedRun

#: Exit codes; 2 is reserved for usage errors.
EXIT = {"pass": 0, "drop": 1, "undecided": 3}
#: Verdicts as printed.
VERDICTS = {"pass": "pass", "drop": "drop", "undecided": "too few prompts"}

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "directory of a finished run; output of crossdraft replay --json; engine's log, metrics or responses"
    parser.add_argument("baseline", metavar="BASELINE", help=source)
    parser.add_argument(
        "current", nargs="?", metavar="CURRENT", help="the same of the current code; without it, the power is printed"
    )
    parser.add_argument(
        "--drop",
        type=number,
        default=0.05,
        metavar="D",
        help="relative drop of the acceptance length that must not pass (0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Return 0 if a drop of ``--drop`` is excluded for every pair, 1 if one dropped, 3 if the prompts are too few.

    Raises:
        UsageError: the sources cannot be read or compared, or CURRENT lacks a pair.
    """
    if not 0 < args.drop < 1:
        raise UsageError(f"--drop must be above 0 and below 1, got {args.drop:g}; 0.05 is 5 %")
    checks, remarks = _checks(args.baseline, args.current, args.drop)
    outcomes = {check.outcome for check in checks}
    outcome = next(name for name in ("drop", "undecided", "pass") if name in outcomes)
    if args.json:
        print(json.dumps(_as_json(checks, remarks, outcome), indent=2))
    else:
        print(_as_text(checks, remarks, args.drop, outcome))
    return EXIT[outcome]


def _checks(baseline: str, current: str | None, drop: float) -> tuple[list[GateCheck], list[str]]:
    from ...metrics.gate import checked, planned
    from .samples import of_run, samples_of

    runs = [kind_of(name) == "directory" for name in (baseline, current) if name is not None]
    if all(runs):
        if current is None:
            return [planned(sample, drop) for sample in of_run(_run(baseline))], []
        return _compared(_run(baseline), _run(current), drop)
    if any(runs):
        raise UsageError(f"{baseline} and {current} are a run and another kind of source; give two of one kind")
    before = {sample.title: sample for sample in samples_of(baseline)}
    if current is None:
        return [planned(sample, drop) for sample in before.values()], _remarks(before)
    after = {sample.title: sample for sample in samples_of(current)}
    if missing := [title for title in before if title not in after]:
        raise UsageError(
            f"{current} lacks {'; '.join(missing)} of {baseline} and has {'; '.join(after)}; measure the same pairs "
            "and draft lengths in both"
        )
    return [checked(sample, after[title], drop) for title, sample in before.items()], _remarks(before | after)


def _remarks(samples: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(sample.remark for sample in samples.values() if sample.remark))


def _run(name: str) -> FinishedRun:
    from ...report.load_run import read_runs
    from ..options.run import note_partial

    runs = read_runs([Path(name)])
    if len(runs) > 1:
        raise UsageError(f"{name} holds shards of {len(runs)} recipes; give the shards of one")
    note_partial(runs)
    return runs[0]


def _compared(baseline: FinishedRun, current: FinishedRun, drop: float) -> tuple[list[GateCheck], list[str]]:
    """Checks of two runs, on the same prompts."""
    from ...metrics.gate import relative
    from ...report.comparison import compare_runs

    comparison, checks = compare_runs(baseline, current), []
    if comparison.only[0]:
        raise UsageError(
            f"{comparison.runs[1]} lacks {'; '.join(comparison.only[0])} of {comparison.runs[0]}; run the same recipe"
        )
    for pair in comparison.pairs:
        before, after = pair.block_efficiency
        if before is None or after is None or pair.difference is None:
            continue
        title = f"{pair.drafter} × {pair.verifier}, {pair.setting}"
        checks.append(relative(title, before, after, pair.difference, pair.prompts, drop))
    if not checks:
        raise UsageError(
            f"{comparison.runs[0]} has no steps with room for a whole draft; run both with a greater max_new_tokens"
        )
    return checks, comparison.remarks


# -- output ------------------------------------------------------------------------------------------------------


def _as_json(checks: list[GateCheck], remarks: list[str], outcome: str) -> dict[str, Any]:
    from ...metrics.gate import POWER

    pairs = [
        asdict(check) | {"detectable": check.detectable, "needed": check.needed, "verdict": check.outcome}
        for check in checks
    ]
    return {"verdict": outcome, "power": POWER, "pairs": pairs, "remarks": remarks}


def _as_text(checks: list[GateCheck], remarks: list[str], drop: float, outcome: str) -> str:
    from ...metrics.gate import POWER
    from ...util.estimate import change_text, percent_text
    from ...util.table import Table

    plan = checks[0].current is None
    unit = checks[0].unit
    columns = {"pair": "left", "baseline": "right", "current": "right", "change [95 %]": "left", unit: "right"}
    columns |= {"detects": "right", f"needed for {percent_text(drop)}": "right", "verdict": "left"}
    rows = []
    for check in checks:
        current = "" if check.current is None else f"{check.current.value:.2f}"
        row = [check.title, f"{check.baseline.value:.2f}", current, change_text(check.change), f"{check.pieces}"]
        needed = "" if check.needed is None else f"{check.needed:,}"
        detects = "" if check.detectable is None else percent_text(check.detectable)
        rows.append([*row, detects, needed, VERDICTS[check.outcome]])
    table = Table(columns, rows).without(*(("current", "change [95 %]") if plan else ()))
    paired = "of the same prompts" if all(check.paired for check in checks) else f"of independent {unit}"
    if plan:
        paired = "of two independent measurements"
    lines = [
        f"detects: the smallest drop that fails with a probability of {POWER:.1f}, by the differences {paired}",
        *remarks,
        _verdict(checks, drop, outcome, unit),
    ]
    return table.text() + "\n\n" + "\n".join(lines)


def _verdict(checks: list[GateCheck], drop: float, outcome: str, unit: str) -> str:
    from ...util.estimate import percent_text

    titles = "; ".join(check.title for check in checks if check.outcome == outcome)
    if checks[0].current is None and outcome == "pass":
        return f"enough {unit} to detect a drop of {percent_text(drop)}"
    if outcome == "pass":
        return f"pass: a drop of {percent_text(drop)} or more is excluded"
    if outcome == "drop":
        return f"drop: the acceptance length dropped: {titles}"
    needed = [check.needed for check in checks if check.outcome == outcome]
    more = "at least 3" if None in needed else f"{max(n for n in needed if n is not None):,}"
    return f"too few {unit} to exclude a drop of {percent_text(drop)}: {titles}; measure {more}"
