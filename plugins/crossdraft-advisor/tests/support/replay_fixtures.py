"""Fixtures of the replay tests: recorded responses, contexts over tiny models, runs with their drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.step_chain import StepAcceptance
from crossdraft_advisor.replay.teacher_forcing.scoring import (
    DEPTH,
    ROWS,
    DraftScores,
    MakeContext,
    ScoringRequest,
    score_drafters,
)
from draft_contexts import GivenContext

from crossdraft.framework import plugins
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import StepEvent
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.transformers_lm import TransformersLM

#: Recipe of a run whose responses are replayed.
RECIPE = """\
target: {target}
prompts: {prompts}
dtype: float32
device: cpu
max_new_tokens: 16
batch_size: 2
drafters: [{{name: prompt-lookup, gamma: {gamma}}}]
verifiers: [block]
sampling: {{temperature: 0.3}}
"""


class RecordedResponse(Response):
    """A recorded response."""

    def __init__(self, prompt: Sequence[int], tokens: Sequence[int], log_p: Sequence[float] | None = None):
        known = None if log_p is None else np.array(log_p)
        super().__init__("q1", "", prompt, tokens, known, place="answers.jsonl:7")


def making(
    target: Any, sampling: Sampling, drafting: Any = None, lm: type[TransformersLM] = TransformersLM, **more: Any
) -> MakeContext:
    """Contexts over slots of ``target``; a drafter that requests a model gets ``drafting``."""

    def make(rows: int, longest: int, extra_tokens: int) -> GivenContext:
        slot = longest + extra_tokens
        return GivenContext(
            lm(target, rows, slot),
            sampling,
            slot,
            load_lm=lambda name: TransformersLM(drafting, rows, slot),
            target_model=target,
            **more,
        )

    return make


def configured(name: str, **options: Any) -> tuple[Any, Any]:
    cls = plugins.get("drafters", name)
    return cls, cls.Config(**options)


@dataclass(frozen=True)
class Run:
    """Responses of the decoder, and the start and the draft of every step.

    A step is ``(response, start, tokens, q of each token)``; q is 1 for a point mass and for trees.
    """

    responses: list[RecordedResponse]
    steps: list[tuple[int, int, list[int], list[float]]]

    def counts(self) -> np.ndarray:
        """``[responses]``: steps of each."""
        return np.bincount([index for index, *_ in self.steps], minlength=len(self.responses))

    def nodes(self) -> np.ndarray:
        """``[responses]``: drafted tokens of each."""
        indices, sizes = [index for index, *_ in self.steps], [len(tokens) for _, _, tokens, _ in self.steps]
        return np.bincount(indices, sizes, minlength=len(self.responses))


def run(
    make: MakeContext,
    drafter: tuple[Any, Any],
    verifier: str,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    rows: int = 8,
    seed: int = 0,
    **loop: Any,
) -> Run:
    """Decode ``prompts`` with the real loop."""
    cls, config = drafter
    context = make(rows, max(map(len, prompts)) + new, 24)
    starts = [0] * len(prompts)
    steps: list[tuple[int, int, list[int], list[float]]] = []

    def look(event: StepEvent) -> None:
        draft = event.draft
        for row, index in enumerate(event.prompts):
            if index is None:
                continue
            n = int(draft.count[row])
            tokens = draft.tokens[row, :n].tolist()
            drawn = draft.q if draft.is_chain else None
            q = [1.0] * n if drawn is None else drawn[row, range(n), tokens].tolist()
            steps.append((index, starts[index], tokens, q))
            starts[index] += len(event.emitted[row])

    rule = plugins.get("verifiers", verifier)()
    assert context.target is not None
    decoder = Decoder(
        context.target, cls(config, context), rule, sampling=context.sampling, max_new_tokens=new,
        rng=CounterRng(seed), on_step=look, **loop,
    )  # fmt: skip
    result = sorted(decoder.run(prompts), key=lambda response: response.index)
    return Run([RecordedResponse(prompts[r.index], r.tokens) for r in result], steps)


def fresh(
    make: MakeContext, drafter: tuple[Any, Any], text: RecordedResponse, t: int, depth: int, forcing: Callable
) -> Any:
    """The draft of a drafter that begins with the prompt and the first ``t`` tokens, forced to the rest."""
    cls, config = drafter
    context = make(1, len(text.prompt) + len(text.tokens), 24)
    instance, target = cls(config, context), context.target
    assert target is not None
    target.hidden_layers = cls.traits(config, context.sampling).hidden_layers
    from crossdraft.framework.contracts.draft import Sequences

    with torch.inference_mode():
        prefix = [*text.prompt, *text.tokens[:t]]
        hidden = target.start(0, prefix)
        seqs = Sequences([[]], torch.zeros(1, context.max_length, dtype=torch.long), [depth], [0])
        seqs.append(0, prefix)
        instance.start(0, prefix, hidden)
        return instance.propose(seqs, forcing(text.tokens[t : t + depth]))


def random_acceptance(seed: int, t: int, depth: int, limit: int | None) -> StepAcceptance:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, depth + 1, t)
    inside = np.arange(depth) < np.minimum(lengths, t - np.arange(t))[:, None]
    return StepAcceptance(np.where(inside, random.random((t, depth)).cumprod(1), 0), lengths, limit)


def score_drafter(
    drafter: Any,
    texts: Sequence[Any],
    make: MakeContext,
    *,
    depth: int = DEPTH,
    sequences: int = 0,
    tops: bool = False,
    rows: int = ROWS,
) -> Iterator[DraftScores]:
    """`score_drafters` for one drafter, see `ScoringRequest`."""
    for (scores,) in score_drafters([ScoringRequest(drafter, depth, sequences, tops)], texts, make, rows=rows):
        yield scores
