"""Model passes that are shared by several drafters of a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import tee

from ..response import Response
from .draft_scores import DraftScores
from .draft_traces import DraftTrace
from .lazy_models import Target
from .scoring import ScoringRequest, sample_drafts, score_drafters


class SharedPasses:
    """Streams of scores of several drafters on the same responses.

    All streams must be created before the first is read, and all use the texts passed to the first.
    """

    def __init__(self, target: Target):
        self.target = target
        self._requests: list[ScoringRequest] = []
        self._streams = 0
        self._scores: list[Iterator[list[DraftScores]]] = []
        self._samples: dict[int, list[Iterator[DraftTrace]]] = {}

    def add(self, request: ScoringRequest) -> int:
        """Add a drafter and return its index."""
        self._requests.append(request)
        return len(self._requests) - 1

    def scores(self, index: int) -> Callable[[Iterable[Response]], Iterator[DraftScores]]:
        """Return a stream of a drafter's `DraftScores`, one per text; it may be called repeatedly."""
        stream_index = self._streams
        self._streams += 1

        def stream_of(texts: Iterable[Response]) -> Iterator[DraftScores]:
            if not self._scores:
                created = score_drafters(self._requests, list(texts), self.target.make, without=self.target.without)
                self._scores = list(tee(created, self._streams))
            del texts
            stream, self._scores[stream_index] = self._scores[stream_index], iter(())
            for batch in stream:
                yield batch[index]

        return stream_of

    def samples(self, index: int) -> Callable[[Iterable[Response]], Iterator[DraftTrace]]:
        """Return a stream of a drafter's sampled drafts, computed once for all readers."""

        def stream_of(texts: Iterable[Response]) -> Iterator[DraftTrace]:
            # The first reader creates the stream and leaves a copy for later ones.
            if index not in self._samples:
                request, target = self._requests[index], self.target
                created = sample_drafts(
                    request.drafter, list(texts), target.make, depth=request.depth, without=target.without
                )
                self._samples[index] = [created]
            del texts
            *_, last = self._samples[index]
            stream, self._samples[index][-1] = tee(last)
            yield from stream

        return stream_of
