"""From what is said to token ids: the one way in which conversations are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ModelError, UsageError, first_line, printable
from ..util.input_files import BROKEN, flaw

#: Characters for each token that fits, beyond which a text is tokenized in parts: more than most tokens have.
_CHARACTERS = 16


def encode(tokenizer: Any, turns: Sequence[str], answers: Sequence[str] = (), chat: bool | None = None) -> list[int]:
    """Token ids of a conversation that waits for the model's answer to the last of `turns`.

    With the tokenizer's chat template (``chat``; by default if it has one), otherwise the plain text, turns and answers
    on lines of their own.

    Raises:
        UsageError: a text that no tokenizer reads (NUL, half of a surrogate pair).
        ModelError: the model's template or tokenizer fails.
    """
    for turn in turns:
        if reason := flaw(turn, BROKEN):
            raise UsageError(f"a text holds {reason}, which no tokenizer reads")
    if bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat:
        messages = []
        for turn, answer in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return encode_messages(tokenizer, messages)
    pieces = [piece for pair in zip(turns, [*answers, ""], strict=True) for piece in pair][:-1]
    return _ids(tokenizer, "\n".join(pieces))


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]], most: int | None = None) -> list[int]:
    """Token ids of messages (``role``, ``content``, ..) by the tokenizer's chat template, where the model is to answer.

    ``most``: see `encode_text`. Raises ModelError: there is no template, or it fails.
    """
    with _explained(tokenizer, "chat template"):
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return _bounded(tokenizer, text, most, add_special_tokens=False)


def encode_text(tokenizer: Any, text: str, *, special: bool, most: int | None = None) -> list[int]:
    """Token ids of a text; ``special``: with what the tokenizer puts before it. Raises as `encode` does.

    ``most``: raise UsageError, without tokenizing all of it, for a text that has more tokens by far.
    """
    if reason := flaw(text, BROKEN):
        raise UsageError(f"a text holds {reason}, which no tokenizer reads")
    return _bounded(tokenizer, text, most, add_special_tokens=special)


def _bounded(tokenizer: Any, text: str, most: int | None, **options: Any) -> list[int]:
    """Token ids of a text that is not far longer than ``most`` tokens.

    Longer and longer beginnings of a long text are tokenized first: one with twice as many tokens settles it. A bound
    by the longest token would be wrong for tokenizers that drop blanks or read a word they do not know as one token.
    """
    size = _CHARACTERS * (most or 0)
    while 0 < size < len(text):
        if len(_ids(tokenizer, text[:size], **options)) > 2 * (most or 0):
            raise UsageError(f"a text of {len(text)} characters has more than the {most} tokens that fit")
        size *= 2
    return _ids(tokenizer, text, **options)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    with _explained(tokenizer, "tokenizer"):
        return [int(one) for one in tokenizer(text, **options)["input_ids"]]


@contextmanager
def _explained(tokenizer: Any, what: str) -> Iterator[None]:
    """Turn what a model's own template or tokenizer raises into one sentence."""
    try:
        yield
    except Exception as error:
        where = printable(str(getattr(tokenizer, "name_or_path", "") or "the model"))
        raise ModelError(f"the {what} of {where} fails: {first_line(error)}") from error
