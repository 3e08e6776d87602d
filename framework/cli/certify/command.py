"""``crossdraft certify``: exact enumeration of drafter x verifier pairs on small exact models.

The drafters and verifiers are registered ones, found through the plug-in manager; what a draft label of the
command line stands for is the table `DRAFTS`. PyTorch is imported once something is to be certified.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...certificate.drafts import DRAFTS, TRANSLATED, DraftKind, NamedDrafter, named_drafter
from ...errors import ContractError, UnknownNameError, UsageError
from . import model, samples

if TYPE_CHECKING:
    from ...certificate.bounds import Bounds
    from ...certificate.rows import Row
    from ...certificate.table_lm import Toy
    from ...contracts.verifier import Verifier

#: A draft label, or what a named drafter is called, and what it stands for.
Drafts = Mapping[str, DraftKind | NamedDrafter]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``crossdraft certify``."""
    labels = "; ".join(f"{label}: {kind.summary}" for label, kind in (DRAFTS | TRANSLATED).items())
    parser.add_argument(
        "--toy",
        type=Path,
        metavar="FILE",
        help="JSON file of exact models (default: T0, G1 to G4, D6, W1 and W2, built in)",
    )
    parser.add_argument(
        "--verifier",
        action="append",
        metavar="NAME",
        help="certify this one; repeatable (default: all registered)",
    )
    parser.add_argument("--draft", action="append", metavar="LABEL", help=f"repeatable (default: all). {labels}")
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="certify this registered drafter with every verifier that accepts its drafts; a name, or a mapping as in "
        "recipes: '{name: draft-model-tree, branching: [2, 1]}'. Any model it asks for is the toy's. With --model: the "
        "model that drafts, one with the target's tokenizer",
    )
    parser.add_argument(
        "--drafter-option", action="append", metavar="KEY=VALUE", help="of --drafter; the value is YAML; repeatable"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="rounds to chain (default: 1, but 2 for verifiers with state and with --drafter)",
    )
    parser.add_argument(
        "--gamma",
        type=int,
        metavar="N",
        help="draft length, of --drafter how deep its drafts may be (default: the toy's own, less for drafts with so "
        "many nodes that it would take minutes)",
    )
    parser.add_argument(
        "--bounds",
        action="store_true",
        help="beside E[tau], print the most that any lossless rule could accept of such drafts in the first step: of "
        "chains (single draft), of any draft by a rule that keeps the law of every step (LP), by any rule (full "
        "information), and the largest Pr(tau >= 1) (root)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and the verdict on standard error")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="a line for each pair and toy, and why others were skipped"
    )
    model.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``crossdraft certify``; 1 if a pair that is declared lossless is not, or one failed.

    With ``--samples`` it is :mod:`crossdraft.framework.cli.certify.samples` that runs, with ``--model`` alone
    :mod:`crossdraft.framework.cli.certify.model`.
    """
    if args.samples:
        return samples.main(args)
    if args.deviation is not None:
        raise UsageError("--deviation is for draws of somebody else; name their file with --samples")
    if args.first_tokens:
        raise UsageError("--first-tokens is for draws of somebody else; name their file with --samples")
    if args.model:
        if args.bounds:
            raise UsageError("--bounds are enumerated on small exact models; leave out either --bounds or --model")
        return model.main(args)
    model.refuse_options(args)
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {args.steps}")
    if args.gamma is not None and args.gamma < 0:
        raise UsageError(f"--gamma must be at least 0, got {args.gamma}")
    from ...certificate.effort import check_joint_size
    from ...certificate.toys import built_in_toys, read_toys, toys_of_two_vocabularies
    from ...models.threads import one_thread

    drafts = _drafts(args)
    toys = read_toys(args.toy) if args.toy else [*built_in_toys(), *toys_of_two_vocabularies()]
    for toy in toys:
        check_joint_size(toy.name, toy.vocab_size, args.steps or 1, toy.gamma if args.gamma is None else args.gamma)
    verifiers, unusable = _verifiers(args.verifier)
    with one_thread():
        rows, incompatible, left_out = _rows(args, toys, drafts, verifiers)

    if left_out and not rows:
        raise UsageError(left_out[0])
    for sentence in unusable:
        print(f"crossdraft: skipped: {sentence}", file=sys.stderr)
    _print_skipped(incompatible, left_out, args.verbose or not rows)
    for sentence in dict.fromkeys(s for row in rows if row.bounds is not None for s in row.bounds.missing):
        print(f"crossdraft: bounds left out: {sentence}", file=sys.stderr)
    if not rows:
        raise UsageError("no pair is left to certify: every one was skipped")
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        (_print_table if args.verbose or args.bounds else _print_compact)(rows, args.bounds)
    whole = not (args.toy or args.draft or args.gamma is not None)
    _remember(rows, whole, drafts if args.drafter else {})
    line, failed = _verdict(rows, bool(args.drafter))
    if args.json:
        print(line, file=sys.stderr)
    else:
        print(f"\n{line}")
    return 1 if unusable or failed else 0


def _print_skipped(incompatible: Sequence[str], left_out: Sequence[str], verbose: bool) -> None:
    """One line for all pairs that were not enumerated, or with ``--verbose`` one for each."""
    if verbose:
        for sentence in (*left_out, *incompatible):
            print(f"crossdraft: skipped: {sentence}", file=sys.stderr)
        return
    parts = [(len(incompatible), "cannot run together"), (len(left_out), "too large to enumerate")]
    if told := ", ".join(f"{count} {why}" for count, why in parts if count):
        print(f"crossdraft: skipped pairs of draft and verifier: {told} (--verbose lists them)", file=sys.stderr)


def _verdict(rows: Sequence[Row], of_drafter: bool) -> tuple[str, bool]:
    """The line that certify ends with, and if it reports a failure."""
    from ...certificate.outcomes import location, worst_row

    wrong = [found for rule in dict.fromkeys(row.verifier for row in rows) if (found := worst_row(_of(rule, rows)))]
    if wrong:
        wrong.sort(key=lambda row: -(row.tv or 0.0))
        names = ", ".join(f"'{row.verifier.name}'" for row in wrong)
        what = f"verifier{'s' * (len(wrong) > 1)} {names} change{'s' * (len(wrong) == 1)}"
        if of_drafter:
            what = f"drafter '{wrong[0].draft}' with {what}"
        return f"FAILED: {what} the target's distribution (TV up to {wrong[0].tv:.2g} {location(wrong[0])})", True
    if errors := [row for row in rows if row.error is not None]:
        row = errors[0]
        more = f"; {len(errors) - 1} more pairs failed" if len(errors) > 1 else ""
        return f"FAILED: verifier '{row.verifier.name}' {location(row)}: {row.error}{more}", True
    if idle := sorted(rule.name for rule in _without_drafts(rows)):
        return f"not certified: no draft of any token reached {', '.join(idle)}", of_drafter
    certified = [row for row in rows if row.traits.lossless]
    lossy = len(rows) - len(certified)
    if not certified:
        return f"lossy: nothing to certify, {_count(lossy)} with verifiers that are declared lossy", False
    more = f"; {_count(lossy)} declared lossy" if lossy else ""
    return (
        f"lossless: {_count(len(certified))} certified, TV at most {max(row.tv or 0.0 for row in certified):.2g}{more}",
        False,
    )


def _count(pairs: int) -> str:
    return f"{pairs} pair{'' if pairs == 1 else 's'}"


def _of(rule: type[Verifier], rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verifier is rule]


def _drafts(args: argparse.Namespace) -> Drafts:
    if args.drafter is None:
        if args.drafter_option:
            raise UsageError("--drafter-option is for the drafter that --drafter names; add it")
        known = DRAFTS | TRANSLATED
        for label in args.draft or ():
            if label not in known:
                raise UnknownNameError.among("draft label", label, known)
        return {label: known[label] for label in args.draft or known}
    if args.draft:
        raise UsageError("--draft and --drafter both say what drafts; leave one of them out")
    found = named_drafter(args.drafter, args.drafter_option or ())
    return {found.label: found}


def _rows(
    args: argparse.Namespace, toys: Sequence[Toy], drafts: Drafts, verifiers: Sequence[type[Verifier]]
) -> tuple[list[Row], list[str], list[str]]:
    """All pairs that can run, why others are no pairs, and what would be too much."""
    from ...certificate.rows import CannotRun, PairTooLarge, certify_row, row_bounds

    rows, incompatible, left_out = [], {}, {}
    for toy in toys:
        for label, kind in drafts.items():
            if kind.translated != (toy.words is not None):
                if args.toy and (args.draft or args.drafter):
                    need = "needs" if kind.translated else "cannot have"
                    incompatible[f"toy {toy.name}: {label} {need} a drafter with tokens of its own"] = None
                continue
            known: dict[Any, Bounds] = {}
            for verifier in verifiers:
                try:
                    row = certify_row(toy, label, kind, verifier, args.steps, args.gamma)
                except PairTooLarge as reason:
                    left_out[str(reason)] = None
                    continue
                except CannotRun as reason:
                    incompatible[str(reason)] = None
                    continue
                if args.bounds and row.error is None:
                    row = replace(row, bounds=row_bounds(toy, kind, row, known))
                rows.append(row)
    return rows, list(incompatible), list(left_out)


def _verifiers(names: Iterable[str] | None) -> tuple[list[type[Verifier]], list[str]]:
    """The verifiers to certify, and why others are unusable (an error if they were asked for by name)."""
    if names:
        return [_verifier(name) for name in dict.fromkeys(names)], []
    usable, unusable = [], []
    for name in plugins.entries("verifiers"):
        try:
            usable.append(_verifier(name))
        except ContractError as error:
            unusable.append(str(error))
    return usable, unusable


def _verifier(name: str) -> type[Verifier]:
    """A registered rule that says its traits with the options it has by default."""
    rule = plugins.get("verifiers", name)
    if needed := [key for key, field in rule.Config.model_fields.items() if field.is_required()]:
        raise ContractError(
            f"verifier '{name}' has no default for {', '.join(needed)}, so it cannot be certified by name"
        )
    try:
        rule.traits(rule.Config())
    except Exception as error:  # whatever a third party's rule may raise
        raise ContractError(f"verifier '{name}' does not say its traits: {type(error).__name__}: {error}") from None
    return rule


def _without_drafts(rows: Sequence[Row]) -> set[type[Verifier]]:
    """Verifiers that never saw a drafted token, on any toy."""
    return {row.verifier for row in rows} - {row.verifier for row in rows if row.drafted}


def _remember(rows: Sequence[Row], whole: bool, named: Drafts) -> None:
    """Keep what was found with the digest of the code.

    A failure is kept whatever part of the table was enumerated, a success only of the whole one. With a named drafter,
    that one is certified, by the verifiers that are certified themselves.
    """
    from ...certificate.outcomes import outcome
    from ...runs import certified_registry
    from ...runs.marks import mark_of_rule
    from ...util.output_files import cache_dir

    found = []
    for drafter in named.values():
        cls, options = drafter.config(0)
        judged = [row for row in rows if mark_of_rule(row.verifier, row.verifier.Config()).headline]
        found.append((cls, options, outcome(judged)))
    if not named:
        for rule in dict.fromkeys(row.verifier for row in rows):
            found.append((rule, rule.Config(), outcome(_of(rule, rows))))
    kept = [(*key, one) for *key, one in found if one is not None and (whole or not one.lossless)]
    try:
        certified_registry.remember(kept)
    except OSError as error:
        print(f"crossdraft: what was certified could not be noted in {cache_dir()}: {error.strerror}", file=sys.stderr)


def _print_compact(rows: list[Row], _: bool) -> None:
    """A line for each verifier."""
    from tabulate import tabulate

    from ...certificate.outcomes import worst_row

    table = []
    for rule in dict.fromkeys(row.verifier for row in rows):
        own = _of(rule, rows)
        errors = [row for row in own if row.error is not None]
        worst = worst_row(own)
        verdicts = dict.fromkeys(row.verdict for row in own if row.verdict != "nothing was drafted")
        verdict = next(iter(verdicts), "nothing was drafted") if worst is None else "NO"
        table.append(
            [
                rule.name,
                ", ".join(dict.fromkeys(row.draft for row in own)),
                str(len(own)),
                f"{max((row.tv for row in own if row.tv is not None), default=0.0):.2g}",
                errors[0].verdict if errors and worst is None else verdict,
            ]
        )
    header = ["verifier", "drafts", "pairs", "largest TV", "lossless"]
    print(
        tabulate(
            table, headers=header, tablefmt="simple", disable_numparse=True, maxcolwidths=[None, 60, None, None, None]
        )
    )


def _print_table(rows: list[Row], with_bounds: bool) -> None:
    from tabulate import tabulate

    header = ["toy", "draft", "verifier", "gamma", "steps", "TV", "E[tau] per step"]
    header += ["single draft", "LP", "full information", "root"] * with_bounds + ["lossless"]
    table = []
    for row in rows:
        line = [
            row.toy,
            row.draft,
            row.verifier.name + " (temperature 0)" * (row.temperature == 0),
            ", ".join(map(str, row.lengths)) if isinstance(row.gamma, list) else str(row.gamma),
            str(len(row.lengths)),
            "-" if row.tv is None else f"{row.tv:.2g}",
            ", ".join(f"{tau:.6f}" for tau in row.expected_tau) or "-",
        ]
        if with_bounds:
            b = row.bounds
            values = (b.single_draft, b.lp, b.full_information, b.optimal_transport) if b else (None,) * 4
            line += ["-" if value is None else f"{value:.6f}" for value in values]
        table.append([*line, row.verdict])
    print(tabulate(table, headers=header, tablefmt="simple", disable_numparse=True))
