"""Execution of one cell: a decoder for its drafter and verifier, its conversations, and the records of its steps.

The cells of a group share one target and take turns on its slots, each with its own drafter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from random import Random
from typing import Any

from ...api.build import Configured, TargetContext, build_decoder, configured, load_draft_model, slot_length
from ...contracts.lm import LM
from ...contracts.models import LoadedModel
from ...contracts.rng import CounterRng
from ...contracts.steps import Request, Response, StepEvent
from ...engine.decoder import Decoder
from ...errors import ContractError
from ...lm.cuda_graphs import CaptureLimits, missed_passes, recording
from ...metrics.cell_metrics import StepRecord
from ...metrics.pieces import PREFILL, Piece
from ...models.configs import read_config
from ...models.cpu.contention import CpuWait
from ...models.digests import model_sha256
from ...models.grammar import compile_constraint
from ...models.load import load_model
from ...models.resolve import resolve
from ...models.tokenizer import load_tokenizer
from ...recipe.prompts import Prompt
from ...recipe.recipe import CellConfig
from ...runs.run_directory import PieceResult
from .. import memory
from .conversations import Conversation

#: Untimed steps before the measurement.
WARM_UP = 4
#: Period of the random tokens of warm-up prompts, so that drafters that copy from the prompt draft, too.
WARM_UP_PERIOD = 8
#: First random stream of the warm-up, beyond those of all prompts.
WARM_UP_STREAM = 1 << 40
#: Unit, in tokens, of the sequence length in a step's shape.
CONTEXT_STEP = 256


class Models:
    """Cache of the last target that was loaded and its draft models.

    Args:
        trusted: names of models loaded with ``trust_remote_code``.
    """

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        self.trusted = frozenset(trusted)
        self._key: tuple[Any, ...] = ()
        self._loaded: dict[str, LoadedModel] = {}

    def target(self, config: CellConfig) -> LoadedModel:
        """Return the target of a cell, loading it if necessary; for an engine's cell without its weights."""
        options = {
            "dtype": config.dtype,
            "device": config.device,
            "trust_remote_code": config.target in self.trusted,
        }
        served = config.engine is not None
        key = (config.target, config.attn_implementation, served, *options.values())
        if key != self._key:
            self._loaded.clear()
            self._key = ()
            self._loaded[config.target] = (
                without_weights(config.target, trust_remote_code=config.target in self.trusted)
                if served
                else load_model(config.target, attn_implementation=config.attn_implementation, **options)
            )
            self._key = key
        return self._loaded[config.target]

    def drafter(self, name: str, target: LoadedModel) -> LoadedModel:
        """Return a draft model for the target loaded last."""
        if name not in self._loaded:
            self._loaded[name] = load_draft_model(name, target, trust_remote_code=name in self.trusted)
        return self._loaded[name]

    def of(self, config: CellConfig) -> list[LoadedModel]:
        """Return the loaded models of a cell, the target first."""
        names = (config.target, config.drafter.config.get("model"))
        return [model for name, model in self._loaded.items() if name in names and model.model is not None]


def without_weights(name: str, *, trust_remote_code: bool) -> LoadedModel:
    """The model ``name`` without its weights, for an engine that loads them itself."""
    resolved, tokenizer = resolve(name), load_tokenizer(name, trust_remote_code=trust_remote_code)
    settings = read_config(resolved.path) if resolved.path.is_dir() else {}
    return LoadedModel(
        model=None,
        tokenizer=tokenizer.tokenizer,
        name=name,
        source=resolved.source,
        sha256=model_sha256(resolved),
        eos_token_ids=tokenizer.eos_token_ids,
        context_length=settings.get("text_config", settings).get("max_position_embeddings"),
        backend=resolved.backend,
    )


def lengths(
    conversations: Sequence[Conversation], configs: Sequence[CellConfig], context_length: int | None
) -> tuple[int, int]:
    """Return the maximum sequence length (prompt and output) and the slot length (with drafts), in tokens."""
    sequence = max(max(c.prompt_lens) for c in conversations) + configs[0].max_new_tokens
    if context_length is not None:
        sequence = min(sequence, context_length)
    return sequence, slot_length(sequence, [drafter_of(config) for config in configs], configs[0].sampling)


