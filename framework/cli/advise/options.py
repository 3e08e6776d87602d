"""The options of ``crossdraft advise``, and what they may be."""

from __future__ import annotations

import argparse

from ... import plugins
from ...errors import UnknownNameError, UsageError
from ...util.limits import MOST_LEVELS, MOST_PROMPTS, MOST_ROWS, MOST_TOKENS
from ..cost.options import add_machine, check_machine, check_numbers, integer, integers, number, option
from ..trust_args import add_trust_argument

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="what tells the acceptance: a finished run's directory; file or URL of an engine's log, scrape, responses",
    )
    parser.add_argument("--batch-size", type=integers, metavar="B,B,...", help="rows (1,2,4,8,16,32,64)")
    parser.add_argument(
        "--context", type=integers, metavar="C,C,...", help="tokens held (a run: as measured; else 1024)"
    )
    engines = ", ".join(sorted(plugins.entries("engines")))
    parser.add_argument("--export", metavar="ENGINE", help=f"print the settings for one: {engines}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    replayed = parser.add_argument_group("acceptance of drafters that nobody has run, from responses (docs/replay.md)")
    replayed.add_argument("--replay", action="append", metavar="SOURCE", help="recorded responses; repeatable")
    replayed.add_argument("--prompts", metavar="SOURCE", help="prompts that the target answers here, by plain decoding")
    replayed.add_argument("--responses", type=integer, default=32, metavar="N", help="to so many of them (32)")
    replayed.add_argument("--max-new-tokens", type=integer, default=128, metavar="N", help="of a response (128)")
    add_trust_argument(replayed)
    about = parser.add_argument_group("what an engine's numbers do not say")
    about.add_argument("--since", metavar="FILE", help="an earlier scrape of the same counters, to count from")
    about.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="drafter (draft-model, eagle3, prompt-lookup, ...); for a replay: a name or '{name: .., model: ..}', "
        "repeatable",
    )
    about.add_argument(
        "--verifier", action="append", metavar="NAME", help="by which rule (token, block); replayed: those that fit"
    )
    about.add_argument("--temperature", type=number, metavar="T", help="of the target; of a run, take that one alone")
    about.add_argument("--gamma", type=integer, metavar="N", help="draft length, where the mean length is all there is")
    about.add_argument("--draft-path", metavar="PATH", help="draft model that the exported settings are to name")
    costs = parser.add_argument_group("what a step costs (a run: as measured where it ran)")
    costs.add_argument("--target", metavar="MODEL", help="measured by crossdraft cost; with --on its config.json")
    costs.add_argument("--draft-model", metavar="MODEL", help="draft model: the same; without, drafting is free")
    costs.add_argument(
        "--draft-vocab", type=integer, metavar="N", help="with --on: tokens that the draft model's head knows"
    )
    costs.add_argument("--overlap", action="store_true", help="drafts are made while the target verifies, at best")
    costs.add_argument("--cost", metavar="FILE", help="CSV of batch_size,width,context,seconds of the target's passes")
    costs.add_argument("--draft-cost", metavar="FILE", help="the same of the draft model")
    add_machine(parser)


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together, or that are no numbers for what they say."""
    check_numbers(
        args, {"batch_size": MOST_ROWS, "context": MOST_TOKENS, "gamma": MOST_LEVELS, "draft_vocab": MOST_TOKENS}
    )
    check_numbers(args, {"responses": MOST_PROMPTS, "max_new_tokens": MOST_TOKENS})
    _check_replay(args)
    check_machine(args)
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise UsageError(f"--temperature must be 0 or greater, not {args.temperature:g}")
    for name, kind in (("drafter", "drafters"), ("verifier", "verifiers"), ("export", "engines")):
        given = getattr(args, name)
        for one in given if isinstance(given, list) else [given] if given is not None else []:
            if one not in plugins.entries(kind) and not one.lstrip().startswith("{"):
                raise UnknownNameError.among(kind.removesuffix("s"), one, plugins.entries(kind))
    if args.on and args.cost:
        raise UsageError("--on and --cost both say what a pass of the target costs; give one of them")
    if args.draft_vocab and not (args.on and args.draft_model):
        raise UsageError("--draft-vocab is of the --draft-model whose passes --on computes; give both")
    if args.on and not args.target:
        raise UsageError("--on needs --target: the config.json of the model, or a directory with one")
    usual = {"devices": 1, "weight_bytes": 2, "cache_bytes": 2, "efficiency": None}
    if not args.on and (idle := [name for name, value in usual.items() if getattr(args, name) != value]):
        raise UsageError(f"{option(idle[0])} describes the machine of --on; give that, too")
    if args.draft_path and not args.export:
        raise UsageError("--draft-path is for the settings of --export; give that, too")
    if args.target and args.cost and not (args.replay or args.prompts):
        raise UsageError("--target and --cost both say what a pass of the target costs; give one of them")
    if args.draft_model and args.draft_cost:
        raise UsageError("--draft-model and --draft-cost both say what a draft costs; give one of them")
    if args.draft_cost and not args.cost:
        raise UsageError("--draft-cost needs --cost: both models' passes on the same machine")
    if args.export and args.context and len(args.context) > 1:
        raise UsageError("--export takes one --context: no engine chooses its drafts by it")


def _check_replay(args: argparse.Namespace) -> None:
    if not args.replay and not args.prompts:
        if not args.sources:
            raise UsageError("advise needs a source of acceptance: a run, what an engine wrote, --replay or --prompts")
        if len(args.drafter or []) > 1 or len(args.verifier or []) > 1:
            raise UsageError("an engine's numbers are of one drafter and rule; several are for --replay and --prompts")
        if any(one.lstrip().startswith("{") for one in args.drafter or []):
            raise UsageError("--drafter with options is for --replay and --prompts; give its name alone")
        if args.responses != 32 or args.max_new_tokens != 128:
            raise UsageError("--responses and --max-new-tokens say what to decode; they need --prompts")
        if args.trust_remote_code:
            raise UsageError("--trust-remote-code is for models that are run: with --replay and --prompts")
        return
    if args.sources or args.since:
        raise UsageError("--replay and --prompts are judged by themselves, without runs or what engines wrote")
    if args.replay and args.prompts:
        raise UsageError("--replay gives responses and --prompts has them decoded; give one of the two")
    if not args.drafter:
        raise UsageError("name what is to be replayed: --drafter NAME, repeatable")
    if args.prompts and not args.target:
        raise UsageError("--prompts needs --target: the model that answers them")
    if args.gamma is not None:
        raise UsageError("--gamma is for numbers without positions; responses are replayed at every length")
    if args.replay and (args.responses != 32 or args.max_new_tokens != 128):
        raise UsageError("--responses and --max-new-tokens say what to decode; they need --prompts")
