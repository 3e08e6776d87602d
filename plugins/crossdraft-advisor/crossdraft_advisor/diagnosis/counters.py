"""``crossdraft diagnose --counters``: the shape of acceptance by position against the catalogue of signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crossdraft import Table, UsageError, quoted

from ..engines.acceptance import Acceptance
from ..engines.formats import CounterSource, read_acceptances
from ..report import Report
from .hypothesis import CLEAR_SHARE, NONE, Assessment, Counts, assess
from .signatures import CIRCUMSTANCES, HEALTHY, counts_of, in_order, signatures


def read_counters(texts: Sequence[str]) -> list[tuple[CounterSource, Acceptance]]:
    """The acceptance in each source of ``--counters``, in their order for signatures. Raises UsageError."""
    counted: list[tuple[CounterSource, Acceptance]] = []
    for text in texts:
        source = CounterSource.parse(text, "--counters")
        # A draft length may choose one of several.
        try:
            read, acceptances = read_acceptances(source.source, source.since or None)
        except UsageError:
            if source.gamma is None:
                raise
            read, acceptances = read_acceptances(source.source, source.since or None, source.gamma)
        acceptances = [part for item in acceptances for part in item.parts or (item,)]
        # Without positions no signature is read, which is refused below.
        chosen = acceptances = [item for item in acceptances if item.marginal] or acceptances[:1]
        if acceptances[0].marginal:
            chosen = [item for item in acceptances if source.gamma in (None, item.gamma)]
        if len(chosen) != 1:
            lengths = ", ".join(str(item.gamma or "unknown") for item in acceptances)
            raise UsageError(
                f"--counters {source.source}: {len(acceptances)} drafters or draft lengths ({lengths}); choose one "
                f"with '{{source: {source.source}, gamma: N}}', or give a file of one"
            )
        facts = {"gamma": chosen[0].gamma, "model": source.model or served_model(read.text)}
        counted.append((source.model_copy(update=facts), chosen[0]))
    return in_order(counted)


def signatures_of(texts: Sequence[str]) -> Report:
    """The catalogue of signatures with their likelihoods."""
    if len(texts) > 2:
        raise UsageError(f"--counters compares one or two sources, not {len(texts)}; give the two that differ most")
    counted = read_counters(texts)
    sources = [source for source, _ in counted]
    reference = counted[0][1]
    labels = [item.source for _, item in counted] if len(counted) > 1 else [""]
    counts = [counts_of(item, label, reference) for (_, item), label in zip(counted, labels, strict=True)]
    assessments = assess(list(signatures(sources, reference.gamma)), counts)
    checks = {"FILE": sources[-1].source}  # placeholder in the command lines of checks -> its value
    served = [(source.source, source.model, acceptance.format.partition(":")[0]) for source, acceptance in counted]
    warnings = list(differences(*served)) if len(served) > 1 else []
    data = {"hypotheses": [assessment_json(item, checks) for item in assessments], "warnings": warnings}
    lines = [*(f"Warning: {text}." for text in warnings), _conclusion(assessments, sources, checks)]
    if assessments[0].hypothesis.name == HEALTHY and reference.gamma > 1:
        lines += [f"{item.label + ': ' if item.label else ''}{_mean_over_positions(item)}" for item in counts]
    parts = [_sources(counted, counts), likelihoods(assessments), "\n".join(lines)]
    return Report(lambda: "\n\n".join(parts), lambda: data)


def _sources(counted: Sequence[tuple[CounterSource, Acceptance]], counts: Sequence[Counts]) -> str:
    rows = []
    for (source, acceptance), of_drafts in zip(counted, counts, strict=True):
        conditions = ", ".join(
            f"{key.replace('_', ' ')} {value:g}"
            for key in CIRCUMSTANCES
            if key != "gamma" and (value := getattr(source, key)) is not None
        )
        drafts = "unknown" if acceptance.drafts is None else f"{of_drafts.at_least[0]:.0f}"
        rates = " ".join(f"{of_drafts.rate(i):.2f}" for i in range(1, of_drafts.gamma + 1))
        rows.append([f"{acceptance.source}{f' ({conditions})' if conditions else ''}", drafts, rates])
    return Table(["counted", ("drafts", "right"), "go on at 1, 2, .."], rows).text()


def likelihoods(assessments: Sequence[Assessment], limit: int | None = None) -> str:
    """Table of the ``limit`` most likely hypotheses."""
    rows = [
        [item.hypothesis.name, f"{100 * item.share:.1f} %", f"{item.log_likelihood:.1f}", item.against]
        for item in assessments[:limit]
    ]
    return Table(
        ["hypothesis", ("likelihood", "right"), ("log L", "right"), "against"], rows, widths=(60, None, None, 60)
    ).text()


def _conclusion(assessments: Sequence[Assessment], sources: Sequence[CounterSource], checks: Mapping[str, str]) -> str:
    (best, second), lines = assessments[:2], []
    if best.share < CLEAR_SHARE:
        lines.append(f"Not decided between '{best.hypothesis.name}' and '{second.hypothesis.name}'.")
    elif best.hypothesis is NONE:
        lines.append("None of the signatures fits: the counters may mix several models, lengths or circumstances.")
    else:
        lines.append(f"Most likely: {best.hypothesis.name} ({best.hypothesis.meaning}).")
    commands = dict.fromkeys(check_of(item, checks) for item in (best, second)[: 1 + (best.share < CLEAR_SHARE)])
    lines += [f"Next check: {command}" for command in commands if command]
    if len(sources) == 1:
        names = ", ".join(f"'{item.name}'" for item in CIRCUMSTANCES.values())
        lines.append(
            f"Not examined, because they need a second source (--counters '{{source: FILE2, batch_size: 1}}'): {names}."
        )
    return "\n".join(lines)


def _mean_over_positions(counts: Counts) -> str:
    """The acceptance rate and the acceptance length that engines print, in words."""
    marginal = [accepted / counts.at_least[0] for accepted in counts.at_least[1:]]
    mean = sum(marginal) / counts.gamma
    return (
        f"{100 * mean:.0f} % of the drafted tokens are accepted. This rate is a mean over {counts.gamma} positions and "
        f"falls with the draft length: {100 * marginal[0]:.0f} % at position 1, {100 * marginal[-1]:.0f} % at position "
        f"{counts.gamma}. Judge drafts by the acceptance length instead: a step with a draft emits "
        f"1 + {counts.gamma} x {mean:.2f} = {1 + sum(marginal):.1f} tokens."
    )


def check_of(assessment: Assessment, checks: Mapping[str, str]) -> str:
    """The command line of the next check, with known values for placeholders."""
    words = assessment.hypothesis.check.split(" ")
    return " ".join(checks.get(word, word) for word in words)


def assessment_json(assessment: Assessment, checks: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": assessment.hypothesis.name,
        "meaning": assessment.hypothesis.meaning,
        "likelihood": assessment.share,
        "log_likelihood": assessment.log_likelihood,
        "against": assessment.against,
        "check": check_of(assessment, checks),
    }


#: A label of counters, an argument in the log of a start, or a key of responses.
_MODEL = re.compile(r"""\bmodel_name=["']([^"']+)|\bserved_model_name=["']?([^"',\s)]+)|"model"\s*:\s*"([^"]+)""")
_SEARCHED = 2**20  # characters of a source in which the model is looked for


def served_model(text: str) -> str:
    """The first name of a model in a source; empty if it does not record one."""
    match = _MODEL.search(text, 0, _SEARCHED)
    return next(filter(None, match.groups()), "") if match else ""


def differences(first: tuple[str, str, str], second: tuple[str, str, str]) -> Iterator[str]:
    """Yield what shows that two sources, each a name, a model and an engine, are not of one server."""
    for word, one, other in zip(("model", "engine"), first[1:], second[1:], strict=True):
        if one and other and one != other:
            yield (
                f"{first[0]} is of the {word} {quoted(one)}, {second[0]} of {quoted(other)}: if they are of two "
                "servers, their difference is not a fault"
            )
