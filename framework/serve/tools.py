"""Fields ``tools`` and ``tool_choice`` of a chat: a call of one function, with arguments constrained to its schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, quoted


@dataclass(frozen=True)
class ToolCall:
    """The function that a response calls.

    Attributes:
        name: its name.
        parameters: JSON schema of its arguments, which are the response.
        tools: all functions, for the chat template.
    """

    name: str
    parameters: Mapping[str, Any]
    tools: list[dict[str, Any]]


def tool_call(fields: Mapping[str, Any]) -> ToolCall | None:
    """The call that a request requires; None without one. Raises UsageError."""
    tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise UsageError(f"tools={quoted(tools)} must be a list of functions")
    functions = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"tools[{i}] must have type function, and a function with a name")
        parameters = function.get("parameters", {"type": "object"})
        if not isinstance(parameters, dict):
            raise UsageError(f"tools[{i}].function.parameters must be a JSON schema, an object")
        functions[function["name"]] = parameters
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice == "auto":
        raise UsageError(
            "tool_choice=auto is not supported, as the calls of each model have a format of their own; name a "
            "function, as in {'type': 'function', 'function': {'name': ...}}, or send required with one tool"
        )
    if choice == "required" and len(functions) == 1:
        name = next(iter(functions))
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise UsageError(
            f"tool_choice={quoted(choice)} must name one of the tools, or be none, or required with one tool"
        )
    return ToolCall(name, functions[name], tools)
