"""The decoders of a server: one drafter-verifier pair over one target, one decoder per set of sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from crossdraft import LoadedModel, Sampling
from crossdraft.models import Decoder

#: Decoders kept besides the default one. Each has its own slots (KV cache) and its own drafter state.
MAX_EXTRA_DECODERS = 3


@dataclass
class DecoderPool:
    """An LRU cache of decoders, keyed by sampling parameters.

    Attributes:
        target: the target model.
        sampling: default sampling parameters of requests that set none.
        check: raises UsageError if the drafter and the verifier are incompatible at these sampling parameters.
        build: builds a decoder.
        max_new_tokens: upper limit of a response, in tokens.
        max_length: length of a slot, prompt and response, in tokens.
        title: the pair, as shown to users.
        decoder: the decoder of the default sampling parameters, which is never evicted.
    """

    target: LoadedModel
    sampling: Sampling
    check: Callable[[Sampling], object]
    build: Callable[[Sampling], Decoder]
    max_new_tokens: int
    max_length: int
    title: str
    decoder: Decoder = field(init=False)
    _extra: dict[Sampling, Decoder] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.decoder = self.build(self.sampling)

    def get(self, sampling: Sampling, busy: Container[Sampling] = ()) -> Decoder:
        """Return the decoder for ``sampling``, building it if it is not cached. For the decoding thread only.

        ``busy``: sampling parameters whose decoders are running and are not evicted; fewer than `MAX_EXTRA_DECODERS`
        besides the default ones.
        """
        if sampling == self.sampling:
            return self.decoder
        decoder = self._extra.pop(sampling, None)
        if decoder is None:
            while len(self._extra) >= MAX_EXTRA_DECODERS:  # free memory before building the next one
                del self._extra[next(key for key in self._extra if key not in busy)]
            decoder = self.build(sampling)
        self._extra[sampling] = decoder
        return decoder
