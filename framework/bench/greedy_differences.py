"""Greedy responses that differ from plain decoding: by a tie within rounding, or by a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..api.cell_runner import Conversation
from ..contracts.lm import LM
from ..contracts.models import LoadedModel
from ..models.device import tie_of
from ..runs.records import CellResult
from ..runs.run_directory import PieceResult

#: Key of a line of ``responses.jsonl``: the first token that differs from plain decoding, see `decide`.
KEY = "difference"


def decide(
    piece: Sequence[Conversation], cells: Sequence[PieceResult], baseline: PieceResult, target: LoadedModel, lm: LM
) -> None:
    """Add the first difference of each conversation to the responses of ``cells`` that differ from the baseline's.

    It holds ``token``, its index in the response; ``gap``, the difference of the target's logits of the two tokens
    there, None if one of the texts ends; ``tie``, the largest gap that rounding explains; and ``fault``, True if the
    gap is larger. Later turns of such a conversation have other prompts and get none.

    Args:
        piece: the conversations that were decoded, in order.
        lm: slots of the target, all free; they are free again afterwards.
    """
    prompts = {conversation.prompt.question_id: conversation for conversation in piece}
    expected = {(r["question_id"], r["turn"]): r for r in baseline.responses}
    gaps: dict[tuple[int, ...], torch.Tensor] = {}
    _, tie = tie_of(target)
    for cell in cells:
        different = set[Any]()
        for response in sorted(cell.responses, key=lambda r: r["turn"]):
            name, plain = response["question_id"], expected[response["question_id"], response["turn"]]
            tokens, others = response["tokens"], plain["tokens"]
            if name in different or tokens == others:
                continue
            different.add(name)
            shared = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
            gap = None
            if shared is not None:
                answers = [expected[name, turn]["text"] for turn in range(response["turn"])]
                prefix = (*prompts[name].encode(target.tokenizer, answers), *tokens[:shared])
                if prefix not in gaps:
                    gaps[prefix] = _logits(lm, prefix)
                gap = abs(float(gaps[prefix][tokens[shared]] - gaps[prefix][others[shared]]))
            token = min(len(tokens), len(others)) if shared is None else shared
            response[KEY] = {"token": token, "gap": gap, "tie": tie, "fault": gap is None or not gap <= tie}


@torch.inference_mode()
def _logits(lm: LM, prefix: Sequence[int]) -> torch.Tensor:
    """Logits ``[V]`` of the token after ``prefix``, on the host."""
    lm.start(0, list(prefix))
    tokens = torch.zeros((lm.batch_size, 1), dtype=torch.int64, device=lm.device)
    tokens[0, 0] = prefix[-1]
    try:
        logits, _ = lm.forward(tokens)
        return logits[0, 0].float().cpu()
    finally:
        lm.commit([0] * lm.batch_size)
        lm.free(0)


def agreement(result: CellResult, expected: Mapping[tuple[Any, int], Sequence[int]]) -> None:
    """Set the agreement of a cell at temperature 0 with plain decoding, from its responses.

    Args:
        expected: tokens of plain decoding by question id and turn.
    """
    metrics = result.metrics
    assert metrics is not None
    differ = [r for r in result.responses if r["tokens"] != expected[r["question_id"], r["turn"]]]
    faults = {r["question_id"]: r[KEY]["fault"] for r in differ if KEY in r}
    decided = [faults[r["question_id"]] for r in differ if r["question_id"] in faults]
    metrics.same_as_baseline = 1 - len(differ) / len(result.responses)
    metrics.ties, metrics.faults = decided.count(False), decided.count(True)
    gaps = [r[KEY]["gap"] for r in differ if KEY in r and r[KEY]["gap"] is not None]
    metrics.largest_gap = max(gaps, default=None)
