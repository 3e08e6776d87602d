"""Acceptance for ``crossdraft advise``, by replaying responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from crossdraft import Sampling, UsageError
from crossdraft.framework import plugins
from crossdraft.runs import counted

from ..engines.acceptance import EACH_LENGTH, Acceptance
from ..engines.engine import not_servable
from ..replay.baseline_responses import baseline_responses
from ..replay.candidates import candidates_of
from ..replay.replay import Candidate, replay
from ..replay.response import Response
from ..replay.responses import Reader
from ..report import log
from .caveats import Remarks

MAX_GAMMA = 16  # the greatest draft length that is replayed
_MIN_TOKENS = 1000  # fewer tokens than this raise a warning


def replayed_acceptances(args: Any, remarks: Remarks) -> list[Acceptance]:
    """Replay every drafter with every compatible verifier at every draft length up to `MAX_GAMMA`.

    ``args``: the command. Raises UsageError: responses, drafters or verifiers that cannot be replayed.
    """
    consent = args.trusted([args.target or None], args.drafter)
    sampling = None if args.temperature is None else Sampling(temperature=args.temperature)
    name = " and ".join(args.replay)
    sources = list(args.replay)
    if args.prompts:
        if sampling is None:
            sampling = Sampling()
            remarks.assume("responses are sampled at temperature 1; set --temperature for another")
        path = baseline_responses(
            args.target,
            args.prompts,
            sampling,
            limit=args.responses,
            maximum=args.max_new_tokens,
            trust_remote_code=args.target in consent,
        )
        sources.append(str(path))
        name = f"responses of {args.target} to {args.prompts}"
    # Responses decoded here have the log-probabilities after temperature and truncation.
    reader = Reader(
        # A config.json has no tokenizer; token ids and drafters without a model need none.
        target="" if args.target.endswith(".json") else args.target,
        sampling=sampling,
        processed=not args.replay,
        trust_remote_code=args.target in consent,
    )
    responses, sampling = reader.sampled(sources, sampling, name)
    candidates = candidates_of(
        args.drafter,
        args.verifier,
        range(1, MAX_GAMMA + 1),
        sampling=sampling,
        target=args.target or reader.target,
        trust_remote_code=consent,
        drafter_options=_drafter_options(args, remarks),
    )
    if args.export:
        candidates = _exportable(candidates, args, sampling, remarks)
    pairs = sum(len(candidate.verifiers) for candidate in candidates)
    number = f"{counted(len(candidates), 'drafter')}, {counted(pairs, 'pair')}"
    log(f"replaying {number}, gamma 1 to {MAX_GAMMA}, without decoding")
    sums = Counter[str]()

    def summed() -> Iterator[Response]:
        for response in responses:
            size = len(response.prompt)
            sums.update(truncated=not response.ended, prompt=size, repeated=size - len(set(response.prompt)))
            yield response

    result = replay(summed(), candidates, by_prompt=True)
    for assumption, count in reader.assumed.items():
        remarks.assume(f"{counted(count, 'response')} {assumption}")
    if result.log_p.warning:
        remarks.warn(f"{name}: {result.log_p.warning}")
    if result.tokens < _MIN_TOKENS:
        remarks.warn(f"{name}: {result.tokens} tokens are few; replay more responses")
    if sums["truncated"] == result.responses:
        remarks.warn(f"{name}: all responses are truncated; acceptance may differ for longer ones")
    if sums["prompt"] >= 500 and sums["repeated"] < 0.05 * sums["prompt"]:  # unlike in text
        remarks.warn(f"{name}: prompts look like random tokens; acceptance on real text will differ")
    return [item for candidate in result.candidates for item in _of_candidate(candidate, name, sampling, remarks)]


def _facts(candidate: Candidate, sampling: Sampling | None) -> dict[str, Any]:
    """Attributes of `Acceptance` about a drafter."""
    cls, config = candidate.drafter
    options = config.model_dump(exclude_unset=True, mode="json")
    return {
        "drafter": cls.name,
        "model": str(options.get("model", "")),
        "temperature": None if sampling is None else sampling.temperature,
        "point_mass": cls.traits(config, sampling or Sampling()).point_mass,
        "options": {key: value for key, value in options.items() if key not in ("model", "gamma")},
    }


def _drafter_options(args: Any, remarks: Remarks) -> Mapping[str, Mapping[str, Any]]:
    """Options with which drafters draft as those of the engine of --export."""
    definition = plugins.get("engines", args.export).counters if args.export else None
    if definition is None:
        return {}
    for drafter, options in definition.drafter_options.items():
        if any(drafter in text for text in args.drafter):
            listed = ", ".join(f"{key}: {value}" for key, value in options.items())
            remarks.assume(f"{drafter} drafts as in {definition.engine}, {listed}, unless its options set that")
    return definition.drafter_options


def _exportable(candidates: list[Candidate], args: Any, sampling: Sampling | None, remarks: Remarks) -> list[Candidate]:
    """The candidates without the pairs that the engine of --export does not support, before anything is replayed.

    Raises UsageError: it supports none of them.
    """
    engine, reasons = plugins.get("engines", args.export)(), []
    for candidate in candidates:
        facts = _facts(candidate, sampling)
        facts["model"] = args.draft_path or facts["model"]
        for verifier in list(candidate.verifiers):
            acceptance = Acceptance((), candidate.title, length=1.0, verifier=verifier, **facts)
            with plugins.guarded("engines", args.export, "cannot()"):
                reason = engine.cannot(acceptance) or not_servable(acceptance.model)
            if reason:
                reasons.append(f"{candidate.title} × {verifier} is left out: {engine.name}: {reason}")
                del candidate.verifiers[verifier]
    remarks.warnings += reasons
    if not any(candidate.verifiers for candidate in candidates):
        raise UsageError(f"--export {args.export}: no pair can be exported: {'; '.join(reasons)}")
    return [candidate for candidate in candidates if candidate.verifiers]


def _of_candidate(candidate: Candidate, name: str, sampling: Sampling | None, remarks: Remarks) -> Iterator[Acceptance]:
    facts = _facts(candidate, sampling)
    if facts["drafter"] == "prompt-lookup":
        facts["options"]["match"] = candidate.drafter[1].match
    for (verifier, k), tally in candidate.tallies.items():
        if k > 1:
            remarks.warn(
                f"{candidate.title} × {verifier}: the cost of several sequences is not modelled; use crossdraft run"
            )
            continue
        for gamma in candidate.gammas:
            rows = tally.by_prompt(gamma)
            if not rows[:, 0].sum():
                remarks.warn(f"{name}: the responses are too short for drafts of {gamma} tokens")
                break
            yield Acceptance.from_rows(
                rows.tolist(), name, verifier=verifier, idle=tally.row(gamma).idle, refusal=EACH_LENGTH, **facts
            )
