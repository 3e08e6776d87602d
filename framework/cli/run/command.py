"""``crossdraft run RECIPE``: measure every cell of a recipe and print the table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ... import plugins
from ...errors import UsageError, quoted
from ..standard_streams import complain, print_kept
from ..trust_args import add_consent, texts_in, trusted
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
        help="replace a key of the recipe (repeatable), e.g. matrix.batch_size=[1,4] or drafters.0.gamma=6",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N prompts; same as --set limit=N")
    parser.add_argument(
        "--time",
        metavar="DURATION",
        help="time budget, 90s, 5m or 2h: as many blocks of prompts as fit, all pairs equally (none: no budget)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where records go (runs)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is on disk already")
    parser.add_argument("--retry-failed", action="store_true", help="measure groups again in which a cell failed")
    parser.add_argument("--fail-fast", action="store_true", help="end with the first cell that fails")
    parser.add_argument(
        "--step-limit",
        type=float,
        metavar="SECONDS",
        help="give a cell up when one step takes longer; without it nothing ends a strategy that hangs",
    )
    parser.add_argument(
        "--validate",
        choices=("sampled", "always", "never"),
        default="sampled",
        help="check drafts and verdicts in full now and then (sampled), in every step, or never",
    )
    add_consent(parser)
    parser.add_argument("--quiet", action="store_true", help="print the table and nothing else")
    parser.add_argument(
        "--track", action="append", default=[], metavar="NAME", help=f"tell of the run: {_listed('trackers')}"
    )
    machines = parser.add_argument_group("more machines", "the groups of a recipe, measured apart (docs/machines.md)")
    machines.add_argument("--shard", metavar="K/N", help="measure part K of N of the groups, and nothing else")
    machines.add_argument("--launcher", metavar="NAME", help=f"start a process for each group: {_listed('launchers')}")
    machines.add_argument("--workers", type=int, metavar="N", help="most processes at once (one for each device)")
    machines.add_argument(
        "--launcher-option",
        dest="launcher_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the launcher (repeatable), see crossdraft list launchers NAME",
    )
    machines.add_argument(
        "--untimed",
        action="store_true",
        help="others use the device, too: keep tokens and block efficiency, and no times",
    )


def _listed(kind: str) -> str:
    return ", ".join(sorted(plugins.entries(kind)))


def main(args: argparse.Namespace) -> int:
    """0: done; 1: a cell failed, or the disk is full; 2 (as UsageError): the recipe is wrong; 130: interrupted."""
    from ...recipe.recipe import read_recipe

    _check(args)
    settings = list(args.settings)
    if args.limit is not None:
        settings.append(f"limit={args.limit}")
    if args.time is not None:
        settings.append(f"time={'null' if args.time == 'none' else _duration(args.time)}")
    recipe = read_recipe(args.recipe, settings)  # before PyTorch is imported, so that a wrong key is reported at once

    from transformers.utils import logging

    from ...bench.matrix import plan
    from ...report.tables import terminal
    from ...report.write import write_summary
    from ...runs.interrupts import Interrupts

    logging.disable_progress_bar()  # a model takes a second to load; the run has a bar of its own
    cells = plan(recipe).cells
    consent = trusted(args, _models(cells)) if args.trust_remote_code else frozenset()
    with Interrupts(), tracking(args.track) as tell:
        outcome = (_launch if args.launcher else _run)(args, recipe, settings, consent)
        summary = write_summary(outcome)
        tell(summary)
        print_kept(terminal(summary))
        if outcome.failed:
            complain(f"crossdraft: {len(outcome.failed)} of {len(outcome.results)} cells failed")
        if summary.stopped:
            complain(f"crossdraft: error: {summary.stopped}")
        return summary.exit_code


def _models(cells: Iterable[CellConfig]) -> Iterator[str]:
    """Every name in the cells that may be a model's."""
    for cell in cells:
        yield cell.target
        yield from texts_in(cell.drafter.config)


def _duration(text: str) -> str:
    from ...recipe.durations import seconds_of

    try:
        seconds_of(text)
    except ValueError as error:
        raise UsageError(f"--time: {error}, or none") from None
    return text


def _print_partial(outcome: Outcome) -> None:
    from ...report.summary import Summary
    from ...report.tables import brief

    complain(f"\n{brief(Summary.of(outcome, []))}")


def _check(args: argparse.Namespace) -> None:
    """Refuse options that have nothing to say to each other."""
    if args.shard and args.launcher:
        raise UsageError("--shard and --launcher: a launcher makes shards itself; give one of them")
    for name, given in (("--workers", args.workers is not None), ("--launcher-option", args.launcher_options)):
        if given and not args.launcher:
            raise UsageError(f"{name} needs --launcher: without one, this process measures every group")


def _run(args: argparse.Namespace, recipe: Recipe, settings: list[str], consent: frozenset[str]) -> Outcome:
    from ...bench.run import log_to_stderr, run
    from ...runs.shards import Shard

    return run(
        recipe,
        args.out,
        fresh=args.fresh,
        retry_failed=args.retry_failed,
        fail_fast=args.fail_fast,
        step_limit=args.step_limit,
        validate=args.validate,
        trust_remote_code=consent,
        shard=Shard.parse(args.shard) if args.shard else None,
        untimed=args.untimed,
        log=None if args.quiet else log_to_stderr,
        progress=not args.quiet,
        debug=args.debug,
        certify=lambda cells, limit: certify_missing(cells, _quiet if args.quiet else log_to_stderr, limit),
        on_partial=None if args.quiet else _print_partial,
    )


def _quiet(_: str) -> None:
    """Print nothing."""


def _launch(args: argparse.Namespace, recipe: Recipe, settings: list[str], consent: frozenset[str]) -> Outcome:
    from ...bench.launch import launch
    from ...bench.matrix import plan
    from ...bench.run import log_to_stderr
    from ...bench.step_limit import StepLimit

    limit = StepLimit(args.step_limit)
    certify_missing(plan(recipe).cells, _quiet if args.quiet else log_to_stderr, limit)  # once, not in every process

    options = {}
    for given in args.launcher_options:
        key, equals, value = given.partition("=")
        if not (key and equals):
            raise UsageError(f"--launcher-option {quoted(given)} is not KEY=VALUE")
        options[key] = value
    command = ["run", args.recipe, "--validate", args.validate]
    for setting in settings:
        command += ["--set", setting]
    for name in sorted(consent):
        command += ["--trust-remote-code", name]
    if args.step_limit is not None:
        command += ["--step-limit", str(args.step_limit)]
    switches = ("fresh", "retry_failed", "fail_fast", "untimed", "debug")
    command += [f"--{switch.replace('_', '-')}" for switch in switches if getattr(args, switch)]
    return launch(
        recipe,
        args.out,
        args.launcher,
        command,
        options=options,
        workers=args.workers,
        untimed=args.untimed,
        fail_fast=args.fail_fast,
        log=None if args.quiet else log_to_stderr,
    )
