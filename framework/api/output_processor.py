"""Outputs of running requests, step by step, for `generate`, `stream` and the server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..contracts.steps import Chunk, Request, Response, StepEvent
from ..engine.decoder import Decoder
from .detokenizer import Detokenizer, decode_text


class Output:
    """The output of one running request.

    Args:
        tokenizer: the target's; None = no text.
        stop: strings that end the output; needs a tokenizer.
        live: True if a chunk per step is needed, not only the last one.
        special: the text includes special tokens; only with ``live``.

    Attributes:
        tokens: the output up to the token that completed a stop string.
        text: its text; None if it is decoded only at the end.
        aborted: may be set from any thread; the sequence ends with the current step.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, live: bool = True, special: bool = False):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        detokenized = tokenizer is not None and (live or stop)
        self.text = Detokenizer(tokenizer, stop, special=special) if detokenized else None
        self.aborted = False
        self._tokenizer, self._returned = tokenizer, 0

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> str | None:
        """Append the tokens of a step; return the finish reason if the sequence ends with them."""
        count = self.text.add(tokens) if self.text is not None else len(tokens)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        if self.text is not None and self.text.stopped:
            return "stop"
        return "abort" if self.aborted else None

    def chunk(self, index: int) -> Chunk:
        """The chunk of everything new since the last one."""
        return self._chunk(index, None if self.text is None else self.text.piece())

    def last(self, response: Response) -> Chunk:
        """The last chunk; cuts ``response`` behind the token that completed a stop string, and sets its text."""
        rest = None
        if self.text is not None:
            rest = self.text.flush()
            response.text = self.text.text
            if self.text.stopped and response.finish_reason != "error":
                response.finish_reason = "stop"
        elif self._tokenizer is not None:
            response.text = decode_text(self._tokenizer, self.tokens)
        if beyond := len(response.tokens) - len(self.tokens):
            response.tokens = response.tokens[: len(self.tokens)]
            if response.logprobs is not None:
                response.logprobs = response.logprobs[: len(self.tokens)]
            step = response.steps[-1]
            emitted = step.emitted - beyond
            response.steps[-1] = replace(step, emitted=emitted, tau=min(step.tau, emitted))
        return self._chunk(response.index, rest, response)

    def _chunk(self, index: int, text: str | None, response: Response | None = None) -> Chunk:
        new, self._returned = slice(self._returned, len(self.tokens)), len(self.tokens)
        return Chunk(index, self.tokens[new], text, self.logprobs[new] or None, response)


class Outputs:
    """The running requests of a decoder and their outputs.

    Args:
        decoder: its `on_step` is replaced during `steps`.
        on_step: called with every step's event, before it is processed.
        live: yield a chunk per running request and step; otherwise only each request's last chunk.
    """

    def __init__(
        self, decoder: Decoder, *, live: bool = True, on_step: Callable[[StepEvent], None] | None = None
    ) -> None:
        self._decoder, self._live, self._callback = decoder, live, on_step
        self._running: dict[int, Output] = {}

    def steps(
        self, waiting: Iterable[tuple[Request, Output] | None], interleaved: Callable[[], bool] = bool
    ) -> Generator[list[Chunk], None, None]:
        """Run `Decoder.steps` and yield the chunks of each step; the response of a failed sequence has its error."""
        self._decoder.on_step = self._process
        try:
            with closing(self._decoder.steps(self._requests(waiting), "finish", interleaved)) as steps:
                for finished in steps:
                    responses = {response.index: response for response in finished}
                    running = [i for i in self._running if i not in responses] if self._live else []
                    chunks = [self._running[i].chunk(i) for i in running if self._running[i].tokens]  # after prefill
                    yield chunks + [self._running.pop(i).last(response) for i, response in responses.items()]
        finally:
            self._running.clear()
            # It refers to the decoder, whose slots are free for others as soon as it is freed.
            self._decoder.on_step = None

    def _requests(self, waiting: Iterable[tuple[Request, Output] | None]) -> Iterator[Request | None]:
        for pair in waiting:
            if pair is None:
                yield None
            else:
                request, self._running[pair[0].index] = pair
                yield request

    def _process(self, event: StepEvent) -> None:
        if self._callback is not None:
            self._callback(event)
        for index, tokens, logprobs in zip(event.prompts, event.emitted, event.logprobs, strict=True):
            if index is not None and (finish_reason := self._running[index].add(tokens, logprobs)):
                self._decoder.end(index, finish_reason)
