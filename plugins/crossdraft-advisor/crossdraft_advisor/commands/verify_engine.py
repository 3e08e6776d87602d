"""``crossdraft verify-engine RECIPE``: check that what an engine serves is what the target and the drafter define."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from crossdraft import Argument, Command, Table, UsageError
from crossdraft.commands import JsonOptions, ProgramOptions, TrustOptions

from ..limits import LEAST_DEVIATION
from ..report import Report, sampling_text

if TYPE_CHECKING:
    from crossdraft.runs import Summary

    from ..samples.engine_checks import CellCheck

EXIT = {"yes": 0, "no": 1, "undecided": 3}  # exit codes; 2 is reserved for usage errors
#: Options of runs, which a finished one does not take.
_RUN_OPTIONS = {"set_", "limit", "out", "fresh", "allow_program"}


class VerifyEngine(TrustOptions, ProgramOptions, JsonOptions, Command):
    """Check of an engine's steps, counters and text against replay and the target.

    Raises UsageError: the recipe has no engine, or a drafter that cannot be replayed.
    """

    name: ClassVar[str] = "verify-engine"

    recipe: Annotated[str, Argument("RECIPE", positional=True)] = Field(
        description="a YAML file with an engine, or the name of an installed recipe; or the directory of a finished "
        "run, to check its responses without sending requests"
    )
    set_: Annotated[tuple[str, ...], Argument("KEY=VALUE")] = Field((), description="override a key of the recipe")
    limit: int | None = Field(None, description="use the first N prompts; same as --set limit=N")
    out: Annotated[Path, Argument("DIR")] = Field(Path("runs"), description="output directory")
    fresh: bool = Field(False, description="send requests again for cells that are on disk")
    deviation: float = Field(
        0.05, ge=LEAST_DEVIATION, lt=0.5, description="allowed total variation of the sampled tokens"
    )
    seed: int = Field(0, ge=0, description="of the random positions within a token's share (0)")

    def run(self) -> int:
        """Return 0 if every cell is verified, 1 if one is not, 3 if one needs more draws."""
        from crossdraft import load_model
        from crossdraft.runs import RunDirectory

        from ..samples.engine_checks import check_cell

        outcome, consent = self._finished() if Path(self.recipe).is_dir() else self._measured()
        failed = [f"{r.config.drafter.title} × {r.config.verifier.title}: {r.error}" for r in outcome.failed]
        results = [r for r in outcome.results if r.config.engine is not None and r.metrics is not None]
        if not results and not failed:
            raise UsageError(f"{self.recipe}: no cell has an engine; add engine: {{name: vllm, ...}}")
        directory, checks, loaded = RunDirectory(outcome.directory), [], {}
        for result in results:
            config = result.config
            key = (config.target, config.dtype)
            if key not in loaded:
                loaded.clear()
                trust = config.target in consent
                loaded[key] = load_model(config.target, dtype=config.dtype, trust_remote_code=trust)
            path = directory.cell_path(config.hash)
            assert path is not None
            pair = f"{config.drafter.title} × {config.verifier.title}"
            print(f"checking {pair}, {sampling_text(config.sampling)}", file=sys.stderr)
            scrapes, options = (
                directory.path / "servers" / config.hash,
                {"deviation": self.deviation, "seed": self.seed},
            )
            checks.append(check_cell(result, path, scrapes, loaded[key], **options, trust=consent))
        Report(lambda: _text(checks, failed), lambda: _json(checks, failed)).emit(self)
        outcomes = {check.outcome for check in checks} | ({"no"} if failed else set())
        return EXIT["no" if "no" in outcomes else "undecided" if "undecided" in outcomes else "yes"]

    def _finished(self) -> tuple[Summary, frozenset[str]]:
        from crossdraft.runs import read_run

        if self.model_fields_set & _RUN_OPTIONS:
            raise UsageError(
                f"{self.recipe} is a finished run: --set, --limit, --fresh, --out and --allow-program apply to recipes "
                "only"
            )
        summary = read_run(Path(self.recipe), timed=False, running=True).summary
        return summary, self.trusted([summary.recipe.target])

    def _measured(self) -> tuple[Summary, frozenset[str]]:
        from crossdraft import load_recipe, run
        from crossdraft.framework.runs.interrupts import saving_interrupts

        settings = [*self.set_, *([f"limit={self.limit}"] if self.limit is not None else [])]
        recipe = load_recipe(self.recipe, settings)
        consent = self.trusted([recipe.target])
        with saving_interrupts():
            options = {"trust_remote_code": consent, "allow_programs": self.allow_program}
            outcome = run(recipe, self.out, fresh=self.fresh, untimed=True, **options)
        if outcome.interrupted or outcome.stopped:
            raise UsageError(
                f"the run was not finished: {outcome.stopped or 'interrupted'}; run the command again to resume"
            )
        return outcome, consent


def _text(checks: list[CellCheck], failed: list[str]) -> str:
    table, reasons = [], []
    for check in checks:
        config, steps, shown, counted = check.config, check.steps, "-", "-"
        if steps is not None:
            shown = f"{steps.accepted:.0f} accepted, {steps.expected:.1f} expected (p = {steps.p_value:.2g})"
            shown = f"{steps.equal} of {steps.steps}" if steps.decided == steps.steps else shown
        if check.counters is not None:
            low, high = check.counters.bounds(1.96)
            expected = f"{low:.0f}" if high - low < 0.5 else f"{low:.0f} to {high:.0f}"
            counted = f"{check.counters.accepted:.0f}, replay {expected}"
        row: dict[str, Any] = {"engine": config.engine.title if config.engine else "", "drafter": config.drafter.title}
        row |= {"verifier": config.verifier.title, "sampling": sampling_text(config.sampling), "B": config.batch_size}
        row |= {"steps as replayed": shown, "counted": counted, "text or distribution": _distribution(check)}
        table.append(row | {"verdict": check.outcome})
        reasons += _reasons(check)
    lines = [*([Table.of(table).text()] if table else []), *reasons]
    lines += [f"failed: {text}" for text in failed]
    return "\n".join(lines)


def _distribution(check: CellCheck) -> str:
    if (text := check.text) is not None:
        ties = f", {text.tied} by ties" if text.tied else ""
        return f"{text.equal + text.tied} of {text.equal + text.tied + len(text.other)} greedy{ties}"
    verdict = check.distribution
    assert verdict is not None
    if verdict.outcome == "no":
        return (
            f"differs: p = {verdict.p_value:.2g}, mean log P {verdict.log_p:.2f}, expected {verdict.expected_log_p:.2f}"
        )
    return f"TV at most {verdict.tv_at_most:.3f} ({verdict.draws} draws)"


def _reasons(check: CellCheck) -> list[str]:
    config, lines = check.config, []
    pair = f"{config.drafter.title} × {config.verifier.title}, {sampling_text(config.sampling)}"
    if check.steps is not None and check.steps.unequal:
        name, token, tau, expected = check.steps.unequal[0]
        lines.append(
            f"{pair}: {len(check.steps.unequal)} steps differ from replay; the first is of prompt {name!r} at token "
            f"{token}: {tau} accepted, {expected} in replay"
        )
        if (step := check.first) is not None:
            drafted = " ".join(map(str, step.drafted)) or "unknown"
            text = f"the response continues {' '.join(map(str, step.emitted))}"
            lines.append(f"  the drafter proposes {drafted} there; {text}")
            now, before = (", ".join(names) or "none" for names in step.others)
            if any(step.others):
                others = f"{now}; in the step before it, where engines draft: {before}"
                lines.append(f"  other requests in that step: {others}")
            if check.text is not None and not check.text.other:
                lines.append("  the text is not affected: all responses are the target's greedy text")
    elif check.steps is not None and check.outcome == "no" and check.steps.p_value < 1e-3:
        lines.append(f"{pair}: the accepted tokens differ from replay by {check.steps.z:+.1f} standard errors")
    if check.counters is not None and not check.counters.agrees:
        low, high = check.counters.bounds(1.96)
        lines.append(
            f"{pair}: the server counted {check.counters.accepted:.0f} accepted tokens; by its definition replay "
            f"expects {low:.1f} to {high:.1f}"
        )
    if check.other_traffic:
        lines.append(f"{pair}: the counters are not compared, because the server served other requests, too")
    if check.text is not None and check.text.other:
        name, token, gap = check.text.other[0]
        lines.append(
            f"{pair}: {len(check.text.other)} responses are not the target's greedy text; the first differs at prompt "
            f"{name!r}, token {token}, where another token is ahead by {gap:.3g} in the logits"
        )
    if check.draws_to_show is not None:
        lines.append(f"{pair}: the difference shows after {check.draws_to_show} draws")
    if check.distribution is not None and check.distribution.outcome == "undecided":
        more = check.distribution.more_draws
        lines.append(
            f"{pair}: {more} more draws decide TV {check.distribution.deviation:g}; raise limit or max_new_tokens"
        )
    return lines


def _json(checks: list[CellCheck], failed: list[str]) -> dict[str, Any]:
    rows = []
    for check in checks:
        row: dict[str, Any] = {"config": check.config.model_dump(mode="json"), "verdict": check.outcome}
        if check.steps is not None:
            row["steps"] = asdict(check.steps) | {"p_value": check.steps.p_value}
        row |= {"counters": check.counters, "text": check.text, "distribution": check.distribution}
        rows.append(row | {"first_unequal_step": check.first, "draws_to_show": check.draws_to_show})
    return {"cells": rows, "failed": failed}
