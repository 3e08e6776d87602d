"""``crossdraft gate BASELINE CURRENT``: fail a build whose acceptance length dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from crossdraft import Argument, Command, Table, UsageError, printable
from crossdraft.commands import JsonOptions, kind_of, parse_json, path_of, read_text
from crossdraft.framework.cli.options.run import one_run
from crossdraft.framework.metrics.cell_metrics import sums_by_prompt, uncut_steps
from crossdraft.framework.report.comparison import compare_runs
from crossdraft.runs import LEAST_PIECES, FinishedRun, group_title

from ..engines.acceptance import Acceptance
from ..engines.formats import read_acceptances
from ..gate import POWER, GateCheck, Sample, checked, planned
from ..limits import METRICS_BYTES
from ..report import Report, change_text, percent_text, right

EXIT = {"pass": 0, "drop": 1, "undecided": 3}  # exit codes; 2 is reserved for usage errors
VERDICTS = {"pass": "pass", "drop": "drop", "undecided": "too few prompts"}  # verdicts as printed


class Gate(JsonOptions, Command):
    """Comparison of the acceptance lengths of two sources: runs, replays, logs, metrics or responses."""

    name: ClassVar[str] = "gate"

    baseline: Annotated[str, Argument("BASELINE", positional=True)] = Field(
        description="directory of a finished run, output of crossdraft replay --json, or an engine's log, metrics or "
        "responses"
    )
    current: Annotated[str | None, Argument("CURRENT", positional=True)] = Field(
        None, description="the same of the current code; without it, the prompts needed are printed"
    )
    fail_under: Annotated[float, Argument("X")] = Field(
        0.95,
        gt=0,
        lt=1,
        description="exit with 1 if the acceptance length of a pair dropped below this share of the baseline's, and "
        "with 3 if the prompts are too few to exclude it",
    )
    markdown: Annotated[bool, Argument(exclusive="format")] = Field(False, description="print Markdown")

    def run(self) -> int:
        """Raises UsageError (exit status 2) for sources that cannot be read or compared."""
        drop = round(1 - self.fail_under, 12)
        checks, remarks = _checks(self.baseline, self.current, drop)
        outcomes = {check.outcome for check in checks}
        outcome = next(name for name in ("drop", "undecided", "pass") if name in outcomes)
        pairs = [
            asdict(check) | {"detectable": check.detectable, "needed": check.needed, "verdict": check.outcome}
            for check in checks
        ]
        data = {"verdict": outcome, "power": POWER, "pairs": pairs, "remarks": remarks}
        paired = "of the same prompts" if all(check.paired for check in checks) else f"of independent {checks[0].unit}"
        paired = "of two independent measurements" if checks[0].current is None else paired
        detects = f"the smallest drop that fails with a probability of {POWER:.1f}, by the differences {paired}"
        lines = "\n".join([f"detects: {detects}", *remarks, _verdict(checks, drop, outcome)])
        table = _table(checks, drop).render("markdown" if self.markdown else "text")
        Report(lambda: f"{table}\n\n{lines}", lambda: data).emit(self)
        return EXIT[outcome]


def _checks(baseline: str, current: str | None, drop: float) -> tuple[list[GateCheck], list[str]]:
    """Checks of all pairs of the baseline, and remarks."""
    runs = [kind_of(name) == "directory" for name in (baseline, current) if name is not None]
    if any(runs) and not all(runs):
        raise UsageError(f"{baseline} and {current} are a run and another kind of source; give two of one kind")
    if all(runs) and current is not None:
        return _compared(one_run(baseline), one_run(current), drop)
    read = _samples_of_run if all(runs) else samples_of
    before = _by_title(read(baseline), baseline)
    remarks = [sample.remark for sample in before.values()]
    if current is None:
        checks = [planned(sample, drop) for sample in before.values()]
    else:
        after = _by_title(read(current), current)
        if missing := [title for title in before if title not in after]:
            raise UsageError(
                f"{current} lacks {'; '.join(missing)} of {baseline} and has {'; '.join(after)}; measure the same "
                "pairs and draft lengths in both"
            )
        checks = [checked(sample, after[title], drop) for title, sample in before.items()]
        remarks += [sample.remark for sample in after.values()]
    return checks, list(dict.fromkeys(filter(None, remarks)))


def _by_title(samples: Sequence[Sample], source: str) -> dict[str, Sample]:
    """Samples by title. Raises UsageError for two of one title."""
    titles = [sample.title for sample in samples]
    if twice := [title for title in dict.fromkeys(titles) if titles.count(title) > 1]:
        raise UsageError(f"{source} has several rows of {'; '.join(twice)}; remove all but one of each")
    return dict(zip(titles, samples, strict=True))


def _compared(baseline: FinishedRun, current: FinishedRun, drop: float) -> tuple[list[GateCheck], list[str]]:
    """Checks of two runs, on the same prompts."""
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
        change = pair.difference.scaled(1 / before.value)
        checks.append(GateCheck(title, before, after, change, pair.prompts, "prompts", True, drop))
    if not checks:
        raise UsageError(
            f"{comparison.runs[0]} has no steps with room for a whole draft; run both with a greater max_new_tokens"
        )
    return checks, comparison.remarks


def _samples_of_run(name: str) -> list[Sample]:
    """The block efficiencies of a finished run."""
    results = one_run(name).summary.results
    cells, samples = [result.config for result in results], []
    for result in results:
        config = result.config
        if metrics := result.drafting:
            sums = sums_by_prompt(uncut_steps(result.records, metrics.depth))
            title = f"{config.drafter.title} × {config.verifier.title}, {group_title(config, cells)}"
            samples.append(Sample(title, list(sums.values()), tuple(map(str, sums)), maximum=1.0 + metrics.depth))
    return samples


def _table(checks: Sequence[GateCheck], drop: float) -> Table:
    columns = ["pair", *right("baseline", "current"), "change [95 %]"]
    columns += [*right(checks[0].unit, "detects", f"needed for {percent_text(drop)}"), "verdict"]
    rows = []
    for check in checks:
        current = None if check.current is None else check.current.value
        detects = "" if check.detectable is None else percent_text(check.detectable)
        needed = "" if check.needed is None else f"{check.needed:,}"
        row = [check.title, check.baseline.value, current, change_text(check.change), str(check.pieces)]
        rows.append([*row, detects, needed, VERDICTS[check.outcome]])
    table = Table(columns, rows)
    return table.without("current", "change [95 %]") if checks[0].current is None else table


def _verdict(checks: Sequence[GateCheck], drop: float, outcome: str) -> str:
    unit, titles = checks[0].unit, "; ".join(check.title for check in checks if check.outcome == outcome)
    if checks[0].current is None and outcome == "pass":
        return f"enough {unit} to detect a drop of {percent_text(drop)}"
    if outcome == "pass":
        return f"pass: a drop of {percent_text(drop)} or more is excluded"
    if outcome == "drop":
        return f"drop: the acceptance length dropped: {titles}"
    needed = [check.needed for check in checks if check.outcome == outcome]
    more = "at least 3" if None in needed else f"{max(n for n in needed if n is not None):,}"
    return f"too few {unit} to exclude a drop of {percent_text(drop)}: {titles}; measure {more}"


_KEYS = {"prompt_ids", "rows", "responses"}


def samples_of(name: str) -> list[Sample]:
    """The samples of a file or URL. Raises UsageError if it does not have any."""
    if not name.startswith(("http://", "https://")):
        if not kind_of(name):
            raise UsageError(
                f"{printable(name)} does not exist; give a run, replay JSON, or an engine's log or metrics"
            )
        text = read_text(path_of(name), METRICS_BYTES)
        if text.lstrip().startswith("{") and '"by_prompt"' in text:
            data = parse_json(text, name)
            if isinstance(data, dict) and data.keys() >= _KEYS:
                return _replayed(data, printable(name))
    samples, numbers = [], Counter[str]()
    for sample in map(_sample, read_acceptances(name)[1]):
        numbers[sample.title] += 1
        number = numbers[sample.title]
        samples.append(replace(sample, title=f"{sample.title} ({number})") if number > 1 else sample)
    return samples


def _sample(acceptance: Acceptance) -> Sample:
    rows = [(row[0] + sum(row[1:]), row[0]) for row in acceptance.rows]
    overall, remark = None, ""
    if len(rows) < LEAST_PIECES:
        overall = acceptance.block_efficiency()
        if overall.low is not None:
            remark = "assumed: independent drafts, on the same prompts in both; logs and responses need no assumption"
    gamma = f", gamma {acceptance.gamma}" if acceptance.gamma else ""
    pair = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier))) or "drafts"
    sampling = {} if acceptance.temperature is None else {"temperature": acceptance.temperature}
    return Sample(
        pair + gamma, rows, acceptance.names, acceptance.pieces, overall, remark, sampling, acceptance.maximum
    )


def _replayed(data: dict[str, Any], name: str) -> list[Sample]:
    """The samples of ``crossdraft replay --json``. Raises UsageError for other contents under its keys."""
    try:
        ids = tuple(str(item) for item in data["prompt_ids"])
        samples = []
        if not ids:
            raise ValueError("prompt_ids is empty")
        for row in data["rows"]:
            copies = f", K = {row['k']}" if row["k"] != 1 else ""
            title = f"{row['drafter']} × {row['verifier']}{copies}, gamma {row['gamma']}"
            rows = [(float(tokens), float(steps)) for tokens, steps in row["by_prompt"]]
            if len(rows) != len(ids) or not all(0 <= steps <= tokens < 1e15 for tokens, steps in rows):
                raise ValueError(f"by_prompt of {title} does not have a token and step count for each prompt")
            if any(steps for _, steps in rows):
                sampling, maximum = dict(data.get("sampling") or {}), 1.0 + float(row["gamma"])
                samples.append(Sample(printable(title), rows, ids, sampling=sampling, maximum=maximum))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name} is not the output of crossdraft replay --json: {error!r}; replay again") from None
    return samples
