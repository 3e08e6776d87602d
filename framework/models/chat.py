"""Encoding of conversations and texts into token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ..errors import ModelError, UsageError, first_line, printable
from ..util.input_files import BROKEN, describe_forbidden_char, parse_json

#: Characters per token of the limit, above which a text is tokenized in parts; longer than most tokens.
_CHARS_PER_TOKEN = 16
#: Halves of surrogate pairs.
_HALVES = re.compile("[\ud800-\udfff]")


def encode(tokenizer: Any, turns: Sequence[str], answers: Sequence[str] = (), chat: bool | None = None) -> list[int]:
    """Encode a conversation up to the generation prompt after the last of `turns`.

    Uses the tokenizer's chat template (``chat``; by default if it has one), otherwise plain text with one line per turn
    and answer.

    Raises:
        UsageError: a text with characters that cannot be tokenized (NUL, half of a surrogate pair).
        ModelError: the chat template or tokenizer fails.
    """
    for turn in turns:
        if reason := describe_forbidden_char(turn, BROKEN):
            raise UsageError(f"a text contains {reason}, which cannot be tokenized; remove it")
    if bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat:
        messages = []
        for turn, answer in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return _ids(tokenizer, render_messages(tokenizer, messages), add_special_tokens=False)
    pieces = [piece for pair in zip(turns, [*answers, ""], strict=True) for piece in pair][:-1]
    return _ids(tokenizer, "\n".join(pieces))


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Encode messages (``role``, ``content``, ..) by the tokenizer's chat template, with the generation prompt.

    ``max_tokens``: see `encode_text`; ``tools``, ``options``: see `render_messages`. Raises as `render_messages` does.
    """
    text = render_messages(tokenizer, messages, tools, options)
    return _bounded(tokenizer, text, max_tokens, add_special_tokens=False)


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    generation_prompt: bool = True,
) -> str:
    """The text of messages by the tokenizer's chat template.

    Args:
        tools: functions in OpenAI's format, for the template.
        options: further variables of the template (``chat_template_kwargs`` of a request).

    Raises:
        UsageError: a message with half of a surrogate pair. NUL is accepted: earlier responses may contain it.
        ModelError: the template is missing or fails.
    """
    with _model_errors(tokenizer, "chat template"):
        variables = {**options, **({} if tools is None else {"tools": list(tools)})}
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **variables
        )
    if reason := describe_forbidden_char(text, _HALVES):
        raise UsageError(f"a message contains {reason}, which cannot be tokenized; remove it")
    return text


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API as chat templates read it: without nulls, and with a text as content.

    Arguments of calls become objects, and the deprecated ``function_call`` one of ``tool_calls``. Raises UsageError for
    content that is not text, and for invalid calls.
    """
    fields = {key: value for key, value in message.items() if value is not None}
    if (call := fields.pop("function_call", None)) is not None:
        fields["tool_calls"] = [*(fields.get("tool_calls") or ()), {"type": "function", "function": call}]
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    if "tool_calls" in fields:
        fields["tool_calls"] = _parsed_calls(fields["tool_calls"])
    if "content" in fields:
        fields["content"] = _joined(fields["content"])
    elif "tool_calls" in fields or "reasoning_content" in fields:
        fields["content"] = ""
    return fields


def _parsed_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, as chat templates read them, not as JSON."""
    parsed = []
    try:
        for call in calls:
            function = call["function"]
            arguments = function["arguments"]
            if isinstance(arguments, str):
                arguments = parse_json(arguments or "{}", "the arguments", nan=False)
            parsed.append({**call, "function": {**function, "arguments": {**arguments}}})
    except (LookupError, TypeError, UsageError):
        raise UsageError(
            "tool_calls must be a list of calls, each with a function whose arguments are a JSON object"
        ) from None
    return parsed


def _joined(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise UsageError("content must be a string or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def encode_text(tokenizer: Any, text: str, *, special: bool, max_tokens: int | None = None) -> list[int]:
    """Encode a text; ``special``: add special tokens. Raises as `encode` does.

    ``max_tokens``: raise UsageError, without tokenizing the whole text, if it has far more tokens.
    """
    if reason := describe_forbidden_char(text, BROKEN):
        raise UsageError(f"a text contains {reason}, which cannot be tokenized; remove it")
    return _bounded(tokenizer, text, max_tokens, add_special_tokens=special)


def _bounded(tokenizer: Any, text: str, max_tokens: int | None, **options: Any) -> list[int]:
    """Encode a text that is not far longer than ``max_tokens`` tokens.

    Prefixes of doubling length are tokenized first; a prefix with more than twice as many tokens is an error. The
    longest token does not bound the count for tokenizers that drop blanks or map unknown words to one token.
    """
    size = _CHARS_PER_TOKEN * (max_tokens or 0)
    while 0 < size < len(text):
        if len(_ids(tokenizer, text[:size], **options)) > 2 * (max_tokens or 0):
            raise UsageError(
                f"a text of {len(text)} characters has more than the maximum of {max_tokens} tokens; shorten it"
            )
        size *= 2
    return _ids(tokenizer, text, **options)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    with _model_errors(tokenizer, "tokenizer"):
        return [int(token) for token in tokenizer(text, **options)["input_ids"]]


@contextmanager
def _model_errors(tokenizer: Any, part: str) -> Iterator[None]:
    """Convert errors of a model's template or tokenizer to ModelError."""
    try:
        yield
    except Exception as error:
        model = printable(str(getattr(tokenizer, "name_or_path", "") or "the model"))
        raise ModelError(f"the {part} of {model} fails: {first_line(error)}") from error
