"""From what is said to token ids: the one way in which conversations are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode(tokenizer: Any, turns: Sequence[str], answers: Sequence[str] = (), chat: bool | None = None) -> list[int]:
    """Token ids of a conversation that waits for the model's answer to the last of `turns`.

    With the tokenizer's chat template (``chat``; by default if it has one), otherwise the plain text, turns and answers
    on lines of their own.
    """
    if bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat:
        messages = []
        for turn, answer in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    pieces = [piece for pair in zip(turns, [*answers, ""], strict=True) for piece in pair][:-1]
    return list(tokenizer("\n".join(pieces))["input_ids"])
