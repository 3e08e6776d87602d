"""Drafters that need models, replayed side by side: what is computed once is handed to everyone who asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import tee

from ..response import Response
from .drafter_walk import Walked
from .forced_draft import Forced
from .forcing import Asked, drafted, together
from .lazy_models import Target


class SideBySide:
    """Streams of what drafters would have drafted along the same responses.

    All of them are to be asked for before one is read, and all read the same texts: those that the first one is given.
    """

    def __init__(self, target: Target):
        self.target = target
        self._asked: list[Asked] = []
        self._streams = 0
        self._forced: list[Iterator[list[Forced]]] = []
        self._drawn: dict[int, list[Iterator[Walked]]] = {}

    def add(self, asked: Asked) -> int:
        """A number for a drafter."""
        self._asked.append(asked)
        return len(self._asked) - 1

    def forced(self, one: int) -> Callable[[Iterable[Response]], Iterator[Forced]]:
        """A stream of a drafter's `Forced`, one for each text; there may be several of a drafter."""
        mine = self._streams
        self._streams += 1

        def along(texts: Iterable[Response]) -> Iterator[Forced]:
            if not self._forced:
                made = together(self._asked, list(texts), self.target.make, without=self.target.without)
                self._forced = list(tee(made, self._streams))
            del texts
            stream, self._forced[mine] = self._forced[mine], iter(())
            for found in stream:
                yield found[one]

        return along

    def drafted(self, one: int) -> Callable[[Iterable[Response]], Iterator[Walked]]:
        """Streams of what it drafts when it draws for itself, made once for all who read it."""

        def along(texts: Iterable[Response]) -> Iterator[Walked]:
            # Who reads first makes it, and leaves a copy for whoever comes later.
            if one not in self._drawn:
                asked, target = self._asked[one], self.target
                made = drafted(asked.drafter, list(texts), target.make, depth=asked.depth, without=target.without)
                self._drawn[one] = [made]
            del texts
            *_, last = self._drawn[one]
            mine, self._drawn[one][-1] = tee(last)
            yield from mine

        return along
