"""Recorded conversations as prompts: the turns of the user.

Two formats are supported: ShareGPT's ``{"conversations": [{"from": "human", "value": ...}, ...]}`` and that of chat
APIs, ``{"messages": [{"role": "user", "content": ...}, ...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, quoted

#: Key of a row -> keys of role and text in its messages.
FORMS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    "system": "system",
}


def turns_of(place: str, key: str, messages: Any) -> tuple[list[str], list[str] | None]:
    """Return the turns of the user, and the recorded answers if each turn has one.

    Consecutive messages of the same role are joined, as are a system message and the user message after it. Answers
    before the first turn and empty messages are skipped.

    Args:
        place: place of the row, for errors.
        key: one of `FORMS`.

    Raises:
        UsageError: `messages` is not a list of messages, or a message has an unknown role.
    """
    role_key, text_key = FORMS[key]
    if not isinstance(messages, list):
        raise UsageError(f"{place}: {key!r} must be a list of messages, not {quoted(messages)}")
    turns: list[str] = []
    answers: list[str] = []
    pending = ""  # system message
    for number, message in enumerate(messages, 1):
        if not (isinstance(message, Mapping) and isinstance(message.get(text_key), str)):
            raise UsageError(
                f"{place}: message {number} of {key!r} must be a mapping with texts {role_key!r} and {text_key!r}"
            )
        role, text = _ROLES.get(str(message.get(role_key)).lower()), message[text_key].strip()
        if role is None:
            raise UsageError(
                f"{place}: message {number} of {key!r} is {role_key} {quoted(message.get(role_key))}; "
                "the role must be user (human), assistant (gpt) or system"
            )
        if not text:
            continue
        if role == "system":
            pending = _append(pending, text)
        elif role == "user":
            text, pending = _append(pending, text), ""
            if len(turns) > len(answers):
                turns[-1] = _append(turns[-1], text)
            else:
                turns.append(text)
        elif turns and len(answers) == len(turns):
            answers[-1] = _append(answers[-1], text)
        elif turns:
            answers.append(text)
    return turns, answers if turns and len(answers) == len(turns) else None


def _append(text: str, addition: str) -> str:
    return f"{text}\n\n{addition}" if text else addition
