"""Constraints of the running sequences: masks of a step's logits, and the state of each grammar.

The target's logits are masked at the root and at every node, before p is computed, by the state of the grammar on the
path to that node. So p is the constrained distribution, and a verifier that is lossless for p is lossless for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from ..contracts.constraint import Grammar, Matcher, permitted_next, walk
from ..contracts.draft import DraftLists
from ..errors import ContractError
from ..util.tensors import unpacked

#: ``[B, N, ceil(V / 8)]`` uint8, a bit for each token.
Bits = np.ndarray


def no_bits(rows: int, nodes: int, vocab_size: int) -> Bits:
    return np.zeros((rows, nodes, -(-vocab_size // 8)), dtype=np.uint8)


def pack(tokens: np.ndarray) -> np.ndarray:
    """The bits of ``tokens [V]`` bool."""
    return np.packbits(tokens, bitorder="little")


def mask_logits(logits: Tensor, forbidden: Bits) -> Tensor:
    """``logits [B, N, V]`` with -inf at the ``forbidden`` tokens; does not wait for the device."""
    return logits.masked_fill(unpacked(forbidden, logits.shape[-1], logits.device), -math.inf)


class Constraints:
    """The matchers of a decoder's slots.

    Attributes:
        matchers: by constrained slot; each is at the end of the committed tokens, except inside of a method.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self.matchers: dict[int, Matcher] = {}
        self._grammars: dict[int, Grammar] = {}
        self._eos: dict[int, list[int]] = {}
        #: Slots and paths of a step after which no token is permitted, and the failure of the matcher, if it is one.
        self._dead_ends: dict[tuple[int, ...], str | None] = {}

    def start(self, row: int, grammar: Grammar, eos: Collection[int]) -> None:
        """Constrain the sequence in slot ``row``; ``eos`` is permitted only if the grammar accepts the response."""
        self.matchers[row], self._grammars[row] = grammar.matcher(), grammar
        self._eos[row] = [token for token in eos if 0 <= token < self._vocab_size]

    def free(self, row: int) -> None:
        for state in (self.matchers, self._grammars, self._eos):
            state.pop(row, None)

    def grammar(self, row: int) -> Grammar | None:
        return self._grammars.get(row)

    def eos(self, row: int) -> Sequence[int]:
        return self._eos[row]

    def implied(self, row: int, limit: int) -> list[int]:
        if (matcher := self.matchers.get(row)) is None or limit < 1:
            return []
        tokens, eos, count = matcher.implied(limit), self._eos[row], 0
        while count < len(tokens) and matcher.advance(tokens[count]):
            count += 1
        ends = count < limit and matcher.accepting and len(eos) == 1 and permitted_next(matcher, eos).sum() == 1
        matcher.rollback(count)
        return tokens[:count] + (eos if ends else [])

    def forbidden(self, nodes: DraftLists) -> Bits:
        """Bits ``[B, N + 1]`` of the tokens that are not permitted after the root and each node of a draft.

        No bit is set after nodes below a token that is not permitted (its p is 0) or that ends the sequence (they are
        cut), and after nodes that no token may follow, see `advance`.
        """
        tokens, parents, valid = nodes
        bits = no_bits(len(tokens), len(tokens[0]) + 1, self._vocab_size)
        self._dead_ends.clear()
        for row, matcher in self.matchers.items():
            eos = self._eos[row]
            for node in walk(matcher, eos, tokens[row], parents[row], valid[row]):
                following = permitted_next(matcher, eos)
                if following.any():
                    bits[row, node + 1] = pack(~following)
                else:
                    path: tuple[int, ...] = ()
                    while node >= 0:
                        path, node = (tokens[row][node], *path), parents[row][node]
                    self._dead_ends[row, *path] = matcher.failure
        return bits

    def advance(self, row: int, tokens: Sequence[int], place: str, verifier: str) -> str | None:
        """Append the tokens of a step up to an end-of-sequence token; an error message if the response cannot go on.

        Args:
            place: sequence and position, for messages.

        Raises:
            ContractError: the verifier emitted a token that is not permitted.
        """
        if (matcher := self.matchers.get(row)) is None:
            return None
        eos = self._eos[row]
        for i, token in enumerate(tokens):
            if (row, *tokens[:i]) in self._dead_ends:
                if (failure := self._dead_ends[row, *tokens[:i]]) is not None:
                    return _failed(place, failure)
                return (
                    f"{place}: the constraint permits no token after {i} tokens of this step (a dead end); use a "
                    "constraint that the target's tokens can complete"
                )
            if token in eos and matcher.accepting:
                break
            if token in eos or not 0 <= token < self._vocab_size or not matcher.advance(token):
                if matcher.failure is not None:
                    return _failed(place, matcher.failure)
                raise ContractError(
                    f"{verifier} emitted the token {token}, which the constraint does not permit ({place}); use a "
                    "lossless verifier"
                )
        return None


def _failed(place: str, failure: str) -> str:
    return f"{place}: the constraint failed: {failure}; simplify it"
