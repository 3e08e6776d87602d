"""From tokens to text while they come: pieces that split no character, and strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What a decoder puts where bytes are no character, or not yet.
_BROKEN = "\ufffd"


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of an answer: without special tokens, and with every space that the tokens have.

    Tidying spaces up would change text that was given away already.
    """
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Text:
    """The text of one answer, which grows by tokens.

    A token is decoded with those that stand before it since the last text, because many a tokenizer writes a token
    otherwise at the start of a text; so an answer costs time in proportion to its length.

    Args:
        tokenizer: any tokenizer of transformers.
        stop: strings that end the text. It is cut before the first of them.

    Attributes:
        text: what is known of it, held back or not; characters that are not complete are missing.
        stopped: whether a stop string was said.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []  # since the last text but one
        self._known, self._read = "", 0  # their text that is in `text`, and how many tokens that is
        self._given = 0
        self.text, self.stopped = "", False

    def add(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the one that completes a stop string; how many were taken."""
        for taken, token in enumerate(tokens, 1):
            self._tokens.append(token)
            found = decoded(self._tokenizer, self._tokens)
            if len(found) > len(self._known) and not found.endswith(_BROKEN):
                self._append(found[len(self._known) :])
                del self._tokens[: self._read]
                self._read = len(self._tokens)
                self._known = decoded(self._tokenizer, self._tokens)
            if self.stopped:
                return taken
        return len(tokens)

    def piece(self) -> str:
        """Text that was not given away yet, but for an end of it that may become a stop string."""
        end = len(self.text) if self.stopped else len(self.text) - self._beginning()
        piece, self._given = self.text[self._given : end], max(end, self._given)
        return piece

    def flush(self) -> str:
        """The rest, where nothing follows: bytes that became no character too."""
        if not self.stopped:
            found = decoded(self._tokenizer, self._tokens)
            self._append(found[len(self._known) :])
        piece, self._given = self.text[self._given :], len(self.text)
        return piece

    def _append(self, new: str) -> None:
        start = max(0, len(self.text) - max(map(len, self._stop), default=1) + 1)
        self.text += new
        places = [place for stop in self._stop if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _beginning(self) -> int:
        """How long an end of the text could be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self._stop):
                return n
        return 0
