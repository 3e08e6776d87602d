"""One cell while it runs: a decoder for its pair, fed with conversations, and what it records.

The cells of a group share one target: they take turns on its slots, each with a drafter of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contracts.errors import UsageError
from ..contracts.lm import LM
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.rounds import Response
from ..decoding.build import (
    Configured,
    TargetContext,
    build_decoder,
    configured,
    load_drafting_model,
    slot_length,
)
from ..decoding.fused import Fused
from ..models.chat import encode
from ..models.load import load_model
from ..runs.metrics import Chunk, RoundRecord
from ..runs.prompts import Prompt
from ..runs.recipe import CellConfig
from . import memory

logger = logging.getLogger(__name__)

#: Tokens generated per sequence before the clock runs.
WARM_UP = 4
#: Tokens that a chat template may put around an answer.
TEMPLATE_SLACK = 16


class Models:
    """Loaded models; those of the last target are kept, with the drafting models that went with it."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._loaded: dict[str, LoadedModel] = {}

    def target(self, config: CellConfig) -> LoadedModel:
        """The target of a cell."""
        options = {
            "dtype": config.dtype,
            "device": config.device,
            "trust_remote_code": config.trust_remote_code,
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
        """A drafting model for the target that was loaded last."""
        if name not in self._loaded:
            self._loaded[name] = load_drafting_model(name, target)
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
    """Most positions that the target evaluates for a row in a round: the root and the widest draft."""
    return slot_length(0, [drafter_of(config)], config.sampling)


@dataclass
class _Tail:
    """Of a chunk: tokens, and decoding time by phase, while slots stayed empty because prompts had run out."""

    emitted: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Cell:
    """A drafter and a verifier on a target's slots.

    Args:
        config: what to run.
        target: the loaded target; ``lm`` are its slots, shared with the group's other cells.
        models: where drafting models come from.
        sequence, slot: see `lengths`.
    """

    def __init__(
        self,
        config: CellConfig,
        target: LoadedModel,
        lm: LM,
        models: Models,
        sequence: int,
        slot: int,
    ):
        self.config, self.target, self.lm = config, target, lm
        self.records: list[RoundRecord] = []
        self.responses: list[dict[str, Any]] = []
        self.chunks: list[Chunk] = []
        #: SHA-256 and source of every model it uses, by name.
        self.models: dict[str, dict[str, Any]] = {target.name: {"sha256": target.sha256, "source": target.source}}

        context = TargetContext.of(
            target, lm, config.sampling, slot=slot, sequence=sequence, load=models.drafter, used=self.models
        )
        self.decoder = build_decoder(
            context,
            drafter_of(config),
            configured("verifiers", {"name": config.verifier.name, **config.verifier.config}),
            eos=target.eos_token_ids,
            max_new_tokens=config.max_new_tokens,
            rng=CounterRng(config.seed),
            compile_verifier=config.compile_verifier,
        )
        self._passes = 0
        self._tail = _Tail()
        #: Bytes, see `memory.peak`.
        self.peak_memory: int | None = None

    @property
    def passes(self) -> int:
        """Forward passes of the drafting model since the warm-up."""
        return self.decoder.drafter.passes - self._passes

    def warm_up(self, conversations: Sequence[Conversation]) -> None:
        """Run every slot for a few tokens and forget them: what is made once is made outside the timing."""
        decoder = self.decoder
        fused = decoder.verifier if isinstance(decoder.verifier, Fused) else None
        if fused is None:  # what is to be compiled comes up in whole sequences only
            decoder.max_new_tokens = min(WARM_UP, self.config.max_new_tokens)
        self._decode(conversations[: self.config.batch_size], 0, {})
        decoder.max_new_tokens = self.config.max_new_tokens
        if fused is not None:
            fused.compiling = False
        decoder.drafter.reset()
        decoder.stopwatch.seconds = dict.fromkeys(decoder.stopwatch.seconds, 0.0)
        decoder.batch_rounds = decoder.target_rows = 0
        self._passes = decoder.drafter.passes

    def run(self, conversations: Sequence[Conversation]) -> None:
        """Measure one chunk: all first turns, then all second turns with the answers that this cell gave."""
        before, self._tail = dict(self.decoder.stopwatch.seconds), _Tail()
        answers: dict[int, list[str]] = {c.prompt.index: [] for c in conversations}
        emitted = 0
        memory.start(self.lm.device)
        for turn in range(max(len(c.prompt.turns) for c in conversations)):
            asked = [c for c in conversations if turn < len(c.prompt.turns)]
            for conversation, response, length in self._decode(asked, turn, answers):
                text = str(self.target.tokenizer.decode(response.tokens, skip_special_tokens=True))
                answers[conversation.prompt.index].append(text)
                self._record(conversation.prompt, turn, response, text, length)
                emitted += len(response.tokens)
        self.peak_memory = max(filter(None, (self.peak_memory, memory.peak(self.lm.device))), default=None)
        tail = self._tail if self._tail.emitted < emitted else _Tail()  # else no slot was ever waited for
        after = self.decoder.stopwatch.seconds
        seconds = {phase: after[phase] - before[phase] - tail.seconds.get(phase, 0.0) for phase in after}
        categories = {c.prompt.category for c in conversations}
        category = categories.pop() if len(categories) == 1 else ""
        self.chunks.append(Chunk(emitted - tail.emitted, seconds, tail.emitted, sum(tail.seconds.values()), category))

    def _decode(
        self, asked: Sequence[Conversation], turn: int, answers: Mapping[int, list[str]]
    ) -> list[tuple[Conversation, Response, int]]:
        """Responses to one turn of each conversation, in order, with their prompts' lengths in tokens.

        Adds to the tail what was decoded once fewer sequences were left than there are slots.
        """
        tokenizer = self.target.tokenizer
        prompts = [c.encode(tokenizer, answers.get(c.prompt.index, [])) for c in asked]
        streams = [c.prompt.stream(turn) for c in asked]
        # The loop would count the prompts it was given; people know them by question_id.
        names = [f"prompt {c.prompt.question_id!r}" for c in asked]
        decoder, responses = self.decoder, []
        full = len(asked) >= self.config.batch_size
        rounds, before = decoder.batch_rounds, dict(decoder.stopwatch.seconds)  # when slots began to stay empty
        for response in decoder.run(prompts, streams, names):
            responses.append(response)
            if full:
                full = len(asked) - len(responses) >= self.config.batch_size
                rounds, before = decoder.batch_rounds, dict(decoder.stopwatch.seconds)
            else:  # its last rounds are those that the batch has made since
                late = decoder.batch_rounds - rounds
                self._tail.emitted += sum(r.emitted for r in response.rounds[len(response.rounds) - late :])
        for phase, seconds in decoder.stopwatch.seconds.items():
            if phase != "prefill":
                self._tail.seconds[phase] = self._tail.seconds.get(phase, 0.0) + seconds - before[phase]
        responses.sort(key=lambda response: response.index)
        return [(asked[r.index], r, len(prompts[r.index])) for r in responses]

    def _record(self, prompt: Prompt, turn: int, response: Response, text: str, length: int) -> None:
        name = str(prompt.question_id)
        for i, r in enumerate(response.rounds):
            counts = (r.tau, r.emitted, r.nodes, r.width, r.survival)
            self.records.append(RoundRecord(prompt.index, name, prompt.category, turn, i, *counts))
        self.responses.append(
            {
                "question_id": prompt.question_id,
                "turn": turn,
                "category": prompt.category,
                "prompt_tokens": length,
                "text": text,
                "tokens": response.tokens,
                "finish": response.finish,
            }
        )