def drafter_of(config: CellConfig) -> Configured:
    return configured("drafters", {"name": config.drafter.name, **config.drafter.config})


def positions(config: CellConfig) -> int:
    """Maximum positions evaluated by the target per row and step: the root and the widest draft."""
    return slot_length(0, [drafter_of(config)], config.sampling)


class _Steps:
    """Recorder of the batch's steps since `start`: their times, and if all slots were in use."""

    def __init__(self, decoder: Decoder, limit: Callable[[], Any]):
        self._decoder, self._limit, self._contention = decoder, limit, CpuWait(decoder.target.device)
        self._clear()

    def start(self) -> None:
        """Start a piece; `stop` must follow, also after an error."""
        self._clear()
        self._contention.start()

    def stop(self) -> None:
        self._contention.close()

    def _clear(self) -> None:
        self.full: list[_Step] = []
        self.partial: list[_Step] = []
        self._before = dict(self._decoder.stopwatch.seconds)
        self._held: dict[int, tuple[int, int]] = {}

    def add(self, event: StepEvent) -> None:
        """Record a step (``Decoder.on_step``); prefill since the previous step is attributed to it."""
        now = dict(self._decoder.stopwatch.seconds)
        seconds = {phase: now[phase] - self._before[phase] for phase in now}
        self._before = now
        longest = max(map(len, self._decoder.sequences.history))
        resumed = " resumed" if event.draft.resume_from is not None else ""
        shape, emitted = f"{event.draft.width} {longest // CONTEXT_STEP}{resumed}", sum(map(len, event.emitted))
        step = _Step(shape, emitted, seconds, self._contention.since(), self._prefilled(event))
        (self.partial if None in event.prompts else self.full).append(step)
        self._limit()

    def _prefilled(self, event: StepEvent) -> int:
        """Prompt tokens of the sequences whose first step this is."""
        tokens = 0
        for row, (prompt, new) in enumerate(zip(event.prompts, event.emitted, strict=True)):
            length = len(self._decoder.sequences.history[row])
            if prompt is not None:
                tokens += length - len(new) if self._held.get(row) != (prompt, length - len(new)) else 0
                self._held[row] = prompt, length
        return tokens

    def piece(self) -> Piece:
        """Sum up the steps. If no step had all slots in use, none belongs to the tail."""
        counted, tail = (self.full, self.partial) if self.full else (self.partial, [])
        steps: dict[str, list[list[int]]] = {}
        for step in counted:
            steps.setdefault(step.shape, []).append(step.row)
        return Piece(
            emitted=sum(step.emitted for step in counted),
            seconds={phase: sum(step.seconds[phase] for step in counted) for phase in self._before},
            tail_emitted=sum(step.emitted for step in tail),
            tail_seconds=sum(s for step in tail for phase, s in step.seconds.items() if phase != PREFILL),
            steps=steps,
        )


@dataclass(frozen=True)
class _Step:
    shape: str
    emitted: int
    seconds: Mapping[str, float]
    waited: float
    prefilled: int

    @property
    def row(self) -> list[int]:
        """Row of `Piece.steps`. The waiting time is split in proportion with the target's prefill before the step."""
        total = sum(self.seconds.values())
        wait = self.waited * (1 - self.seconds[PREFILL] / total) if total else 0.0
        times = [self.seconds[phase] for phase in ("draft", "target", "verify", "rest")] + [wait]
        row = [round(1e6 * s) for s in times]
        return [*row, self.prefilled, round(1e6 * self.seconds["draft_prefill"])] if self.prefilled else row


