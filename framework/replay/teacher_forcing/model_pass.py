"""One pass of a model over recorded responses, as in prefill: what a law that follows from the text alone needs."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from ...contracts.draft import on_device
from ...contracts.lm import LM
from ..response import Response


def pieces(lm: LM, texts: Sequence[Response], width: int) -> Generator[Tensor]:
    """Logits ``[B, w, V]`` of the next ``width`` tokens of at most B responses, again and again; the last may be fewer.

    Row b of piece i is what ``lm`` says of tokens i * width, i * width + 1, .. of response b; behind its end, and in
    rows without a response, it means nothing. To be used under `torch.inference_mode`.
    """
    rows = lm.batch_size
    longest = max((len(text.tokens) for text in texts), default=0)
    lm.hidden_layers = ()
    busy = [row for row, text in enumerate(texts) if len(text.tokens)]
    for row in busy:
        lm.start(row, list(texts[row].prompt))
    # What is fed is one token behind what is said: the prompt's last comes first.
    fed = [[int(text.prompt[-1]), *map(int, text.tokens[:-1])][: len(text.tokens)] for text in texts]
    padded = [tokens + [0] * (longest - len(tokens)) for tokens in fed] + [[0] * longest] * (rows - len(fed))
    tokens = on_device(padded, lm.device)
    try:
        for start in range(0, longest, width):
            logits, _ = lm.forward(tokens[:, start : start + width])
            lm.commit([*(min(max(len(one) - start, 0), logits.shape[1]) for one in fed), *[0] * (rows - len(fed))])
            yield logits
            for row in [row for row in busy if len(fed[row]) <= start + width]:
                busy.remove(row)
                lm.free(row)
    finally:
        if busy:
            lm.commit([0] * rows)
            for row in busy:
                lm.free(row)
