"""``crossdraft run RECIPE``: measure every cell of a recipe and print the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


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
    parser.add_argument("--quiet", action="store_true", help="print the table and nothing else")


def main(args: argparse.Namespace) -> int:
    """0: done; 1: a cell failed; 2 (as UsageError): the recipe is wrong; 130: interrupted."""
    from transformers.utils import logging

    from ..bench.matrix import load_recipe, plan
    from ..bench.run import run, say
    from ..report.tables import terminal
    from ..report.write import write_summary

    logging.disable_progress_bar()  # a model takes a second to load; the run has a bar of its own
    settings = list(args.settings)
    if args.limit is not None:
        settings.append(f"limit={args.limit}")
    recipe = load_recipe(args.recipe, settings)
    quiet = args.quiet
    outcome = run(recipe, args.out, fresh=args.fresh, say=None if quiet else say, progress=not quiet)
    print(terminal(write_summary(outcome)))
    if outcome.failed:
        print(f"crossdraft: {len(outcome.failed)} of {len(plan(recipe).cells)} cells failed", file=sys.stderr)
    return outcome.exit_code
