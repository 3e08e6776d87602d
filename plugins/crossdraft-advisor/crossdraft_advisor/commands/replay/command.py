"""``crossdraft replay SOURCE...``: block efficiency from recorded responses, without decoding."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossdraft.framework.cli.options.run import add_force, add_segment
from crossdraft.framework.cli.options.sampling import sampling_from
from crossdraft.framework.cli.options.trust import add_trust_argument, strings_in, trusted_with_drafter
from crossdraft.framework.errors import UsageError, quoted
from crossdraft.framework.util.limits import MOST_REPLAYED, MOST_SEQUENCES
from crossdraft.framework.util.output_files import check_output

from ...engines.counter_definitions import DEFINITIONS
from ..baseline_responses import log

if TYPE_CHECKING:
    from crossdraft.framework.contracts.sampling import Sampling

    from ...engines.counter_definitions import CounterDefinition
    from ...replay.replay import ReplayResult
    from ...replay.response import Response
    from ...replay.responses import Reader

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="directory of a finished run or of one of its cells, JSONL file of responses, directory that the datasets "
        "library can read, or hf:org/name",
    )
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="NAME",
        help="drafter: a name, or a mapping as in recipes: '{name: prompt-lookup, max_ngram: 4}'; if it sets gamma, "
        "only that length is replayed (repeatable)",
    )
    parser.add_argument(
        "--verifier",
        action="append",
        default=[],
        metavar="NAME",
        help="verifier (repeatable; default: all compatible)",
    )
    parser.add_argument("--gamma", default="1-16", metavar="LIST", help="draft lengths, as in 1-8,12 (1-16)")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="length policy: static, oracle, heuristic, heuristic:START or confidence:0.2,0.4 (thresholds); all but "
        "static use the greatest gamma (repeatable; static)",
    )
    parser.add_argument(
        "--as",
        dest="engine",
        action="append",
        default=[],
        choices=tuple(DEFINITIONS),
        help="also compute the counters that this engine would report for the responses (docs/engines.md); several "
        "with --counted (repeatable)",
    )
    parser.add_argument(
        "--counted",
        action="append",
        default=[],
        metavar="FILE",
        help="log or scrape of the engine of --as while it decoded SOURCE: compare its counters and name the cause of "
        "a difference (repeatable, with a SOURCE and --as each)",
    )
    add_segment(parser)
    parser.add_argument("--k", metavar="LIST", help="numbers of i.i.d. sequences (default: the drafter's K)")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="MODEL",
        help="target, for its tokenizer and its log-probabilities; several are checkpoints in order, each with its "
        "own responses as SOURCE (repeatable)",
    )
    parser.add_argument(
        "--drop",
        type=float,
        metavar="D",
        help="with several targets: relative loss of block efficiency that is too large (0.05)",
    )
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float)):
        parser.add_argument(f"--{name}", type=kind, help="sampling parameter of responses that do not record it")
    parser.add_argument(
        "--logprobs",
        choices=("processed",),
        help="log-probabilities in files are after temperature and truncation (vLLM: processed_logprobs); not needed "
        "at temperature 0, or at 1 without truncation",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N responses")
    parser.add_argument("--column", metavar="NAME", help="text column of a data set")
    parser.add_argument("--split", metavar="NAME", help="split of a data set")
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="prompt length for texts of a data set (64)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="maximum response length for texts of a data set (128)"
    )
    parser.add_argument("--dtype", default="auto", help="dtype of the models (auto)")
    parser.add_argument("--device", default="auto", help="device of the models (auto)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write per-position results to a Parquet file")
    add_force(parser)
    add_trust_argument(parser)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON, including results by category")
    formats.add_argument(
        "--csv", action="store_true", help="print CSV: a row per drafter, verifier, K, gamma and category"
    )


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError (exit status 2) for a source, drafter or verifier that cannot be replayed."""
    from crossdraft.framework.recipe.recipe import Strategy

    from ...replay.replay import MARK
    from .checkpoints import checkpoints_of
    from .counted import counted_of
    from .output import as_csv, as_json, tables

    for name in ("limit", "prompt_tokens", "tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    out, targets = None, args.target or [""]
    if args.drop is None:
        args.drop = 0.05
    elif len(targets) == 1:
        raise UsageError("--drop requires several --target: it is a loss from the first to another one")
    if not 0 < args.drop < 1:
        raise UsageError(f"--drop must be above 0 and below 1, got {args.drop:g}; 0.05 is 5 %")
    if args.out is not None:
        drafters = [Strategy.parse(text, "--drafter").config for text in args.drafter]
        inputs = [*args.sources, *targets, *strings_in(drafters)]
        out = check_output(args.out, "--out", inputs=inputs, mark=MARK, force=args.force)
    if args.counted or len(args.engine) > 1:
        print(counted_of(args, _replay))
        return 0
    if len(targets) > 1:
        print(checkpoints_of(args, _replay))
        return 0
    result, sampling, assumed = _replay(args, args.sources, targets[0], "".join(args.engine), out=out)
    if args.json:
        print(as_json(result, sampling, assumed))
    elif args.csv:
        print(as_csv(result), end="")
    else:
        print(tables(result, sampling, assumed))
    return 0


def _replay(
    args: argparse.Namespace,
    sources: Sequence[str],
    target: str,
    engine: str = "",
    variants: Sequence[CounterDefinition] = (),
    out: Path | None = None,
    note: Callable[[Response], None] = lambda response: None,
) -> tuple[ReplayResult, Sampling | None, Mapping[str, int]]:
    """Replay the responses of ``sources``: the result, their sampling parameters and the assumptions made.

    Args:
        engine: of the counters to compute, or empty; ``variants``: further definitions of them.
        note: called with each response.
    """
    from crossdraft.framework.models.segments import Segments

    from ...replay.replay import replay
    from ...replay.responses import Reader
    from .candidates import candidates_of

    gammas = _numbers("--gamma", args.gamma, MOST_REPLAYED)
    ks = _numbers("--k", args.k, MOST_SEQUENCES) if args.k is not None else ()
    sampling = _sampling(args)
    consent = trusted_with_drafter(args, args.target)
    reader = Reader(
        target=target,
        sampling=sampling,
        processed=args.logprobs == "processed",
        trust_remote_code=target in consent,
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        split=args.split,
        column=args.column,
        limit=args.limit,
    )
    responses, sampling = read_responses(reader, sources, sampling)
    definition = DEFINITIONS.get(engine)
    policies = args.policy or ["static"]
    if definition is not None and policies != ["static"]:
        raise UsageError(f"--as {engine} and --policy cannot be combined; remove one of them")
    candidates = candidates_of(
        args.drafter,
        args.verifier,
        gammas,
        ks=ks,
        sampling=sampling,
        target=target or reader.target,
        policies=policies,
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=consent,
        drafter_options=definition.drafter_options if definition is not None else {},
    )
    replayed_ks = {k for candidate in candidates for ks_of in candidate.verifiers.values() for k in ks_of}
    if max(ks, default=1) > 1 == max(replayed_ks, default=1):
        raise UsageError(
            f"--k {args.k}: no drafter drafts several sequences; remove it, or add one such as draft-model-iid"
        )
    for candidate in candidates:
        if definition is not None and any(k > 1 for ks in candidate.verifiers.values() for k in ks):
            raise UsageError(
                f"--as {engine}: drafter '{candidate.title}' drafts several sequences, and engines count one; use --k 1"
            )
    segments = Segments.parse(args.segment, reader.tokenizer("--segment")).of if args.segment else None
    result = replay(
        _noted(responses, note), candidates, out, definition=definition, variants=variants, segments=segments
    )
    if result.log_p.warning:
        log(f"warning: {result.log_p.warning}")
    return result, sampling, reader.assumed


def _noted(responses: Iterable[Response], note: Callable[[Response], None]) -> Iterator[Response]:
    for response in responses:
        note(response)
        yield response


def _sampling(args: argparse.Namespace) -> Sampling | None:
    """Sampling parameters of the options; None if not set, so that the responses' own are used."""
    from crossdraft.framework.contracts.sampling import Sampling

    names = [key for key in Sampling.model_fields if getattr(args, key) is not None]
    if names and "temperature" not in names:
        raise UsageError("sampling parameters require --temperature; add it")
    return sampling_from(args) if names else None


def _numbers(option: str, text: str, most: Any) -> tuple[int, ...]:
    """Parse ``1-4,8`` into 1, 2, 3, 4, 8, sorted and without duplicates."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {quoted(text)} is not a list of numbers and ranges such as 1-8,12")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise UsageError(f"{option}: {part.strip()} is not a range of positive numbers")
        if reason := most.refusal(high):
            raise UsageError(f"{option}: {high} is too large; {reason}")
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


def read_responses(
    reader: Reader, sources: Sequence[str], sampling: Sampling | None, title: str = ""
) -> tuple[Iterator[Response], Sampling | None]:
    """The responses of ``sources``, and their sampling parameters, by default those of the first one.

    Args:
        title: of the sources in messages.

    Raises:
        UsageError: no responses; while they are read, one with other sampling parameters.
    """
    responses = reader.read(sources)
    first = next(responses, None)
    if first is None:
        raise UsageError(f"{title or ', '.join(map(quoted, sources))}: no responses to replay")
    sampling = sampling or first.sampling
    return _same_sampling(chain([first], responses), sampling), sampling


def _same_sampling(responses: Iterable[Response], sampling: Sampling | None) -> Iterator[Response]:
    for response in responses:
        if response.sampling is not None and response.sampling != sampling:
            raise UsageError(
                f"{response.where}: sampling parameters differ from those of earlier responses; replay them separately"
            )
        yield response
