"""Grammars over the tokens of toys: automata that count tokens, so that what they permit depends on the whole text."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

#: ``transitions[state][token]`` is the next state; tokens without one are not permitted.
Transitions = dict[int, dict[int, int]]

COUNTING: Transitions = {0: {0: 1, 1: 2}, 1: {0: 0, 1: 2, 2: 1}, 2: {1: 1, 2: 0}}
TWO_TOKENS: Transitions = {0: {0: 1, 1: 2}, 1: {1: 0}, 2: {0: 2, 1: 1}}


class Automaton:
    """A grammar; ``final`` states accept.

    A ``lenient`` one advances over every token (to state 0 if it is not permitted), so that a mask of the wrong node
    changes the distribution instead of raising an error.
    """

    mask_drafts = False

    def __init__(self, transitions: Transitions, vocab_size: int, final: Collection[int] = (), lenient: bool = False):
        self.transitions, self.vocab_size, self.final, self.lenient = transitions, vocab_size, final, lenient

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(self)


class AutomatonMatcher:
    """A matcher of an `Automaton`."""

    failure = None

    def __init__(self, automaton: Automaton):
        self.automaton, self.states = automaton, [0]

    @property
    def accepting(self) -> bool:
        return self.states[-1] in self.automaton.final

    def advance(self, token: int) -> bool:
        following = self.automaton.transitions[self.states[-1]]
        if token not in following and not self.automaton.lenient:
            return False
        self.states.append(following.get(token, 0))
        return True

    def rollback(self, count: int) -> None:
        assert 0 <= count < len(self.states)
        del self.states[len(self.states) - count :]

    def permitted(self) -> np.ndarray:
        permitted = np.zeros(self.automaton.vocab_size, dtype=bool)
        permitted[list(self.automaton.transitions[self.states[-1]])] = True
        return permitted

    def implied(self, limit: int) -> list[int]:
        tokens, state = [], self.states[-1]
        while len(tokens) < limit and len(self.automaton.transitions[state]) == 1:
            (token, state) = next(iter(self.automaton.transitions[state].items()))
            tokens.append(token)
        return tokens


#: An automaton for each vocabulary size.
automaton_of: Callable[[int], Transitions] = {2: TWO_TOKENS, 3: COUNTING}.__getitem__
