"""Options of ``crossdraft cost`` and their validation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError, quoted
from ...util.limits import (
    MOST_BYTES,
    MOST_DEVICES,
    MOST_LEVELS,
    MOST_NODES,
    MOST_POINTS,
    MOST_REPEATS,
    MOST_ROWS,
    MOST_TOKENS,
    Limit,
)
from ..options.trust import add_trust_argument, trusted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", help="model to measure; with --on: its config.json or directory (weights are not loaded)"
    )
    parser.add_argument("--drafter", metavar="MODEL", help="draft model; with --on: its config.json or directory")
    parser.add_argument(
        "--batch-size", type=integers, metavar="B,B,...", help="batch sizes (1,2,4,8,16; --on: up to 256)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    measuring = parser.add_argument_group("measuring on this machine")
    measuring.add_argument("--width", type=integers, metavar="W,W,...", help="new tokens per row (1,2,3,5,9,17)")
    measuring.add_argument("--context", type=integers, metavar="C,C,...", help="context lengths (128,512; --on: 1024)")
    measuring.add_argument("--repeats", type=integer, default=5, metavar="N", help="repetitions per pass (5)")
    measuring.add_argument("--dtype", default="auto")
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--fresh", action="store_true", help="ignore stored curves and measure again")
    measuring.add_argument("--quiet", action="store_true", help="no progress bar")
    add_trust_argument(measuring)
    predicting = parser.add_argument_group("predicting")
    predicting.add_argument("--gamma", type=integer, metavar="N", help="draft length of a chain (4)")
    predicting.add_argument(
        "--acceptance",
        type=floats,
        metavar="A,A,...",
        help="acceptance rate per token, for token verification of chains (0.6,0.7,0.8,0.9)",
    )
    predicting.add_argument(
        "--run", type=Path, metavar="DIR", help="use the pairs and acceptance of a finished run (runs/...)"
    )
    add_machine(parser)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options of the roofline model; see `check_machine`."""
    machine = parser.add_argument_group("another machine")
    machine.add_argument("--on", metavar="NAME", help="accelerator (h100, a100-80g, ...), or a YAML file with one")
    machine.add_argument("--devices", type=integer, default=1, metavar="N", help="tensor-parallel devices (1)")
    machine.add_argument("--weight-bytes", type=number, default=2, metavar="X", help="bytes per weight (2: bfloat16)")
    machine.add_argument(
        "--cache-bytes", type=number, default=2, metavar="X", help="bytes per key or value element (2)"
    )
    machine.add_argument(
        "--efficiency",
        type=floats,
        metavar="M,C",
        help="attained fractions of the peak bandwidth and FLOP rate (0.8,0.7)",
    )


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that are invalid or cannot be combined."""
    trusted(args, () if args.on else (args.target, args.drafter))
    if not args.target and (args.on or not args.run):
        raise UsageError("cost requires --target: a model to measure, or with --on its config.json")
    if args.run and args.acceptance:
        raise UsageError("--run and --acceptance cannot be combined: both give the acceptance; remove one of them")
    for name in ("drafter", "gamma", "width", "context"):
        if not args.target and getattr(args, name) is not None:
            raise UsageError(f"{option(name)} requires --target; --run alone predicts cells as they were measured")
    limits = {"batch_size": MOST_ROWS, "width": MOST_NODES, "context": MOST_TOKENS, "gamma": MOST_LEVELS}
    check_numbers(args, limits | {"repeats": MOST_REPEATS})
    check_machine(args)
    if any(not 0 <= a <= 1 for a in args.acceptance or ()):
        raise UsageError("--acceptance takes probabilities between 0 and 1")
    if args.on and args.context and len(args.context) > 1:
        raise UsageError("--context takes one value with --on")
    points = len(args.batch_size or [1]) * len(args.width or [1]) * len(args.context or [1])
    if reason := MOST_POINTS.refusal(points):
        raise UsageError(f"--batch-size, --width and --context together are {points} points; {reason}")


def check_numbers(args: argparse.Namespace, limits: Mapping[str, Limit]) -> None:
    """Raise UsageError for integers, or lists of them, outside 1 to their limit."""
    for name, limit in limits.items():
        setting = getattr(args, name)
        for value in setting if isinstance(setting, list) else [setting] if setting is not None else []:
            if value < 1:
                rule = "takes positive numbers" if isinstance(setting, list) else "must be at least 1"
                raise UsageError(f"{option(name)} {rule}, got {quoted(value)}")
            if reason := limit.refusal(value):
                raise UsageError(f"{option(name)} {quoted(value)} is too large; {reason}")


def check_machine(args: argparse.Namespace) -> None:
    """Raise UsageError for invalid options of `add_machine`."""
    check_numbers(args, {"devices": MOST_DEVICES})
    for name in ("weight_bytes", "cache_bytes"):
        if not 0 < getattr(args, name) <= MOST_BYTES:
            raise UsageError(f"{option(name)} must be a positive number up to {MOST_BYTES}, got {getattr(args, name)}")
    if args.efficiency and (len(args.efficiency) != 2 or any(not 0 < share <= 1 for share in args.efficiency)):
        raise UsageError("--efficiency takes two fractions between 0 and 1, of the bandwidth and of the FLOP rate")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _numbers(text: str, kind: type[int] | type[float], example: str) -> list[Any]:
    try:
        if len(text) > 10_000:
            raise ValueError
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a list of numbers such as {example}") from None


def integers(text: str) -> list[int]:
    return _numbers(text, int, "1,2,4")


def floats(text: str) -> list[float]:
    return _numbers(text, float, "0.6,0.8")


def integer(text: str) -> int:
    return _single(integers(text), text)


def number(text: str) -> float:
    return _single(floats(text), text)


def _single(numbers: list[Any], text: str) -> Any:
    if len(numbers) != 1:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a single number")
    return numbers[0]
