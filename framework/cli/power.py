"""``crossdraft power``: the bias that a task's score can show, and the draws that show it instead."""

from __future__ import annotations

import argparse
import json

from ..errors import UsageError
from ..util.limits import LEAST_DEVIATION
from .cost.options import integer, number

loads_models = False  # as of `Command`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=integer, required=True, metavar="N", help="number of questions of the task")
    parser.add_argument("--score", type=number, required=True, metavar="S", help="share of right answers, 0 to 1")
    parser.add_argument(
        "--changed",
        type=number,
        metavar="C",
        help="share of questions whose grade differs between two runs of one server (default: 2 S (1 - S), the most)",
    )
    parser.add_argument(
        "--deviation", type=number, default=0.02, metavar="D", help="bias to show: total variation of a token (0.02)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for numbers out of range."""
    from ..certificate.samples.planning import POWER, ScorePlan, draws_to_exclude, draws_to_show

    if not 1 <= args.questions <= 10**9:
        raise UsageError(f"--questions must be from 1 to 1,000,000,000, got {args.questions}")
    for name in ("score", "changed", "deviation"):
        value, most = getattr(args, name), 0.5 if name == "deviation" else 1
        if value is not None and not LEAST_DEVIATION <= value < most:
            raise UsageError(
                f"--{name} must be at least {LEAST_DEVIATION:g} and below {most}, got {value:g}; it is a share, not a "
                "percentage"
            )
    most = 2 * args.score * (1 - args.score)
    if args.changed is not None and args.changed > most * (1 + 1e-9):
        raise UsageError(
            f"--changed must be at most {most:g}, got {args.changed:g}: with {args.score:g} of the answers right, no "
            "more grades differ between two runs of one server; correct it or --score, or remove --changed"
        )
    plan = ScorePlan(args.questions, args.score, args.changed)
    visible, needed = plan.visible, plan.needed(args.deviation)
    exclude, show = draws_to_exclude(args.deviation), draws_to_show(args.deviation)
    if args.json:
        fields = {"visible_difference": visible, "questions_needed": needed, "power": POWER}
        print(json.dumps(fields | {"draws_to_show": show, "draws_to_exclude": exclude}, indent=2))
        return 0
    from ..report.table_utils import tabulated

    points = f"{100 * args.deviation:g} points"
    rows = [
        [f"score of {args.questions:,} questions", f"{100 * visible:.1f} points", f"{needed:,} questions, twice"],
        ["certify --samples", f"TV {args.deviation:g} a token", f"{show:,} tokens"],
    ]
    columns = {"": "left", "shows": "left", f"to show a bias of {args.deviation:g}": "left"}
    print(tabulated(columns, rows, "simple"))
    grades = "independent answers" if args.changed is None else f"{100 * args.changed:g} % of the grades changing"
    print(
        f"\nscore: with and without drafting, {args.score:g} right, {grades}, level 0.05, probability {POWER:g}\n"
        f"bias: a TV of {args.deviation:g} at the token that decides an answer moves the score by at most {points}\n"
        f"draws: tokens of any responses, about {-(-show // 128):,} of 128 tokens; if the sampler is right, "
        f"{exclude:,} tokens exclude that bias"
    )
    return 0
