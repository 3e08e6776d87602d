"""What drafters without a model would have drafted along recorded responses: no target, no model, streamed.

A drafter may offer a fast path, `Drafter.drafts_along`. Without one its public `propose` is asked at every token, by
drafters whose slots begin with the text so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any, Protocol

import numpy as np
import torch

from ... import plugins
from ...contracts.draft import Sequences
from ...contracts.drafter import DraftContext, Drafter
from ...contracts.rng import CounterRng
from ...contracts.sampling import Sampling
from ...errors import ModelError, UsageError
from .forced_draft import Forced

#: Texts that are compared with their drafts together.
WINDOW = 64
#: Slots of a drafter whose `propose` is asked: places of one text.
SLOTS = 64
#: Tokens that a vocabulary is said to have, where no model says.
VOCABULARY = 2**24


#: Prompt and response.
Pair = tuple[Sequence[int], Sequence[int]]


class Text(Protocol):
    """A recorded text as token ids."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def tokens(self) -> Sequence[int]: ...


def needs_no_model(cls: type[Drafter], config: Any, sampling: Sampling) -> bool:
    """Whether a drafter's drafts are point-mass chains that no model is needed for."""
    traits = plugins.traits_of("drafters", cls, config, sampling)
    if not traits.is_chain or not traits.point_mass or traits.hidden_layers or traits.adapts:
        return False
    try:
        cls(config, _context(sampling, 1, 1))
    except ModelError:  # the context refuses: it has none
        return False
    return True


def forced(cls: type[Drafter], config: Any, texts: Iterable[Text], depth: int, sampling: Sampling) -> Iterator[Forced]:
    """What the drafter would have drafted along each text, ``depth`` tokens deep; `needs_no_model` has to hold.

    Nothing is known of P, and nothing has to be: ``log_p`` is 0, which leaves a point mass accepted where it agrees.

    Raises:
        ContractError: the drafter's own code fails, or gives something else than drafts.
        UsageError: a drafter that remembers earlier sequences and offers no fast path.
    """
    texts, asked = tee(texts)
    pairs = ((text.prompt, text.tokens) for text in asked)
    with plugins.guarded("drafters", cls.name, "drafts_along()"):
        drafts = cls.drafts_along(config, pairs, depth)
    if drafts is None:
        if cls.remembers(config):
            raise UsageError(
                f"drafter '{cls.name}' remembers what earlier sequences said and offers no drafts_along, so it cannot "
                "be replayed; measure it with crossdraft run, or, if it remembers nothing with these options, let its "
                "classmethod remembers(config) return False"
            )
        drafts = _proposed(cls, config, pairs, depth, sampling)
    drafts, texts = iter(drafts), iter(texts)
    while window := list(islice(texts, WINDOW)):
        found = []
        for text in window:
            one, t = _next(drafts, cls.name), len(text.tokens)
            if not isinstance(one, np.ndarray) or one.shape != (t, depth) or one.dtype.kind != "i":
                shape = f"int64 [{t}, {depth}]"
                raise plugins.unusable("drafters", cls.name, f"drafts_along() must give {shape} for each text")
            found.append(one)
        yield from of_drafts(found, [text.tokens for text in window])


def of_drafts(drafts: Sequence[np.ndarray], responses: Sequence[Sequence[int]]) -> list[Forced]:
    """The `Forced` of point-mass drafts ``[T, depth]``, -1 past their end, along each of some responses."""
    depth = drafts[0].shape[1]
    sizes, apart = np.array([len(tokens) for tokens in responses]), np.full(depth, -2)
    said = np.concatenate([part for tokens in responses for part in (np.asarray(tokens, dtype=np.int64), apart)])
    starts = np.arange(sizes.sum()) + np.repeat(depth * np.arange(len(sizes)), sizes)
    every = np.concatenate(drafts)
    log_q = np.where(every == said[starts[:, None] + np.arange(depth)], 0.0, -np.inf)
    lengths = np.logical_and.accumulate(every >= 0, axis=1).sum(1)
    log_p, ends = np.zeros(len(every)), np.cumsum(sizes)
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [Forced(log_q[one], lengths[one], log_p[one]) for one in slices]


def _next(drafts: Iterator[np.ndarray], name: str) -> np.ndarray | None:
    """The next of somebody's drafts; the guard is set up only where something is wrong, because that takes longer."""
    try:
        return next(drafts, None)
    except BaseException as error:
        with plugins.guarded("drafters", name, "drafts_along()"):
            raise error


def _context(sampling: Sampling, rows: int, length: int) -> DraftContext:
    return DraftContext(sampling, rows, length, VOCABULARY, torch.device("cpu"))


@torch.inference_mode()
def _proposed(
    cls: type[Drafter],
    config: Any,
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    depth: int,
    sampling: Sampling,
) -> Iterator[np.ndarray]:
    """What ``propose`` drafts in slots that begin with the text so far."""
    for prompt, response in texts:
        whole, t = [*prompt, *response], len(response)
        found = np.full((t, depth), -1)
        for start in range(0, t, SLOTS):
            places = range(start, min(start + SLOTS, t))
            rows = len(places)
            history = [whole[: len(prompt) + place] for place in places]
            length = len(whole) + depth + 1
            tokens = torch.zeros(rows, length, dtype=torch.long)
            for row, one in enumerate(history):
                tokens[row, : len(one)] = torch.tensor(one)
            sequences = Sequences(history, tokens, [depth] * rows, list(range(rows)))
            with plugins.guarded("drafters", cls.name, "propose()"):
                drafter = cls(config, _context(sampling, rows, length))
                for row, one in enumerate(history):
                    drafter.start(row, list(one))
                rng = CounterRng(0).for_step(sequences.stream, [len(one) for one in history], sequences.device)
                draft = drafter.propose(sequences, rng)
            if draft.q is not None or not draft.is_chain or draft.width > depth:
                raise plugins.unusable("drafters", cls.name, "propose() gave a draft that its traits do not promise")
            width = draft.width
            found[start : start + rows, :width] = torch.where(draft.valid, draft.tokens, -1).numpy()
        yield found
