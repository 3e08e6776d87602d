"""Counters of a Prometheus scrape, by exact name, each with the line it stands in.

vLLM and llama.cpp count the same four things under the same names but for a prefix::

    <prefix>spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total
    <prefix>spec_decode_num_accepted_tokens_per_pos_total{position="0"}

The last is marginal: drafts of which the token at that position was accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from ..errors import first_line, printable
from ..util.limits import MOST_NAME
from .acceptance import Acceptance
from .engine_log import Source

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
#: A series: its name and labels, sorted.
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Sample:
    """The value of a series, and the line it stands in."""

    value: float
    line: int


def samples(given: Source, names: Collection[str]) -> dict[Key, Sample]:
    """The series called one of ``names``, and no others: ``_created`` of a counter is another name.

    Raises:
        UsageError: with file and line, for a line that is cut off, a series that stands there twice, NaN, infinity and
            negative numbers.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[Key, Sample] = {}
    last = 0
    for number, line in given.lines():
        name = _NAME.match(line)
        if name is None or name[0] not in names:
            continue
        last = number
        try:
            ((sample,),) = [family.samples for family in text_string_to_metric_families(line)]
        except Exception as error:  # of its parser: ValueError, IndexError
            raise given.error(number, f"no line of a Prometheus scrape: {first_line(error)}") from None
        if not 0 <= sample.value < math.inf:
            raise given.error(number, f"{sample.name} is {sample.value:g}, which counts nothing")
        key = sample.name, tuple(sorted(sample.labels.items()))
        if key in found:
            raise given.error(number, f"{sample.name} stands there twice, the first time in line {found[key].line}")
        found[key] = Sample(sample.value, number)
    if last and last == given.count and not given.ended:
        raise given.error(last, "the scrape is cut off in this line; take it again")
    return found


def since(later: dict[Key, Sample], earlier: dict[Key, Sample], given: Source, before: Source) -> dict[Key, Sample]:
    """What was counted between two scrapes. Raises UsageError where a counter went back: it was reset."""
    for key, sample in earlier.items():
        if key not in later or later[key].value < sample.value:
            line = later[key].line if key in later else given.count
            now = f"is {later[key].value:g}" if key in later else "is gone"
            raise given.error(
                line, f"{key[0]} {now} and was {sample.value:g} in {before.place(sample.line)}: the counter was reset"
            )
    nothing = Sample(0.0, 0)
    return {key: Sample(s.value - earlier.get(key, nothing).value, s.line) for key, s in later.items()}


def spec_decode(prefix: str, given: Source, before: Source | None = None) -> list[Acceptance]:
    """Acceptance by model, summed over engines, from the four counters; nothing where there is none of them.

    Args:
        before: an earlier scrape of the same server, to count from.

    Raises:
        UsageError: counters that contradict each other, or count nothing.
    """
    stem = f"{prefix}spec_decode_num_"
    drafts_name, tokens_name, accepted_name, position_name = (
        f"{stem}{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    names = {drafts_name, tokens_name, accepted_name, position_name}
    found = samples(given, names)
    if before is not None and found:
        found = since(found, samples(before, names), given, before)
    models: dict[str, dict[str, dict[int, Sample]]] = {}
    for (name, labels), sample in found.items():
        given_labels = dict(labels)
        position = 0
        if name == position_name:
            text = given_labels.get("position", "")
            if not (text.isascii() and text.isdigit() and len(text) < 6):
                raise given.error(sample.line, f"{name} has the position {text!r}, which is no number")
            position = int(text)
        of_model = models.setdefault(given_labels.get("model_name", ""), {}).setdefault(name, {})
        summed = of_model.get(position, Sample(0.0, 0))
        of_model[position] = Sample(summed.value + sample.value, sample.line)
    return [
        _acceptance(model, counted, given, drafts_name, tokens_name, accepted_name, position_name)
        for model, counted in models.items()
    ]


def _acceptance(
    model: str,
    counted: dict[str, dict[int, Sample]],
    given: Source,
    drafts_name: str,
    tokens_name: str,
    accepted_name: str,
    position_name: str,
) -> Acceptance:
    missing = [name for name in (drafts_name, accepted_name) if name not in counted]
    if missing:
        raise given.error(given.count, f"the scrape has no {missing[0]}; is it cut off?")
    drafts, accepted = counted[drafts_name][0], counted[accepted_name][0]
    if not drafts.value:
        raise given.error(drafts.line, "no draft was counted; let the server answer some requests first")
    source = given.name + (f", model {printable(model)[:MOST_NAME]}" if model else "")
    positions = counted.get(position_name, {})
    if not positions:
        length = 1 + accepted.value / drafts.value
        return Acceptance((), source, drafts=drafts.value, rows=((drafts.value, accepted.value),), length=length)
    for i in range(len(positions)):
        if i not in positions:
            raise given.error(given.count, f"{position_name} has no position {i}; is the scrape cut off?")
        most = positions[i - 1].value if i else drafts.value
        if positions[i].value > most:
            raise given.error(
                positions[i].line,
                f"{position_name} at position {i} is {positions[i].value:g}, more than the {most:g} that came so far",
            )
    total = sum(sample.value for sample in positions.values())
    if total != accepted.value:
        raise given.error(
            accepted.line,
            f"{accepted_name} is {accepted.value:g}, its positions come to {total:g}; take the scrape again",
        )
    row = (drafts.value, *(positions[i].value for i in range(len(positions))))
    remarks = ()
    if tokens_name in counted and (drafted := counted[tokens_name][0].value) < drafts.value * len(positions):
        remarks = (short_drafts(drafted / drafts.value, len(positions)),)
    return Acceptance.from_rows([row], source, remarks=remarks)


def short_drafts(mean: float, gamma: int) -> str:
    """The remark on drafts that were shorter than the longest."""
    return f"drafts held {mean:.2f} of {gamma} tokens in the mean; where one ends early, the rest counts as refused"
