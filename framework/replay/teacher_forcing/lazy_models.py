"""A target that is loaded when somebody first needs it, and draft models that are loaded once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from ...api.build import TargetContext, load_draft_model
from ...contracts.drafter import DraftContext
from ...contracts.models import TRANSFORMERS, Checkpoint, LoadedModel
from ...contracts.sampling import Sampling
from ...errors import CrossdraftError
from ...models.checkpoint import load_checkpoint
from ...models.configs import read_config
from ...models.device import pick_device
from ...models.load import load_model
from ...models.resolve import resolve
from ...models.tokenizer import load_tokenizer
from .forcing import MakeContext, over


class Target:
    """The target called ``name``, sampled as the responses were.

    Args:
        dtype, device: see `load_model`; of draft models, too.
        trust_remote_code: names of the models that may run Python code of their own.
    """

    def __init__(
        self,
        name: str,
        sampling: Sampling,
        *,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: Collection[str] = (),
    ):
        pick_device(device)  # one: some responses are replayed without the target
        self.name, self.sampling, self._trusted = name, sampling, frozenset(trust_remote_code)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._drafting: dict[tuple[str, bool], LoadedModel] = {}
        self._heads: Callable[[str], Checkpoint] = load_checkpoint

    @cached_property
    def loaded(self) -> LoadedModel:
        """With its weights."""
        return load_model(self.name, trust_remote_code=self.name in self._trusted, **self._options)

    def make(self, rows: int, longest: int, room: int) -> DraftContext:
        """A `MakeContext` over its slots."""
        return over(self.loaded, self.sampling, load=self._load, heads=self._heads)(rows, longest, room)

    def with_heads(self, change: Callable[[Checkpoint], Checkpoint]) -> Target:
        """The same target, for which heads are changed as they are loaded."""
        loaded, other = self.loaded, copy(self)
        other.loaded, other._heads = loaded, lambda name: change(load_checkpoint(name))
        return other

    @cached_property
    def without(self) -> MakeContext | None:
        """One that knows the target's tokenizer and sizes and has no slots of it; None if these are not told by its
        files."""
        try:
            found = resolve(self.name)
            if found.backend != TRANSFORMERS:
                return None
            config = read_config(Path(found.path))
            known = load_tokenizer(self.name, trust_remote_code=self.name in self._trusted)
        except CrossdraftError:  # loading it says what is wrong, if it comes to that
            return None
        nested = config.get("text_config")
        text = nested if isinstance(nested, dict) else config
        vocab, length = text.get("vocab_size"), text.get("max_position_embeddings")
        if not isinstance(vocab, int):
            return None
        facts = LoadedModel(None, known.tokenizer, self.name, found.source, "", known.eos_token_ids, length)
        device = pick_device(self._options["device"])

        def make(rows: int, longest: int, room: int) -> DraftContext:
            return TargetContext(
                sampling=self.sampling,
                batch_size=rows,
                max_length=longest + room,
                vocab_size=vocab,
                device=device,
                target_name=self.name,
                tokenizer=known.tokenizer,
                loaded=facts,
                sequence=longest,
                load=self._load,
            )

        return make

    def _load(self, name: str, target: LoadedModel) -> LoadedModel:
        """A draft model, once; by itself where the target is not there."""
        key = name, target.model is None
        if key not in self._drafting:
            consent = name in self._trusted
            if target.model is None:
                self._drafting[key] = load_model(name, trust_remote_code=consent, **self._options)
            else:
                self._drafting[key] = load_draft_model(name, target, trust_remote_code=consent)
        return self._drafting[key]
