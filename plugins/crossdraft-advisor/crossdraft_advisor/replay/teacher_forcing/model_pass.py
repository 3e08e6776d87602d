"""Chunked passes of a model over recorded responses, as in prefill."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from crossdraft.framework.contracts.lm import LM
from crossdraft.framework.util.tensors import on_device

from ..response import Response


def prefill_chunks(lm: LM, texts: Sequence[Response], width: int) -> Generator[Tensor]:
    """Yield logits ``[B, w, V]`` of at most B responses in chunks of ``width`` tokens; the last may be narrower.

    Row b of chunk i predicts tokens i * width, i * width + 1, .. of response b; values past its end, and in rows
    without a response, are undefined. Use it under `torch.inference_mode`.
    """
    rows = lm.batch_size
    longest = max((len(text.tokens) for text in texts), default=0)
    lm.hidden_layers = ()
    active = [row for row, text in enumerate(texts) if len(text.tokens)]
    for row in active:
        lm.start(row, list(texts[row].prompt))
    # Inputs are shifted by one token: the prompt's last comes first.
    inputs = [[int(text.prompt[-1]), *map(int, text.tokens[:-1])][: len(text.tokens)] for text in texts]
    padded = [tokens + [0] * (longest - len(tokens)) for tokens in inputs] + [[0] * longest] * (rows - len(inputs))
    tokens = on_device(padded, lm.device)
    try:
        for start in range(0, longest, width):
            logits, _ = lm.forward(tokens[:, start : start + width])
            lm.commit(
                [
                    *(min(max(len(row_inputs) - start, 0), logits.shape[1]) for row_inputs in inputs),
                    *[0] * (rows - len(inputs)),
                ]
            )
            yield logits
            for row in [row for row in active if len(inputs[row]) <= start + width]:
                active.remove(row)
                lm.free(row)
    finally:
        if active:
            lm.commit([0] * rows)
            for row in active:
                lm.free(row)
