"""Incremental detokenization: text in pieces of whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Replacement character, decoded from incomplete or invalid bytes.
REPLACEMENT = "\ufffd"


def decode_text(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    """The text of ``tokens``, with ``special`` tokens or without; spaces are not cleaned up, to keep earlier text."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


class Detokenizer:
    """The growing text of one output.

    A token is decoded together with the tokens since the previous piece of text, because many tokenizers write a token
    differently at the start of a text. The total time is linear in the length of the output.

    Args:
        tokenizer: any tokenizer of transformers.
        stop: strings that end the text, which is cut before the first of them.
        special: include special tokens.

    Attributes:
        text: all complete characters, including those that `piece` holds back.
        stopped: True once a stop string is complete.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, special: bool = False):
        self._tokenizer, self._stop, self._special = tokenizer, tuple(stop), special
        self._tokens: list[int] = []  # context of the next token: since the last piece of text but one
        self._prefix, self._prefix_tokens = "", 0  # their text that is already in `text`, and its tokens
        self._returned = 0  # characters returned by `piece`
        self.text, self.stopped = "", False

    def add(self, tokens: Sequence[int]) -> int:
        """Append tokens up to the one that completes a stop string; return their number."""
        for count, token in enumerate(tokens, 1):
            self._tokens.append(token)
            text = self._decode()
            if len(text) > len(self._prefix) and not text.endswith(REPLACEMENT):
                self._append(text[len(self._prefix) :])
                del self._tokens[: self._prefix_tokens]
                self._prefix_tokens = len(self._tokens)
                self._prefix = self._decode()
            if self.stopped:
                return count
        return len(tokens)

    def piece(self) -> str:
        """Return the new text, without a suffix that may become a stop string."""
        end = len(self.text) if self.stopped else len(self.text) - self._partial_stop()
        piece, self._returned = self.text[self._returned : end], max(end, self._returned)
        return piece

    def flush(self) -> str:
        """Return the rest at the end of the output, incomplete characters included."""
        if not self.stopped:
            text = self._decode()
            self._append(text[len(self._prefix) :])
        piece, self._returned = self.text[self._returned :], len(self.text)
        return piece

    def _decode(self) -> str:
        return decode_text(self._tokenizer, self._tokens, self._special)

    def _append(self, new: str) -> None:
        start = max(0, len(self.text) - max(map(len, self._stop), default=1) + 1)
        self.text += new
        matches = [match for stop in self._stop if (match := self.text.find(stop, start)) >= 0]
        if matches:
            self.text, self.stopped = self.text[: min(matches)], True

    def _partial_stop(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self._stop):
                return n
        return 0