class PieceRunner(ABC):
    """Base of what measures the pieces of one cell: the decoding loop of this process, or an engine's server.

    Attributes:
        models: digest and source of every model of the cell, by name.
        depth: maximum depth of the drafts.
    """

    models: dict[str, dict[str, Any]]
    depth: int

    def __init__(self, config: CellConfig, tokenizer: Any):
        self.config, self._tokenizer = config, tokenizer

    @property
    def remembers(self) -> bool:
        """True if drafts depend on earlier sequences; such a cell decodes finished pieces again when it resumes."""
        return False

    @abstractmethod
    def warm_up(self, length: int) -> None:
        """Run a few steps in every slot and discard them; prompts are ``length`` random tokens."""

    @contextmanager
    @abstractmethod
    def _measured(self, result: PieceResult) -> Iterator[None]:
        """Measure the piece that is decoded inside, and complete ``result`` except for records and responses."""
        yield

    @abstractmethod
    def _decode(
        self, conversations: Sequence[Conversation], prompts: Sequence[list[int]], turn: int
    ) -> Sequence[Response]:
        """Decode one turn of each conversation. Returns the responses in their order."""

    def close(self) -> None:
        """Free what the cell holds outside of this process."""

    def run(self, conversations: Sequence[Conversation]) -> PieceResult:
        """Measure one piece: all first turns, then all second turns after this cell's responses, and so on."""
        result = PieceResult()
        answers: dict[int, list[str]] = {c.prompt.index: [] for c in conversations}
        with self._measured(result):
            for turn in range(max(len(c.prompt.turns) for c in conversations)):
                active = [c for c in conversations if turn < len(c.prompt.turns)]
                prompts = [c.encode(self._tokenizer, answers[c.prompt.index]) for c in active]
                responses = self._decode(active, prompts, turn)
                for conversation, prompt, response in zip(active, prompts, responses, strict=True):
                    text = str(self._tokenizer.decode(response.tokens, skip_special_tokens=True))
                    answers[conversation.prompt.index].append(text)
                    _record(result, conversation.prompt, turn, response, text, len(prompt))
        categories = {c.prompt.category for c in conversations}
        if len(categories) == 1:
            result.piece = replace(result.piece, category=categories.pop())
        return result


def _record(result: PieceResult, prompt: Prompt, turn: int, response: Response, text: str, length: int) -> None:
    name = str(prompt.question_id)
    for i, r in enumerate(response.steps):
        counts = (r.tau, r.emitted, r.nodes, r.width, r.limit, r.survival)
        result.records.append(StepRecord(prompt.index, name, prompt.category, turn, i, *counts))
    line: dict[str, Any] = {
        "question_id": prompt.question_id,
        "turn": turn,
        "category": prompt.category,
        "prompt_tokens": length,
        "text": text,
        "tokens": response.tokens,
        "finish_reason": response.finish_reason,
    }
    if response.error is not None:
        line["error"] = response.error
    if response.logprobs is not None:  # JSON has no infinity: null is probability 0
        line["logprobs"] = [round(value, 6) if isfinite(value) else None for value in response.logprobs]
    result.responses.append(line)


