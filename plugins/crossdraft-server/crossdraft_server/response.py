"""Response objects of the OpenAI API, complete or as stream chunks."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from crossdraft import Chunk, Response
from crossdraft.framework.api.detokenizer import REPLACEMENT, Detokenizer

from .protocol import CompletionRequest
from .tools import CallParser

#: Stands for log 0, which JSON cannot represent; OpenAI uses the same number.
_LOG_ZERO = -9999.0


class ResponseBuilder:
    """Builds the response to one HTTP request.

    Args:
        request: the parsed request.
        model: the model's name.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Any):
        self._request, self._body, self._tokenizer = request, request.body, tokenizer
        kind = "chat.completion" if request.body.chat else "text_completion"
        head = {"id": f"{'chatcmpl' if request.body.chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._complete = {**head, "object": kind, "model": model}
        self._chunk = {**head, "object": f"{kind}.chunk" if request.body.chat else kind, "model": model}
        if request.body.stream_options.include_usage:
            self._chunk["usage"] = None  # set in the last chunk only
        self._completion_tokens = 0
        form = request.call_format
        self._parser = None if form is None else CallParser(form, tokenizer, request.prompts[0].prompt)
        self._texts = [Detokenizer(tokenizer) for _ in request.prompts]  # for text offsets

    def role_chunks(self) -> list[dict[str, Any]]:
        """The chunks that open a chat stream; empty for completions."""
        if not self._body.chat:
            return []
        content: dict[str, Any] = {"content": ""}
        if self._request.tool is not None:
            content = {"content": None, "tool_calls": [{"index": 0, **self._call(self._request.tool, "")}]}
        return [
            self._choice_chunk(i, delta={"role": "assistant", **content}) for i in range(len(self._request.prompts))
        ]

    def chunk(self, choice: int, chunk: Chunk) -> dict[str, Any] | None:
        """The stream chunk for new tokens of a choice; None if all of their text is held back."""
        self._completion_tokens += len(chunk.tokens)
        request, end = self._request, chunk.response is not None
        parsed = None if self._parser is None else self._parsed(self._parser, chunk.text, end, indexed=True)
        new = chunk.text if parsed is None else parsed
        if not (new or end or ((self._body.logprobs or self._body.return_token_ids) and chunk.tokens)):
            return None
        logprobs = self._logprobs(choice, chunk)
        finish_reason = None if chunk.response is None else self._finish_reason(chunk.response)
        if parsed is not None:
            content: dict[str, Any] = {"delta": parsed}
        elif request.tool is not None:
            calls = [{"index": 0, "function": {"arguments": chunk.text}}]
            content = {"delta": {"tool_calls": calls} if chunk.text else {}}
        elif self._body.chat:
            content = {"delta": {"content": chunk.text} if chunk.text else {}}
        else:
            content = {"text": chunk.text}
        content |= {"token_ids": chunk.tokens} if self._body.return_token_ids else {}
        return self._choice_chunk(choice, finish_reason=finish_reason, logprobs=logprobs, **content)

    def complete(self, chunks: list[Chunk]) -> dict[str, Any]:
        """The response without streaming; ``chunks``: all tokens of each choice, in order."""
        choices, responses = [], [chunk.response for chunk in chunks if chunk.response is not None]
        for i, (chunk, response) in enumerate(zip(chunks, responses, strict=True)):
            text = response.text
            content: dict[str, Any] = {"text": text}
            if self._parser is not None:
                parsed = self._parsed(self._parser, text, end=True, indexed=False)
                content = {"message": {"role": "assistant", "content": None, **parsed}}
            elif self._request.tool is not None:
                calls = [self._call(self._request.tool, text)]
                content = {"message": {"role": "assistant", "content": None, "tool_calls": calls}}
            elif self._body.chat:
                content = {"message": {"role": "assistant", "content": text}}
            content |= {"token_ids": chunk.tokens} if self._body.return_token_ids else {}
            logprobs, finish_reason = self._logprobs(i, chunk), self._finish_reason(response)
            choices.append({"index": i, **content, "logprobs": logprobs, "finish_reason": finish_reason})
        return {**self._complete, "choices": choices, "usage": self._usage(responses)}

    def _parsed(self, parser: CallParser, text: str | None, end: bool, *, indexed: bool) -> dict[str, Any]:
        """The fields that new text adds to a message; ``indexed``: as in a delta, each call with its index."""
        first = parser.count
        fields, calls = parser.add(text or "", end)
        tool_calls = [
            {**({"index": index} if indexed else {}), **self._call(*call, index)}
            for index, call in enumerate(calls, first)
        ]
        return {**fields, **({"tool_calls": tool_calls} if calls else {})}

    def _call(self, name: str, arguments: str | None, index: int = 0) -> dict[str, Any]:
        """A call; a chat has one choice."""
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{self._complete['id']}-{index}", "type": "function", "function": function}

    def _finish_reason(self, response: Response) -> str:
        called = self._request.tool is not None or (self._parser is not None and self._parser.count > 0)
        return "tool_calls" if called and response.finish_reason == "stop" else response.finish_reason

    def usage_chunk(self, responses: list[Response]) -> dict[str, Any]:
        """The last chunk of a stream with ``include_usage``."""
        return {**self._chunk, "choices": [], "usage": self._usage(responses)}

    def _usage(self, responses: list[Response]) -> dict[str, Any]:
        completion = sum(len(response.tokens) for response in responses)
        steps = [step for response in responses for step in response.steps]
        accepted = sum(step.tau for step in steps)
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(step.nodes for step in steps) - accepted,
        }
        return {**self._token_counts(completion), "completion_tokens_details": details}

    def _token_counts(self, completion: int) -> dict[str, int]:
        prompt = sum(len(request.prompt) for request in self._request.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _choice_chunk(self, choice: int, **content: Any) -> dict[str, Any]:
        chunk = {**self._chunk, "choices": [{"index": choice, "finish_reason": None, "logprobs": None, **content}]}
        if self._body.stream_options.continuous_usage_stats:
            chunk["usage"] = self._token_counts(self._completion_tokens)
        return chunk

    def _logprobs(self, choice: int, chunk: Chunk) -> dict[str, Any] | None:
        """The ``logprobs`` object; at temperature 0 every log-probability is 0."""
        if not self._body.logprobs:
            return None
        names = [str(self._tokenizer.decode([token])) for token in chunk.tokens]
        values = [_LOG_ZERO if math.isinf(value) else value for value in chunk.logprobs or [0.0] * len(names)]
        if self._body.chat:
            # The bytes of a token that is only a part of a character are not known: null.
            codes = [None if REPLACEMENT in name else list(name.encode()) for name in names]
            return {
                "content": [
                    {"token": name, "logprob": value, "bytes": code, "top_logprobs": []}
                    for name, value, code in zip(names, values, codes, strict=True)
                ],
                "refusal": None,
            }
        offsets, text = [], self._texts[choice]
        for token in chunk.tokens:
            offsets.append(len(text.text))
            text.add([token])
        return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
