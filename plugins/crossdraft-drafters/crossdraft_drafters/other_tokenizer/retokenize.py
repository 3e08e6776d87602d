"""Incremental conversion of a text from the target's tokens to the draft model's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .token_bytes import TokenBytes, complete

#: Maximum number of bytes of a piece of text, the unit of encoding.
LONGEST = 32
#: A piece ends before a space: no tokenizer joins it with the previous character, unless that is whitespace, too.
_END = re.compile(rb"(?<=[^ \t\r\n]) ")


class Retokenizer:
    """One sequence of the target in the draft model's tokens.

    The text is cut into pieces before spaces, and after `LONGEST` bytes at most; each complete piece is encoded by
    itself. So the draft model's tokens depend on the target's tokens only, not on how they arrived (in one prompt or
    step by step), and only those of the last piece can change.

    Args:
        target, draft: bytes of the target's tokens and of the draft model's.
        draft_ids: the draft model's id of each target token that both have.
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes, draft_ids: Mapping[int, int]):
        self._target, self._draft, self._draft_ids = target, draft, draft_ids
        self.count = 0  # tokens of the target so far
        self._ids: list[int] = []
        self._open, self._start = b"", True  # the last piece; True if it starts a text

    def add(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` of the target."""
        self.count += len(tokens)
        for token in tokens:
            piece = self._target.pieces.get(token)
            if piece is not None:
                self._open += piece
                self._cut()
                continue
            self._close(len(self._open))
            if (draft_id := self._draft_ids.get(token)) is not None:
                self._ids.append(draft_id)
            else:  # a special token, e.g. of a chat template: encode its name as text
                self._ids += self._draft.encode(self._target.specials.get(token, "").encode(), self._start)
            self._start = True

    def ids(self) -> tuple[list[int], int]:
        """Return the draft model's tokens, and the number of final ones."""
        return self._ids + self._draft.encode(self._open, self._start), len(self._ids)

    def retokenize(self, text: bytes) -> list[int]:
        """Encode ``text`` as a continuation in the target's tokens, without an incomplete last character."""
        text = text[: complete(text)]
        if not text:
            return []
        ids = self._target.encode(self._open + text, self._start)
        left = sum(len(self._target.pieces[id]) for id in ids) - len(text)
        first = 0
        while left > 0:
            left -= len(self._target.pieces[ids[first]])
            first += 1
        # Below 0, a token spans the boundary: encode the text by itself.
        return ids[first:] if left == 0 else self._target.encode(text, False)

    def _cut(self) -> None:
        while True:
            match = _END.search(self._open)
            if match is not None and match.start() <= LONGEST:
                self._close(match.start())
            elif len(self._open) > LONGEST:
                self._close(complete(self._open[:LONGEST]) or LONGEST)
            else:
                return

    def _close(self, end: int) -> None:
        if end:
            self._ids += self._draft.encode(self._open[:end], self._start)
            self._open, self._start = self._open[end:], False