class Cell(PieceRunner):
    """A drafter and a verifier on the slots of a target.

    Args:
        config: configuration of the cell.
        target: loaded target.
        lm: slots of the target, shared with the other cells of the group.
        models: source of draft models.
        sequence, slot: see `lengths`.
        on_step: called before the first step and after every step, for instance to restart a time limit.
        validate: how often drafts and verdicts are checked in full, see `Decoder`.
        mask_drafts: prompts have constraints of their own that mask draft models.
    """

    def __init__(
        self,
        config: CellConfig,
        target: LoadedModel,
        lm: LM,
        models: Models,
        sequence: int,
        slot: int,
        on_step: Callable[[], Any] = lambda: None,
        validate: str = "sampled",
        mask_drafts: bool = False,
    ):
        super().__init__(config, target.tokenizer)
        self.lm, self._on_step = lm, on_step
        self.models = {target.name: {"sha256": target.sha256, "source": target.source}}

        context = TargetContext.of(
            target, lm, config.sampling, slot=slot, sequence=sequence, load=models.drafter, used=self.models
        )
        drafter, options = drafter_of(config)
        constraint = compile_constraint(config.constraint, target, lm.vocab_size) if config.constraint else None
        self.decoder = build_decoder(
            context,
            (drafter, options),
            configured("verifiers", {"name": config.verifier.name, **config.verifier.config}),
            eos=target.eos_token_ids,
            max_new_tokens=config.max_new_tokens,
            rng=CounterRng(config.seed),
            compile_verifier=config.compile_verifier,
            prefill_tokens=config.prefill_tokens,
            constraint=constraint,
            mask_drafts=mask_drafts,
            validate=validate,
            on_step=lambda event: self._steps.add(event),
        )
        self._steps = _Steps(self.decoder, on_step)
        self.depth = drafter.traits(options, config.sampling).depth

    @property
    def remembers(self) -> bool:
        return self.decoder.drafter.remembers(self.decoder.drafter.config)

    @property
    def _passes(self) -> int:
        passes = self.decoder.drafter.passes
        if isinstance(passes, bool) or not isinstance(passes, int):
            raise ContractError(f"drafter '{self.config.drafter.name}' has passes = {passes!r}; it must be an int")
        return passes

    def warm_up(self, length: int) -> None:
        """Run a few steps in every slot and discard them, so that one-time costs are not measured.

        This captures CUDA graphs for all widths up to that of the widest draft and for all sequence lengths. Prompts
        are ``length`` random tokens on separate random streams, so that a drafter with memory does not see measured
        prompts; it is reset afterwards.
        """
        decoder, random = self.decoder, Random(self.config.seed)
        compiled = decoder.compiled_verifier
        ends, decoder.eos = decoder.eos, frozenset()
        constraint, decoder.constraint = decoder.constraint, None
        if compiled is None:  # enough for a draft of full depth; a compiled verifier needs whole sequences
            decoder.max_new_tokens = min(WARM_UP + self.depth, self.config.max_new_tokens)
        prompts = []
        for _ in range(self.config.batch_size):
            phrase = [random.randrange(self.lm.vocab_size) for _ in range(min(WARM_UP_PERIOD, length))]
            prompts.append([phrase[i % len(phrase)] for i in range(length)])
        full_requests = [Request(prompt, i, WARM_UP_STREAM + i, "warm-up prompt") for i, prompt in enumerate(prompts)]
        # Prefill and a single token: the last step of a sequence.
        prefill_requests = [request._replace(prompt=request.prompt[:1], most=1) for request in full_requests]
        self._on_step()
        with recording(CaptureLimits(depth=self.depth, nodes=positions(self.config) - 1)):
            for requests in (full_requests, prefill_requests):
                with closing(decoder.steps(requests)) as steps:
                    for count, _ in enumerate(steps, 1):
                        if compiled is None and count == WARM_UP:
                            break
        decoder.eos, decoder.max_new_tokens = ends, self.config.max_new_tokens
        decoder.constraint = constraint
        if compiled is not None:
            compiled.compiling = False
        decoder.drafter.reset()
        decoder.batch_steps = decoder.target_rows = 0

    @contextmanager
    def _measured(self, result: PieceResult) -> Iterator[None]:
        passes, missed = self._passes, missed_passes()
        memory.start(self.lm.device)
        self._steps.start()
        try:
            yield
        finally:
            self._steps.stop()
        result.piece = self._steps.piece()
        result.passes, result.peak_memory = self._passes - passes, memory.peak(self.lm.device)
        result.missed_graphs = missed_passes() - missed

    def _decode(
        self, conversations: Sequence[Conversation], prompts: Sequence[list[int]], turn: int
    ) -> Sequence[Response]:
        streams = [c.prompt.stream(turn) for c in conversations]
        # Error messages name prompts by question_id instead of by their position in this call.
        names = [f"prompt {c.prompt.question_id!r}" for c in conversations]
        self._on_step()
        with recording(None):
            grammars = [c.grammar for c in conversations]
            return sorted(
                self.decoder.run(prompts, streams, names, constraints=grammars), key=lambda response: response.index
            )
