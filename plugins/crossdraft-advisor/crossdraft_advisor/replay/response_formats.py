"""Formats of responses other than the plain one and OpenAI's: each converts its objects to the plain format.

Formats are registered through the hook ``crossdraft_register_formats``, each a subclass of `ResponseFormat`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from crossdraft import ContractError, UsageError
from crossdraft.framework import plugins

from .generated_text import GENERATED_KEYS
from .response import ParseContext

#: Stop types of llama.cpp -> finish reasons.
_STOP_TYPES = {"eos": "stop", "limit": "length", "word": "stop_sequence"}
Rows = Iterable[dict[str, Any]] | None  # rows of the plain format; None for an object in another format
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: Keys of an answer beside its messages or its prompt.
_ANSWERS = frozenset(
    {"response", "tokens", "choices", "output", "outputs", "generated_text", "meta_info", "error", "done"}
)
#: Senders in conversations -> roles.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant"}
_ROLES |= {"bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= {"developer": "developer", "model": "assistant", "function": "tool"}


class ResponseFormat(ABC):
    """A format of responses."""

    name: ClassVar[str]  # as registered

    @abstractmethod
    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        """Return rows of the plain format (`jsonl_formats`) for a JSON object; None if it is not in this format.

        Raises UsageError if the object is in the format, and has no response that can be replayed.
        """


def plain_rows(row: Any, context: ParseContext, place: str) -> Iterator[Any]:
    """Yield the rows of the plain format, or of OpenAI's, for a JSON object in any format."""
    if isinstance(row, dict):
        for name in context.formats:
            try:
                with plugins.guarded("formats", name, "rows()"):
                    rows = plugins.get("formats", name)().rows(row, context, place)
                    rows = None if rows is None else list(rows)
            except ContractError as error:  # of a plug-in; the other formats are tried
                context.skip("that a format of a plug-in cannot convert", f"{place}: {error}")
                continue
            if rows is not None:
                for converted in rows:
                    yield {key: value for key, value in converted.items() if value is not None}
                return
    yield row


class SglangGenerate(ResponseFormat):
    """SGLang's ``/generate``: a response with ``meta_info``, beside the request or its prompt."""

    name = "sglang-generate"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
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
        result = {key: parameters.get(key) for key in _SAMPLING}
        result |= {"id": info.get("id"), "prompt": prompt, "finish_reason": info.get("finish_reason")}
        result |= {"max_tokens": parameters.get("max_new_tokens"), "messages": row.get("messages")}
        result |= {"usage": {"completion_tokens": info.get("completion_tokens")}, "category": row.get("category")}
        answer = (
            {"tokens": body["output_ids"]} if body.get("output_ids") is not None else {"response": body.get("text")}
        )
        return [result | answer]


class SglangExtension(ResponseFormat):
    """Completions of SGLang with token ids in their extension ``sglext``, beside the request."""

    name = "sglang-extension"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        _, body = _pair(row)
        extension, choices = body.get("sglext"), body.get("choices")
        extension = extension if isinstance(extension, dict) else {}
        ids = extension.get("output_ids")
        if not isinstance(ids, list) or not isinstance(choices, list) or len(ids) != len(choices):
            return None
        choices = [{**choice, "token_ids": tokens} for choice, tokens in zip(choices, ids, strict=True)]
        fields = {"choices": choices, "prompt_token_ids": extension.get("input_ids")}
        result = {key: value for key, value in {**body, **fields}.items() if key != "sglext"}
        return [result if body is row else {**row, "response": result}]


class LlamaCppCompletion(ResponseFormat):
    """llama.cpp's ``/completion``, which returns the prompt and the settings."""

    name = "llama.cpp-completion"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        if not ("content" in row and "generation_settings" in row):
            return None
        settings = row["generation_settings"] if isinstance(row["generation_settings"], dict) else {}
        result = {key: settings.get(key) for key in _SAMPLING}
        stop = row.get("stop_type")
        result |= {"prompt": row.get("prompt"), "finish_reason": _STOP_TYPES.get(str(stop), stop)}
        answer = {"tokens": row["tokens"]} if row.get("tokens") else {"response": row["content"]}
        return [result | answer]


class LmEvalSamples(ResponseFormat):
    """Samples that lm-eval logs (``--log_samples``): a line for each document and filter."""

    name = "lm-eval"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        if not ({"resps", "arguments"} <= row.keys()):
            return None
        return self._rows(row, context, place)

    def _rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Iterator[dict[str, Any]]:
        key = json.dumps([row.get("doc_id"), row.get("task_name"), row["arguments"]])
        if key in context.seen:
            context.skip("that another filter of lm-eval repeats", place)
            return
        context.seen.add(key)
        # Arguments of the requests: a list, or an object ``gen_args_0`` of an object ``arg_0``, ``arg_1``.
        requests = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
        for i, (request, texts) in enumerate(zip(requests, row["resps"], strict=False)):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise UsageError(f"{place}: the choices are scored, not generated; log a task that generates text")
            prompt, settings = (*(request.values() if isinstance(request, dict) else request), {})[:2]
            settings = settings if isinstance(settings, dict) else {}
            result: dict[str, Any] = {"id": f"{row.get('doc_id')}" + (f".{i}" if i else "")}
            result |= {key: settings.get(key) for key in _SAMPLING}
            if settings.get("do_sample") is False:
                result["temperature"] = 0
            result["category"] = row.get("task_name")
            if isinstance(prompt, str) and prompt.startswith('[{"role"'):
                result["messages"] = json.loads(prompt)
            else:
                result["prompt"] = prompt
            for text in texts:
                yield result | {"response": text}


