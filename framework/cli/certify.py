"""``crossdraft certify``: exact enumeration of drafter x verifier pairs on small exact models.

Draft labels of the command line are defined in `DRAFTS`. PyTorch is imported only when pairs are certified.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from .. import plugins
from ..certificate.drafts import DRAFTS, AnyDrafter, named_drafter
from ..contracts.command import Argument, Command
from ..errors import ContractError, UnknownNameError, UsageError
from .options.run import JsonOptions

if TYPE_CHECKING:
    from ..certificate.bounds import Bounds
    from ..certificate.rows import Row
    from ..certificate.table_lm import Toy
    from ..contracts.verifier import Verifier
    from ..util.table import Table

#: Exit code of a strategy that raised, as of draws that are too few: the certificate is undecided.
ERROR = 3

#: Draft kinds by draft label, or named drafters by name.
Drafts = Mapping[str, AnyDrafter]


_LABELS = "; ".join(f"{label}: {kind.summary}" for label, kind in DRAFTS.items())


class Certify(JsonOptions, Command):
    """Certificate of pairs by enumeration."""

    name: ClassVar[str] = "certify"

    toy: Annotated[Path | None, Argument("FILE")] = Field(
        None, description="JSON file of exact models (default: T0, G1 to G4, D6, W1 and W2, built in)"
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="verifier to certify (repeatable; default: all registered)"
    )
    draft: Annotated[tuple[str, ...], Argument("LABEL")] = Field(
        (), description="kind of draft (repeatable; default: all). " + _LABELS
    )
    drafter: Annotated[str, Argument("NAME")] = Field(
        "",
        description="certify this registered drafter with every compatible verifier; a name, or a mapping as in "
        "recipes: '{name: draft-model-tree, branching: [2, 1]}'. Its draft model is the toy's",
    )
    drafter_option: Annotated[tuple[str, ...], Argument("KEY=VALUE")] = Field(
        (), description="option of --drafter, a YAML value (repeatable)"
    )
    steps: int | None = Field(
        None, ge=1, description="number of consecutive steps (default: 1; 2 for stateful verifiers and with --drafter)"
    )
    gamma: int | None = Field(
        None,
        ge=0,
        description="draft length, or maximum depth with --drafter (default: the toy's, or less if that takes minutes)",
    )
    bounds: bool = Field(
        False,
        description="also print upper bounds of E[tau] in the first step of lossless verification: for chains (single "
        "draft), for verifiers that preserve the distribution of every step (LP), for any verifier (full information), "
        "and the largest Pr(tau >= 1) (root)",
    )
    verbose: Annotated[bool, Argument(short="-v")] = Field(
        False, description="print one row per pair and toy, and the reasons for skipped pairs"
    )

    def run(self) -> int:
        """Return 1 if a pair that is declared lossless is not, 3 if one raised, so that it is not known; else 0."""
        return _enumerate(self)


def _enumerate(options: Certify) -> int:
    """Certify the pairs on toys."""
    from ..certificate.effort import check_joint_size
    from ..certificate.toys import built_in_toys, read_toys, toys_of_two_vocabularies
    from ..runs.threads import one_thread

    drafts, gamma = _drafts(options), options.gamma
    toys = read_toys(options.toy) if options.toy else [*built_in_toys(), *toys_of_two_vocabularies()]
    for toy in toys:
        check_joint_size(toy.name, toy.vocab_size, options.steps or 1, toy.gamma if gamma is None else gamma)
    verifiers, unusable = _verifiers(options.verifier)
    with one_thread():
        rows, incompatible, too_large = _rows(options, toys, drafts, verifiers)

    if too_large and not rows:
        raise UsageError(too_large[0])
    for message in unusable:
        print(f"crossdraft: skipped: {message}", file=sys.stderr)
    _print_skipped(incompatible, too_large, options.verbose or not rows)
    for reason in dict.fromkeys(s for row in rows if row.bounds is not None for s in row.bounds.missing):
        print(f"crossdraft: bounds omitted: {reason}", file=sys.stderr)
    if not rows:
        raise UsageError("nothing to certify: all pairs were skipped")
    rows = _diagnosed(rows, toys, drafts)
    if options.json_:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        print((_pair_table if options.verbose or options.bounds else _verifier_table)(rows, options.bounds).text())
    complete = not (options.toy or options.draft or gamma is not None)
    _remember(rows, complete, drafts if options.drafter else {})
    line, code = _verdict(rows, bool(options.drafter))
    if options.json_:
        print(line, file=sys.stderr)
    else:
        print("\n".join(["", *_explanations(rows), line]))
    return 1 if unusable else code


def _diagnosed(rows: list[Row], toys: Sequence[Toy], drafts: Drafts) -> list[Row]:
    """The rows, with a diagnosis in one failed row of each verifier."""
    from ..certificate.rows import diagnosed

    result = list(rows)
    for verifier in dict.fromkeys(row.verifier for row in rows if row.failed):
        row = diagnosed(_rows_of(verifier, rows), toys, drafts)
        same = (row.toy, row.draft, row.verifier)
        result = [row if (other.toy, other.draft, other.verifier) == same else other for other in result]
    return result


def _explanations(rows: Sequence[Row]) -> list[str]:
    """Lines that explain each failed verifier, and the place of each error."""
    from ..certificate.outcomes import location

    lines = []
    for row in rows:
        if row.diagnosis is not None:
            lines += [f"verifier '{row.verifier.name}' with draft '{row.draft}':"]
            lines += [f"  {line}" for line in row.diagnosis.lines()]
    for verifier in dict.fromkeys(row.verifier for row in rows if row.error is not None):
        first = next(row for row in _rows_of(verifier, rows) if row.error is not None)
        lines += [f"verifier '{verifier.name}' {location(first)}:", f"  error: {first.error}"]
    return [*lines, ""] if lines else []


def _print_skipped(incompatible: Sequence[str], too_large: Sequence[str], verbose: bool) -> None:
    """Print one line for all skipped pairs, or with ``--verbose`` one line each."""
    if verbose:
        for reason in (*too_large, *incompatible):
            print(f"crossdraft: skipped: {reason}", file=sys.stderr)
        return
    parts = [(len(incompatible), "incompatible"), (len(too_large), "too large to enumerate")]
    if counts := ", ".join(f"{count} {reason}" for count, reason in parts if count):
        print(f"crossdraft: skipped pairs of draft and verifier: {counts} (--verbose lists them)", file=sys.stderr)


def _verdict(rows: Sequence[Row], of_drafter: bool) -> tuple[str, int]:
    """The last line of the output, and the exit code."""
    from ..certificate.outcomes import location, unexercised, worst_row

    verifiers = dict.fromkeys(row.verifier for row in rows)
    wrong = [worst for verifier in verifiers if (worst := worst_row(_rows_of(verifier, rows)))]
    if faults := [row for row in wrong if row.fault is not None]:
        more = f"; {len(wrong) - 1} more verifiers failed" if len(wrong) > 1 else ""
        return f"FAILED: {faults[0].fault}{more}", 1
    if wrong:
        wrong.sort(key=lambda row: -(row.tv or 0.0))
        names = ", ".join(f"'{row.verifier.name}'" for row in wrong)
        subject = f"verifier{'s' * (len(wrong) > 1)} {names} change{'s' * (len(wrong) == 1)}"
        if of_drafter:
            subject = f"drafter '{wrong[0].draft}' with {subject}"
        diagnosis = next((row.diagnosis for row in _rows_of(wrong[0].verifier, rows) if row.diagnosis), None)
        mistake = f": {diagnosis.summary}" if diagnosis is not None and len(wrong) == 1 else ""
        return (
            f"FAILED: {subject} the target's distribution (TV up to {wrong[0].tv:.2g} {location(wrong[0])}){mistake}",
            1,
        )
    if errors := [row for row in rows if row.error is not None]:
        row = errors[0]
        more = f"; {len(errors) - 1} more pairs raised errors" if len(errors) > 1 else ""
        return f"ERROR: verifier '{row.verifier.name}' {location(row)}: {row.error}{more}", ERROR
    if idle := [row for row in rows if row.gap and row.traits.lossless]:
        names = ", ".join(dict.fromkeys(f"'{row.verifier.name}'" for row in idle))
        pairs = _count(len(idle))
        return f"not exercised: {pairs} with {names}, so nothing is proved ({unexercised(idle)})", int(of_drafter)
    certified = [row for row in rows if row.traits.lossless]
    lossy = len(rows) - len(certified)
    if not certified:
        return f"lossy: nothing to certify; {_count(lossy)} declared lossy", 0
    more = f"; {_count(lossy)} declared lossy" if lossy else ""
    return (
        f"lossless: {_count(len(certified))} certified, TV at most {max(row.tv or 0.0 for row in certified):.2g}{more}",
        0,
    )


def _count(pairs: int) -> str:
    return f"{pairs} pair{'' if pairs == 1 else 's'}"


def _rows_of(verifier: type[Verifier], rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verifier is verifier]


def _drafts(options: Certify) -> Drafts:
    if not options.drafter:
        options.refuse_given(["drafter_option"], "without --drafter")
        for label in options.draft:
            if label not in DRAFTS:
                raise UnknownNameError.among("draft label", label, DRAFTS)
        return {label: DRAFTS[label] for label in options.draft or DRAFTS}
    options.refuse_given(["draft"], "with --drafter")
    drafter = named_drafter(options.drafter, options.drafter_option)
    return {drafter.label: drafter}


def _rows(
    options: Certify, toys: Sequence[Toy], drafts: Drafts, verifiers: Sequence[type[Verifier]]
) -> tuple[list[Row], list[str], list[str]]:
    """Rows of all pairs that can be enumerated, and the reasons why others are incompatible or too large."""
    from ..certificate.rows import CannotRun, PairTooLarge, certify_row, row_bounds, with_pair_coverage

    rows, incompatible, too_large = [], {}, {}
    for toy in toys:
        for label, kind in drafts.items():
            if kind.translated != (toy.token_texts is not None):
                if options.toy and (options.draft or options.drafter):
                    need = "requires" if kind.translated else "does not support"
                    incompatible[f"toy {toy.name}: {label} {need} a drafter with another vocabulary"] = None
                continue
            cache: dict[Any, Bounds] = {}
            for verifier in verifiers:
                try:
                    row = certify_row(toy, label, kind, verifier, options.steps, options.gamma)
                except PairTooLarge as reason:
                    too_large[str(reason)] = None
                    continue
                except CannotRun as reason:
                    incompatible[str(reason)] = None
                    continue
                if options.bounds and row.error is None:
                    row = replace(row, bounds=row_bounds(toy, kind, row, cache))
                rows.append(row)
    return with_pair_coverage(rows), list(incompatible), list(too_large)


def _verifiers(names: Iterable[str]) -> tuple[list[type[Verifier]], list[str]]:
    """The verifiers to certify, and error messages of unusable ones (raised if they were named)."""
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
    """A registered verifier whose default options are valid."""
    verifier = plugins.get("verifiers", name)
    if needed := [key for key, field in verifier.Config.model_fields.items() if field.is_required()]:
        raise ContractError(f"verifier '{name}' cannot be certified by name: {', '.join(needed)} has no default")
    with plugins.guarded("verifiers", name, "its Config"):
        plugins.traits_of("verifiers", verifier, verifier.Config())
    return verifier


def _remember(rows: Sequence[Row], complete: bool, named: Drafts) -> None:
    """Store certificates under the digest of the code.

    Failures are always stored, successes only if the table is ``complete``. With a named drafter, the certificate is
    the drafter's, from the rows of certified verifiers.
    """
    from ..certificate.outcomes import outcome
    from ..runs import certified_registry
    from ..runs.marks import mark_of_verifier
    from ..util.output_files import cache_dir

    certificates = []
    for drafter in named.values():
        cls, options = drafter.config(0)
        certified = [row for row in rows if mark_of_verifier(row.verifier, row.verifier.Config()).headline]
        certificates.append((cls, options, outcome(certified)))
    if not named:
        for verifier in dict.fromkeys(row.verifier for row in rows):
            certificates.append((verifier, verifier.Config(), outcome(_rows_of(verifier, rows))))
    entries = [(*key, c) for *key, c in certificates if c is not None and (complete or not c.lossless)]
    try:
        certified_registry.remember(entries)
    except OSError as error:
        print(f"crossdraft: certificates cannot be stored in {cache_dir()}: {error.strerror}", file=sys.stderr)


def _verifier_table(rows: list[Row], _: bool) -> Table:
    """One row per verifier."""
    from ..certificate.outcomes import worst_row
    from ..util.table import Table

    table = []
    for verifier in dict.fromkeys(row.verifier for row in rows):
        own = _rows_of(verifier, rows)
        errors = [row for row in own if row.error is not None]
        worst, tvs = worst_row(own), [row.tv for row in own if row.tv is not None]
        verdicts = sorted((row.verdict for row in own), key=lambda verdict: not verdict.startswith("not exercised"))
        verdict = verdicts[0] if worst is None else "NO"
        largest = f"{max(tvs):.2g}" if len(tvs) == len(own) else "-"
        drafts = ", ".join(dict.fromkeys(row.draft for row in own))
        table.append([verifier.name, drafts, str(len(own)), largest, "ERROR" if errors and worst is None else verdict])
    columns = ("verifier", "drafts", "pairs", "largest TV", "lossless")
    return Table(columns, table, widths=(None, 60, None, None, None))


def _pair_table(rows: list[Row], with_bounds: bool) -> Table:
    """One row per pair and toy."""
    from ..util.table import Table

    columns = ["toy", "draft", "verifier", "gamma", "steps", "TV", "E[tau] per step"]
    columns += ["single draft", "LP", "full information", "root"] * with_bounds + ["lossless"]
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
    return Table(columns, table)
