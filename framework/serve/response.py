"""How answers are told: the objects of the OpenAI protocol, whole or chunk by chunk."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from ..api.detokenizer import Detokenizer
from ..contracts.steps import Chunk, Response
from .protocol import Asked

#: What stands for log 0, which JSON cannot say; the protocol's own number.
_IMPOSSIBLE = -9999.0


class Telling:
    """The answer to one request, told piece by piece or at once.

    Args:
        asked: the request.
        name: the model's name.
        tokenizer: the model's.
    """

    def __init__(self, asked: Asked, name: str, tokenizer: Any):
        self._asked, self._tokenizer = asked, tokenizer
        kind = "chat.completion" if asked.chat else "text_completion"
        head = {"id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._whole = {**head, "object": kind, "model": name}
        self._part = {**head, "object": f"{kind}.chunk" if asked.chat else kind, "model": name}
        if asked.usage:
            self._part["usage"] = None  # of every chunk but the last one
        self._said = 0
        self._texts = [Detokenizer(tokenizer) for _ in asked.requests]  # where in its text a token begins

    def first(self) -> list[dict[str, Any]]:
        """The chunks before any text: who speaks."""
        if not self._asked.chat:
            return []
        return [self._chunk(i, delta={"role": "assistant", "content": ""}) for i in range(len(self._asked.requests))]

    def part(self, choice: int, piece: Chunk) -> dict[str, Any] | None:
        """The chunk of a piece; None where it says nothing yet, because its text is held back."""
        done = piece.response is not None
        self._said += len(piece.tokens)
        if not (piece.text or done or (self._asked.logprobs and piece.tokens)):
            return None
        logprobs = self._logprobs(choice, piece)
        finish_reason = None if piece.response is None else piece.response.finish_reason
        said = {"delta": {"content": piece.text} if piece.text else {}} if self._asked.chat else {"text": piece.text}
        return self._chunk(choice, finish_reason=finish_reason, logprobs=logprobs, **said)

    def whole(self, pieces: list[Chunk]) -> dict[str, Any]:
        """All answers at once; ``pieces``: the whole of each, in order."""
        choices, responses = [], [piece.response for piece in pieces if piece.response is not None]
        for i, (piece, response) in enumerate(zip(pieces, responses, strict=True)):
            said = {"message": {"role": "assistant", "content": response.text}} if self._asked.chat else {}
            said = said or {"text": response.text}
            logprobs, finish_reason = self._logprobs(i, piece), response.finish_reason
            choices.append({"index": i, **said, "logprobs": logprobs, "finish_reason": finish_reason})
        return {**self._whole, "choices": choices, "usage": self.counted(responses)}

    def usage(self, responses: list[Response]) -> dict[str, Any]:
        """The chunk behind all others, where it was asked for."""
        return {**self._part, "choices": [], "usage": self.counted(responses)}

    def counted(self, responses: list[Response]) -> dict[str, Any]:
        """Tokens, and how many of those that were drafted were accepted."""
        prompt = sum(len(request.prompt) for request in self._asked.requests)
        new = sum(len(response.tokens) for response in responses)
        steps = [one for response in responses for one in response.steps]
        accepted = sum(one.tau for one in steps)
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(one.nodes for one in steps) - accepted,
        }
        return {**_counts(prompt, new), "completion_tokens_details": details}

    def _chunk(self, choice: int, **said: Any) -> dict[str, Any]:
        chunk = {**self._part, "choices": [{"index": choice, "finish_reason": None, "logprobs": None, **said}]}
        if self._asked.counting:
            chunk["usage"] = _counts(sum(len(request.prompt) for request in self._asked.requests), self._said)
        return chunk

    def _logprobs(self, choice: int, piece: Chunk) -> dict[str, Any] | None:
        """At temperature 0 every log P is 0."""
        if not self._asked.logprobs:
            return None
        names = [str(self._tokenizer.decode([token])) for token in piece.tokens]
        numbers = [_IMPOSSIBLE if math.isinf(one) else one for one in piece.logprobs or [0.0] * len(names)]
        if self._asked.chat:
            return {
                "content": [
                    {"token": name, "logprob": number, "bytes": list(name.encode()), "top_logprobs": []}
                    for name, number in zip(names, numbers, strict=True)
                ],
                "refusal": None,
            }
        offsets, text = [], self._texts[choice]
        for token in piece.tokens:
            offsets.append(len(text.text))
            text.add([token])
        return {"tokens": names, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}


def _counts(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
