"""``crossdraft diagnose`` on responses: trials of common mistakes, and the one that gives what a server counted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crossdraft.framework.api.build import Configured
from crossdraft.framework.api.generate import generate
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.models import TRANSFORMERS, Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UsageError, quoted
from crossdraft.framework.metrics.intervals import LEAST_PIECES
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.shared_embedding import shared_embedding_of
from crossdraft.framework.util.estimate import estimate_text
from crossdraft.framework.util.input_files import read_json
from crossdraft.framework.util.limits import CONFIG_BYTES
from crossdraft.framework.util.table import Table

from ...diagnosis.engine_keys import Reading, engine_keys, further_keys, value_of
from ...diagnosis.engine_keys import readings as readings_of_keys
from ...diagnosis.matching import ALIKE, CONFIGURED, LEVEL, UNLISTED, Match, match
from ...diagnosis.readings import OF_FILES, READINGS, Setup, readings
from ...diagnosis.text_fit import fit_texts
from ...diagnosis.trials import Trial, TrialResult, inconclusive, likely_causes, responses_needed, run_trials
from ...engines.counter_definitions import DEFINITIONS
from ...replay.response import Response
from ...replay.responses import Reader
from ...replay.teacher_forcing.lazy_models import Target
from .. import log
from ..baseline_responses import BATCH_SIZE, baseline_responses, duration
from ..replay.command import read_responses
from .command import Diagnose
from .counters import assessment_json, differences, likelihoods, read_counters


def replayed_of(args: Diagnose, drafter: Configured) -> str:
    """Replay the drafter with mistakes undone, one at a time: text or JSON.

    Raises UsageError: a drafter that cannot be replayed, or sources that cannot be read.
    """
    counted = read_counters(args.counters)
    if len(counted) > 1:
        raise UsageError("--counters with a target takes one source; give the one of the replayed responses")
    definition = DEFINITIONS[args.as_] if counted else None
    options = {"device": args.device, "trust_remote_code": args.trusted([args.target], [args.drafter])}
    recorded, sampling, served = _recorded(args)
    target, facts = Target(args.target, sampling, dtype=args.dtype, **options), []
    gamma = counted[0][1].gamma if counted else args.gamma
    if recorded and counted and args.dtype == "auto":
        target, facts = _in_dtype_of_responses(args.target, target, recorded, options)
    past_end = definition is not None and definition.accepted == "all" and sampling.temperature == 0
    continued = partial(_continued, gamma=gamma) if past_end else Setup.continued
    heads = load_checkpoint(drafter[1].model) if _has_heads(drafter) else None
    trials = list(_trials(args, drafter, target, heads, recorded, options, continued))
    results: list[TrialResult] = []
    start = time.perf_counter()
    for result in run_trials(drafter, trials, gamma, definition):
        results.append(result)
        if len(results) == 1:
            seconds = time.perf_counter() - start
            log(f"trying {len(trials) - 1} common mistakes, about {duration(seconds)} each")
    facts += [] if heads is None else target_facts(heads, target.name, target.loaded.sha256)
    if results[0].warning:
        facts.append(results[0].warning)
    if counted and args.replay:
        source = counted[0][0]
        facts += differences((source.source, source.model, ""), (args.replay[0], served, ""))
    own = None if not args.counted else args.counted == "replay"
    matched = match(results, counted[0][1], own=own) if counted else None
    if matched is not None:
        facts += _limits(results, target.name, drafter[0].name)
    likely = likely_causes(results)
    if args.json_:
        return _report(results, likely, facts, matched)
    parts = [_table(results)] if matched is None else [likelihoods(matched.assessments, 12), _matched(matched)]
    lines = _conclusion(results, likely, facts, matched is None)
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def _limits(results: Sequence[TrialResult], target: str, drafter: str) -> Iterator[str]:
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


def _recorded(args: Diagnose) -> tuple[list[Response] | None, Sampling, str]:
    """The responses of ``--replay``, None without them, their sampling parameters, and the model that they name."""
    if not args.replay:
        return None, args.sampling, ""
    stated = args.sampling if args.model_fields_set & Sampling.model_fields.keys() else None
    limit = args.responses if "responses" in args.model_fields_set else None
    consent = args.target in args.trust_remote_code
    reader = Reader(target=args.target, sampling=stated, trust_remote_code=consent, limit=limit)
    responses, sampling = read_responses(reader, args.replay, stated)
    if sampling is None:
        raise UsageError("--replay: the responses do not record their sampling parameters; give --temperature")
    return list(responses), sampling, reader.model


def _in_dtype_of_responses(
    name: str, target: Target, responses: Sequence[Response], options: dict[str, Any]
) -> tuple[Target, list[str]]:
    """The target in the dtype that fits the responses better: its default, or another; and the reason for another."""
    default = str(target.loaded.model.dtype).removeprefix("torch.") if target.loaded.backend == TRANSFORMERS else ""
    fit = fit_texts(target, responses)
    if not default or fit.share == 1:
        return target, []
    dtype = "bfloat16" if default == "float32" else "float32"
    other = Target(name, target.sampling, dtype=dtype, **options)
    other_fit = fit_texts(other, responses)
    if other_fit.log_likelihood - fit.log_likelihood <= math.log(ALIKE):
        return target, []
    shares = "" if fit.share is None else f" ({100 * other_fit.share:.1f} % of the tokens, not {100 * fit.share:.1f} %)"  # type: ignore[operator]
    return other, [f"the server computes in {dtype}: {name} generates the responses in it, not in {default}{shares}"]


def _continued(responses: Sequence[Response], target: Target, gamma: int) -> list[Response]:
    """The responses with what the target emits past their end at temperature 0, where engines count drafts, too."""
    results = list(responses)
    maximum = target.loaded.context_length
    short = [
        number
        for number, response in enumerate(results)
        if not len(response.continuation)
        and (maximum is None or len(response.prompt) + len(response.tokens) + gamma <= maximum)
    ]
    if short:
        texts = [[*results[number].prompt, *results[number].tokens] for number in short]
        options = {"temperature": 0.0, "ignore_eos": True, "batch_size": min(BATCH_SIZE, len(short))}
        for number, more in zip(short, generate(target.loaded, texts, max_new_tokens=gamma, **options), strict=True):
            results[number] = replace(results[number], continuation=more.tokens)
    return results


def _report(
    results: Sequence[TrialResult], likely: Sequence[TrialResult], facts: Sequence[str], matched: Match | None
) -> str:
    open_questions = [result.misconfiguration.mistake for result in inconclusive(results)]
    report: dict[str, Any] = {
        "facts": facts,
        "likely": list(map(_json, likely)),
        "tried": list(map(_json, results)),
        "inconclusive": open_questions,
        "responses_needed": responses_needed(results) if open_questions else None,
    }
    if matched is not None:
        report["hypotheses"] = [assessment_json(item, {}) for item in matched.assessments]
        report |= {"own_responses": matched.own, "named": matched.named(), "unexplained": matched.unexplained}
    return json.dumps(report)


def _matched(matched: Match) -> str:
    """The most likely reading in words, against the drafter as configured."""
    best = matched.assessments[0]
    name, results, named = best.hypothesis.name, matched.results, matched.named()
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
        lines.append(f"The server {verb} what the files define: {_counted(matched, 1)} at position 1 ({interval}).")
        if not matched.own:
            lines.append("A fault that changes acceptance by less than this interval does not show in these counters.")
    else:
        verb = "may be" if len(named) > 1 else "is"
        position = _telling_position(matched, name)
        would_be = ""
        if CONFIGURED in results:
            gives = estimate_text(matched.expected(CONFIGURED, position), digits=3)
            would_be = f"; as configured it would be {gives}"
        counted = f"{_counted(matched, position)} at position {position}"
        gives = estimate_text(matched.expected(name, position), digits=3)
        lines.append(f"Your server's {counted} {verb} what this drafter gives if {name} ({gives}){would_be}.")
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


def _counted(matched: Match, position: int) -> str:
    return f"{matched.counted.at_least[position] / matched.counted.at_least[0]:.3f}"


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


def _telling_position(matched: Match, name: str) -> int:
    """The position at which a reading differs most from the drafter as configured; 1 if they are the same."""
    ours, theirs = (matched.results.get(key) for key in (CONFIGURED, name))
    if ours is None or theirs is None or ours.counts is None or theirs.counts is None:
        return 1
    rates = [result.per_position / result.drafts for result in (ours.counts, theirs.counts)]
    return int(abs(rates[0] - rates[1]).argmax()) + 1


def _trials(
    args: Diagnose,
    drafter: Configured,
    target: Target,
    heads: Checkpoint | None,
    recorded: Sequence[Response] | None,
    options: dict[str, Any],
    continued: Callable[[Sequence[Response], Target], Sequence[Response]],
) -> Iterator[Trial]:
    responses = _responses(args, target.sampling) if recorded is None else recorded
    setup = Setup(drafter, heads, target, responses, args.or_model, continued)
    yield from readings(setup, READINGS if args.counters else OF_FILES)
    if recorded is None and getattr(target.loaded.tokenizer, "chat_template", None):
        raw = _responses(args, target.sampling, chat=False)
        mistake = "the drafter was trained without the chat template of the prompts"
        yield Trial(Misconfiguration(mistake, "send prompts as plain text, or train it on conversations"), target, raw)
    precision = str(target.loaded.model.dtype).removeprefix("torch.")
    if precision != "float32":
        exact = Target(args.target, target.sampling, dtype="float32", **options)
        mistake = f"{precision} is not precise enough for the drafter or the target"
        if args.counters:
            mistake = f"the server computes in float32, not in {precision}"
        # The recorded log-probabilities are those at the lower precision.
        unknown = continued([replace(response, log_p=None) for response in responses], exact)
        yield Trial(Misconfiguration(mistake, "run them with --dtype float32"), exact, unknown)


def _has_heads(drafter: Configured) -> bool:
    """True if the drafter loads heads, which read the target's hidden states."""
    cls, config = drafter
    return bool(cls.traits(config, Sampling()).hidden_layers) and isinstance(getattr(config, "model", None), str)


