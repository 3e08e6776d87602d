"""Segments of responses: thinking, tool calls, code, and the answer around them.

A segment is a span of the text, special tokens included; a token belongs to it if they overlap. Markers of thinking and
tool calls are those that the model's chat template or vocabulary contains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import UnknownNameError, UsageError, quoted
from ..util.patterns import SECONDS, compile_pattern
from .tokenizer import TokenizerOf, decode_tokens

#: Title of the tokens outside of all segments.
ANSWER = "answer"
#: Opening and closing marker of a segment, as chat templates write them.
MARKERS = {
    "think": (
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel|>analysis", "<|end|>"),
    ),
    "tool": (
        ("<tool_call>", "</tool_call>"),
        ("<function_call>", "</function_call>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("<|channel|>commentary", "<|call|>"),
        ("<|python_tag|>", "<|eom_id|>"),
        ("[TOOL_CALLS]", "</s>"),
    ),
}
#: A fenced block, by CommonMark's rules for its first and last line; an unfinished one ends with the text.
_CODE = r"^[ \t]*(?P<fence>`{3,}|~{3,})[^`\n]*$.*?(?:^[ \t]*(?P=fence)[`~]*[ \t\r]*$|\Z)"
_NAMED = re.compile(r"([A-Za-z][\w-]{0,31})=(.+)", re.DOTALL)
#: Tokens of a prompt in which an opening marker is searched.
_TAIL = 16


@dataclass(frozen=True)
class Segments:
    """Finds the segment of each token of a response.

    Attributes:
        names: titles, `ANSWER` last.
        patterns: ``regex.Pattern`` of the text of each segment but the answer; a token in several belongs to the first.
        openings: markers with which a prompt may end, so that the response begins inside of the segment.
        tokenizer: of the target.
    """

    names: tuple[str, ...]
    patterns: tuple[Any, ...]
    openings: tuple[str, ...]
    tokenizer: Any

    @classmethod
    def parse(cls, requests: Sequence[str], target: TokenizerOf) -> Segments:
        """Parse ``think``, ``tool``, ``code`` or ``NAME=REGEX``, the first that matches wins.

        Raises:
            UsageError: an unknown or duplicate name, an invalid regular expression, or a model without markers.
        """
        patterns: dict[str, Any] = {}
        openings: list[str] = []
        for text in requests:
            match = _NAMED.fullmatch(text)
            name = match[1] if match else text
            if name in (ANSWER, *patterns):
                raise UsageError(f"--segment {quoted(text)}: the name {name!r} is taken; choose another one")
            if match:
                patterns[name] = _compiled(match[2], text)
            elif name == "code":
                patterns[name] = compile_pattern(_CODE, lines=True)
            elif name in MARKERS:
                pairs = _markers(name, target)
                patterns[name] = compile_pattern(
                    "|".join(rf"{re.escape(start)}.*?(?:{re.escape(end)}|\Z)" for start, end in pairs), lines=True
                )
                openings += [start for start, _ in pairs]
            else:
                hint = "Or give NAME=REGEX, a regular expression of the text."
                raise UnknownNameError.among("segment", name, [*MARKERS, "code"], hint)
        return cls((*patterns, ANSWER), tuple(patterns.values()), tuple(openings), target.tokenizer)

    def of(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """The name of the segment of each token of a response. Raises UsageError if a pattern takes too long."""
        texts = [self._opened(prompt), *decode_tokens(self.tokenizer, tokens)]
        text, ends, end = "".join(texts), [], 0
        for part in texts:
            end += len(part)
            ends.append(end)
        labels = [self.names.index(ANSWER)] * len(text)
        for number, pattern in reversed(list(enumerate(self.patterns))):
            try:
                for match in pattern.finditer(text, timeout=SECONDS):
                    labels[match.start() : match.end()] = [number] * (match.end() - match.start())
            except (TimeoutError, MemoryError):
                raise UsageError(
                    f"--segment {self.names[number]}: its expression takes more than {SECONDS} s for a response "
                    f"of {len(text)} characters; simplify it (nested repetitions take exponential time)"
                ) from None
        names = []
        for start, end in pairwise(ends):
            # The characters of a token that ends inside a character are those of the next one.
            overlap = labels[start:end] or labels[start : start + 1] or labels[-1:] or [len(self.names) - 1]
            names.append(self.names[min(overlap)])
        return names

    def _opened(self, prompt: Sequence[int]) -> str:
        """The opening marker with which a prompt ends, or an empty string."""
        if not self.openings:
            return ""
        tail = "".join(decode_tokens(self.tokenizer, prompt[-_TAIL:])).rstrip()
        return max((marker for marker in self.openings if tail.endswith(marker)), key=len, default="")


def _markers(name: str, target: TokenizerOf) -> list[tuple[str, str]]:
    """Markers that the chat template or vocabulary contains. Raises UsageError without any."""
    template = getattr(target.tokenizer, "chat_template", None)
    added = getattr(target.tokenizer, "get_added_vocab", dict)()
    text = template if isinstance(template, str) else str(template or "")
    pairs = [pair for pair in MARKERS[name] if pair[0] in added or pair[0] in text]
    if not pairs:
        raise UsageError(
            f"--segment {name}: the chat template of {target.model} does not contain a known marker; give the text as "
            f"--segment '{name}=REGEX'"
        )
    return pairs


def _compiled(pattern: str, request: str) -> Any:
    try:
        return compile_pattern(pattern, lines=True)
    except ValueError as error:
        raise UsageError(
            f"--segment {quoted(request)} is not a valid regular expression: {error}; correct it"
        ) from None
