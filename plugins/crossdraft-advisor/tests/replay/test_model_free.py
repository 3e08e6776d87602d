"""Drafters without a model along recorded texts: as their own `propose`, step by step, drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor import prompt_lookup
from crossdraft_advisor.prompt_lookup import _drafts, response_drafts
from crossdraft_advisor.replay.teacher_forcing.model_free import is_model_free, score_chains, score_model_free
from crossdraft_advisor.replay.teacher_forcing.scoring import mask_past_end
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import DenseScores, Draft, Sequences, Verdict
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ContractError, UsageError

SAMPLING = Sampling()
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=25)


def by_steps(config: Any, prompt: list[int], response: list[int], depth: int) -> np.ndarray:
    """Proposals of the real drafter if every step commits one token."""
    context = DraftContext(SAMPLING, 1, 100, 4, torch.device("cpu"))
    drafter = PromptLookup(config.model_copy(update={"gamma": depth}), context)
    sequences = Sequences([list(prompt)], torch.zeros(1, 100, dtype=torch.long), [depth], [0])
    drafter.start(0, prompt)
    result = np.full((len(response), depth), -1)
    for t, token in enumerate(response):
        draft = drafter.propose(sequences, CounterRng(0).for_step([0], [t], sequences.device))
        n = int(draft.count[0])
        result[t, :n] = draft.tokens[0, :n]
        sequences.append(0, [token])
        nothing = DenseScores(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
        drafter.observe(sequences, draft, Verdict(torch.zeros(1), torch.tensor([token])), [0], nothing)
    return result


@settings(max_examples=60)
@given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4),
    st.sampled_from(["first", "latest"]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 5),
)
def test_prompt_lookup_as_it_proposes(texts: Any, match: Any, shortest: int, more: int, depth: int) -> None:
    config = PromptLookup.Config(match=match, min_ngram=shortest, max_ngram=shortest + more, gamma=2)
    result = list(response_drafts(PromptLookup, config, iter(texts), depth) or ())
    assert len(result) == len(texts)
    for drafts, (prompt, response) in zip(result, texts, strict=True):
        assert drafts.tolist() == by_steps(config, prompt, response, depth).tolist()


def test_texts_are_independent_of_their_batch(monkeypatch: Any) -> None:
    random = np.random.default_rng(0)
    texts = [(random.integers(0, 9, 20).tolist(), random.integers(0, 9, 30).tolist()) for _ in range(20)]
    batched = list(_drafts(texts, 4, range(3, 0, -1), False))
    monkeypatch.setattr(prompt_lookup, "BATCH", 60)
    for item, other in zip(batched, _drafts(texts, 4, range(3, 0, -1), False), strict=True):
        assert np.array_equal(item, other)


def test_texts_are_requested_lazily(monkeypatch: Any) -> None:
    monkeypatch.setattr(prompt_lookup, "BATCH", 100)
    monkeypatch.setattr("crossdraft_advisor.replay.teacher_forcing.model_free.WINDOW", 3)
    indices = []

    def texts() -> Any:
        for i in range(1000):
            indices.append(i)
            yield SimpleNamespace(prompt=[1, 2, 3], tokens=[1, 2] * 10)

    result = score_model_free(PromptLookup, PromptLookup.Config(), texts(), 4, SAMPLING)
    next(result)
    assert len(indices) < 10


class Echo(Drafter):
    """Drafts repetitions of the last token; has no fast path."""

    name = "echo"

    class Config(StrategyConfig):
        gamma: int = 3

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma)

    def propose(self, sequences: Sequences, rng: Any) -> Draft:
        lengths = [min(limit, self.config.gamma) for limit in sequences.limit]
        last = torch.tensor([history[-1] for history in sequences.history])
        return Draft.chain(last[:, None].expand(-1, max(lengths)), lengths)


class Learner(Echo):
    name = "learner"

    def reset(self) -> None: ...


class Liar(Echo):
    name = "liar"

    @classmethod
    def response_drafts(cls, config: Any, texts: Any, depth: int) -> Any:
        return (np.zeros((1, depth)) for _ in texts)


class Broken(Echo):
    name = "broken"

    def propose(self, sequences: Sequences, rng: Any) -> Draft:
        raise ValueError("no idea")


def text(tokens: list[int]) -> Any:
    return SimpleNamespace(prompt=[5], tokens=tokens)


def test_drafter_without_fast_path_drafts_itself() -> None:
    config = Echo.Config(gamma=2)
    tokens = [5, 5, 6, 6] * 30
    result = next(score_model_free(Echo, config, [text(tokens)], 4, SAMPLING))
    assert result.lengths.tolist() == [2] * 120
    agrees = np.isfinite(result.log_q)
    assert agrees[:4].tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [False, False, False, False],
        [True, False, False, False],
    ]
    assert result.log_p.tolist() == [0.0] * 120


def test_same_by_propose_and_by_fast_path() -> None:
    class Slow(PromptLookup):
        response_drafts = Drafter.response_drafts

    random = np.random.default_rng(1)
    texts = [text(random.integers(0, 3, 80).tolist()) for _ in range(3)]
    config = PromptLookup.Config(gamma=4)
    for fast, slow in zip(
        score_model_free(PromptLookup, config, texts, 4, SAMPLING),
        score_model_free(Slow, config, texts, 4, SAMPLING),
        strict=True,
    ):
        assert np.array_equal(mask_past_end(fast.log_q), slow.log_q) and np.array_equal(fast.lengths, slow.lengths)


def test_model_free_drafters() -> None:
    assert is_model_free(PromptLookup, PromptLookup.Config(), SAMPLING)
    assert is_model_free(Echo, Echo.Config(), SAMPLING)
    small = plugins.get("drafters", "draft-model")
    assert not is_model_free(small, small.Config(model="x"), SAMPLING)
    assert not is_model_free(small, small.Config(model="x", temperature=0), SAMPLING)  # a point mass, of a model
    none = plugins.get("drafters", "none")
    assert not is_model_free(none, none.Config(), SAMPLING)
    for name in ("jacobi", "early-exit", "layer-skip"):  # one adapts, the others run layers of a target
        own = plugins.get("drafters", name)
        config = own.Config(**({"skip_mlp": [1]} if name == "layer-skip" else {}))
        assert not is_model_free(own, config, Sampling(temperature=0)), name


def test_drafters_that_cannot_be_replayed() -> None:
    with pytest.raises(UsageError, match="'learner' remembers earlier sequences"):
        next(score_model_free(Learner, Learner.Config(), [text([1])], 2, SAMPLING))

    class Off(Learner):
        @classmethod
        def remembers(cls, config: Any) -> bool:
            return False

    assert next(score_model_free(Off, Off.Config(), [text([1])], 2, SAMPLING)).lengths.shape == (1,), (
        "its memory is off"
    )
    with pytest.raises(ContractError, match=r"'liar'.*must yield int64 \[2, 3\] for each text"):
        next(score_model_free(Liar, Liar.Config(), [text([1, 2])], 3, SAMPLING))
    with pytest.raises(ContractError, match=r"'broken'.*propose\(\) raised ValueError: no idea"):
        next(score_model_free(Broken, Broken.Config(), [text([1, 2])], 3, SAMPLING))


def test_draft_ends_at_first_gap() -> None:
    result = score_chains([np.array([[7, -1, 7], [8, 8, -1]])], [[7, 8]])[0]
    assert result.lengths.tolist() == [1, 2]
    assert np.isfinite(result.log_q).tolist() == [[True, False, False], [True, False, False]]