def _responses(args: Diagnose, sampling: Sampling, chat: bool | None = None) -> list[Response]:
    name, consent = args.target, args.target in args.trust_remote_code
    limits = {"limit": args.responses, "maximum": args.max_new_tokens}
    options = {"chat": chat, "dtype": args.dtype, "device": args.device, "trust_remote_code": consent}
    path = baseline_responses(name, args.prompts, sampling, **limits, **options)
    return list(Reader(target=name, sampling=sampling, processed=True).read([str(path)]))


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


def _table(results: Sequence[TrialResult]) -> str:
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


def _conclusion(
    results: Sequence[TrialResult], likely: Sequence[TrialResult], facts: Sequence[str], final: bool
) -> list[str]:
    """Lines about the drafter itself; ``final``: with the likely causes, if no counters decide."""
    base, lines = results[0], []
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
        lines.append(_too_few(results))
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


def _too_few(results: Sequence[TrialResult]) -> str:
    """The conclusion if the intervals are too wide."""
    open_questions, needed = inconclusive(results), responses_needed(results)
    advice = f"about {needed} are needed" if needed else f"at least {LEAST_PIECES} are needed"
    few = f"too few to confirm or exclude {len(open_questions)} of the {len(results) - 1} common mistakes"
    return f"No conclusion: the responses are {few}; {advice} (--responses{f' {needed}' if needed else ''})."


