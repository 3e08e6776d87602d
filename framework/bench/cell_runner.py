"""One cell while it runs: a decoder for its pair, fed with conversations, and what it records.

The cells of a group share one target: they take turns on its slots, each with a drafter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Any

from ..api.build import Configured, TargetContext, build_decoder, configured, load_draft_model, slot_length
from ..contracts.lm import LM
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.steps import Request, Response, StepEvent
from ..engine.decoder import Decoder
from ..errors import ContractError, UsageError
from ..lm.cuda_graphs import CaptureLimits, recording
from ..metrics.cell_metrics import StepRecord
from ..metrics.pieces import PREFILL, Piece
from ..models.chat import encode
from ..models.cpu_contention import Waiting
from ..models.load import load_model
from ..recipe.prompts import Prompt
from ..recipe.recipe import CellConfig
from ..runs.run_directory import PieceResult
from . import memory

#: Steps before the clock runs.
WARM_UP = 4
#: Tokens after which the prompts of the warm-up repeat themselves, so that drafters that copy draft too.
WARM_UP_PERIOD = 8
#: Random streams of the warm-up: far from any prompt's.
WARM_UP_STREAM = 1 << 40
#: A step's shape counts the length of its longest sequence in steps of so many tokens.
CONTEXT_STEP = 256
#: Tokens that a chat template may put around an answer.
TEMPLATE_SLACK = 16


class Models:
    """Loaded models; those of the last target are kept, with the draft models that went with it.

    ``trusted``: names of models that may run Python code of their own.
    """

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        self.trusted = frozenset(trusted)
        self._of: tuple[Any, ...] = ()
        self._loaded: dict[str, LoadedModel] = {}

    def target(self, config: CellConfig) -> LoadedModel:
        """The target of a cell."""
        options = {
            "dtype": config.dtype,
            "device": config.device,
            "trust_remote_code": config.target in self.trusted,
        }
        key = (config.target, config.attn_implementation, *options.values())
        if key != self._of:
            self._loaded.clear()
            self._of = ()
            loaded = load_model(config.target, attn_implementation=config.attn_implementation, **options)
            self._loaded[config.target] = loaded
            self._of = key
        return self._loaded[config.target]

    def drafter(self, name: str, target: LoadedModel) -> LoadedModel:
        """A draft model for the target that was loaded last."""
        if name not in self._loaded:
            self._loaded[name] = load_draft_model(name, target, trust_remote_code=name in self.trusted)
        return self._loaded[name]

    def of(self, config: CellConfig) -> list[LoadedModel]:
        """Those of a cell's models that are loaded, the target first."""
        used = (config.target, config.drafter.config.get("model"))
        return [model for name, model in self._loaded.items() if name in used]


