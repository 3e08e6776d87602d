"""``crossdraft run RECIPE``: measure every cell of a recipe and print a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ... import plugins
from ...errors import UsageError, quoted
from ..options.trust import add_program_argument, add_trust_argument, strings_in, trusted
from ..standard_streams import print_error, print_stored
from .certificates import certify_missing
from .tracking import tracking

if TYPE_CHECKING:
    from ...recipe.recipe import CellConfig, Recipe
    from ...runs.records import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of an installed recipe (crossdraft list recipes)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe (repeatable), e.g. matrix.batch_size=[1,4] or drafters.0.gamma=6",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N prompts; same as --set limit=N")
    parser.add_argument(
        "--time",
        metavar="DURATION",
        help="time budget, 90s, 5m or 2h: as many blocks of prompts as fit, the same for all pairs (none: no limit)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="output directory (runs)")
    parser.add_argument("--fresh", action="store_true", help="measure cells again that are on disk")
    parser.add_argument("--retry-failed", action="store_true", help="measure groups with failed cells again")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failed cell")
    parser.add_argument(
        "--step-limit",
        type=float,
        metavar="SECONDS",
        help="abort a cell if a step takes longer (default: no limit)",
    )
    parser.add_argument(
        "--validate",
        choices=("sampled", "always", "never"),
        default="sampled",
        help="check drafts and verdicts in some steps (sampled), in all (always), or never",
    )
    add_trust_argument(parser)
    add_program_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="print the table only")
    parser.add_argument(
        "--track", action="append", default=[], metavar="NAME", help=f"experiment tracker: {_names('trackers')}"
    )
    machines = parser.add_argument_group(
        "parallel runs", "measure the groups of a recipe in several processes (docs/machines.md)"
    )
    machines.add_argument("--shard", metavar="K/N", help="measure only part K of N of the groups")
    machines.add_argument("--launcher", metavar="NAME", help=f"start a process per group: {_names('launchers')}")
    machines.add_argument(
        "--workers", type=int, metavar="N", help="maximum number of processes (default: number of devices)"
    )
    machines.add_argument(
        "--launcher-option",
        dest="launcher_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="launcher option (repeatable); see crossdraft list launchers NAME",
    )
    machines.add_argument(
        "--untimed",
        action="store_true",
        help="do not record times, for a device that is shared with other processes",
    )


def _names(kind: str) -> str:
    return ", ".join(sorted(plugins.entries(kind)))


def main(args: argparse.Namespace) -> int:
    """Return 0; 1 if a cell failed or the disk is full; 130 if interrupted. Raises UsageError (exit status 2)."""
    from ...recipe.recipe import read_recipe

    settings = list(args.settings)
    if args.limit is not None:
        settings.append(f"limit={args.limit}")
    if args.time is not None:
        settings.append(f"time={'null' if args.time == 'none' else _duration(args.time)}")
    recipe = read_recipe(args.recipe, settings)  # before PyTorch is imported, so that errors are reported at once

    from transformers.utils import logging

    from ...bench.matrix import expand
    from ...report.tables import terminal
    from ...report.write import write_summary
    from ...runs.interrupts import Interrupts

    logging.disable_progress_bar()  # the run has its own progress bar
    cells = expand(recipe).cells
    consent = trusted(args, _models(cells)) if args.trust_remote_code else frozenset()
    with Interrupts(), tracking(args.track) as notify_finished:
        outcome = _run(args, recipe, settings, consent)
        summary = write_summary(outcome)
        notify_finished(summary)
        print_stored(terminal(summary))
        if outcome.failed:
            print_error(f"crossdraft: {len(outcome.failed)} of {len(outcome.results)} cells failed")
        if summary.stopped:
            print_error(f"crossdraft: error: {summary.stopped}")
        return summary.exit_code


def _models(cells: Iterable[CellConfig]) -> Iterator[str]:
    """All strings in the cells that may be models."""
    for cell in cells:
        yield cell.target
        yield from strings_in(cell.drafter.config)


def _duration(text: str) -> str:
    from ...recipe.durations import seconds_of

    try:
        seconds_of(text)
    except ValueError as error:
        raise UsageError(f"--time: {error}, or none") from None
    return text


def _print_partial(outcome: Outcome) -> None:
    from ...cost.summary import Summary
    from ...report.tables import brief

    print_error(f"\n{brief(Summary.of(outcome, []))}")


def _run(args: argparse.Namespace, recipe: Recipe, settings: list[str], consent: frozenset[str]) -> Outcome:
    from ...bench.config import log_to_stderr
    from ...bench.run import run
    from ...runs.shards import Shard

    options = {}
    for text in args.launcher_options:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"--launcher-option {quoted(text)} is not KEY=VALUE")
        options[key] = value
    return run(
        recipe,
        args.out,
        fresh=args.fresh,
        retry_failed=args.retry_failed,
        fail_fast=args.fail_fast,
        step_limit=args.step_limit,
        validate=args.validate,
        trust_remote_code=consent,
        allow_programs=args.allow_program,
        shard=Shard.parse(args.shard) if args.shard else None,
        untimed=args.untimed,
        log=None if args.quiet else log_to_stderr,
        progress=not args.quiet,
        debug=args.debug,
        certify=lambda cells, limit: certify_missing(cells, _discard if args.quiet else log_to_stderr, limit),
        on_partial=None if args.quiet else _print_partial,
        launcher=args.launcher or "",
        launcher_options=options,
        workers=args.workers,
        command=["run", args.recipe, *(part for setting in settings for part in ("--set", setting))],
    )


def _discard(_: str) -> None:
    """Ignore a message."""
