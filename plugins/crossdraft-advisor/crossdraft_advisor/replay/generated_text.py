"""Text that a target generated for the message of a response: thinking, content and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossdraft import CrossdraftError, UsageError, printable, quoted
from crossdraft.framework.models.segments import MARKERS
from crossdraft.models import TokenizerOf, render_messages, template_message

#: Keys of the thinking of a message: of vLLM and SGLang; of newer vLLM and OpenRouter; of gpt-oss' template and Ollama.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Fields with text that the model generated; further ones of this kind are not understood.
GENERATED_KEYS = (*THINKING_KEYS, "content", "refusal", "tool_calls", "function_call")
_UNKNOWN = re.compile("think|thought|reasoning|analysis|call|audio|image")
_REMEDY = "record token ids (vLLM: return_token_ids)"


@dataclass(frozen=True)
class ChatRequest:
    """Request of a chat, as far as the chat template reads it."""

    messages: Sequence[Mapping[str, Any]] | None = None  # None if the prompt is a text or token ids
    tools: Sequence[Mapping[str, Any]] | None = None  # functions in OpenAI's format; None without
    # further variables of the template (``chat_template_kwargs``)
    options: Mapping[str, Any] = field(default_factory=dict)
    choice: Any = "auto"  # ``tool_choice``

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> ChatRequest:
        """Parse the fields of a request. Raises UsageError with the key."""
        messages, tools, options = (fields.get(key) for key in ("messages", "tools", "chat_template_kwargs"))
        if messages is not None:
            if (
                not isinstance(messages, list)
                or not messages
                or not all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in messages)
            ):
                raise UsageError("'messages' must be a list of objects with 'role' and 'content'")
            messages = [_checked(message, f"'messages', message {i}") for i, message in enumerate(messages)]
        if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or ()):
            raise UsageError("'tools' must be a list of objects")
        if not isinstance(options or {}, dict):
            raise UsageError("'chat_template_kwargs' must be an object")
        return cls(messages, tools or None, options or {}, fields.get("tool_choice") or "auto")

    @property
    def requires_call(self) -> bool:
        """The response is the arguments of a function."""
        return self.choice not in ("auto", "none")

    def render(self, tokenizer: Any, *messages: Mapping[str, Any], generation_prompt: bool = False) -> str:
        """The text of the prompt and further messages."""
        chat = [*(self.messages or ()), *messages]
        return render_messages(tokenizer, chat, self.tools, self.options, generation_prompt=generation_prompt)


@dataclass(frozen=True)
class Message:
    """The fields of a response's message that the model generated."""

    thinking: str = ""
    content: str = ""
    calls: Sequence[Mapping[str, Any]] = ()  # in OpenAI's format, their arguments as JSON

    def texts(self, request: ChatRequest) -> list[str]:
        """Texts that the response contains, in order: of calls their names, or what is generated of a required one."""
        part = "arguments" if request.requires_call else "name"
        return [self.thinking.strip(), self.content.strip(), *(str(call["function"][part]) for call in self.calls)]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Message | None:
        """Parse a message of OpenAI's API; None if it has no text. Raises UsageError."""
        thinking = {value for key in THINKING_KEYS if (value := fields.get(key))}
        if len(thinking) > 1 or not all(isinstance(value, str) for value in thinking):
            raise UsageError(f"the message has different texts as {', '.join(THINKING_KEYS)}; give one of them")
        content = fields.get("content")
        if isinstance(content, list):  # Mistral's and Anthropic's parts
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
            content = [part for part in content if part not in parts]
            texts = (part.get("thinking") for part in parts)
            thinking |= {
                "".join(
                    text if isinstance(text, str) else _checked({"content": text}, "thinking")["content"]
                    for text in texts
                )
            } - {""}
        refusal = fields.get("refusal")
        if refusal and content:
            raise UsageError("the message has content and a refusal; give the one that the model generated")
        for key in fields.keys() - GENERATED_KEYS:
            # OpenRouter repeats the thinking in its details.
            if fields[key] and _UNKNOWN.search(key) and not (thinking and key == "reasoning_details"):
                raise UsageError(f"the message has {quoted(key)}, which replay does not read; {_REMEDY}")
        calls = list(fields.get("tool_calls") or ())
        calls += [{"type": "function", "function": call} for call in [fields.get("function_call")] if call]
        if not all(_is_call(call) for call in calls):
            raise UsageError("'tool_calls' must be a list of calls, each with a function that has name and arguments")
        content = "" if content is None else _checked({"content": refusal or content}, "the message")["content"]
        return cls("".join(thinking), refusal or content, calls) if thinking or content or refusal or calls else None

    def generated(self, request: ChatRequest, target: TokenizerOf, *, ended: bool) -> str:
        """The generated text, without the end-of-sequence token.

        Thinking and calls are rendered by the chat template, in which the prompt must be a prefix. Thinking that it
        leaves out is put between its markers.

        ``ended``: the response is complete; else nothing is rendered after its last character. Raises UsageError:
        neither is possible, so that the text is unknown.
        """
        if not (self.thinking or self.calls):
            return self.content
        if self.calls and request.requires_call:
            if len(self.calls) != 1 or self.thinking or self.content:
                raise UsageError(f"the text of calls that the request required is unknown; {_REMEDY}")
            return str(self.calls[0]["function"]["arguments"])
        if self.calls and not ended:
            raise UsageError(f"a truncated response with calls cannot be rendered by the chat template; {_REMEDY}")
        if request.messages is not None:
            for key in THINKING_KEYS if self.thinking else ("",):
                if (text := self._rendered(request, target, key, ended=ended)) is not None:
                    return text
        if not self.calls and (text := self._between_markers(request, target, ended=ended)) is not None:
            return text
        part = "thinking" if self.thinking else "calls"
        raise UsageError(
            f"the message has {part} in a field of its own, which the chat template of {printable(target.model)} does "
            f"not write, so the generated text is unknown; {_REMEDY}, or set --target to the model that generated it"
        )

    def _rendered(self, request: ChatRequest, target: TokenizerOf, key: str, *, ended: bool) -> str | None:
        message = {"role": "assistant", "content": self.content, **({key: self.thinking} if key else {})}
        message = _checked({**message, "tool_calls": list(self.calls)}, "the message")
        tokenizer = target.tokenizer
        prompt = request.render(tokenizer, generation_prompt=True)
        try:
            text = request.render(tokenizer, message)
        except CrossdraftError:  # a template that does not know the field may fail
            return None
        if not text.startswith(prompt) or request.render(tokenizer) == prompt:  # which would be in the text, too
            return None
        text, end = text[len(prompt) :], 0
        for part in self.texts(request):
            if (start := text.find(part, end)) < 0:
                return None
            end = start + len(part)
        if not ended:
            return text[:end]
        ends = [text.find(str(tokenizer.decode([token])), end) for token in target.eos_token_ids]
        return text[: min((place for place in ends if place >= 0), default=len(text.rstrip()))]

    def _between_markers(self, request: ChatRequest, target: TokenizerOf, *, ended: bool) -> str | None:
        """Thinking between the markers of the chat template, of which the prompt may have the first."""
        template = str(getattr(target.tokenizer, "chat_template", None) or "")
        markers = next((pair for pair in MARKERS["think"] if pair[1] in template), None)
        if markers is None:
            return None
        start, end = markers
        opened = request.messages is not None and (
            request.render(target.tokenizer, generation_prompt=True).rstrip().endswith(start)
        )
        # A server that keeps the line breaks around the markers returns the text as it was generated.
        exact = self.thinking.endswith("\n") or self.content.startswith("\n")
        text = ("" if opened else start if exact else f"{start}\n") + self.thinking
        if not self.content and not ended:
            return text
        return text + (end if exact else f"\n{end}\n\n") + self.content


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _checked(message: Mapping[str, Any], subject: str) -> dict[str, Any]:
    try:
        return template_message(message)
    except UsageError as error:
        raise UsageError(f"{subject}: {error}") from None
