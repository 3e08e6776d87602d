"""Options of ``crossdraft replay``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from crossdraft import Argument, Command, Sampling, UnknownNameError, UsageError, quoted
from crossdraft.commands import ForceOptions, JsonOptions, SamplingOptions, TrustOptions, check_output
from crossdraft.framework.cli.options.run import SegmentOptions
from crossdraft.framework.cli.options.trust import strings_in
from crossdraft.runs import counted

from ...engines.counter_definitions import DEFINITIONS
from ...limits import MOST_REPLAYED, MOST_SEQUENCES
from ...report import Report, log

if TYPE_CHECKING:
    from ...engines.counter_definitions import CounterDefinition
    from ...replay.replay import ReplayResult
    from ...replay.response import Response


class Replay(SamplingOptions, SegmentOptions, ForceOptions, TrustOptions, JsonOptions, Command):
    """Replay of drafters along recorded responses.

    Raises UsageError: a source, drafter or verifier that cannot be replayed, or options that cannot be combined.
    """

    name: ClassVar[str] = "replay"

    sources: Annotated[tuple[str, ...], Argument("SOURCE", positional=True)] = Field(
        description="directory of a finished run or of one of its cells, JSONL file of responses, directory that the "
        "datasets library can read, or hf:org/name"
    )
    drafter: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        description="drafter: a name, or a mapping as in recipes: '{name: prompt-lookup, max_ngram: 4}'; if it sets "
        "gamma, only that length is replayed (repeatable)"
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="verifier (repeatable; default: all compatible)"
    )
    gamma: Annotated[str, Argument("LIST")] = Field("1-16", description="draft lengths, as in 1-8,12")
    policy: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        ("static",),
        description="length policy: static, oracle, heuristic, heuristic:START or confidence:0.2,0.4 (thresholds); all "
        "but static use the greatest gamma (repeatable)",
    )
    as_: Annotated[tuple[str, ...], Argument("ENGINE")] = Field(
        (),
        description=f"also compute the counters that this engine would report for the responses, docs/engines.md: "
        f"{', '.join(DEFINITIONS)}; several with --counted (repeatable)",
    )
    counted: Annotated[tuple[str, ...], Argument("FILE", requires="as_")] = Field(
        (),
        description="log or scrape of the engine of --as while it decoded SOURCE: compare its counters and name the "
        "cause of a difference (repeatable, with a SOURCE and --as each)",
    )
    k: Annotated[str, Argument("LIST")] = Field(
        "", description="numbers of i.i.d. sequences (default: the drafter's K)"
    )
    target: Annotated[tuple[str, ...], Argument("MODEL")] = Field(
        (),
        description="target, for its tokenizer and its log-probabilities; several are checkpoints in order, each with "
        "its own responses as SOURCE (repeatable)",
    )
    drop: Annotated[float, Argument("D")] = Field(
        0.05, gt=0, lt=1, description="with several targets: relative loss of block efficiency that is too large"
    )
    logprobs: Literal["processed"] | None = Field(
        None,
        description="log-probabilities in files are after temperature and truncation (vLLM: processed_logprobs); not "
        "needed at temperature 0, or at 1 without truncation",
    )
    limit: int | None = Field(None, ge=1, description="replay the first N responses")
    column: Annotated[str | None, Argument("NAME")] = Field(None, description="text column of a data set")
    split: Annotated[str | None, Argument("NAME")] = Field(None, description="split of a data set")
    prompt_tokens: int = Field(64, ge=1, description="prompt length for texts of a data set")
    tokens: int = Field(128, ge=1, description="maximum response length for texts of a data set")
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device of the models")
    out: Annotated[Path | None, Argument("FILE")] = Field(
        None, description="write per-position results to a Parquet file"
    )
    csv: Annotated[bool, Argument(exclusive="format")] = Field(
        False, description="print CSV: a row per drafter, verifier, K, gamma and category"
    )

    @property
    def known_sampling(self) -> Sampling | None:
        """Sampling parameters; None if none is given, so that the responses' own are used."""
        return self.sampling if self.model_fields_set & Sampling.model_fields.keys() else None

    @model_validator(mode="after")
    def _combinable(self) -> Replay:
        for engine in self.as_:
            if engine not in DEFINITIONS:
                raise UnknownNameError.among("engine with known counters", engine, DEFINITIONS)
        many = len(self.target) > 1
        if "drop" in self.model_fields_set and not many:
            raise UsageError("--drop requires several --target: it is a loss from the first to another one")
        mode = "several targets" if many else "--counted" if self.counted or len(self.as_) > 1 else ""
        for name in ("csv", "out", "segment") if mode else ():
            if getattr(self, name):
                raise UsageError(f"--{name} cannot be combined with {mode}; use --json, or replay them one by one")
        if self.counted or len(self.as_) > 1:
            counts = {"sources": len(self.sources), "--as": len(self.as_), "--counted": len(self.counted)}
            if len(set(counts.values())) > 1:
                numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
                raise UsageError(
                    f"got {numbers}; give each engine its responses as SOURCE, --as ENGINE, and --counted FILE"
                )
            if len(self.drafter) > 1 or len(self.verifier) > 1 or many:
                raise UsageError("--counted is for one pair: give one --target, --drafter and --verifier")
        elif many:
            if len(self.sources) != len(self.target):
                raise UsageError(
                    f"--target is given {len(self.target)} times for {counted(len(self.sources), 'source')}; give each "
                    "checkpoint one source, its own responses, in the same order"
                )
            if len(set(self.target)) < len(self.target):
                raise UsageError("--target names the same checkpoint twice; give each once")
            if self.as_:
                raise UsageError("--as cannot be combined with several targets; replay them one by one")
        if self.known_sampling is not None and "temperature" not in self.model_fields_set:
            raise UsageError("sampling parameters require --temperature; add it")
        return self

    def run(self) -> int:
        from crossdraft.runs import Strategy

        from ...replay.replay import MARK
        from .checkpoints import checkpoints_of
        from .counted import counted_of
        from .output import as_json, records, tables

        out, target = None, "".join(self.target[:1])
        if self.out is not None:
            drafters = [Strategy.parse(text, "--drafter").config for text in self.drafter]
            inputs = [*self.sources, *self.target, *strings_in(drafters)]
            out = check_output(self.out, "--out", inputs=inputs, mark=MARK, force=self.force)
        if self.counted or len(self.as_) > 1:
            triples = zip(self.sources, self.as_, self.counted, strict=True)
            report = counted_of(triples, target, self.drafter[0], self.dtype, partial(_replay, self))
        elif len(self.target) > 1:
            pairs = zip(self.sources, self.target, strict=True)
            report = checkpoints_of(pairs, self.drop, partial(_replay, self))
        else:
            result, *facts = _replay(self, self.sources, target, "".join(self.as_), out=out)
            text, data = partial(tables, result, *facts), partial(as_json, result, *facts)
            report = Report(text, data, partial(records, result))
        report.emit(self)
        return 0


