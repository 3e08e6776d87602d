"""A text in the tokens of one model, told again in those of another, while it grows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .token_bytes import Spelling, complete

#: Most bytes of a piece of text that is encoded by itself.
LONGEST = 32
#: Where a piece may end: no tokenizer joins a space with the character before it, unless that is one, too.
_END = re.compile(rb"(?<=[^ \t\r\n]) ")


class Retelling:
    """One sequence of the target in the draft model's tokens.

    The text is cut into pieces before spaces, and after `LONGEST` bytes at most; each is encoded by itself, once it is
    over for good. So the draft model's tokens follow from the target's alone, however these came (in one prompt,
    or step after step), and all but those of the last piece never change.

    Args:
        theirs, mine: spellings of the target's tokens and of the draft model's.
        twins: the draft model's id of target tokens that both have.
    """

    def __init__(self, theirs: Spelling, mine: Spelling, twins: Mapping[int, int]):
        self._theirs, self._mine, self._twins = theirs, mine, twins
        self.told = 0  # tokens of the target
        self._ids: list[int] = []
        self._open, self._start = b"", True  # the last piece, and whether it stands at the start of a text

    def add(self, tokens: Sequence[int]) -> None:
        """The target's text goes on with ``tokens``."""
        self.told += len(tokens)
        for token in tokens:
            piece = self._theirs.pieces.get(token)
            if piece is not None:
                self._open += piece
                self._cut()
                continue
            self._close(len(self._open))
            if (twin := self._twins.get(token)) is not None:
                self._ids.append(twin)
            else:  # the marks of a conversation, say: what stands there is read as it is written
                self._ids += self._mine.encode(self._theirs.specials.get(token, "").encode(), self._start)
            self._start = True

    def ids(self) -> tuple[list[int], int]:
        """The draft model's tokens, and how many of them will never change."""
        return self._ids + self._mine.encode(self._open, self._start), len(self._ids)

    def respelt(self, text: bytes) -> list[int]:
        """The target's tokens for ``text``, should it follow; without a character that has only begun at its end."""
        text = text[: complete(text)]
        if not text:
            return []
        ids = self._theirs.encode(self._open + text, self._start)
        left = sum(len(self._theirs.pieces[id]) for id in ids) - len(text)
        first = 0
        while left > 0:
            left -= len(self._theirs.pieces[ids[first]])
            first += 1
        # Below 0, a token would reach from what stands there into the text: then the text is encoded by itself.
        return ids[first:] if left == 0 else self._theirs.encode(text, False)

    def _cut(self) -> None:
        while True:
            found = _END.search(self._open)
            if found is not None and found.start() <= LONGEST:
                self._close(found.start())
            elif len(self._open) > LONGEST:
                self._close(complete(self._open[:LONGEST]) or LONGEST)
            else:
                return

    def _close(self, end: int) -> None:
        if end:
            self._ids += self._mine.encode(self._open[:end], self._start)
            self._open, self._start = self._open[end:], False