def target_facts(heads: Checkpoint, target: str, digest: str) -> list[str]:
    """Findings from files: a missing embedding, a target other than the one that the heads were trained for."""
    shared = shared_embedding_of(heads.path)
    if shared is not None:
        return [
            f"{heads.name} does not contain its embedding, which is that of {shared['model']}: engines load it after "
            "crossdraft train export",
            *_training_facts(heads, target, digest),
        ]
    return _training_facts(heads, target, digest)


def _training_facts(heads: Checkpoint, target: str, digest: str) -> list[str]:
    path = heads.path / "training.json"
    training = read_json(path, CONFIG_BYTES) if path.is_file() else {}
    theirs = training.get("target_sha256") if isinstance(training, dict) else None
    if not isinstance(theirs, str) or not theirs:
        return ["the heads do not record the target checkpoint that they were trained for"]
    if theirs == digest:
        return []
    other, own = ("+".join(part[:12] for part in sha256.split("+")) for sha256 in (theirs, digest))
    return [
        f"the heads were trained for a target with SHA-256 {quoted(other)}, but {target} has {quoted(own)}; use the "
        "target that they were trained for"
    ]


def files_of(drafter: Configured, target: str, as_json: bool) -> str:
    """The keys of a head that change what it computes, as engines read them, as text or JSON.

    A draft model has no such keys: of its files, the tokenizer and the facts about its training are compared.

    Raises UsageError: a drafter without heads, or one that the table does not have.
    """
    from crossdraft.framework.models.configs import read_config
    from crossdraft.framework.models.digests import model_sha256
    from crossdraft.framework.models.load import same_tokenizer
    from crossdraft.framework.models.resolve import resolve
    from crossdraft.framework.models.tokenizer import load_tokenizer

    name, table = drafter[0].name, engine_keys()
    model = getattr(drafter[1], "model", None)
    own_model = not drafter[0].traits(drafter[1], Sampling()).hidden_layers
    if not isinstance(model, str) or not (own_model or name in table.keys):
        raise UsageError(
            f"--files: no facts about how engines read heads of '{name}' (known: {', '.join(table.keys)}); compare "
            "counters with a replay instead (--replay, --counters)"
        )
    heads = load_checkpoint(model)
    resolved = resolve(target)
    facts = target_facts(heads, target, model_sha256(resolved))
    if own_model:
        tokenizers = [load_tokenizer(name).tokenizer for name in (model, target)]
        facts.append(same_tokenizer(*tokenizers) or "the tokenizers of draft model and target are equal")
        if as_json:
            return json.dumps({"facts": facts, "absent": [], "keys": [], "further_keys": {}})
        line = f"Engines load the model of '{name}' as any other one: it has no keys of heads that they could misread."
        return "\n".join([*(f"Note: {fact}." for fact in facts), line])
    config = read_config(Path(resolved.path)) if resolved.backend == TRANSFORMERS else {}
    depth = (config.get("text_config") or config).get("num_hidden_layers", 0)
    treatments = list(readings_of_keys(heads, name, depth))
    absent = [
        f"{engine} {release.version} does not load heads of {name} ({release.where})"
        for engine, release in table.absent.items()
        if name in release.drafters
    ]
    others = dict(further_keys(heads.config, name))
    if as_json:
        keys = [_reading_json(reading) for reading in treatments]
        return json.dumps({"facts": facts, "absent": absent, "keys": keys, "further_keys": others}, default=str)
    if others:
        shown = ", ".join(f"{key} {json.dumps(value, default=str)[:60]}" for key, value in others.items())
        facts.append(f"further keys that change what the head computes, without facts about engines: {shown}")
    return "\n\n".join([_keys_table(heads, name, treatments), _keys_conclusion(treatments, facts, absent)])


def _reading_json(reading: Reading) -> dict[str, Any]:
    return {
        "key": reading.key,
        "engine": reading.engine,
        "value": reading.value,
        "used": reading.used,
        "misread": reading.misread,
        "ignored_at": reading.ignored_at,
        "origin": reading.origin,
    }


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


def _keys_conclusion(treatments: Sequence[Reading], facts: Sequence[str], absent: Sequence[str]) -> str:
    lines = [f"Note: {fact}." for fact in (*facts, *absent)]
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
