"""The bytes of a tokenizer's tokens, and the shared tokens of two tokenizers.

Tokens are compared by their bytes, not by their ids: byte-level vocabularies write a space as "Ġ", SentencePiece-like
ones as "▁", and single bytes as "<0x0A>". Special tokens have no bytes; they are shared if they have the same role (end
of sequence) or the same name.
"""

from __future__ import annotations

import re
from typing import Any

#: Size of the cache of encoded texts, mostly words, which recur.
REMEMBERED = 16_384
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Prefix of text that does not start a document; no token joins it with the next character.
_ANCHOR = "\n"


def _byte_alphabet() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable bytes map to themselves, others to characters above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(other)}}


def complete(text: bytes) -> int:
    """Number of bytes of ``text`` without an incomplete UTF-8 character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if needed > back else len(text)
        if byte < 0x80:
            break
    return len(text)


class TokenBytes:
    """The tokens of a transformers tokenizer as bytes.

    Attributes:
        pieces: bytes of every ordinary token, by id.
        specials: names of special tokens, by id.
        size: one more than the largest id.
        faithful: True if a text is the concatenation of its tokens' bytes. Word-level and WordPiece tokenizers omit
            spaces.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The order of `get_vocab` differs from call to call.
        vocab = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        named = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.size = max(vocab.values(), default=-1) + 1
        self.specials = {id: token for token, id in vocab.items() if id in named}
        ordinary = {token: id for token, id in vocab.items() if id not in named and id not in added}
        marks = {mark: sum(token.startswith(mark) for token in ordinary) for mark in ("▁", "Ġ")}
        mark = max(marks, key=marks.__getitem__)
        decode = {"▁": _pieces, "Ġ": _byte_level}[mark] if marks[mark] else _plain
        self.pieces = {id: piece for token, id in ordinary.items() if (piece := decode(token))}
        # Added tokens are literal text.
        self.pieces |= {id: token.content.encode() for id, token in added.items() if id not in named and token.content}
        self.faithful = decode is not _plain or self._is_concatenation()
        self._id_of: dict[bytes, int] = {}
        for id in sorted(self.pieces):
            self._id_of.setdefault(self.pieces[id], id)
        self._longest = max(map(len, self._id_of), default=0)
        self._cache: dict[tuple[bytes, bool], list[int]] = {}

    def id_of(self, piece: bytes) -> int | None:
        """First token with the bytes ``piece``, or None."""
        return self._id_of.get(piece)

    def decode(self, ids: list[int]) -> bytes | None:
        """Bytes of ``ids``; None if one of them is special."""
        pieces = [self.pieces.get(id) for id in ids]
        return None if None in pieces else b"".join(pieces)  # type: ignore[arg-type]

    def encode(self, text: bytes, start: bool) -> list[int]:
        """Encode ``text`` exactly: by the tokenizer if its tokens decode to ``text``, else by greedy longest match.

        Bytes without a token are omitted. At the ``start`` of a text the tokens may have an additional leading space.
        """
        key = text, start
        if key not in self._cache:
            if len(self._cache) >= REMEMBERED:
                self._cache.clear()
            end = complete(text)
            self._cache[key] = self._tokenized(text[:end], start) + self._longest_first(text[end:])
        return self._cache[key]

    # -- pieces -----------------------------------------------------------------------------------------------

    def _tokenized(self, text: bytes, start: bool) -> list[int]:
        if not text:
            return []
        try:
            string = text.decode()
        except UnicodeDecodeError:
            return self._longest_first(text)
        ids = self._ids(string)
        if (decoded := self.decode(ids)) == text or (start and decoded == b" " + text):
            return ids
        if text[:1] == b" " and self.decode(ids := self._ids(string[1:])) == text:
            return ids
        ids, anchor = self._ids(_ANCHOR + string), _ANCHOR.encode()
        for n in range(1, min(3, len(ids)) + 1):
            if self.decode(ids[:n]) in (anchor, b" " + anchor) and self.decode(ids[n:]) == text:
                return ids[n:]
        return self._longest_first(text)

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception:  # tokenizers raise various errors for characters without a token
            return []

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            for n in range(min(self._longest, len(text) - start), 0, -1):
                if (id := self._id_of.get(text[start : start + n])) is not None:
                    ids.append(id)
                    break
            else:
                n = 1
            start += n
        return ids

    def _is_concatenation(self) -> bool:
        """True if the tokenizer decodes tokens by concatenation."""
        ids = [id for id in sorted(self.pieces) if self.pieces[id].isascii()][:8]
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text.encode() == self.decode(ids)


def _byte_level(token: str, alphabet: dict[str, int] = _byte_alphabet()) -> bytes:  # noqa: B008 - made once
    values = [alphabet.get(character) for character in token]
    return b"" if None in values else bytes(values)  # type: ignore[arg-type]


def _pieces(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _plain(token: str) -> bytes:
    return token.encode()


def shared_tokens(target: TokenBytes, draft: TokenBytes, roles: list[tuple[Any, Any]]) -> dict[int, int]:
    """Draft id of every target token that both have; an injective map.

    Args:
        roles: pairs of special ids with the same role, either of which may be None.
    """
    ids = {a: b for a, b in roles if a is not None and b is not None}
    names = {name: id for id, name in draft.specials.items()}
    for id, name in target.specials.items():
        if id not in ids and name in names:
            ids[id] = names[name]
    for id in sorted(target.pieces):
        if (own := draft.id_of(target.pieces[id])) is not None:
            ids.setdefault(id, own)
    seen: set[int] = set()
    return {id: own for id, own in ids.items() if not (own in seen or seen.add(own))}
