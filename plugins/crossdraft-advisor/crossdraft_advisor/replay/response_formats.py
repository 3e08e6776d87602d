"""Formats of responses other than the plain one and OpenAI's: each converts its objects to the plain format.

Formats are registered through the hook ``crossdraft_register_response_formats``, each a subclass of `ResponseFormat`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from crossdraft.framework import plugins
from crossdraft.framework.errors import ContractError, UsageError

from .response import ParseContext

#: Stop types of llama.cpp -> finish reasons.
_STOP_TYPES = {"eos": "stop", "limit": "length", "word": "stop_sequence"}
#: Senders of ShareGPT -> roles.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant"}
_ROLES |= {"bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool"}


class ResponseFormat(ABC):
    """A format of responses.

    Attributes:
        name: as registered.
    """

    name: ClassVar[str]

    @abstractmethod
    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]] | None:
        """Return rows of the plain format (`jsonl_formats`) for a JSON object; None if it is not in this format.

        Raises:
            UsageError: the object is in the format, and has no response that can be replayed.
        """


def plain_rows(row: Any, context: ParseContext, place: str) -> Iterator[Any]:
    """Yield the rows of the plain format, or of OpenAI's, for a JSON object in any format."""
    if isinstance(row, dict):
        for name in plugins.entries("response_formats"):
            try:
                with plugins.guarded("response_formats", name, "rows()"):
                    rows = plugins.get("response_formats", name)().rows(row, context, place)
                    rows = None if rows is None else list(rows)
            except ContractError as error:  # of a plug-in; the other formats are tried
                context.skip("that a format of a plug-in cannot convert", f"{place}: {error}")
                continue
            if rows is not None:
                yield from rows
                return
    yield row


class SglangGenerate(ResponseFormat):
    """SGLang's ``/generate``: a response with ``meta_info``, beside the request or its prompt."""

    name = "sglang-generate"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]] | None:
        body = row["response"] if isinstance(row.get("response"), dict) else row
        info = body.get("meta_info")
        if not isinstance(info, dict) or "choices" in body:
            return None
        if info.get("finish_reason", "") is None:
            raise UsageError(f"{place}: it is a chunk of a stream, which later ones repeat; record the last one")
        request = row["request"] if isinstance(row.get("request"), dict) else row
        parameters = request.get("sampling_params")
        parameters = parameters if isinstance(parameters, dict) else {}
        prompt = next((row[key] for key in ("prompt", "input_ids") if row.get(key) is not None), None)
        if prompt is None and request is not row:
            prompt = next((request[key] for key in ("input_ids", "text") if request.get(key) is not None), None)
        result = {key: value for key, value in parameters.items() if key in ("temperature", "top_k", "top_p", "min_p")}
        result |= {"id": info.get("id"), "prompt": prompt, "finish_reason": info.get("finish_reason")}
        result |= {"max_tokens": parameters.get("max_new_tokens"), "messages": row.get("messages")}
        result |= {"usage": {"completion_tokens": info.get("completion_tokens")}, "category": row.get("category")}
        answer = (
            {"tokens": body["output_ids"]} if body.get("output_ids") is not None else {"response": body.get("text")}
        )
        return iter([_without_none(result | answer)])


class LlamaCppCompletion(ResponseFormat):
    """llama.cpp's ``/completion``, which returns the prompt and the settings."""

    name = "llama.cpp-completion"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]] | None:
        if not ("content" in row and "generation_settings" in row):
            return None
        settings = row["generation_settings"] if isinstance(row["generation_settings"], dict) else {}
        result = {key: settings.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
        stop = row.get("stop_type")
        result |= {"prompt": row.get("prompt"), "finish_reason": _STOP_TYPES.get(str(stop), stop)}
        answer = {"tokens": row["tokens"]} if row.get("tokens") else {"response": row["content"]}
        return iter([_without_none(result | answer)])


class LmEvalSamples(ResponseFormat):
    """Samples that lm-eval logs (``--log_samples``): a line for each document and filter."""

    name = "lm-eval"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]] | None:
        if not ({"resps", "arguments"} <= row.keys()):
            return None
        return self._rows(row, context, place)

    def _rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]]:
        key = json.dumps([row.get("doc_id"), row.get("task_name"), row["arguments"]])
        if key in context.seen:
            context.skip("that another filter of lm-eval repeats", place)
            return
        context.seen.add(key)
        for i, (arguments, texts) in enumerate(zip(_arguments(row["arguments"]), row["resps"], strict=False)):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise UsageError(f"{place}: the choices are scored, not generated; log a task that generates text")
            prompt, settings = (*arguments, {})[:2]
            settings = settings if isinstance(settings, dict) else {}
            result: dict[str, Any] = {"id": f"{row.get('doc_id')}" + (f".{i}" if i else "")}
            result |= {key: settings.get(key) for key in ("temperature", "top_k", "top_p", "min_p")}
            if settings.get("do_sample") is False:
                result["temperature"] = 0
            result["category"] = row.get("task_name")
            if isinstance(prompt, str) and prompt.startswith('[{"role"'):
                result["messages"] = json.loads(prompt)
            else:
                result["prompt"] = prompt
            for text in texts:
                yield _without_none(result | {"response": text})


def _arguments(arguments: Any) -> list[list[Any]]:
    """Arguments of the requests: a list, or an object ``gen_args_0`` of an object ``arg_0``, ``arg_1``."""
    items = list(arguments.values()) if isinstance(arguments, dict) else arguments
    return [list(item.values()) if isinstance(item, dict) else list(item) for item in items]


class ShareGpt(ResponseFormat):
    """ShareGPT: conversations, every answer of which is a response to the messages before it."""

    name = "sharegpt"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]] | None:
        turns = row.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) and "from" in turn for turn in turns):
            return None
        return self._rows(row, turns, context, place)

    def _rows(
        self, row: Mapping[str, Any], turns: list[dict[str, Any]], context: ParseContext, place: str
    ) -> Iterator[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            role, text = _ROLES.get(str(turn["from"]).lower()), turn.get("value")
            if role is None or not isinstance(text, str):
                raise UsageError(f"{place}: a turn of {turn['from']!r:.40} is not a text of a known sender")
            if role == "assistant" and messages:
                context.assumed["of conversations (ShareGPT), assumed to be samples of the target"] += 1
                yield _without_none({"id": row.get("id"), "messages": list(messages), "response": text})
            messages.append({"role": role, "content": text})


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
