"""What running sequences say, step by step: for `generate`, `stream` and the server alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..contracts.steps import Chunk, Request, Response, StepEvent
from ..engine.decoder import Decoder
from ..models.threads import thread_count
from .detokenizer import Text, decoded


class Output:
    """The answer to one request, as far as it has come.

    Args:
        tokenizer: the target's; None: there will be no text.
        stop: strings that end the answer, which needs a tokenizer.
        live: whether pieces of it are wanted, or the whole alone.

    Attributes:
        tokens: up to the one that completed a stop string.
        text: None where nobody needs it before the end.
        given_up: set it, from any thread, and the sequence ends with the step that is under way.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, live: bool = True):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = Text(tokenizer, stop) if tokenizer is not None and (live or stop) else None
        self.given_up = False
        self._tokenizer, self._given = tokenizer, 0

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> str | None:
        """What a step emitted; how the sequence is to end with it, or None."""
        taken = self.text.add(tokens) if self.text is not None else len(tokens)
        self.tokens += tokens[:taken]
        self.logprobs += logprobs[:taken]
        if self.text is not None and self.text.stopped:
            return "stop"
        return "abort" if self.given_up else None

    def piece(self, index: int) -> Chunk:
        """What is new since the last piece."""
        return self._piece(index, None if self.text is None else self.text.piece())

    def last(self, response: Response) -> Chunk:
        """The last piece, with the response cut where a stop string was completed, and its text."""
        rest = None
        if self.text is not None:
            rest = self.text.flush()
            response.text = self.text.text
            if self.text.stopped and response.finish_reason != "error":
                response.finish_reason = "stop"
        elif self._tokenizer is not None:
            response.text = decoded(self._tokenizer, self.tokens)
        if beyond := len(response.tokens) - len(self.tokens):
            response.tokens = response.tokens[: len(self.tokens)]
            if response.logprobs is not None:
                response.logprobs = response.logprobs[: len(self.tokens)]
            cut = response.steps[-1]
            emitted = cut.emitted - beyond
            response.steps[-1] = replace(cut, emitted=emitted, tau=min(cut.tau, emitted))
        return self._piece(response.index, rest, response)

    def _piece(self, index: int, text: str | None, response: Response | None = None) -> Chunk:
        new, self._given = slice(self._given, len(self.tokens)), len(self.tokens)
        return Chunk(index, self.tokens[new], text, self.logprobs[new] or None, response)


class Outputs:
    """The requests of a decoder and what they say.

    Args:
        decoder: its `on_step` is taken; ``on_step`` is called before.
        live: whether pieces are wanted every step, or each request's last one alone.
    """

    def __init__(
        self, decoder: Decoder, *, live: bool = True, on_step: Callable[[StepEvent], None] | None = None
    ) -> None:
        self._decoder, self._live, self._watcher = decoder, live, on_step
        self._open: dict[int, Output] = {}
        decoder.on_step = self._hear

    def steps(
        self, waiting: Iterable[tuple[Request, Output] | None], interleaved: Callable[[], bool] = bool
    ) -> Generator[list[Chunk], None, None]:
        """Round after step, what was said in it; see `Decoder.steps`. A failed sequence's response has its error."""
        try:
            with closing(self._decoder.steps(self._opened(waiting), "finish", interleaved)) as steps:
                for finished in thread_count(self._decoder.target).applied(steps):
                    responses = {response.index: response for response in finished}
                    running = [i for i in self._open if i not in responses] if self._live else []
                    pieces = [self._open[i].piece(i) for i in running if self._open[i].tokens]  # else: in prefill yet
                    yield pieces + [self._open.pop(i).last(response) for i, response in responses.items()]
        finally:
            self._open.clear()

    def _opened(self, waiting: Iterable[tuple[Request, Output] | None]) -> Iterator[Request | None]:
        for pair in waiting:
            if pair is None:
                yield None
            else:
                request, self._open[pair[0].index] = pair
                yield request

    def _hear(self, event: StepEvent) -> None:
        if self._watcher is not None:
            self._watcher(event)
        for index, tokens, logprobs in zip(event.prompts, event.emitted, event.logprobs, strict=True):
            if index is not None and (finish_reason := self._open[index].hear(tokens, logprobs)):
                self._decoder.end(index, finish_reason)
