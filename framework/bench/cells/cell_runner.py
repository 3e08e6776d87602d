"""Execution of one cell: a decoder for its drafter and verifier, its conversations, and the records of its steps.

The cells of a group share one target and take turns on its slots, each with its own drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from operator import attrgetter
from statistics import median_low
from typing import Any

from ... import plugins
from ...api.build import TargetContext, build_decoder, configured, load_draft_model, slot_length
from ...api.cell_runner import CellRunner, Conversation
from ...contracts.lm import LM
from ...contracts.models import LoadedModel
from ...contracts.rng import CounterRng
from ...contracts.steps import Request, Response
from ...engine.stopwatch import StepTiming
from ...errors import ContractError
from ...lm.cuda_graphs import CaptureLimits, missed_passes, recording
from ...metrics.pieces import PREFILL, Piece
from ...models.grammar import compile_constraint
from ...models.load import load_model
from ...recipe.recipe import CellConfig
from ...runs.run_directory import PieceResult
from ...util.contention import CpuWait
from .. import memory

#: Steps before their pace counts: the first ones compile and allocate.
LEAST_STEPS = 3
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
        options: dict[str, Any] = {"trust_remote_code": config.target in self.trusted}
        key = (config.target, config.attn_implementation, config.engine is None, config.dtype, config.device)
        if key != self._key:
            self._loaded.clear()
            self._key = ()
            if config.engine is None:
                options |= {"dtype": config.dtype, "device": config.device}
                target = load_model(config.target, attn_implementation=config.attn_implementation, **options)
            else:
                target = plugins.of_companion("runner of engines").load_target(config, **options)
            self._loaded[config.target], self._key = target, key
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


def lengths(
    conversations: Sequence[Conversation], configs: Sequence[CellConfig], context_length: int | None
) -> tuple[int, int]:
    """Return the maximum sequence length (prompt and output) and the slot length (with drafts), in tokens."""
    sequence = max(max(c.prompt_lens) for c in conversations) + configs[0].max_new_tokens
    if context_length is not None:
        sequence = min(sequence, context_length)
    return sequence, slot_length(sequence, [configured("drafters", c.drafter) for c in configs], configs[0].sampling)


def _piece(timings: Sequence[StepTiming], waits: Sequence[float], before: Mapping[str, float]) -> Piece:
    """Sum up the steps of a piece. If no step had all slots in use, none belongs to the tail.

    Args:
        waits: CPU time lost in each step.
        before: seconds of the stopwatch before the first step.
    """
    full, partial = list[Any](), list[Any]()  # emitted tokens, seconds by phase, shape and row of each step
    slots: dict[int, tuple[int, int]] = {}
    for timing, waited in zip(timings, waits, strict=True):
        seconds = {phase: now - before[phase] for phase, now in timing.seconds.items()}
        before, total = timing.seconds, sum(seconds.values())
        # Split in proportion with the target's prefill before the step.
        wait = waited * (1 - seconds[PREFILL] / total) if total else 0.0
        times = [*(seconds[phase] for phase in ("draft", "target", "verify", "rest")), wait]
        row = [round(1e6 * s) for s in times]
        if prefilled := _prefilled(timing, slots):
            row += [prefilled, round(1e6 * seconds["draft_prefill"])]
        shape = f"{timing.width} {max(timing.lengths) // CONTEXT_STEP}{' resumed' if timing.resumed else ''}"
        (partial if None in timing.prompts else full).append((sum(timing.emitted), seconds, shape, row))
    counted, tail = (full, partial) if full else (partial, [])
    steps: dict[str, list[list[int]]] = {}
    for _, _, shape, row in counted:
        steps.setdefault(shape, []).append(row)
    return Piece(
        emitted=sum(emitted for emitted, *_ in counted),
        seconds={phase: sum(seconds[phase] for _, seconds, *_ in counted) for phase in before},
        tail_emitted=sum(emitted for emitted, *_ in tail),
        tail_seconds=sum(s for _, seconds, *_ in tail for phase, s in seconds.items() if phase != PREFILL),
        steps=steps,
    )


def _prefilled(timing: StepTiming, slots: dict[int, tuple[int, int]]) -> int:
    """Prompt tokens of the sequences whose first step this is; ``slots``: their prompts and lengths before it."""
    tokens = 0
    for row, (prompt, emitted, length) in enumerate(zip(timing.prompts, timing.emitted, timing.lengths, strict=True)):
        if prompt is not None:
            tokens += length - emitted if slots.get(row) != (prompt, length - emitted) else 0
            slots[row] = prompt, length
    return tokens


class Cell(CellRunner):
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
        drafter, options = configured("drafters", config.drafter)
        verifier, verifier_options = configured("verifiers", config.verifier)
        constraint = compile_constraint(config.constraint, target, lm.vocab_size) if config.constraint else None
        self.decoder = build_decoder(
            context,
            partial(drafter, options),  # the pair was checked when the recipe was expanded
            verifier(verifier_options),
            eos=target.eos_token_ids,
            max_new_tokens=config.max_new_tokens,
            rng=CounterRng(config.seed),
            compile_verifier=config.compile_verifier,
            prefill_tokens=config.prefill_tokens,
            constraint=constraint,
            mask_drafts=mask_drafts,
            validate=validate,
        )
        self._contention = CpuWait(lm.device)
        self._timings: list[StepTiming] = []
        self._waits: list[float] = []  # CPU time lost in each step
        traits = drafter.traits(options, config.sampling)
        self.depth, self._nodes = traits.depth, traits.nodes

    @property
    def remembers(self) -> bool:
        return self.decoder.drafter.remembers(self.decoder.drafter.config)

    @property
    def pace(self) -> float | None:
        ends = [sum(timing.seconds.values()) for timing in self._timings if timing.seconds]  # that were reached
        if len(ends) <= LEAST_STEPS:
            return None
        seconds = median_low([after - before for before, after in pairwise(ends)])
        return seconds * self.config.max_new_tokens / self.config.batch_size

    @property
    def _passes(self) -> int:
        passes = self.decoder.drafter.passes
        if isinstance(passes, bool) or not isinstance(passes, int):
            raise ContractError(f"drafter '{self.config.drafter.name}' has passes = {passes!r}; it must be an int")
        return passes

    def warm_up(self, length: int) -> None:
        """Warm up the decoder; captures CUDA graphs for all widths up to the widest draft and all sequence lengths."""
        self._on_step()
        self._timings = self.decoder.timings = []
        with recording(CaptureLimits(depth=self.depth, nodes=self._nodes)):
            for _ in self.decoder.warm_up(length, self.config.seed):
                self._on_step()

    @contextmanager
    def _measured(self, result: PieceResult) -> Iterator[None]:
        passes, missed = self._passes, missed_passes()
        memory.start(self.lm.device)
        self._timings = self.decoder.timings = []
        self._waits, before = [], dict(self.decoder.stopwatch.seconds)
        self._contention.start()
        try:
            yield
        finally:
            self.decoder.timings = None
            self._contention.close()
        self.decoder.stopwatch.wait()  # for the seconds of all timings
        result.piece = _piece(self._timings, self._waits, before)
        result.passes, result.peak_memory = self._passes - passes, memory.peak(self.lm.device)
        result.missed_graphs = missed_passes() - missed

    def _decode(
        self, conversations: Sequence[Conversation], prompts: Sequence[list[int]], turn: int
    ) -> Sequence[Response]:
        responses = list[Response]()
        requests = [
            Request(prompt, i, c.prompt.stream(turn), f"prompt {c.prompt.question_id!r}", constraint=c.grammar)
            for i, (c, prompt) in enumerate(zip(conversations, prompts, strict=True))
        ]
        self._on_step()
        with recording(None), closing(self.decoder.steps(requests)) as steps:
            for finished in steps:
                if len(self._timings) > len(self._waits):
                    self._waits.append(self._contention.since())
                self._on_step()
                responses += finished
        return sorted(responses, key=attrgetter("index"))
