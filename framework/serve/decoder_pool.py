"""What a server offers: a pair over one target, and a decoder of it for each law that requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from ..contracts.models import LoadedModel
from ..contracts.sampling import Sampling
from ..engine.decoder import Decoder

#: Laws beside the server's own whose decoders are kept; each has slots of its own, and a drafter with its memory.
MOST_OTHERS = 3


@dataclass
class Served:
    """What a server offers, to answers of up to ``most`` tokens in slots of ``length``.

    Attributes:
        sampling: the law of requests that name none.
        check: raises UsageError where drafter and rule cannot run together at a law; builds nothing.
        build: makes the decoder of a law.
        decoder: that of the server's own law, which is never dropped.
    """

    target: LoadedModel
    sampling: Sampling
    check: Callable[[Sampling], object]
    build: Callable[[Sampling], Decoder]
    most: int
    length: int
    title: str
    decoder: Decoder = field(init=False)
    _others: dict[Sampling, Decoder] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.decoder = self.build(self.sampling)

    def decoder_of(self, law: Sampling, busy: Container[Sampling] = ()) -> Decoder:
        """The decoder of a law, made now if it is not among those used last; for the decoding thread only.

        ``busy``: laws whose decoders run, fewer than `MOST_OTHERS` beside the server's own; those are not dropped.
        """
        if law == self.sampling:
            return self.decoder
        found = self._others.pop(law, None)
        if found is None:
            while len(self._others) >= MOST_OTHERS:  # before another takes their memory
                del self._others[next(other for other in self._others if other not in busy)]
            found = self.build(law)
        self._others[law] = found
        return found