class Conversations(ResponseFormat):
    """Conversations of data sets, every answer of which is a response to the messages before it.

    ShareGPT (``conversations`` of ``from`` and ``value``), LMSYS-Chat (``conversation``) and the messages with which
    chats are fine-tuned, of ``role`` and ``content``.
    """

    name = "conversations"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        turns = next((row[key] for key in ("conversations", "conversation") if row.get(key) is not None), None)
        if turns is None and not row.keys() & _ANSWERS and isinstance(row.get("messages"), list) and row["messages"]:
            last = row["messages"][-1]
            turns = row["messages"] if isinstance(last, dict) and last.get("role") == "assistant" else None
        if not isinstance(turns, list) or not all(
            isinstance(turn, dict) and {"from", "role"} & turn.keys() for turn in turns
        ):
            return None
        return self._rows(row, turns, context, place)

    def _rows(
        self, row: Mapping[str, Any], turns: list[dict[str, Any]], context: ParseContext, place: str
    ) -> Iterator[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        name = next((row[key] for key in ("id", "conversation_id") if row.get(key) is not None), None)
        for turn in turns:
            sender = str(turn.get("from", turn.get("role")))
            role, text = _ROLES.get(sender.lower()), turn.get("value", turn.get("content"))
            if role is None or not (isinstance(text, str) or (text is None and turn.get("tool_calls"))):
                raise UsageError(f"{place}: a turn of {sender!r:.40} is not a text of a known sender")
            if role == "assistant" and messages:
                context.assumed["of conversations of a data set, assumed to be samples of the target"] += 1
                generated = {key: turn.get(key) for key in GENERATED_KEYS if key != "content"}
                result = {"id": name, "messages": list(messages), "response": text or "", "tools": row.get("tools")}
                yield result | generated
            messages.append({"role": role, "content": text} if "from" in turn else turn)


class PromptCompletion(ResponseFormat):
    """Prompts and completions for fine-tuning, each a text or messages; the first message of an answer is read."""

    name = "prompt-completion"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        prompt, completion = row.get("prompt"), row.get("completion")
        if completion is None or prompt is None or row.keys() & _ANSWERS:
            return None
        result = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
        result["messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"] = prompt
        message = completion[0] if isinstance(completion, list) and completion else {"content": completion}
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UsageError(f"{place}: 'completion' must be a text, or a list with a message of the assistant")
        context.assumed["of prompts and completions of a data set, assumed to be samples of the target"] += 1
        return [result | {"response": message["content"]}]


class VllmOutputs(ResponseFormat):
    """``RequestOutput`` of vLLM's offline API, as JSON: ``outputs`` with ``token_ids`` beside ``prompt_token_ids``."""

    name = "vllm-outputs"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        outputs = row.get("outputs")
        if not isinstance(outputs, list) or not all(isinstance(item, dict) and "token_ids" in item for item in outputs):
            return None
        # Their log-probabilities are objects by token, which are not read.
        choices = [{key: value for key, value in item.items() if key != "logprobs"} for item in outputs]
        return [{**row, "id": row.get("request_id"), "choices": choices}]


class TextGeneration(ResponseFormat):
    """Text Generation Inference: ``generated_text`` and its ``details`` beside ``inputs`` and ``parameters``."""

    name = "text-generation"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        request, body = _pair(row)
        if not isinstance(body.get("generated_text"), str):
            return None
        details, parameters = (
            value if isinstance(value, dict) else {} for value in (body.get("details"), request.get("parameters"))
        )
        tokens = details.get("tokens")
        ids = [item.get("id") for item in tokens if isinstance(item, dict)] if isinstance(tokens, list) else []
        result = {key: parameters.get(key) for key in _SAMPLING} | {"max_tokens": parameters.get("max_new_tokens")}
        if parameters.get("do_sample") is False:
            result["temperature"] = 0
        result |= {"prompt": request.get("inputs"), "finish_reason": details.get("finish_reason")}
        result |= {"tokens": ids} if ids else {"response": body["generated_text"]}
        return [result]


class Ollama(ResponseFormat):
    """Ollama's ``/api/chat`` and ``/api/generate``, beside the request."""

    name = "ollama"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        request, body = _pair(row)
        if "done" not in body or not isinstance(body.get("message", body.get("response")), dict | str):
            return None
        if not body["done"]:
            raise UsageError(f"{place}: it is a chunk of a stream; record whole responses (stream: false)")
        message = body["message"] if isinstance(body.get("message"), dict) else {"content": body.get("response")}
        options = request.get("options")
        options = options if isinstance(options, dict) else {}
        result = {key: options.get(key) for key in _SAMPLING} | {"max_tokens": options.get("num_predict")}
        result |= {key: request.get(key) for key in ("messages", "prompt", "tools", "id")}
        result |= {key: message.get(key) for key in GENERATED_KEYS if key != "content"}
        result |= {"response": message.get("content"), "finish_reason": body.get("done_reason")}
        result |= {"usage": {"completion_tokens": body.get("eval_count")}}
        return [result]


class OpenAiResponses(ResponseFormat):
    """OpenAI's Responses API, beside the request or its ``input``."""

    name = "openai-responses"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        request, body = _pair(row)
        if body.get("object") != "response" or not isinstance(body.get("output"), list):
            return None
        texts: dict[str, list[str]] = {"reasoning": [], "message": []}
        calls = []
        for item in body["output"]:
            kind = item.get("type") if isinstance(item, dict) else None
            if kind == "function_call":
                function = {key: item.get(key) for key in ("name", "arguments")}
                calls.append({"type": "function", "function": function})
            elif kind in texts:
                texts[kind] += _part_texts(item, place)
            else:
                raise UsageError(f"{place}: output of the type {kind!r:.40} is not read; record chat completions")
        source = {**body, **{key: value for key, value in request.items() if value is not None}}
        messages = [{"role": "system", "content": source["instructions"]}] if source.get("instructions") else []
        turns = source.get("input")
        for item in [{"role": "user", "content": turns}] if isinstance(turns, str) else turns or []:
            if not isinstance(item, dict) or "role" not in item:
                raise UsageError(f"{place}: 'input' has an item without a role; record chat completions")
            content = item.get("content")
            text = content if isinstance(content, str) else "".join(_part_texts(item, place))
            messages.append({"role": item["role"], "content": text})
        tools = [
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in source.get("tools") or ()
        ]
        usage = body.get("usage")
        counted = usage.get("output_tokens") if isinstance(usage, dict) else None
        result: dict[str, Any] = {key: source.get(key) for key in _SAMPLING}
        result |= {"id": body.get("id"), "messages": messages or None, "tools": tools or None}
        result |= {"max_tokens": source.get("max_output_tokens"), "usage": {"completion_tokens": counted}}
        result |= {"response": "".join(texts["message"]), "reasoning_content": "".join(texts["reasoning"]) or None}
        result |= {"tool_calls": calls or None}
        result["finish_reason"] = {"completed": "stop", "incomplete": "length"}.get(str(body.get("status")))
        return [result]


def _part_texts(item: Mapping[str, Any], place: str) -> list[str]:
    """Texts of the parts of an item; of reasoning its content, not a summary."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UsageError(f"{place}: content of the type {type(parts).__name__} is not read; record chat completions")
    texts = [part.get("text", part.get("refusal")) for part in parts]
    if None in texts or (item.get("summary") and not texts):
        raise UsageError(f"{place}: it has other content than text, or a summary of hidden reasoning; record token ids")
    return [str(text) for text in texts]


class AnthropicMessages(ResponseFormat):
    """Anthropic's Messages API, which vLLM serves, too, beside the request."""

    name = "anthropic-messages"

    def rows(self, row: Mapping[str, Any], context: ParseContext, place: str) -> Rows:
        request, body = _pair(row)
        if body.get("type") != "message" or not isinstance(body.get("content"), list):
            return None
        calls, content = [], []
        for part in body["content"]:
            if isinstance(part, dict) and part.get("type") == "tool_use":
                function = {"name": part.get("name"), "arguments": json.dumps(part.get("input"))}
                calls.append({"type": "function", "function": function})
            else:
                content.append(part)
        thinking = "".join(str(part.get("thinking")) for part in content if part.get("type") == "thinking")
        texts = [part.get("text") for part in content if part.get("type") != "thinking"]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{place}: the message has other content than text, thinking and calls; record token ids")
        system = request.get("system")
        if isinstance(system, list):
            system = "".join(str(part.get("text")) for part in system)
        messages = [*([{"role": "system", "content": system}] if system else []), *(request.get("messages") or ())]
        result: dict[str, Any] = {key: request.get(key) for key in _SAMPLING}
        result |= {"id": body.get("id"), "messages": messages or None, "max_tokens": request.get("max_tokens")}
        result |= {"response": "".join(texts), "reasoning_content": thinking or None, "tool_calls": calls or None}
        result |= {"finish_reason": body.get("stop_reason"), "usage": body.get("usage")}
        return [result]


def _pair(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The request and the response of a row, which may be one object."""
    body = row["response"] if isinstance(row.get("response"), dict) else row
    return (row["request"] if isinstance(row.get("request"), dict) else row), body
