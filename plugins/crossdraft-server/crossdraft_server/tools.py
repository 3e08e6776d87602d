"""Fields ``tools`` and ``tool_choice`` of a chat, and calls in responses.

A required call is a response constrained to the schema of the function's arguments. With ``auto`` the response is not
constrained, and the calls in it are parsed by a response template of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict

from crossdraft import LoadedModel, UsageError, quoted
from crossdraft.commands import Options

#: Response templates for chat templates with ``<tool_call>``: a JSON object with name and arguments (Hermes, Qwen), or
#: a tag for each parameter (Qwen3-Coder, Qwen3.5).
_JSON_CALLS: dict[str, Any] = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
}
_TAGGED_CALLS: dict[str, Any] = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


@dataclass(frozen=True)
class ToolCall:
    """The function that a response calls.

    Attributes:
        name: its name; None: the model decides whether to call, and which.
        parameters: JSON schema of its arguments, which are the response.
        tools: all functions, for the chat template.
    """

    name: str | None
    parameters: Mapping[str, Any]
    tools: list[dict[str, Any]]


class Function(Options):
    """A function that a response may call; the chat template reads further keys."""

    model_config = ConfigDict(extra="ignore")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(Options):
    """An item of ``tools``."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


def tool_call(tools: Sequence[Tool], choice: Any, objects: list[dict[str, Any]] | None) -> ToolCall | None:
    """The call that a request requires; None without one. Raises UsageError.

    ``objects``: the tools as they were sent, for the chat template.
    """
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice == "auto":
        return ToolCall(None, {}, objects or [])
    functions = {tool.function.name: {"type": "object", **(tool.function.parameters or {})} for tool in tools}
    if choice == "required" and len(functions) == 1:
        name = next(iter(functions))
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise UsageError(
            f"tool_choice={quoted(choice)} must name one of the tools, or be auto, none, or required with one tool"
        )
    return ToolCall(name, functions[name], objects or [])


@dataclass(frozen=True)
class CallFormat:
    """The format of the calls that a model decides on.

    Attributes:
        template: response template of transformers.
        reads_prompt: the template's start is in the prompt.
        tools: all functions, for the types of arguments.
        parallel: return all calls, not only the first.
    """

    template: dict[str, Any]
    reads_prompt: bool
    tools: list[dict[str, Any]]
    parallel: bool


def call_format(target: LoadedModel, tools: list[dict[str, Any]], parallel: bool) -> CallFormat:
    """The format of the tokenizer's response template, or of its chat template. Raises UsageError if it is unknown."""
    tokenizer = target.tokenizer
    template = getattr(tokenizer, "response_template", None)
    if template is not None and "tool_calls" in template["fields"]:
        return CallFormat(template, True, tools, parallel)
    chat = str(getattr(tokenizer, "chat_template", None) or "")
    if "<tool_call>" not in chat:
        raise UsageError(
            f"tool_choice=auto is not supported for {target.name}: its tokenizer has no response_template with "
            "tool_calls and its chat template does not contain <tool_call>, so the format of its calls is unknown; "
            "name a function, as in {'type': 'function', 'function': {'name': ...}}, or send required with one tool"
        )
    calls = {**(_TAGGED_CALLS if "<function=" in chat else _JSON_CALLS), "repeats": True}
    content = {"content": "text", **({"close": special} if (special := _special(tokenizer)) else {})}
    fields = {"tool_calls": calls, "content": content}
    return CallFormat({"start_anchor": "<tool_call>", "fields": fields}, False, tools, parallel)


def _special(tokenizer: Any) -> list[str]:
    """Special tokens that do not belong to calls."""
    return [token for token in tokenizer.all_special_tokens if token not in ("<tool_call>", "</tool_call>")]


class CallParser:
    """Splits one response into content and calls, as it grows.

    A response with an invalid call is content from there on.

    Args:
        form: of the calls.
        tokenizer: the model's.
        prompt: token ids.
    """

    def __init__(self, form: CallFormat, tokenizer: Any, prompt: Sequence[int]):
        prefix = list(prompt) if form.reads_prompt else ""
        self._parser = tokenizer.get_response_parser(form.template, prefix=prefix, tools=form.tools)
        self._special, self._parallel = _special(tokenizer), form.parallel
        self._pending = ""  # text that is neither returned nor part of a complete call
        self.count = 0  # calls returned

    def add(self, text: str, end: bool = False) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Process new text, with special tokens; ``end``: the last one.

        Returns:
            the new text by field (``content``, ``reasoning_content``), and name and arguments (JSON) of new calls.
        """
        texts = {"content": "", "reasoning_content": ""}
        calls: list[tuple[str, str]] = []
        pieces = re.findall(r"\w+|\W", text)  # a marker ends with a piece
        while self._parser is not None and (pieces or end):
            piece = pieces.pop(0) if pieces else ""
            self._pending += piece
            try:
                events = self._parser.feed(piece) if piece else self._parser.finalize()[1]
                calls += self._split(events, texts)
            except (LookupError, TypeError, ValueError):
                self._parser, pieces = None, [self._pending, *pieces]
            else:
                end = end and bool(piece)
        rest = "".join(pieces)
        for token in self._special:
            rest = rest.replace(token, "")
        texts["content"] += rest
        if not self._parallel:
            calls = calls[: 1 - self.count]
        self.count += len(calls)
        return {field: text for field, text in texts.items() if text}, calls

    def _split(self, events: Sequence[Mapping[str, Any]], texts: dict[str, str]) -> list[tuple[str, str]]:
        """Append the text of parser events to ``texts``, and return their calls."""
        calls = []
        for event in events:
            field = event["field"]
            if field == "tool_calls":
                if event["type"] == "region_close":
                    values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                    calls += [_name_and_arguments(value) for value in values]
                    self._pending = ""
            elif event["type"] == "region_chunk" and not event["dirty"]:
                texts["content" if field == "content" else "reasoning_content"] += event["text"]
                self._pending = self._pending.partition(event["text"])[2]
        return calls


def _name_and_arguments(value: Any) -> tuple[str, str]:
    """Raises LookupError, TypeError or ValueError if ``value`` is not a call."""
    function = value["function"]
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise TypeError("a call has a name and arguments")
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