_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def _replay(
    args: Replay,
    sources: Sequence[str],
    target: str,
    engine: str = "",
    variants: Sequence[CounterDefinition] = (),
    out: Path | None = None,
    note: Callable[[Response], None] = lambda response: None,
    dtype: str = "",
) -> tuple[ReplayResult, Sampling | None, Mapping[str, int]]:
    """Replay the responses of ``sources``: the result, their sampling parameters and the assumptions made.

    ``engine``: of the counters to compute, or empty; ``variants``: further definitions of them; ``note``: called with
    each response.
    """
    from crossdraft.models import Segments

    from ...replay.candidates import candidates_of
    from ...replay.replay import replay
    from ...replay.responses import Reader

    gammas = _numbers("--gamma", args.gamma, MOST_REPLAYED)
    ks = _numbers("--k", args.k, MOST_SEQUENCES) if args.k else ()
    sampling = args.known_sampling
    consent = args.trusted(args.target, args.drafter)
    options = {name: getattr(args, name) for name in ("prompt_tokens", "tokens", "split", "column", "limit")}
    raw = {"processed": args.logprobs == "processed", "trust_remote_code": target in consent}
    reader = Reader(target=target, sampling=sampling, **raw, **options)
    responses, sampling = reader.sampled(sources, sampling)
    definition = DEFINITIONS.get(engine)
    if definition is not None and args.policy != ("static",):
        raise UsageError(f"--as {engine} and --policy cannot be combined; remove one of them")
    candidates = candidates_of(
        args.drafter,
        args.verifier,
        gammas,
        ks=ks,
        sampling=sampling,
        target=target or reader.target,
        policies=args.policy,
        dtype=dtype or args.dtype,
        device=args.device,
        trust_remote_code=consent,
        drafter_options=definition.drafter_options if definition is not None else {},
    )
    multiple = [item.title for item in candidates if any(max(numbers) > 1 for numbers in item.verifiers.values())]
    if max(ks, default=1) > 1 and not multiple:
        raise UsageError(
            f"--k {args.k}: no drafter drafts several sequences; remove it, or add one such as draft-model-iid"
        )
    if definition is not None and multiple:
        raise UsageError(
            f"--as {engine}: drafter '{multiple[0]}' drafts several sequences, and engines count one; use --k 1"
        )
    segments = Segments.parse(args.segment, reader.tokenizer("--segment")).of if args.segment else None

    def noted() -> Iterator[Response]:
        for response in responses:
            note(response)
            yield response

    result = replay(noted(), candidates, out, definition=definition, variants=variants, segments=segments)
    if result.log_p.warning:
        log(f"warning: {result.log_p.warning}")
    return result, sampling, reader.assumed


def _numbers(option: str, text: str, maximum: Any) -> tuple[int, ...]:
    """Parse ``1-4,8`` into 1, 2, 3, 4, 8, sorted and without duplicates."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {quoted(text)} is not a list of numbers and ranges such as 1-8,12")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high:
            raise UsageError(f"{option}: {part.strip()} is not a range of positive numbers")
        if reason := maximum.violation(high):
            raise UsageError(f"{option}: {high} is too large; {reason}")
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))