@dataclass(frozen=True)
class Conversation:
    """A prompt, and the most tokens that each of its turns may have when it is asked."""

    prompt: Prompt
    room: tuple[int, ...]

    def encode(self, tokenizer: Any, answers: Sequence[str]) -> list[int]:
        """Turn ``len(answers)`` after the turns before it and their answers.

        An answer that takes more tokens as text than when it was generated (bytes that are no text) is cut.
        """
        turn = len(answers)
        answers = list(answers)
        while True:
            tokens = encode(tokenizer, self.prompt.turns[: turn + 1], answers)
            if len(tokens) <= self.room[turn] or not any(answers):
                return tokens
            longest = max(range(turn), key=lambda i: len(answers[i]))
            answers[longest] = answers[longest][: len(answers[longest]) * 3 // 4]


def prepare(prompts: Sequence[Prompt], target: LoadedModel, max_new_tokens: int) -> list[Conversation]:
    """Measure every turn. Raises UsageError, naming the prompt, for one that cannot be asked."""
    conversations = []
    for prompt in prompts:
        room = []
        for turn in range(len(prompt.turns)):
            tokens = encode(target.tokenizer, prompt.turns[: turn + 1], [""] * turn)
            most = len(tokens) + turn * (max_new_tokens + TEMPLATE_SLACK)
            what = f"prompt {prompt.question_id!r}" + (f", turn {turn + 1}" if len(prompt.turns) > 1 else "")
            if not tokens:
                raise UsageError(f"{what} has no tokens; a prompt needs at least one")
            if target.context_length is not None and most >= target.context_length:
                length = f"{most} tokens" if turn == 0 else f"up to {most} tokens with the answers before it"
                raise UsageError(
                    f"{what} has {length}, but {target.name} has a context of {target.context_length}; "
                    "shorten or leave out the prompt, or take a target with a longer context"
                )
            room.append(most)
        conversations.append(Conversation(prompt, tuple(room)))
    return conversations


def lengths(
    conversations: Sequence[Conversation], configs: Sequence[CellConfig], context_length: int | None
) -> tuple[int, int]:
    """In tokens: the longest sequence of prompt and output; the length of a slot, with room for a draft."""
    sequence = max(max(c.room) for c in conversations) + configs[0].max_new_tokens
    if context_length is not None:
        sequence = min(sequence, context_length)
    return sequence, slot_length(sequence, [drafter_of(config) for config in configs], configs[0].sampling)


def drafter_of(config: CellConfig) -> Configured:
    return configured("drafters", {"name": config.drafter.name, **config.drafter.config})


def positions(config: CellConfig) -> int:
    """Most positions that the target evaluates for a row in a step: the root and the widest draft."""
    return slot_length(0, [drafter_of(config)], config.sampling)


class _Steps:
    """The steps that the whole batch made since `start`: what they took, and how many slots were in use."""

    def __init__(self, decoder: Decoder, limit: Callable[[], Any]):
        self._decoder, self._limit, self._waiting = decoder, limit, Waiting(decoder.target.device)
        self._clear()

    def start(self) -> None:
        """Begin a piece; `stop` ends it, whatever happened."""
        self._clear()
        self._waiting.start()

    def stop(self) -> None:
        self._waiting.close()

    def _clear(self) -> None:
        self.full: list[_Step] = []
        self.others: list[_Step] = []
        self._before = dict(self._decoder.stopwatch.seconds)
        self._held: dict[int, tuple[int, int]] = {}

    def add(self, event: StepEvent) -> None:
        """A step is over (``Decoder.on_step``); what was prefilled since the last one is booked with it."""
        now = dict(self._decoder.stopwatch.seconds)
        seconds = {phase: now[phase] - self._before[phase] for phase in now}
        self._before = now
        longest = max(map(len, self._decoder.sequences.history))
        resumed = " resumed" if event.draft.resume_from is not None else ""
        shape, emitted = f"{event.draft.width} {longest // CONTEXT_STEP}{resumed}", sum(map(len, event.emitted))
        found = _Step(shape, emitted, seconds, self._waiting.since(), self._prefilled(event))
        (self.others if None in event.prompts else self.full).append(found)
        self._limit()

    def _prefilled(self, event: StepEvent) -> int:
        """Tokens of the prompts that this step is the first one of."""
        tokens = 0
        for row, (prompt, new) in enumerate(zip(event.prompts, event.emitted, strict=True)):
            length = len(self._decoder.sequences.history[row])
            if prompt is not None:
                tokens += length - len(new) if self._held.get(row) != (prompt, length - len(new)) else 0
                self._held[row] = prompt, length
        return tokens

    def piece(self, category: str) -> Piece:
        """What they come to. Where no slot was ever waited for, no step is of the tail."""
        counted, tail = (self.full, self.others) if self.full else (self.others, [])
        steps: dict[str, list[list[int]]] = {}
        for one in counted:
            steps.setdefault(one.shape, []).append(one.row)
        return Piece(
            emitted=sum(one.emitted for one in counted),
            seconds={phase: sum(one.seconds[phase] for one in counted) for phase in self._before},
            tail_emitted=sum(one.emitted for one in tail),
            tail_seconds=sum(s for one in tail for phase, s in one.seconds.items() if phase != PREFILL),
            category=category,
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
        """The step as `Piece.steps` keeps it. The target's prefill before it has its share of what was waited."""
        every = sum(self.seconds.values())
        waited = self.waited * (1 - self.seconds[PREFILL] / every) if every else 0.0
        times = [self.seconds[phase] for phase in ("draft", "target", "verify", "rest")] + [waited]
        row = [round(1e6 * s) for s in times]
        return [*row, self.prefilled, round(1e6 * self.seconds["draft_prefill"])] if self.prefilled else row


class Cell:
    """A drafter and a verifier on a target's slots.

    Args:
        config: what to run.
        target: the loaded target; ``lm`` are its slots, shared with the group's other cells.
        models: where draft models come from.
        sequence, slot: see `lengths`.
        on_step: called after every step, and before the first one: a time limit, say.
        validate: how often drafts and verdicts are checked in full, see `Decoder`.
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
    ):
        self.config, self.target, self.lm, self._on_step = config, target, lm, on_step
        #: Digests and source of every model it uses, by name.
        self.models: dict[str, dict[str, Any]] = {target.name: {"sha256": target.sha256, "source": target.source}}

        context = TargetContext.of(
            target, lm, config.sampling, slot=slot, sequence=sequence, load=models.drafter, used=self.models
        )
        drafter, options = drafter_of(config)
        self.decoder = build_decoder(
            context,
            (drafter, options),
            configured("verifiers", {"name": config.verifier.name, **config.verifier.config}),
            eos=target.eos_token_ids,
            max_new_tokens=config.max_new_tokens,
            rng=CounterRng(config.seed),
            compile_verifier=config.compile_verifier,
            prefill_tokens=config.prefill_tokens,
            validate=validate,
            on_step=lambda event: self._steps.add(event),
        )
        self._steps = _Steps(self.decoder, on_step)
        #: Depth of the deepest draft that it can make.
        self.depth: int = drafter.traits(options, config.sampling).depth

    @property
    def remembers(self) -> bool:
        """Does what the drafter drafts depend on sequences before? One that does defines `Drafter.reset`."""
        return self.decoder.drafter.remembers(self.decoder.drafter.config)

    @property
    def _passes(self) -> int:
        passes = self.decoder.drafter.passes
        if isinstance(passes, bool) or not isinstance(passes, int):
            raise ContractError(f"drafter '{self.config.drafter.name}' made {passes!r} passes, which is no number")
        return passes

    def warm_up(self, length: int) -> None:
        """Run every slot for a few steps and forget them: what is made once is made outside the timing.

        That includes CUDA graphs: of all widths up to that of the widest draft, and for sequences of all lengths.
        Prompts are ``length`` random tokens on random streams of their own: a drafter that remembers sees nothing of
        what is measured, and is told to forget it anyway.
        """
        decoder, random = self.decoder, Random(self.config.seed)
        compiled = decoder.compiled_verifier
        ends, decoder.eos = decoder.eos, frozenset()
        if compiled is None:  # the first draft is a whole one; what is to be compiled comes up in whole sequences only
            decoder.max_new_tokens = min(WARM_UP + self.depth, self.config.max_new_tokens)
        prompts = []
        for _ in range(self.config.batch_size):
            phrase = [random.randrange(self.lm.vocab_size) for _ in range(min(WARM_UP_PERIOD, length))]
            prompts.append([phrase[i % len(phrase)] for i in range(length)])
        whole = [Request(prompt, i, WARM_UP_STREAM + i, "the warm-up") for i, prompt in enumerate(prompts)]
        # The target alone, as where the last token is all that is wanted.
        last = [one._replace(prompt=one.prompt[:1], most=1) for one in whole]
        self._on_step()
        with recording(CaptureLimits(depth=self.depth, nodes=positions(self.config) - 1)):
            for requests in (whole, last):
                with closing(decoder.steps(requests)) as steps:
                    for made, _ in enumerate(steps, 1):
                        if compiled is None and made == WARM_UP:
                            break
        decoder.eos, decoder.max_new_tokens = ends, self.config.max_new_tokens
        if compiled is not None:
            compiled.compiling = False
        decoder.drafter.reset()
        decoder.batch_steps = decoder.target_rows = 0

    def run(self, conversations: Sequence[Conversation]) -> PieceResult:
        """Measure one piece: all first turns, then all second turns with the answers that this cell gave."""
        found, passes = PieceResult(), self._passes
        answers: dict[int, list[str]] = {c.prompt.index: [] for c in conversations}
        memory.start(self.lm.device)
        self._steps.start()
        try:
            for turn in range(max(len(c.prompt.turns) for c in conversations)):
                asked = [c for c in conversations if turn < len(c.prompt.turns)]
                with recording(None):
                    decoded = self._decode(asked, turn, answers)
                for conversation, response, length in decoded:
                    text = str(self.target.tokenizer.decode(response.tokens, skip_special_tokens=True))
                    answers[conversation.prompt.index].append(text)
                    self._record(found, conversation.prompt, turn, response, text, length)
        finally:
            self._steps.stop()
        categories = {c.prompt.category for c in conversations}
        found.piece = self._steps.piece(categories.pop() if len(categories) == 1 else "")
        found.passes, found.peak_memory = self._passes - passes, memory.peak(self.lm.device)
        return found

    def _decode(
        self, asked: Sequence[Conversation], turn: int, answers: Mapping[int, list[str]]
    ) -> list[tuple[Conversation, Response, int]]:
        """Responses to one turn of each conversation, in order, with their prompts' lengths in tokens."""
        tokenizer = self.target.tokenizer
        prompts = [c.encode(tokenizer, answers.get(c.prompt.index, [])) for c in asked]
        streams = [c.prompt.stream(turn) for c in asked]
        # The loop would count the prompts it was given; people know them by question_id.
        names = [f"prompt {c.prompt.question_id!r}" for c in asked]
        self._on_step()
        responses = sorted(self.decoder.run(prompts, streams, names), key=lambda response: response.index)
        return [(asked[r.index], r, len(prompts[r.index])) for r in responses]

    def _record(
        self, found: PieceResult, prompt: Prompt, turn: int, response: Response, text: str, length: int
    ) -> None:
        name = str(prompt.question_id)
        for i, r in enumerate(response.steps):
            counts = (r.tau, r.emitted, r.nodes, r.width, r.limit, r.survival)
            found.records.append(StepRecord(prompt.index, name, prompt.category, turn, i, *counts))
        said: dict[str, Any] = {
            "question_id": prompt.question_id,
            "turn": turn,
            "category": prompt.category,
            "prompt_tokens": length,
            "text": text,
            "tokens": response.tokens,
            "finish_reason": response.finish_reason,
        }
        if response.logprobs is not None:  # JSON knows no infinity: null is a token that the target never says
            said["logprobs"] = [round(value, 6) if isfinite(value) else None for value in response.logprobs]
        found.responses.append(said)
