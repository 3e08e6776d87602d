"""What the tokens of a tokenizer spell, as bytes, and which tokens of two tokenizers are the same.

Tokens are compared by the bytes they stand for, never by their ids: byte-level vocabularies write a space as "Ġ", those
in the manner of SentencePiece as "▁", and single bytes as "<0x0A>". Special tokens spell nothing. They are the same
where they have the same role (the end of a sequence) or the same name.
"""

from __future__ import annotations

import re
from typing import Any

#: Texts whose tokens are remembered: most of what is encoded is words, which come again.
REMEMBERED = 16_384
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: A character that no token joins with what follows it, put before text that is not at the start of one.
_ANCHOR = "\n"


def _byte_alphabet() -> dict[str, int]:
    """The characters of byte-level vocabularies: printable ones stand for themselves, others are moved behind 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


def complete(text: bytes) -> int:
    """How many bytes of ``text`` there are before a character that has only begun at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if needed > back else len(text)
        if byte < 0x80:
            break
    return len(text)


class Spelling:
    """The tokens of a tokenizer of transformers as bytes.

    Attributes:
        pieces: the bytes of every ordinary token, by id.
        specials: the names of special tokens, by id: they spell nothing.
        size: one more than the largest id.
        faithful: whether text is its tokens' bytes, one after the other. Word-level and WordPiece tokenizers leave
            out where spaces are.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        vocab: dict[str, int] = tokenizer.get_vocab()
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        named = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.size = max(vocab.values(), default=-1) + 1
        self.specials = {id: token for token, id in vocab.items() if id in named}
        ordinary = {token: id for token, id in vocab.items() if id not in named and id not in added}
        marks = {mark: sum(token.startswith(mark) for token in ordinary) for mark in ("▁", "Ġ")}
        mark = max(marks, key=marks.__getitem__)
        spelt = {"▁": _pieces, "Ġ": _byte_level}[mark] if marks[mark] else _plain
        self.pieces = {id: piece for token, id in ordinary.items() if (piece := spelt(token))}
        # What was added stands in the text as it is written.
        self.pieces |= {id: token.content.encode() for id, token in added.items() if id not in named and token.content}
        self.faithful = spelt is not _plain or self._joins()
        self._id_of: dict[bytes, int] = {}
        for id in sorted(self.pieces):
            self._id_of.setdefault(self.pieces[id], id)
        self._longest = max(map(len, self._id_of), default=0)
        self._known: dict[tuple[bytes, bool], list[int]] = {}

    def id_of(self, piece: bytes) -> int | None:
        """The (first) token that spells ``piece``."""
        return self._id_of.get(piece)

    def spelt(self, ids: list[int]) -> bytes | None:
        """What ``ids`` spell; None if one of them is special."""
        found = [self.pieces.get(id) for id in ids]
        return None if None in found else b"".join(found)  # type: ignore[arg-type]

    def encode(self, text: bytes, start: bool) -> list[int]:
        """Tokens that spell ``text``: those of the tokenizer where they do, else the longest there are, byte by byte.

        Bytes that no token spells are left out. Of tokenizers that put a space before every text, tokens at the
        ``start`` of one may have it.
        """
        key = text, start
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            end = complete(text)
            self._known[key] = self._tokenized(text[:end], start) + self._longest_first(text[end:])
        return self._known[key]

    # -- pieces -----------------------------------------------------------------------------------------------

    def _tokenized(self, text: bytes, start: bool) -> list[int]:
        if not text:
            return []
        try:
            written = text.decode()
        except UnicodeDecodeError:
            return self._longest_first(text)
        ids = self._ids(written)
        if (spelt := self.spelt(ids)) == text or (start and spelt == b" " + text):
            return ids
        if text[:1] == b" " and self.spelt(ids := self._ids(written[1:])) == text:
            return ids
        ids, before = self._ids(_ANCHOR + written), _ANCHOR.encode()
        for n in range(1, min(3, len(ids)) + 1):
            if self.spelt(ids[:n]) in (before, b" " + before) and self.spelt(ids[n:]) == text:
                return ids[n:]
        return self._longest_first(text)

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception:  # what a tokenizer raises for characters that it has no token for is its own affair
            return []

    def _longest_first(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            for n in range(min(self._longest, len(text) - at), 0, -1):
                if (id := self._id_of.get(text[at : at + n])) is not None:
                    found.append(id)
                    break
            else:
                n = 1
            at += n
        return found

    def _joins(self) -> bool:
        """Whether decoding tokens puts nothing between them."""
        ids = [id for id in sorted(self.pieces) if self.pieces[id].isascii()][:8]
        said = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return said.encode() == self.spelt(ids)


def _byte_level(token: str, alphabet: dict[str, int] = _byte_alphabet()) -> bytes:  # noqa: B008 - made once
    found = [alphabet.get(character) for character in token]
    return b"" if None in found else bytes(found)  # type: ignore[arg-type]


def _pieces(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _plain(token: str) -> bytes:
    return token.encode()


def same_tokens(theirs: Spelling, mine: Spelling, roles: list[tuple[Any, Any]]) -> dict[int, int]:
    """My id of every one of their tokens that I have, too; no two have the same.

    Args:
        roles: pairs of special ids that mean the same, either of which may be None.
    """
    found = {a: b for a, b in roles if a is not None and b is not None}
    names = {name: id for id, name in mine.specials.items()}
    for id, name in theirs.specials.items():
        if id not in found and name in names:
            found[id] = names[name]
    for id in sorted(theirs.pieces):
        if (own := mine.id_of(theirs.pieces[id])) is not None:
            found.setdefault(id, own)
    seen: set[int] = set()
    return {id: own for id, own in found.items() if not (own in seen or seen.add(own))}
