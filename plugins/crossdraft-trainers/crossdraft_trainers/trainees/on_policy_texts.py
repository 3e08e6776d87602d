"""Answers sampled from the current student, for on-policy distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def own_answers(
    student: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int], eos: Sequence[int]
) -> list[list[int]]:
    """Sample an answer to each prompt from the student at temperature 1, without truncation.

    Uses PyTorch's random numbers; puts the student into eval mode for the call.

    Args:
        student: a causal LM of transformers.
        prompts: token ids, not empty.
        limits: maximum length of each answer, at least 1, including the end-of-sequence token.
        eos: ids that end an answer.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = [[*[0] * (width - len(prompt)), *prompt] for prompt in prompts]
    mask = [[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts]
    # Explicit values for all options that change the distribution: the defaults come from the model's own config.
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max(limits),
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        bos_token_id=None,
    )
    training = student.training
    student.eval()
    try:
        tensors = [torch.tensor(rows, dtype=torch.long, device=student.device) for rows in (ids, mask)]
        output: Tensor = student.generate(tensors[0], attention_mask=tensors[1], generation_config=config)
    finally:
        student.train(training)
    return [
        _until_end(answer[:longest], eos) for answer, longest in zip(output[:, width:].tolist(), limits, strict=True)
    ]


def _until_end(answer: list[int], eos: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(answer) if token in eos]
    return answer[: ends[0] + 1] if ends else answer
