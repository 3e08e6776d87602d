"""``crossdraft replay SOURCE...``: block efficiency from recorded responses, without decoding."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, quoted
from ...util.limits import MOST_REPLAYED, MOST_SEQUENCES
from ...util.output_files import check_output
from ..baseline_responses import say
from ..run_args import add_force
from ..sampling_args import sampling_from
from ..trust_args import add_trust_argument, strings_in, trusted_with_drafter

if TYPE_CHECKING:
    from ...contracts.sampling import Sampling
    from ...replay.response import Response

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``crossdraft replay``."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="the directory of a finished run or of one of its cells, a JSONL file of responses, a directory that the "
        "library datasets can read, or hf:org/name",
    )
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="NAME",
        help="a name, or a mapping as in recipes: '{name: prompt-lookup, max_ngram: 4}'; one that sets gamma is "
        "replayed at that length alone; repeatable",
    )
    parser.add_argument(
        "--verifier",
        action="append",
        default=[],
        metavar="NAME",
        help="repeatable (default: those that fit)",
    )
    parser.add_argument("--gamma", default="1-16", metavar="LIST", help="draft lengths, as in 1-8,12 (1-16)")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="static, oracle, heuristic or heuristic:START, confidence:0.2,0.4 (thresholds); all but static at the "
        "greatest gamma; repeatable (static)",
    )
    parser.add_argument("--k", metavar="LIST", help="numbers of i.i.d. sequences (the drafter's own K)")
    parser.add_argument(
        "--target",
        default="",
        metavar="MODEL",
        help="whose tokenizer reads texts, and whose log P is needed",
    )
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float)):
        parser.add_argument(f"--{name}", type=kind, help="what the responses were sampled with, where they do not say")
    parser.add_argument(
        "--logprobs",
        choices=("processed",),
        help="log-probabilities in files are those after temperature and truncation (vLLM: processed_logprobs); not "
        "needed at temperature 0, and at 1 without truncation",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N responses")
    parser.add_argument("--column", metavar="NAME", help="of a data set, the text")
    parser.add_argument("--split", metavar="NAME", help="of a data set")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of a text of a data set (64)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="most that follow them (128)")
    parser.add_argument("--dtype", default="auto", help="of models that are run (auto)")
    parser.add_argument("--device", default="auto", help="that models are run on (auto)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers of every position, as Parquet")
    add_force(parser)
    add_trust_argument(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, by category too")
    form.add_argument("--csv", action="store_true", help="print a line for each drafter, rule, K, gamma and category")


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): a source, a drafter or a rule that cannot be replayed."""
    from ...recipe.recipe import Strategy
    from ...replay.replay import MARK, replay
    from ...replay.responses import Reader
    from .candidates import candidates_of
    from .output import as_csv, as_json, tables

    gammas = _numbers("--gamma", args.gamma, MOST_REPLAYED)
    ks = _numbers("--k", args.k, MOST_SEQUENCES) if args.k is not None else ()
    for name in ("limit", "prompt_tokens", "tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    out = None
    if args.out is not None:
        drafters = [Strategy.parse(text, "--drafter").config for text in args.drafter]
        read = [*args.sources, args.target, *strings_in(drafters)]
        out = check_output(args.out, "--out", inputs=read, mark=MARK, force=args.force)
    sampling = _sampling(args)
    consent = trusted_with_drafter(args, args.target)
    reader = Reader(
        target=args.target,
        sampling=sampling,
        processed=args.logprobs == "processed",
        trust_remote_code=args.target in consent,
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        split=args.split,
        column=args.column,
        limit=args.limit,
    )
    responses = reader.read(args.sources)
    first = next(responses, None)
    if first is None:
        raise UsageError(f"{', '.join(map(quoted, args.sources))}: there is no response to replay")
    sampling = sampling or first.sampling
    candidates = candidates_of(
        args.drafter,
        args.verifier,
        gammas,
        ks=ks,
        sampling=sampling,
        target=args.target or reader.target,
        policies=args.policy or ["static"],
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=consent,
    )
    found = replay(alike(chain([first], responses), sampling), candidates, out)
    if found.log_p.warning:
        say(f"warning: {found.log_p.warning}")
    if args.json:
        print(as_json(found, sampling, reader.assumed))
    elif args.csv:
        print(as_csv(found), end="")
    else:
        print(tables(found, sampling, reader.assumed))
    return 0


def _sampling(args: argparse.Namespace) -> Sampling | None:
    """None where nothing is said, which leaves it to the responses."""
    from ...contracts.sampling import Sampling

    given = [key for key in Sampling.model_fields if getattr(args, key) is not None]
    if given and "temperature" not in given:
        raise UsageError("sampling parameters need a --temperature beside them")
    return sampling_from(args) if given else None


def _numbers(option: str, text: str, most: Any) -> tuple[int, ...]:
    """``1-4,8`` as 1, 2, 3, 4, 8, in order and each once."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {quoted(text)}: write numbers and ranges, as in 1-8,12")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise UsageError(f"{option}: {part.strip()} is no range of numbers from 1 on")
        if reason := most.refusal(high):
            raise UsageError(f"{option}: {high} is too much; {reason}")
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def alike(responses: Iterable[Response], sampling: Sampling | None) -> Iterator[Response]:
    """The responses, as long as none was sampled in another way than the first."""
    for response in responses:
        if response.sampling is not None and response.sampling != sampling:
            raise UsageError(
                f"{response.where}: it was sampled in another way than the responses before it; replay them apart"
            )
        yield response
