"""Lazily loaded target, and draft models that are loaded once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import Any

import torch

from crossdraft import Checkpoint, CrossdraftError, DraftContext, LoadedModel, Sampling, load_model, load_tokenizer
from crossdraft.models import (
    TRANSFORMERS,
    TargetContext,
    load_checkpoint,
    load_draft_model,
    pick_device,
    read_config,
    resolve,
)

from ..response import Response
from .scoring import DraftScores, MakeContext, ScoringRequest, context_factory, sample_drafts, score_drafters


class Target:
    """The target ``name``, loaded on first use, with the options of `load_model`; ``sampling``: of the responses."""

    def __init__(
        self,
        name: str,
        sampling: Sampling,
        *,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: Collection[str] = (),
    ):
        pick_device(device)  # validate now: the target may not be loaded at all
        self.name, self.sampling, self._trusted = name, sampling, frozenset(trust_remote_code)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._draft_models: dict[tuple[str, bool], LoadedModel] = {}
        self._heads: Callable[[str], Checkpoint] = load_checkpoint
        self.draft_model_change: Callable[[Any], None] | None = None

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(self.name, trust_remote_code=self.name in self._trusted, **self._options)

    def make(self, rows: int, longest: int, slack: int) -> DraftContext:
        """A `MakeContext` over slots of the target."""
        return context_factory(self.loaded, self.sampling, load=self._load, heads=self._heads)(rows, longest, slack)

    def with_heads(self, change: Callable[[Checkpoint], Checkpoint]) -> Target:
        """Return the same target, with ``change`` applied to heads as they are loaded."""
        loaded, other = self.loaded, copy(self)
        other.loaded, other._heads = loaded, lambda name: change(load_checkpoint(name))
        return other

    def with_draft_models(self, change: Callable[[Any], None]) -> Target:
        """Return the same target, with ``change`` applied to copies of draft models as they are loaded."""
        loaded, other = self.loaded, copy(self)
        other.loaded, other._draft_models, other.draft_model_change = loaded, {}, change
        return other

    @cached_property
    def without(self) -> MakeContext | None:
        """A `MakeContext` with the target's tokenizer and sizes only; None if its files do not specify them."""
        try:
            resolved = resolve(self.name)
            if resolved.backend != TRANSFORMERS:
                return None
            config = read_config(Path(resolved.path))
            tokenizer_of = load_tokenizer(self.name, trust_remote_code=self.name in self._trusted)
        except CrossdraftError:  # loading the target raises it, if needed
            return None
        nested = config.get("text_config")
        text_config = nested if isinstance(nested, dict) else config
        vocab, length = text_config.get("vocab_size"), text_config.get("max_position_embeddings")
        if not isinstance(vocab, int):
            return None
        metadata = LoadedModel(
            None, tokenizer_of.tokenizer, self.name, resolved.source, "", tokenizer_of.eos_token_ids, length
        )
        device = pick_device(self._options["device"])

        def make(rows: int, longest: int, slack: int) -> DraftContext:
            return TargetContext(
                sampling=self.sampling,
                batch_size=rows,
                max_length=longest + slack,
                vocab_size=vocab,
                device=device,
                target_name=self.name,
                tokenizer=tokenizer_of.tokenizer,
                loaded=metadata,
                sequence=longest,
                load=self._load,
            )

        return make

    def _load(self, name: str, target: LoadedModel) -> LoadedModel:
        """Load a draft model once, without a target if it is not loaded."""
        key = name, target.model is None
        if key not in self._draft_models:
            trusted = name in self._trusted
            if target.model is None:
                self._draft_models[key] = load_model(name, trust_remote_code=trusted, **self._options)
            else:
                self._draft_models[key] = load_draft_model(name, target, trust_remote_code=trusted)
            if self.draft_model_change is not None:
                model = deepcopy(self._draft_models[key].model)
                with torch.no_grad():
                    self.draft_model_change(model)
                self._draft_models[key] = replace(self._draft_models[key], model=model)
        return self._draft_models[key]


class SharedPasses:
    """Streams of scores of several drafters on the same responses.

    All streams must be created before the first is read, and all use the texts passed to the first.
    """

    def __init__(self, target: Target):
        self.target = target
        self._requests: list[ScoringRequest] = []
        self._streams = 0
        self._scores: list[Iterator[list[DraftScores]]] = []
        self._samples: dict[int, list[Iterator[DraftScores]]] = {}

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

    def samples(self, index: int) -> Callable[[Iterable[Response]], Iterator[DraftScores]]:
        """Return a stream of a drafter's sampled drafts, computed once for all readers."""

        def stream_of(texts: Iterable[Response]) -> Iterator[DraftScores]:
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
