"""``crossdraft certify``: exact enumeration of drafter x verifier pairs on small exact models.

The drafters and verifiers are registered ones, found through the plug-in manager; what a draft label of the
command line stands for is the table `DRAFTS`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..certificate.drafts import DRAFTS
from ..contracts.errors import ContractError, CrossdraftError, NumericalError, UnknownNameError, UsageError
from . import certify_model

if TYPE_CHECKING:
    from ..certificate.bounds import Bounds
    from ..certificate.tablelm import Toy
    from ..contracts.verifier import Verifier, VerifierTraits

#: The joint law of an output is held as one table: most entries it may have.
LARGEST_LAW = 20_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``crossdraft certify``."""
    labels = "; ".join(f"{label}: {kind.summary}" for label, kind in DRAFTS.items())
    parser.add_argument(
        "--toy", type=Path, metavar="FILE", help="JSON file of exact models (default: T0, G1 to G4, built in)"
    )
    parser.add_argument(
        "--verifier",
        action="append",
        metavar="NAME",
        help="certify this one; repeatable (default: all registered)",
    )
    parser.add_argument("--draft", action="append", metavar="LABEL", help=f"repeatable (default: all). {labels}")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds to chain (default: 1)")
    parser.add_argument("--gamma", type=int, metavar="N", help="draft length (default: the toy's own)")
    parser.add_argument(
        "--bounds",
        action="store_true",
        help="beside E[tau], print the most that any lossless rule could accept of such drafts in the first round: of "
        "chains (single draft), of any draft by a rule that keeps the law of every round (LP; needs "
        "crossdraft[bounds]), by any rule (full information), and the largest Pr(tau >= 1) (root)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    certify_model.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``crossdraft certify``; 1 if a pair that is declared lossless is not, or one failed.

    With ``--model`` it is :mod:`crossdraft.framework.cli.certify_model` that runs.
    """
    if args.model:
        if args.bounds:
            raise UsageError("--bounds are enumerated on small exact models; leave out either --bounds or --model")
        return certify_model.main(args)
    from ..certificate.tablelm import built_in_toys, read_toys

    if args.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {args.rounds}")
    if args.gamma is not None and args.gamma < 0:
        raise UsageError(f"--gamma must be at least 0, got {args.gamma}")
    labels = list(dict.fromkeys(args.draft or DRAFTS))
    for label in labels:
        if label not in DRAFTS:
            raise UnknownNameError.among("draft label", label, DRAFTS)
    toys = read_toys(args.toy) if args.toy else built_in_toys()
    for toy in toys:
        _check_size(toy, args.rounds, toy.gamma if args.gamma is None else args.gamma)
    verifiers, unusable = _verifiers(args.verifier)

    rows, skipped, missing = [], {}, {}
    for toy in toys:
        gamma = toy.gamma if args.gamma is None else args.gamma
        for label in labels:
            bounds: dict[float, Bounds] = {}  # by the target's temperature
            for verifier in verifiers:
                row = _certify(toy, label, verifier, args.rounds, gamma)
                if not isinstance(row, Row):
                    skipped[row] = None
                    continue
                if args.bounds and row.error is None:
                    row = replace(row, bounds=_bounds(toy, row, bounds))
                    missing |= dict.fromkeys(row.bounds.missing if row.bounds else ())
                rows.append(row)
    for sentence in unusable:
        print(f"crossdraft: skipped: {sentence}", file=sys.stderr)
    if args.verifier or args.draft:
        for sentence in skipped:
            print(f"crossdraft: skipped: {sentence}", file=sys.stderr)
    elif skipped:
        pairs = "pair" if len(skipped) == 1 else "pairs"
        print(
            f"crossdraft: skipped: {len(skipped)} {pairs} of draft and verifier that cannot run together; name a "
            "--draft or --verifier to see why",
            file=sys.stderr,
        )
    for sentence in missing:
        print(f"crossdraft: bounds left out: {sentence}", file=sys.stderr)
    if not rows:
        raise UsageError("no pair is left to certify: every one was skipped")
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        _print_table(rows, args.bounds)
    return 1 if unusable or any(row.bad for row in rows) else 0


@dataclass(frozen=True)
class Row:
    """One certified pair; ``error`` is the sentence of one that could not be enumerated."""

    toy: str
    draft: str
    verifier: type[Verifier]
    gamma: int
    rounds: int
    tv: float | None = None
    expected_tau: tuple[float, ...] = ()
    lossless: bool = False
    error: str | None = None
    bounds: Bounds | None = None

    @property
    def promise(self) -> VerifierTraits:
        """What the verifier says of itself."""
        return self.verifier.traits(self.verifier.Config())

    @property
    def bad(self) -> bool:
        return self.error is not None or (self.promise.lossless and not self.lossless)

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return f"FAILED: {self.error}"
        if not self.promise.lossless:
            return "declared lossy"
        return "yes" if self.lossless else "NO"

    def as_json(self) -> dict[str, Any]:
        """The row for programs; ``error`` is there only if it failed, ``bounds`` only if they were asked for."""
        found = {
            "toy": self.toy,
            "draft": self.draft,
            "verifier": self.verifier.name,
            "gamma": self.gamma,
            "rounds": self.rounds,
            "tv": self.tv,
            "expected_tau": list(self.expected_tau),
            "lossless": self.lossless,
        }
        if self.bounds is not None:
            found["bounds"] = {key: value for key, value in asdict(self.bounds).items() if key != "missing"}
        return found if self.error is None else {**found, "error": self.error}


def _certify(toy: Toy, label: str, verifier: type[Verifier], rounds: int, gamma: int) -> Row | str:
    """Certify one pair, or say why it cannot run."""
    from ..certificate.certify import certify
    from ..contracts.sampling import Sampling
    from ..contracts.verifier import incompatible

    kind = DRAFTS[label]
    sampling = Sampling(temperature=_temperature(verifier))
    drafter, config = kind.config(gamma)
    draft = drafter.traits(config, sampling)
    if reason := incompatible(kind.drafter, draft, verifier.name, verifier.traits(verifier.Config()), sampling):
        return f"{label}: {reason}"
    try:
        found = certify(
            toy, kind.build, verifier, rounds=rounds, gamma=gamma, temperature=sampling.temperature, markov=True
        )
        if not math.isfinite(found.tv):
            raise NumericalError(f"verifier '{verifier.name}' produced probabilities that are not numbers")
    except Exception as error:  # whatever a third party's strategy may raise
        return Row(toy.name, label, verifier, gamma, rounds, error=_sentence(error))
    return Row(toy.name, label, verifier, gamma, rounds, found.tv, tuple(found.expected_tau), found.lossless)


def _temperature(verifier: type[Verifier]) -> float:
    """The target's temperature that a verifier is certified at."""
    return 0.0 if verifier.traits(verifier.Config()).temperature_zero_only else 1.0


def _bounds(toy: Toy, row: Row, known: dict[float, Bounds]) -> Bounds:
    """The bounds that bind a row's rule; ``known`` ones of the same toy and draft are not computed again."""
    from ..certificate.bounds import Bounds, bounds

    if not row.promise.lossless:
        return Bounds()
    temperature = _temperature(row.verifier)
    if temperature not in known:
        try:
            known[temperature] = bounds(toy, DRAFTS[row.draft].build, row.gamma, temperature)
        except NumericalError as error:
            known[temperature] = Bounds(missing=(f"toy {toy.name}, draft {row.draft}: {error}",))
    if row.promise.stateful:  # it may take in this round what it repays in a later one
        return replace(known[temperature], single_draft=None, lp=None)
    return known[temperature]


def _verifiers(names: Iterable[str] | None) -> tuple[list[type[Verifier]], list[str]]:
    """The verifiers to certify, and why others are unusable (an error if they were asked for by name)."""
    if names:
        return [plugins.get("verifiers", name) for name in dict.fromkeys(names)], []
    usable, unusable = [], []
    for name in plugins.entries("verifiers"):
        try:
            usable.append(plugins.get("verifiers", name))
        except ContractError as error:
            unusable.append(str(error))
    return usable, unusable


def _check_size(toy: Toy, rounds: int, gamma: int) -> None:
    tokens = rounds * (gamma + 1)
    if tokens * math.log(toy.vocab_size) <= math.log(LARGEST_LAW):
        return
    if rounds > 1:
        advice = f"lower --rounds (now {rounds})"
    else:
        advice = f"lower the draft length with --gamma (now {gamma})"
    raise UsageError(
        f"toy {toy.name} has V = {toy.vocab_size}, so there are more outputs of rounds x (gamma + 1) = "
        f"{tokens} tokens than the {LARGEST_LAW:,} that can be enumerated; {advice}"
    )


def _print_table(rows: list[Row], with_bounds: bool) -> None:
    from tabulate import tabulate

    header = ["toy", "draft", "verifier", "gamma", "rounds", "TV", "E[tau] per round"]
    header += ["single draft", "LP", "full information", "root"] * with_bounds + ["lossless"]
    table = []
    for row in rows:
        line = [
            row.toy,
            row.draft,
            row.verifier.name + " (temperature 0)" * row.promise.temperature_zero_only,
            str(row.gamma),
            str(row.rounds),
            "-" if row.tv is None else f"{row.tv:.2g}",
            ", ".join(f"{tau:.6f}" for tau in row.expected_tau) or "-",
        ]
        if with_bounds:
            b = row.bounds
            values = (b.single_draft, b.lp, b.full_information, b.optimal_transport) if b else (None,) * 4
            line += ["-" if value is None else f"{value:.6f}" for value in values]
        table.append([*line, row.verdict])
    print(tabulate(table, headers=header, tablefmt="simple", disable_numparse=True))


def _sentence(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CrossdraftError) else f"{type(error).__name__}: {text}"
