"""Options of ``crossdraft advise`` and their validation."""

from __future__ import annotations

import argparse

from ... import plugins
from ...errors import UnknownNameError, UsageError
from ...util.limits import MOST_LEVELS, MOST_PROMPTS, MOST_ROWS, MOST_TOKENS
from ..cost.options import add_machine, check_machine, check_numbers, integer, integers, number, option
from ..options.trust import add_trust_argument

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="source of acceptance: directory of a finished run; file or URL of an engine's log, metrics or responses",
    )
    parser.add_argument("--batch-size", type=integers, metavar="B,B,...", help="batch sizes (1,2,4,8,16,32,64)")
    parser.add_argument(
        "--context", type=integers, metavar="C,C,...", help="context lengths (as measured in a run; else 1024)"
    )
    engines = ", ".join(sorted(plugins.entries("engines")))
    parser.add_argument("--export", metavar="ENGINE", help=f"print settings for an engine: {engines}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replayed = parser.add_argument_group("acceptance by replaying responses (docs/replay.md)")
    replayed.add_argument("--replay", action="append", metavar="SOURCE", help="recorded responses (repeatable)")
    replayed.add_argument(
        "--prompts", metavar="SOURCE", help="prompts; their responses are decoded here without drafting"
    )
    replayed.add_argument("--responses", type=integer, default=32, metavar="N", help="number of prompts to decode (32)")
    replayed.add_argument(
        "--max-new-tokens", type=integer, default=128, metavar="N", help="maximum tokens per response (128)"
    )
    add_trust_argument(replayed)
    about = parser.add_argument_group("facts missing in an engine's numbers")
    about.add_argument("--since", metavar="FILE", help="an earlier scrape of the same counters, to subtract")
    about.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="drafter (draft-model, eagle3, prompt-lookup, ...); for a replay: a name or '{name: .., model: ..}' "
        "(repeatable)",
    )
    about.add_argument(
        "--verifier",
        action="append",
        metavar="NAME",
        help="verifier (token, block, ...); for a replay: all compatible ones",
    )
    about.add_argument(
        "--temperature", type=number, metavar="T", help="temperature of the target; selects cells of a run"
    )
    about.add_argument(
        "--gamma", type=integer, metavar="N", help="draft length, if only the mean acceptance length is known"
    )
    about.add_argument("--draft-path", metavar="PATH", help="draft model in the exported settings")
    costs = add_costs(parser, "cost of a step (default for a run: as measured)")
    costs.add_argument("--overlap", action="store_true", help="assume that drafting and verification overlap")


def add_costs(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Add the options that `costs.costs_of` reads; see `check_costs`."""
    costs = parser.add_argument_group(title)
    costs.add_argument(
        "--target", metavar="MODEL", help="target measured by crossdraft cost; with --on its config.json"
    )
    costs.add_argument("--draft-model", metavar="MODEL", help="draft model, likewise (default: drafting is free)")
    costs.add_argument(
        "--draft-vocab", type=integer, metavar="N", help="with --on: vocabulary size of the draft model's head"
    )
    costs.add_argument(
        "--cost", metavar="FILE", help="CSV of batch_size,width,context,seconds for passes of the target"
    )
    costs.add_argument("--draft-cost", metavar="FILE", help="the same for the draft model")
    add_machine(parser)
    return costs


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that are invalid or cannot be combined."""
    check_numbers(args, {"batch_size": MOST_ROWS, "context": MOST_TOKENS, "gamma": MOST_LEVELS})
    check_numbers(args, {"responses": MOST_PROMPTS, "max_new_tokens": MOST_TOKENS})
    _check_replay(args)
    check_costs(args)
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise UsageError(f"--temperature must be at least 0, got {args.temperature:g}")
    for name, kind in (("drafter", "drafters"), ("verifier", "verifiers"), ("export", "engines")):
        value = getattr(args, name)
        for text in value if isinstance(value, list) else [value] if value is not None else []:
            if text not in plugins.entries(kind) and not text.lstrip().startswith("{"):
                raise UnknownNameError.among(kind.removesuffix("s"), text, plugins.entries(kind))
    if args.draft_path and not args.export:
        raise UsageError("--draft-path requires --export")
    if args.target and args.cost and not (args.replay or args.prompts):
        raise UsageError("--target and --cost cannot be combined: both give the cost of the target; remove one of them")
    if args.export and args.context and len(args.context) > 1:
        raise UsageError("--export takes one --context: engine settings do not depend on the context length")


def check_costs(args: argparse.Namespace) -> None:
    """Raise UsageError for options of `add_costs` that are invalid or cannot be combined."""
    check_numbers(args, {"draft_vocab": MOST_TOKENS})
    check_machine(args)
    if args.on and args.cost:
        raise UsageError("--on and --cost cannot be combined: both give the cost of the target; remove one of them")
    if args.draft_vocab and not (args.on and args.draft_model):
        raise UsageError("--draft-vocab requires --draft-model and --on")
    if args.on and not args.target:
        raise UsageError("--on requires --target: a config.json, or a directory with one")
    defaults = {"devices": 1, "weight_bytes": 2, "cache_bytes": 2, "efficiency": None}
    if not args.on and (unused := [name for name, value in defaults.items() if getattr(args, name) != value]):
        raise UsageError(f"{option(unused[0])} requires --on")
    if args.draft_model and args.draft_cost:
        raise UsageError(
            "--draft-model and --draft-cost cannot be combined: both give the cost of a draft; remove one of them"
        )
    if args.draft_cost and not args.cost:
        raise UsageError("--draft-cost requires --cost, measured on the same machine")


def _check_replay(args: argparse.Namespace) -> None:
    if not args.replay and not args.prompts:
        if not args.sources:
            raise UsageError(
                "advise requires a source of acceptance: a run, an engine's log or metrics, --replay or --prompts"
            )
        if len(args.drafter or []) > 1 or len(args.verifier or []) > 1:
            raise UsageError(
                "several drafters or verifiers require --replay or --prompts; an engine's numbers are for one of each"
            )
        if any(text.lstrip().startswith("{") for text in args.drafter or []):
            raise UsageError("--drafter with options requires --replay or --prompts; give its name only")
        if args.responses != 32 or args.max_new_tokens != 128:
            raise UsageError("--responses and --max-new-tokens require --prompts")
        if args.trust_remote_code:
            raise UsageError("--trust-remote-code requires --replay or --prompts; no model is run without them")
        return
    if args.sources or args.since:
        raise UsageError("--replay and --prompts cannot be combined with SOURCE or --since; remove one of them")
    if args.replay and args.prompts:
        raise UsageError("--replay and --prompts cannot be combined; remove one of them")
    if not args.drafter:
        raise UsageError("--drafter is missing: give at least one drafter to replay")
    if args.prompts and not args.target:
        raise UsageError("--prompts requires --target")
    if args.gamma is not None:
        raise UsageError(
            "--gamma cannot be combined with --replay or --prompts, which replay all draft lengths; remove it"
        )
    if args.replay and (args.responses != 32 or args.max_new_tokens != 128):
        raise UsageError("--responses and --max-new-tokens require --prompts")
