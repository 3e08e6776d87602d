"""``crossdraft diagnose`` on responses and files: the conclusions, as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossdraft import Checkpoint, ModelError, Sampling, Table, UsageError, load_tokenizer, quoted
from crossdraft.commands import CONFIG_BYTES, read_json
from crossdraft.models import (
    TRANSFORMERS,
    Configured,
    load_checkpoint,
    model_sha256,
    read_config,
    resolve,
    same_tokenizer,
    shared_embedding_of,
)
from crossdraft.runs import LEAST_PIECES, estimate_text

from ..report import Report
from .counters import assessment_json
from .engine_keys import Reading, engine_keys, further_keys, readings, value_of
from .matching import CONFIGURED, LEVEL, UNLISTED, Match
from .trials import TrialResult, inconclusive, likely_causes, responses_needed


def limits(results: Sequence[TrialResult], target: str, drafter: str) -> Iterator[str]:
    """Yield reasons why the truth may not be among the readings."""
    if len(results) == 1:
        yield (
            f"no misreading of drafter '{drafter}' is known, so that only the files are compared with the counters; a "
            "class lists its own in misconfigurations()"
        )
    fits = [result.texts for result in results if result.texts is not None]
    best = max(fits, key=lambda fit: fit.log_likelihood, default=None)
    if best is None or not best.foreign:
        return
    measure = (
        f"their log-probability is {best.errors:.0f} standard errors below that of its own"
        if best.share is None
        else f"only {100 * best.share:.0f} % of their tokens are its choices at temperature 0"
    )
    yield (
        f"the responses are not those of {target}: {measure}, for these prompts and all variants; the server runs "
        "another checkpoint, or renders its prompts in another way"
    )


def report_json(results: Sequence[TrialResult], facts: Sequence[str], matched: Match | None) -> dict[str, Any]:
    open_questions = [result.misconfiguration.mistake for result in inconclusive(results)]
    report: dict[str, Any] = {
        "facts": facts,
        "likely": list(map(_json, likely_causes(results))),
        "tried": list(map(_json, results)),
        "inconclusive": open_questions,
        "responses_needed": responses_needed(results) if open_questions else None,
    }
    if matched is not None:
        report["hypotheses"] = [assessment_json(item, {}) for item in matched.assessments]
        report |= {"own_responses": matched.own, "named": matched.named(), "unexplained": matched.unexplained}
    return report


def matched_text(matched: Match) -> str:
    """The most likely reading in words, against the drafter as configured."""
    best = matched.assessments[0]
    name, results, named = best.hypothesis.name, matched.results, matched.named()
    drafts, *counted = matched.counted.at_least
    texts = "the counted responses" if matched.own else "other responses than the counted ones"
    lines = [f"Replayed: {texts} (--counted {'other' if matched.own else 'replay'} if that is wrong)."]
    if matched.unexplained:
        lines.append(
            f"None of the {len(results)} readings gives what the server counted, each tested at a level of "
            f"{100 * LEVEL:g} %: {best.hypothesis.meaning}."
        )
        if name != UNLISTED:
            lines.append(f"Its shape: {name}.")
    elif name not in results:
        lines.append(f"Most likely: {name} ({best.hypothesis.meaning}).")
    elif name == CONFIGURED:
        verb = "may compute" if len(named) > 1 else "computes"
        interval = estimate_text(matched.expected(name, 1), digits=3)
        lines.append(f"The server {verb} what the files define: {counted[0] / drafts:.3f} at position 1 ({interval}).")
        if not matched.own:
            lines.append("A fault that changes acceptance by less than this interval does not show in these counters.")
    else:
        verb = "may be" if len(named) > 1 else "is"
        position, would_be = 1, ""  # the position that differs most from the drafter as configured
        both = [results[key].counts for key in (CONFIGURED, name) if key in results]
        if len(both) == 2 and both[0] is not None and both[1] is not None:
            first, second = (counts.per_position / counts.drafts for counts in both if counts is not None)
            position = int(abs(first - second).argmax()) + 1
        if CONFIGURED in results:
            gives = estimate_text(matched.expected(CONFIGURED, position), digits=3)
            would_be = f"; as configured it would be {gives}"
        rate = f"{counted[position - 1] / drafts:.3f} at position {position}"
        gives = estimate_text(matched.expected(name, position), digits=3)
        lines.append(f"Your server's {rate} {verb} what this drafter gives if {name} ({gives}){would_be}.")
        lines.append(
            "Check how the engine reads the files (--files). If the files are wrong instead, the cure is: "
            f"{best.hypothesis.meaning}."
        )
    if others := named[1:]:
        lines.append(f"Not distinguished from it by these counters: {'; '.join(others)}.")
        lines.append(f"Next check: {_next_check(matched)}.")
    if matched.unknown:
        lines.append(f"{matched.unknown} readings could not be replayed.")
    return "\n".join(lines)


def _next_check(matched: Match) -> str:
    """The cheapest check that would distinguish the readings that are named."""
    if not matched.own:
        return "replay the responses that were counted, best at temperature 0 (--counted replay)"
    if len(set(matched.named()) & set(matched.results)) < 2:
        return "more of the counted responses, and further checkpoints that the server may have loaded (--or-model)"
    needed = matched.responses_to_decide()
    if needed is None:
        return "how the engine reads the files (--files); on such texts the counters are the same"
    return f"how the engine reads the files (--files), or about {needed} counted responses"


def _json(result: TrialResult) -> dict[str, Any]:
    row = result.row
    fields: dict[str, Any] = {
        "mistake": result.misconfiguration.mistake,
        "cure": result.misconfiguration.cure,
        "reason": result.reason,
    }
    if row is not None and row.block_efficiency is not None:
        fields |= {"gamma": row.gamma, "marginal": row.marginal, "block_efficiency": row.block_efficiency.value}
    if result.gain is not None:
        fields |= {"gain": result.gain.value, "gain_low": result.gain.low, "gain_high": result.gain.high}
    return fields


def trials_text(results: Sequence[TrialResult]) -> str:
    base, rows = results[0], []
    ordered = sorted(results[1:], key=lambda r: -1.0 if r.gain is None else r.gain.value, reverse=True)
    for result in (base, *ordered):
        row, efficiency = result.row, result.row and result.row.block_efficiency
        failed = "" if result is base else result.reason[:60] or "-"
        rows.append(
            [
                result.misconfiguration.mistake or "none (as configured)",
                " ".join(f"{value:.2f}" for value in row.marginal) if row else "-",
                f"{efficiency.value:.2f}" if efficiency else "-",
                estimate_text(result.gain, "+") or failed,
            ]
        )
    columns = ["hypothesis", "accepted at 1, 2, ..", "BE", "gain [95 %]"]
    return Table(columns, rows, widths=(60, None, None, 60)).markdown()


def conclusion_lines(results: Sequence[TrialResult], facts: Sequence[str], final: bool) -> list[str]:
    """Lines about the drafter itself; ``final``: with the likely causes, if no counters decide."""
    base, lines = results[0], list[str]()
    likely = likely_causes(results)
    if base.reason:
        lines.append(f"The drafter does not draft as configured: {base.reason}")
    elif base.tally is not None and len(base.tally.categories) > 1:
        parts = ((name, base.tally.row(base.gamma, name)) for name in base.tally.categories)
        rates = ", ".join(f"{name} {row.marginal[0]:.2f}" for name, row in parts if row.marginal)
        lines.append(f"Acceptance rate of the first drafted token, by category: {rates}")
    lines += [f"Note: {fact}." for fact in facts]
    if not final:
        return lines
    if not likely and base.reason:
        lines.append(f"None of the {len(results) - 1} common mistakes explains this error; fix it first.")
    elif not likely and inconclusive(results):
        open_questions, needed = inconclusive(results), responses_needed(results)
        advice = f"about {needed} are needed" if needed else f"at least {LEAST_PIECES} are needed"
        few = f"too few to confirm or exclude {len(open_questions)} of the {len(results) - 1} common mistakes"
        option = f"--responses{f' {needed}' if needed else ''}"
        lines.append(f"No conclusion: the responses are {few}; {advice} ({option}).")
    elif not likely:
        lines.append(
            f"None of the {len(results) - 1} common mistakes explains it: every interval excludes a clear gain. "
            "Train the drafter longer or on similar prompts, or use another drafter."
        )
    for number, result in enumerate(likely, 1):
        first = "Most likely" if number == 1 else f"{number}. Possibly"
        row = result.row
        assert row is not None and row.block_efficiency is not None
        lines.append(
            f"{first}: {result.misconfiguration.mistake} (BE {row.block_efficiency.value:.2f}). "
            f"Fix: {result.misconfiguration.cure}."
        )
    return lines


def target_facts(heads: Checkpoint, target: str, digest: str) -> list[str]:
    """Findings from files: a missing embedding, a target other than the one that the heads were trained for."""
    facts, path = [], heads.path / "training.json"
    if (shared := shared_embedding_of(heads.path)) is not None:
        facts.append(
            f"{heads.name} does not contain its embedding, which is that of {shared['model']}: engines load it after "
            "crossdraft train export"
        )
    training = read_json(path, CONFIG_BYTES) if path.is_file() else {}
    theirs = training.get("target_sha256") if isinstance(training, dict) else None
    if not isinstance(theirs, str) or not theirs:
        facts.append("the heads do not record the target checkpoint that they were trained for")
    elif theirs != digest:
        other, own = ("+".join(part[:12] for part in sha256.split("+")) for sha256 in (theirs, digest))
        facts.append(
            f"the heads were trained for a target with SHA-256 {quoted(other)}, but {target} has {quoted(own)}; use "
            "the target that they were trained for"
        )
    return facts


def files_of(drafter: Configured, target: str) -> Report:
    """The keys of a head that change what it computes, as engines read them.

    A draft model has no such keys: of its files, the tokenizer and the facts about its training are compared.

    Raises UsageError: a drafter without heads, or one that the table does not have.
    """
    name, table = drafter[0].name, engine_keys()
    model = getattr(drafter[1], "model", None)
    heads = load_checkpoint(model) if isinstance(model, str) else None
    own_model = False
    if heads and name not in table.keys and not drafter[0].traits(drafter[1], Sampling()).hidden_layers:
        with suppress(ModelError):  # they are heads of another kind
            heads.check_kind("draft-model")
            own_model = True
    if heads is None or not (own_model or name in table.keys):
        raise UsageError(
            f"--files: no facts about how engines read heads of '{name}' (known: {', '.join(table.keys)}); compare "
            "counters with a replay instead (--replay, --counters)"
        )
    resolved = resolve(target)
    facts = target_facts(heads, target, model_sha256(resolved))
    if own_model:
        tokenizers = [load_tokenizer(model).tokenizer for model in (heads.name, target)]
        facts.append(same_tokenizer(*tokenizers) or "the tokenizers of draft model and target are equal")
        line = f"Engines load the model of '{name}' as any other one: it has no keys of heads that they could misread."
        text = "\n".join([*(f"Note: {fact}." for fact in facts), line])
        return Report(lambda: text, lambda: {"facts": facts, "absent": [], "keys": [], "further_keys": {}})
    config = read_config(Path(resolved.path)) if resolved.backend == TRANSFORMERS else {}
    depth = (config.get("text_config") or config).get("num_hidden_layers", 0)
    treatments = list(readings(heads, name, depth))
    absent = [
        f"{engine} {release.version} does not load heads of {name} ({release.where})"
        for engine, release in table.absent.items()
        if name in release.drafters
    ]
    others = dict(further_keys(heads.config, name))
    keys = [{**asdict(reading), "misread": reading.misread} for reading in treatments]
    notes, data = [*facts], {"facts": facts, "absent": absent, "keys": keys, "further_keys": others}
    if others:
        shown = ", ".join(f"{key} {json.dumps(value, default=str)[:60]}" for key, value in others.items())
        notes.append(f"further keys that change what the head computes, without facts about engines: {shown}")
    parts = [_keys_table(heads, name, treatments), _keys_conclusion(treatments, [*notes, *absent])]
    return Report(lambda: "\n\n".join(parts), lambda: data)


def _keys_table(heads: Checkpoint, name: str, treatments: Sequence[Reading]) -> str:
    engines = [engine for engine, sources in engine_keys().sources.items() if name in sources]
    by_key = {(reading.key, reading.engine): reading for reading in treatments}
    rows = []
    for key, facts in engine_keys().keys[name].items():
        value, own = (value_of(heads, key, neutral) for neutral in (facts.neutral, None))
        shown = json.dumps(value) if own is not None else f"absent ({json.dumps(value)})"
        cells = []
        for engine in engines:
            reading = by_key.get((key, engine))
            known = "right" if reading is None or not reading.misread else f"USES {json.dumps(reading.used)}"
            cells.append("unknown" if reading is None else known)
        rows.append([key, shown[:24], *cells])
    return Table(["key", "in the head", *engines], rows).text()


def _keys_conclusion(treatments: Sequence[Reading], facts: Sequence[str]) -> str:
    lines = [f"Note: {fact}." for fact in facts]
    lines += [
        f"{reading.engine} would misread {reading.key}: {json.dumps(reading.used)} for {json.dumps(reading.value)} "
        f"({reading.origin})."
        for reading in treatments
        if reading.misread
    ]
    lines += [
        f"{reading.engine} at commit {reading.ignored_at} did not read {reading.key}; later ones do ({reading.origin})."
        for reading in treatments
        if reading.ignored_at
    ]
    if not any(reading.misread for reading in treatments):
        lines.append("No engine of the table would misread this head.")
    lines.append("Engines change: check the named place in your version. Corrections: engine_keys.yaml.")
    return "\n".join(lines)
