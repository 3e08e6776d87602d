"""``crossdraft run RECIPE``: measure every cell of a recipe and print the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .consent import add_consent, trusted

if TYPE_CHECKING:
    from ..runs.recipe import CellConfig


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
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where records go (runs)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is on disk already")
    parser.add_argument("--retry-failed", action="store_true", help="measure groups again in which a cell failed")
    parser.add_argument("--fail-fast", action="store_true", help="end with the first cell that fails")
    parser.add_argument(
        "--round-limit",
        type=float,
        metavar="SECONDS",
        help="give a cell up when one round takes longer; without it nothing ends a strategy that hangs",
    )
    parser.add_argument(
        "--validate",
        choices=("sampled", "always", "never"),
        default="sampled",
        help="check drafts and verdicts in full now and then (sampled), in every round, or never",
    )
    add_consent(parser)
    parser.add_argument("--quiet", action="store_true", help="print the table and nothing else")


def main(args: argparse.Namespace) -> int:
    """0: done; 1: a cell failed, or the disk is full; 2 (as UsageError): the recipe is wrong; 130: interrupted."""
    from transformers.utils import logging

    from ..bench.matrix import load_recipe, plan
    from ..bench.run import run, say
    from ..report.tables import terminal
    from ..report.write import write_summary
    from ..runs.interrupts import Interrupts

    logging.disable_progress_bar()  # a model takes a second to load; the run has a bar of its own
    settings = list(args.settings)
    if args.limit is not None:
        settings.append(f"limit={args.limit}")
    recipe = load_recipe(args.recipe, settings)
    consent = trusted(args, _models(plan(recipe).cells)) if args.trust_remote_code else frozenset()
    with Interrupts():
        outcome = run(
            recipe,
            args.out,
            fresh=args.fresh,
            retry_failed=args.retry_failed,
            fail_fast=args.fail_fast,
            round_limit=args.round_limit,
            validate=args.validate,
            trust_remote_code=consent,
            say=None if args.quiet else say,
            progress=not args.quiet,
            debug=args.debug,
        )
        summary = write_summary(outcome)
        print(terminal(summary))
        if outcome.failed:
            print(f"crossdraft: {len(outcome.failed)} of {len(outcome.results)} cells failed", file=sys.stderr)
        if summary.stopped:
            print(f"crossdraft: error: {summary.stopped}", file=sys.stderr)
        return summary.exit_code


def _models(cells: Iterable[CellConfig]) -> Iterator[str]:
    """Every name in the cells that may be a model's."""
    for cell in cells:
        yield cell.target
        yield from _texts(cell.drafter.config)


def _texts(options: Any) -> Iterator[str]:
    """Every text in a drafter's options: which of them are models, the drafter alone knows."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, dict | list):
        for one in options.values() if isinstance(options, dict) else options:
            yield from _texts(one)
