"""``crossdraft diagnose``: the likely cause of a low acceptance rate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from crossdraft import Argument, Command, Sampling, UsageError
from crossdraft.commands import MOST_PROMPTS, MOST_TOKENS, JsonOptions, SamplingOptions, TrustOptions
from crossdraft.runs import duration

from ..engines.counter_definitions import DEFINITIONS
from ..limits import MOST_REPLAYED
from ..replay.baseline_responses import baseline_responses
from ..report import Report, log

if TYPE_CHECKING:
    from crossdraft.models import Configured

    from ..diagnosis.readings import Setup
    from ..diagnosis.trials import Trial
    from ..replay.response import Response

_COUNTERS = "what an engine counted (without a model)"


class Diagnose(SamplingOptions, TrustOptions, JsonOptions, Command):
    """The cause of a low acceptance rate: from counters, or by trials of common mistakes on responses.

    Raises UsageError: options that cannot be combined; a drafter that cannot be replayed.
    """

    name: ClassVar[str] = "diagnose"

    counters: Annotated[tuple[str, ...], Argument("SOURCE", group=_COUNTERS)] = Field(
        (),
        description="log, metrics or responses of an engine, or a mapping with the circumstances: "
        "'{source: FILE, temperature: 0, batch_size: 1, context: 512}' (one, or two to compare)",
    )
    target: Annotated[str, Argument("MODEL", requires="drafter")] = Field("", description="target model")
    drafter: Annotated[str, Argument("NAME", requires="target")] = Field(
        "", description="drafter: a name, or a mapping as in recipes: '{name: eagle3, model: my-heads}'"
    )
    files: Annotated[bool, Argument(requires="drafter")] = Field(
        False, description="how engines read the keys of the heads' config.json; no model is run"
    )
    replay: Annotated[tuple[str, ...], Argument("SOURCE", requires="drafter")] = Field(
        (), description="recorded responses, see crossdraft replay (default: decode prompts; repeatable)"
    )
    as_: Annotated[str, Argument("ENGINE", requires="counters")] = Field(
        "", description=f"engine that counted --counters, to match it with replays: {', '.join(DEFINITIONS)}"
    )
    counted: Annotated[Literal["", "replay", "other"], Argument("RESPONSES", requires="counters")] = Field(
        "",
        description="responses that --counters are of: those of --replay, or other ones (default: recognised by the "
        "number of tokens)",
    )
    or_model: Annotated[tuple[str, ...], Argument("MODEL", requires="counters")] = Field(
        (), description="further heads or draft model that the server may have loaded: another checkpoint (repeatable)"
    )
    prompts: Annotated[str, Argument("SOURCE")] = Field("builtin", description="prompts")
    responses: Annotated[int, MOST_PROMPTS] = Field(
        16, ge=1, description="number of prompts to decode, or of recorded responses to replay"
    )
    max_new_tokens: Annotated[int, MOST_TOKENS] = Field(64, ge=1, description="maximum tokens per response")
    gamma: Annotated[int, MOST_REPLAYED] = Field(4, ge=1, description="draft length")
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device of the models")

    @model_validator(mode="after")
    def _has_an_input(self) -> Diagnose:
        if not self.target and not self.counters:
            raise UsageError(
                "diagnose requires --counters (what an engine counted), or --target and --drafter (models to replay)"
            )
        if self.target and self.counters and not self.files and self.as_ not in DEFINITIONS:
            raise UsageError(
                f"--counters with a target requires --as, the engine that counted: one of {', '.join(DEFINITIONS)}"
            )
        return self

    def run(self) -> int:
        from ..diagnosis.counters import signatures_of

        if not self.target:
            signatures_of(self.counters).emit(self)
            return 0
        from crossdraft.models import configured
        from crossdraft.runs import Strategy

        from ..diagnosis.report import files_of

        strategy = Strategy.parse(self.drafter, "--drafter")
        drafter = configured("drafters", strategy)
        (files_of(drafter, self.target) if self.files else _replayed(self, drafter)).emit(self)
        return 0


def _replayed(args: Diagnose, drafter: Configured) -> Report:
    """Replay the drafter with mistakes undone, one at a time.

    Raises UsageError: a drafter that cannot be replayed, or sources that cannot be read.
    """
    from crossdraft.models import load_checkpoint

    from ..diagnosis import report
    from ..diagnosis.counters import differences, likelihoods, read_counters
    from ..diagnosis.matching import match
    from ..diagnosis.readings import Setup, with_continuations
    from ..diagnosis.text_fit import in_dtype_of_responses
    from ..diagnosis.trials import TrialResult, run_trials
    from ..replay.teacher_forcing.lazy_models import Target

    counted = read_counters(args.counters)
    if len(counted) > 1:
        raise UsageError("--counters with a target takes one source; give the one of the replayed responses")
    definition = DEFINITIONS[args.as_] if counted else None
    options = {"device": args.device, "trust_remote_code": args.trusted([args.target], [args.drafter])}
    recorded, sampling, served = _recorded(args)
    target, facts = Target(args.target, sampling, dtype=args.dtype, **options), []
    gamma = counted[0][1].gamma if counted else args.gamma
    if recorded and counted and args.dtype == "auto":
        target, facts = in_dtype_of_responses(args.target, target, recorded, options)
    past_end = definition is not None and definition.accepted == "all" and sampling.temperature == 0
    continued = partial(with_continuations, gamma=gamma) if past_end else Setup.continued
    cls, config = drafter
    reads_states, name = cls.traits(config, Sampling()).hidden_layers, getattr(config, "model", None)
    heads = load_checkpoint(name) if reads_states and isinstance(name, str) else None
    responses = _responses(args, target.sampling) if recorded is None else recorded
    setup = Setup(drafter, heads, target, responses, args.or_model, continued)
    trials = list(_trials(args, setup, recorded is None, options))
    results: list[TrialResult] = []
    start = time.perf_counter()
    for result in run_trials(drafter, trials, gamma, definition):
        results.append(result)
        if len(results) == 1:
            seconds = time.perf_counter() - start
            log(f"trying {len(trials) - 1} common mistakes, about {duration(seconds)} each")
    facts += [] if heads is None else report.target_facts(heads, target.name, target.loaded.sha256)
    if results[0].warning:
        facts.append(results[0].warning)
    if counted and args.replay:
        source = counted[0][0]
        facts += differences((source.source, source.model, ""), (args.replay[0], served, ""))
    own = None if not args.counted else args.counted == "replay"
    matched = match(results, counted[0][1], own=own) if counted else None
    if matched is not None:
        facts += report.limits(results, target.name, cls.name)

    def text() -> str:
        parts = [report.trials_text(results)]
        if matched is not None:
            parts = [likelihoods(matched.assessments, 12), report.matched_text(matched)]
        lines = report.conclusion_lines(results, facts, matched is None)
        return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])

    return Report(text, lambda: report.report_json(results, facts, matched))


def _recorded(args: Diagnose) -> tuple[list[Response] | None, Sampling, str]:
    """The responses of ``--replay``, None without them, their sampling parameters, and the model that they name."""
    if not args.replay:
        return None, args.sampling, ""
    from ..replay.responses import Reader

    stated = args.sampling if args.model_fields_set & Sampling.model_fields.keys() else None
    limit = args.responses if "responses" in args.model_fields_set else None
    consent = args.target in args.trust_remote_code
    reader = Reader(target=args.target, sampling=stated, trust_remote_code=consent, limit=limit)
    responses, sampling = reader.sampled(args.replay, stated)
    if sampling is None:
        raise UsageError("--replay: the responses do not record their sampling parameters; give --temperature")
    return list(responses), sampling, reader.model


def _trials(args: Diagnose, setup: Setup, decoded: bool, options: dict[str, Any]) -> Iterator[Trial]:
    """Yield the readings, and what template and precision change; ``decoded``: the responses are of this call."""
    from crossdraft import Misconfiguration

    from ..diagnosis.readings import OF_FILES, READINGS, readings
    from ..diagnosis.trials import Trial
    from ..replay.teacher_forcing.lazy_models import Target

    target = setup.target
    yield from readings(setup, READINGS if args.counters else OF_FILES)
    if decoded and getattr(target.loaded.tokenizer, "chat_template", None):
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
        unknown = setup.continued([replace(response, log_p=None) for response in setup.responses], exact)
        yield Trial(Misconfiguration(mistake, "run them with --dtype float32"), exact, unknown)


def _responses(args: Diagnose, sampling: Sampling, chat: bool | None = None) -> list[Response]:
    from ..replay.responses import Reader

    name, consent = args.target, args.target in args.trust_remote_code
    limits = {"limit": args.responses, "maximum": args.max_new_tokens}
    options = {"chat": chat, "dtype": args.dtype, "device": args.device, "trust_remote_code": consent}
    path = baseline_responses(name, args.prompts, sampling, **limits, **options)
    return list(Reader(target=name, sampling=sampling, processed=True).read([str(path)]))
