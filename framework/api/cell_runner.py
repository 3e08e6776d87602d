"""Measurement of the cells of a run: the base of what decodes their prompts, and the prompts themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from ..contracts.constraint import Grammar
from ..contracts.steps import Response
from ..metrics.cell_metrics import StepRecord
from ..models.chat import encode
from ..recipe.prompts import Prompt
from ..recipe.recipe import CellConfig
from ..runs.run_directory import PieceResult


@dataclass(frozen=True)
class Conversation:
    """A prompt, ready to be decoded.

    Attributes:
        prompt_lens: maximum length in tokens of each of its turns, earlier turns and responses included.
        grammar: its compiled constraint.
    """

    prompt: Prompt
    prompt_lens: tuple[int, ...]
    grammar: Grammar | None = None

    def encode(self, tokenizer: Any, answers: Sequence[str]) -> list[int]:
        """Encode turn ``len(answers)`` after the earlier turns and their responses.

        A response may have more tokens when encoded again (bytes that are not text); it is truncated then.
        """
        turn = len(answers)
        answers = list(answers)
        while True:
            tokens = encode(tokenizer, self.prompt.turns[: turn + 1], answers)
            if len(tokens) <= self.prompt_lens[turn] or not any(answers):
                return tokens
            longest = max(range(turn), key=lambda i: len(answers[i]))
            answers[longest] = answers[longest][: len(answers[longest]) * 3 // 4]


class CellRunner(ABC):
    """Base of what measures the pieces of a cell: the decoding loop of this process, or another program.

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

    @property
    def pace(self) -> float | None:
        """Seconds per turn, from the steps of the current piece or warm-up; None if unknown."""
        return None

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
