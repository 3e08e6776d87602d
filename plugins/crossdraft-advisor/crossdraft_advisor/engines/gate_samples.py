"""Block efficiencies for ``crossdraft gate``: replay JSON, or an engine's log, metrics or responses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from crossdraft.framework.errors import UsageError, printable
from crossdraft.framework.metrics.intervals import LEAST_PIECES
from crossdraft.framework.util.input_files import kind_of, parse_json, path_of, read_text
from crossdraft.framework.util.limits import METRICS_BYTES

from ..gate import Sample
from .acceptance import Acceptance
from .formats import read_acceptances

_KEYS = {"prompt_ids", "rows", "responses"}


def samples_of(name: str) -> list[Sample]:
    """The samples of a file or URL. Raises UsageError if it does not have any."""
    if not name.startswith(("http://", "https://")):
        if not kind_of(name):
            raise UsageError(
                f"{printable(name)} does not exist; give a run, replay JSON, or an engine's log or metrics"
            )
        text = read_text(path_of(name), METRICS_BYTES)
        if text.lstrip().startswith("{") and '"by_prompt"' in text:
            data = parse_json(text, name)
            if isinstance(data, dict) and data.keys() >= _KEYS:
                return _replayed(data, printable(name))
    samples, numbers = [], Counter[str]()
    for sample in map(_sample, read_acceptances(name)[1]):
        numbers[sample.title] += 1
        number = numbers[sample.title]
        samples.append(replace(sample, title=f"{sample.title} ({number})") if number > 1 else sample)
    return samples


def _sample(acceptance: Acceptance) -> Sample:
    rows = [(row[0] + sum(row[1:]), row[0]) for row in acceptance.rows]
    overall, remark = None, ""
    if len(rows) < LEAST_PIECES:
        overall = acceptance.block_efficiency()
        if overall.low is not None:
            remark = "assumed: independent drafts, on the same prompts in both; logs and responses need no assumption"
    gamma = f", gamma {acceptance.gamma}" if acceptance.gamma else ""
    pair = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier))) or "drafts"
    sampling = {} if acceptance.temperature is None else {"temperature": acceptance.temperature}
    return Sample(
        pair + gamma, rows, acceptance.names, acceptance.pieces, overall, remark, sampling, acceptance.maximum
    )


def _replayed(data: dict[str, Any], name: str) -> list[Sample]:
    """The samples of ``crossdraft replay --json``. Raises UsageError for other contents under its keys."""
    try:
        ids = tuple(str(item) for item in data["prompt_ids"])
        samples = []
        if not ids:
            raise ValueError("prompt_ids is empty")
        for row in data["rows"]:
            copies = f", K = {row['k']}" if row["k"] != 1 else ""
            title = f"{row['drafter']} × {row['verifier']}{copies}, gamma {row['gamma']}"
            rows = [(float(tokens), float(steps)) for tokens, steps in row["by_prompt"]]
            if len(rows) != len(ids) or not all(0 <= steps <= tokens < 1e15 for tokens, steps in rows):
                raise ValueError(f"by_prompt of {title} does not have a token and step count for each prompt")
            if any(steps for _, steps in rows):
                sampling, maximum = dict(data.get("sampling") or {}), 1.0 + float(row["gamma"])
                samples.append(Sample(printable(title), rows, ids, sampling=sampling, maximum=maximum))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name} is not the output of crossdraft replay --json: {error!r}; replay again") from None
    return samples
