"""Requests of an engine's batch in the slots of a drafter.

An engine adds, moves, preempts and removes the rows of its batch between steps; a request keeps its slot while the
engine keeps the request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from crossdraft import DenseScores, DraftContext, Drafter, Sequences, UniformStepRng, Verdict
from crossdraft.framework.contracts.rng import PURPOSES


@dataclass(frozen=True)
class Row:
    """A row of the engine's batch after a step.

    Attributes:
        request: id of its request.
        tokens: its tokens; the first ``length`` are committed, those of this step included.
        length: number of committed tokens.
        prompt_len: number of prompt tokens.
        sampled: the tokens of this step; empty while the prompt is prefilled; None = those after the drafter's text.
        limit: maximum length of the next draft; negative if the response has its maximum length.
        stop: token ids that end the response.
    """

    request: str
    tokens: Sequence[int]
    length: int
    prompt_len: int
    sampled: Sequence[int] | None
    limit: int
    stop: Collection[int] = ()


@dataclass
class _Request:
    """A request and its slot.

    Attributes:
        seen: number of its committed tokens.
        stopped: True if it emitted a stop token; later tokens of that step are not in the slot's history.
        limit: maximum draft length after its last step; negative if its maximum length was reached.
    """

    slot: int
    seen: int = 0
    stopped: bool = False
    limit: int = 0

    @property
    def finish_reason(self) -> str:
        return "stop" if self.stopped else "length" if self.limit < 0 else "abort"


class DrafterSlots:
    """A drafter of point-mass chains that follows the batch of an engine.

    Args:
        drafter: class and config.
        context: its ``batch_size`` is the maximum number of rows.
    """

    def __init__(self, drafter: tuple[type[Drafter], Any], context: DraftContext):
        cls, config = drafter
        with torch.inference_mode():
            self.drafter = cls(config, context)
            size = context.batch_size
            tokens = torch.zeros(size, context.max_length, dtype=torch.long, device=context.device)
        self._sequences = Sequences([[] for _ in range(size)], tokens, [0] * size, list(range(size)))
        self._requests: dict[str, _Request] = {}
        self._free = list(range(size))[::-1]
        with torch.inference_mode():
            self._drafted()  # of free slots: a drafter observes only what it proposed

    @torch.inference_mode()
    def propose(self, batch: Sequence[Row], live: Collection[str]) -> list[list[int]]:
        """Return the drafts of ``batch``, one list of tokens per row.

        Args:
            live: ids of all requests that the engine keeps, also of those without a row in this step.
        """
        self._release(batch, live)
        size = self._sequences.batch_size
        accepted, continued, limits = [0] * size, [False] * size, [0] * size
        slots: list[int | None] = []
        for row in batch:
            seen = self._requests[row.request].seen if row.request in self._requests else row.prompt_len
            sampled = row.tokens[seen : row.length] if row.sampled is None else row.sampled
            if not len(sampled):  # its prompt is not complete
                slots.append(None)
                continue
            request, is_new = self._commit(row, sampled)
            slots.append(request.slot)
            if not is_new:
                accepted[request.slot], continued[request.slot] = len(sampled) - 1, True
            if not request.stopped:
                limits[request.slot] = max(request.limit, 0)
        self._observe(accepted, continued)
        self._sequences.limit = limits
        rows = self._drafted()
        return [[] if slot is None else rows[slot] for slot in slots]

    def _release(self, batch: Sequence[Row], live: Collection[str]) -> None:
        """Free the slots of finished requests; if too few are free, also those of requests without a row."""
        for name in [name for name in self._requests if name not in live]:
            self._drop(name, self._requests[name].finish_reason)
        present = {row.request for row in batch}
        missing = len(present - self._requests.keys()) - len(self._free)
        absent = [name for name in self._requests if name not in present]
        for name in absent[: max(missing, 0)]:
            self._drop(name, None)

    def _drop(self, name: str, finish_reason: str | None) -> None:
        slot = self._requests.pop(name).slot
        self.drafter.free(slot, finish_reason)
        self._sequences.history[slot] = []
        self._free.append(slot)

    def _commit(self, row: Row, sampled: Sequence[int]) -> tuple[_Request, bool]:
        """Append the tokens of this step to the row's slot; the flag is True for a request that is started first."""
        request = self._requests.get(row.request)
        if request is not None and request.seen + len(sampled) != row.length:  # the engine changed the text
            self._drop(row.request, None)
            request = None
        is_new = request is None
        if request is None:
            request = self._requests[row.request] = _Request(self._free.pop())
            prompt = [int(token) for token in row.tokens[: row.prompt_len]]
            self._sequences.history[request.slot] = []
            self._sequences.append(request.slot, prompt)
            self.drafter.start(request.slot, prompt)
            new = [int(token) for token in row.tokens[row.prompt_len : row.length]]
        else:
            new = list(sampled)
        end = next((i for i, token in enumerate(new) if token in row.stop), None)
        request.stopped = end is not None
        self._sequences.append(request.slot, new if end is None else new[: end + 1])
        request.seen, request.limit = row.length, row.limit
        return request, is_new

    def _observe(self, accepted: list[int], continued: list[bool]) -> None:
        """Pass the outcome of the last drafts to the drafter."""
        device = self._sequences.device
        draft = replace(self._draft, valid=self._draft.valid & torch.tensor(continued, device=device)[:, None])
        accepted = [min(tau, n) for tau, n in zip(accepted, draft.count.tolist(), strict=True)]
        last = [history[-1] if history else 0 for history in self._sequences.history]
        verdict = Verdict(torch.tensor(accepted, device=device), torch.tensor(last, device=device))
        nothing = torch.zeros(draft.batch_size, draft.width + 1, 1, device=device)
        self.drafter.observe(self._sequences, draft, verdict, accepted, DenseScores(nothing, nothing))

    def _drafted(self) -> list[list[int]]:
        """The drafts of the slots."""
        shape = (2 * len(PURPOSES), self._sequences.batch_size, 1)
        rng = UniformStepRng(torch.zeros(shape, dtype=torch.float64, device=self._sequences.device))
        draft = self.drafter.propose(self._sequences, rng)
        self._draft = draft
        drafts = torch.where(draft.valid, draft.tokens, -1).tolist()
        return [[token for token in row if token >= 0] for row in drafts]
