"""``crossdraft run RECIPE``: measure every cell of a recipe and print a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ...contracts.command import Argument, Command
from ...errors import UsageError, quoted
from ..options.trust import ProgramOptions, TrustOptions, strings_in
from ..standard_streams import print_error, print_stored
from .certificates import certify_missing
from .tracking import tracking

if TYPE_CHECKING:
    from ...bench.config import RunConfig
    from ...cost.summary import Summary

_PARALLEL = "parallel runs"


class RunRecipe(ProgramOptions, TrustOptions, Command):
    """Options of a run."""

    name: ClassVar[str] = "run"

    recipe: Annotated[str, Argument("recipe", positional=True)] = Field(
        description="a YAML file, or the name of an installed recipe (crossdraft list recipes)"
    )
    set_: Annotated[tuple[str, ...], Argument("KEY=VALUE")] = Field(
        (),
        description="override a key of the recipe (repeatable), e.g. matrix.batch_size=[1,4] or drafters.0.gamma=6",
    )
    target: Annotated[str, Argument("MODEL")] = Field("", description="target; same as --set target=MODEL")
    limit: Annotated[int | None, Argument("N")] = Field(
        None, ge=1, description="use the first N prompts; same as --set limit=N"
    )
    time: Annotated[str, Argument("DURATION")] = Field(
        "",
        description="time budget, 90s, 5m or 2h: as many blocks of prompts as fit, the same for all pairs (none: no "
        "limit)",
    )
    out: Annotated[Path, Argument("DIR")] = Field(Path("runs"), description="output directory (runs)")
    fresh: bool = Field(False, description="measure cells again that are on disk")
    retry_failed: bool = Field(False, description="measure groups with failed cells again")
    fail_fast: bool = Field(False, description="stop at the first failed cell")
    step_limit: Annotated[float | None, Argument("SECONDS")] = Field(
        None, gt=0, lt=1e6, description="abort a cell if a step takes longer (default: no limit)"
    )
    validate_: Literal["sampled", "always", "never"] = Field(
        "sampled", description="check drafts and verdicts in some steps (sampled), in all (always), or never"
    )
    quiet: bool = Field(False, description="print the table only")
    track: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="experiment tracker (repeatable); see crossdraft list trackers"
    )
    shard: Annotated[str, Argument("K/N", group=_PARALLEL)] = Field(
        "", description="measure only part K of N of the groups of the recipe"
    )
    launcher: Annotated[str, Argument("NAME", group=_PARALLEL)] = Field(
        "", description="start a process per group; see crossdraft list launchers"
    )
    workers: Annotated[int | None, Argument("N", group=_PARALLEL, requires="launcher")] = Field(
        None, ge=1, description="maximum number of processes (default: number of devices)"
    )
    launcher_option: Annotated[tuple[str, ...], Argument("KEY=VALUE", group=_PARALLEL, requires="launcher")] = Field(
        (), description="launcher option (repeatable); see crossdraft list launchers NAME"
    )
    untimed: Annotated[bool, Argument(group=_PARALLEL)] = Field(
        False, description="do not record times, for a device that is shared with other processes"
    )

    def run(self) -> int:
        """Return 0; 1 if a cell failed or the disk is full; 130 if interrupted."""
        config = self._config()

        from transformers.utils import logging

        from ...bench.plan import make_plan
        from ...bench.run import opened
        from ...report.tables import terminal
        from ...report.write import write_summary
        from ...runs.interrupts import saving_interrupts

        logging.disable_progress_bar()  # the run has its own progress bar
        plan = make_plan(config)
        # Any string in a drafter's options may be a model.
        self.trusted(name for cell in plan.expansion.cells for name in (cell.target, *strings_in(cell.drafter.config)))
        with saving_interrupts(), tracking(self.track, plan) as outcome:
            with opened(plan) as started:
                certify_missing(plan.new, config.message, started.limit)
                started.measure()
            summary = write_summary(started.outcome)
            outcome.update(exit_code=summary.exit_code, failed=len(summary.failed))
            outcome.update(interrupted=summary.interrupted, stopped=summary.stopped)
            print_stored(terminal(summary))
            if summary.failed:
                print_error(f"crossdraft: {len(summary.failed)} of {len(summary.results)} cells failed")
            if summary.stopped:
                print_error(f"crossdraft: error: {summary.stopped}")
            return summary.exit_code

    def _config(self) -> RunConfig:
        from ...recipe.recipe import read_recipe

        settings = [*self.set_, *([f"limit={self.limit}"] if self.limit is not None else [])]
        settings += [f"target={self.target}"] if self.target else []
        if self.time:
            settings.append(f"time={'null' if self.time == 'none' else _duration(self.time)}")
        recipe = read_recipe(self.recipe, settings)  # before PyTorch is imported, so that errors are reported at once

        from ...bench.config import RunConfig, log_to_stderr
        from ...runs.shards import Shard

        same = ("out", "fresh", "retry_failed", "fail_fast", "step_limit", "trust_remote_code", "untimed", "debug")
        same += ("launcher", "workers")
        return RunConfig(
            recipe,
            **{name: getattr(self, name) for name in same},
            validate=self.validate_,
            allow_programs=self.allow_program,
            shard=Shard.parse(self.shard) if self.shard else None,
            log=None if self.quiet else log_to_stderr,
            table=None if self.quiet else _print_partial,
            progress=not self.quiet,
            launcher_options=dict(map(_launcher_option, self.launcher_option)),
            command=["run", self.recipe, *(part for setting in settings for part in ("--set", setting))],
        )


def _print_partial(outcome: Summary) -> None:
    from ...report.tables import brief

    print_error(f"\n{brief(outcome)}")


def _duration(text: str) -> str:
    from ...recipe.durations import seconds_of

    try:
        seconds_of(text)
    except ValueError as error:
        raise UsageError(f"--time: {error}, or none") from None
    return text


def _launcher_option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"--launcher-option {quoted(text)} is not KEY=VALUE")
    return key, value
