"""Recorded conversations as prompts: what the user asked, turn by turn.

Two forms are read: ShareGPT's ``{"conversations": [{"from": "human", "value": ...}, ...]}`` and that of chat APIs,
``{"messages": [{"role": "user", "content": ...}, ...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, quoted

#: The key of a row: the keys of a message.
FORMS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    "system": "system",
}


def turns_of(where: str, key: str, messages: Any) -> tuple[list[str], list[str] | None]:
    """What the user asked, and the answers that are recorded, if each turn has one.

    Messages of one side that follow each other become one, so does what a system message says and the question after
    it. What was answered before anybody asked, and messages without text, are left out.

    Args:
        where: the row stands, for errors; ``key``: one of `FORMS`.

    Raises:
        UsageError: no list of messages, or one that neither the user, the model nor the system says.
    """
    who, what = FORMS[key]
    if not isinstance(messages, list):
        raise UsageError(f"{where}: {key!r} must be a list of messages, not {quoted(messages)}")
    turns: list[str] = []
    answers: list[str] = []
    pending = ""  # of the system
    for number, message in enumerate(messages, 1):
        if not (isinstance(message, Mapping) and isinstance(message.get(what), str)):
            raise UsageError(f"{where}: message {number} of {key!r} must have texts {who!r} and {what!r}")
        role, text = _ROLES.get(str(message.get(who)).lower()), message[what].strip()
        if role is None:
            raise UsageError(
                f"{where}: message {number} of {key!r} is {who} {quoted(message.get(who))}; "
                "user (human), assistant (gpt) and system are read"
            )
        if not text:
            continue
        if role == "system":
            pending = _joined(pending, text)
        elif role == "user":
            text, pending = _joined(pending, text), ""
            if len(turns) > len(answers):
                turns[-1] = _joined(turns[-1], text)
            else:
                turns.append(text)
        elif turns and len(answers) == len(turns):
            answers[-1] = _joined(answers[-1], text)
        elif turns:
            answers.append(text)
    return turns, answers if turns and len(answers) == len(turns) else None


def _joined(first: str, then: str) -> str:
    return f"{first}\n\n{then}" if first else then
