"""Errors of teacher forcing: unsupported drafters, and texts that are not valid for the target."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import strategies
import torch
from crossdraft_advisor.replay.teacher_forcing.scoring import TracedDrafter, sample_drafts, trace_drafters
from replay_fixtures import RecordedResponse, configured, making, score_drafter

from crossdraft import Draft, Drafter, DraftTraits, Sampling, Sequences, StepRng
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.errors import CrossdraftError, NumericalError, UsageError

V = 11
WARM = Sampling(temperature=1.0)
TEXTS = [RecordedResponse([1, 2, 3], [4, 5, 6, 7]), RecordedResponse([3], [9, 9])]


class Uniform(Drafter):
    """Two tokens from a uniform distribution; each subclass violates one rule of the contract."""

    name = "uniform"
    point_mass = False

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=cls.point_mass, nodes=2)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        q = torch.full((sequences.batch_size, 2, V), 1 / V)
        tokens = torch.stack([self.token(q[:, i], rng, i) for i in range(2)], 1)
        return Draft.chain(tokens, [min(2, maximum) for maximum in sequences.limit], None if self.point_mass else q)

    def token(self, q: torch.Tensor, rng: StepRng, i: int) -> torch.Tensor:
        return rng.draw(q, "draft", i)


class OwnNumbers(Uniform):
    def token(self, q: torch.Tensor, rng: StepRng, i: int) -> torch.Tensor:
        return torch.multinomial(q, 1)[:, 0]


class Coins(Uniform):
    def token(self, q: torch.Tensor, rng: StepRng, i: int) -> torch.Tensor:
        rng.accept(q[:, :1], "other", i)
        return rng.draw(q, "draft", i)


class OtherPurpose(Uniform):
    def token(self, q: torch.Tensor, rng: StepRng, i: int) -> torch.Tensor:
        return rng.draw(q, "other", i)


class RandomPointMass(Uniform):
    point_mass = True


class NotANumber(Uniform):
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        draft = super().propose(sequences, rng)
        if any(len(history) == 5 for history in sequences.history):
            assert draft.q is not None
            draft.q[:, 1] = torch.nan
        return draft


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", vocab_size=V, context=24, copy="refused")


def replay(
    drafter: tuple[Any, Any], target: Any, texts: Sequence[RecordedResponse] = TEXTS, sampling: Sampling = WARM
) -> list:
    return list(score_drafter(drafter, texts, making(target, sampling, target), depth=4))


def plain(cls: Any) -> tuple[Any, Any]:
    return cls, cls.Config()


def test_valid_drafter_is_scored(target: Any) -> None:
    for item, text in zip(replay(plain(Uniform), target), TEXTS, strict=True):
        n = len(text.tokens)
        assert (item.lengths == 2).all()
        expected = torch.full((n, 4), -torch.inf).double()
        for t in range(n):
            expected[t, : min(2, n - t)] = torch.tensor(1 / V).double().log()
        assert item.log_q == pytest.approx(expected.numpy())


@pytest.mark.parametrize(
    "drafter, reason",
    [
        (plain(OwnNumbers), "its tokens differ from the draws of its random source"),
        (plain(RandomPointMass), "its tokens differ from the draws of its random source"),
        (plain(Coins), "it makes random accept decisions while drafting"),
        (plain(OtherPurpose), "it draws random numbers for the purpose 'other' while drafting"),
        (plain(strategies.Window), "its drafts are not plain chains"),
        (configured("draft-model-tree", model="x"), "it drafts trees ('without_replacement')"),
        (configured("draft-model", model="x", policy="heuristic"), "it adapts to the outcome of earlier steps"),
        (configured("eagle3", model="x", policy="heuristic"), "it adapts to the outcome of earlier steps"),
        (
            configured("draft-model", model="x", policy="learnt-threshold"),
            "it adapts to the outcome of earlier steps",
        ),
        (configured("early-exit", policy="heuristic"), "it adapts to the outcome of earlier steps"),
        (configured("jacobi"), "it adapts to the outcome of earlier steps"),
        (configured("lookahead"), "it adapts to the outcome of earlier steps"),
    ],
)
def test_unsupported_drafters(drafter: Any, reason: str, target: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"cannot be replayed: .*; measure it with crossdraft run") as caught:
        replay(drafter, target)
    assert reason in str(caught.value)


def test_k_sequences_need_text_distribution(target: Any) -> None:
    with pytest.raises(UsageError, match="the distribution of its sequences depends on where a step starts"):
        list(score_drafter(plain(Uniform), TEXTS, making(target, WARM), depth=2, sequences=2))
    cold = making(target, Sampling(temperature=0), target)
    with pytest.raises(UsageError, match="at temperature 0, not 3 sequences"):
        list(score_drafter(configured("draft-model-iid", model="x"), TEXTS, cold, depth=2, sequences=3))


@pytest.mark.parametrize(
    "text, message",
    [
        (RecordedResponse([], [1]), "the prompt is empty"),
        (RecordedResponse([1], [2, V]), f"token {V} is outside of the target's vocabulary of {V}"),
        (RecordedResponse([-1], [2]), "token -1 is outside"),
        (RecordedResponse([1] * 20, [2] * 6), "26 tokens, but the target's context length is 24"),
        (RecordedResponse([1], [2, 3], [-0.5]), "log P has shape \\[1\\], expected \\[2\\]"),
    ],
)
def test_invalid_texts(text: RecordedResponse, message: str, target: Any) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        replay(configured("draft-model", model="x"), target, [TEXTS[0], text])
    assert str(caught.value).startswith("answers.jsonl:7: ")


def test_text_may_fill_the_context(target: Any) -> None:
    """The target does not read its last token."""
    text = RecordedResponse([1] * 20, [2] * 5)
    for drafter in (plain(Uniform), configured("draft-model", model="x")):
        assert torch.tensor(replay(drafter, target, [text])[0].log_p).isfinite().all()


def test_numbers_that_are_none(target: Any, tiny_model: Callable) -> None:
    with pytest.raises(NumericalError, match="drafter 'uniform' produced NaN or infinite numbers at token 2"):
        replay(plain(NotANumber), target)
    broken = tiny_model("llama", vocab_size=V, context=24, copy="broken")
    broken.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(CrossdraftError, match="NaN at token 0 of answers"):
        list(score_drafter(configured("draft-model", model="x"), TEXTS, making(target, WARM, broken), depth=2))
    with pytest.raises(CrossdraftError, match="the target produced NaN"):
        replay(plain(Uniform), broken)


def test_error_leaves_slots_clean(target: Any) -> None:
    """A drafter that fails in the middle, and the same slots of the target again."""

    class Failing(Uniform):
        def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
            if any(len(history) == 5 for history in sequences.history):
                raise RuntimeError("in the middle")
            return super().propose(sequences, rng)

    context = making(target, WARM)(2, 8, 4)
    uniform, failing = (cls(cls.Config(), context) for cls in (Uniform, Failing))
    (before,) = trace_drafters([TracedDrafter(uniform, 2)], context, TEXTS)
    with pytest.raises(RuntimeError, match="in the middle"):
        trace_drafters([TracedDrafter(failing, 2)], context, TEXTS)
    assert context.target is not None and context.target.lengths == [0, 0]
    for item, repeat in zip(before, *trace_drafters([TracedDrafter(uniform, 2)], context, TEXTS), strict=True):
        assert (item.log_p == repeat.log_p).all()


def test_draft_ends_with_context(target: Any) -> None:
    text = RecordedResponse([1] * 18, [2, 3, 4, 5, 6, 7])
    for drafter in (plain(Uniform), configured("draft-model", model="x")):
        (result,) = replay(drafter, target, [text])
        maximum = 2 if drafter[0] is Uniform else 4
        assert result.lengths.tolist() == [min(maximum, 24 - (18 + t) - 1) for t in range(6)]


def test_memory_that_outlives_sequence_is_taught_in_order(target: Any) -> None:
    """The second text is known from the first, whatever room there would be for both at once."""
    text = RecordedResponse([1], [2, 3, 4])
    first, second = replay(plain(strategies.Frequent), target, [text, text])
    assert first.lengths.tolist() == [0, 0, 0]
    assert second.lengths.tolist() == [1, 1, 1] and (second.log_q[:, 0] == 0).all()


def test_own_drafts_are_as_long_as_runs(target: Any) -> None:
    """Draft lengths under a policy, sampled: their distribution does not depend on the text."""
    never = configured("draft-model", model="x", policy={"name": "confidence", "threshold": 0})
    always = configured("draft-model", model="x", policy={"name": "confidence", "threshold": 1})
    make = making(target, WARM, target)
    assert [item.lengths.tolist() for item in sample_drafts(never, TEXTS, make, depth=3)] == [[3] * 4, [3] * 2]
    assert [item.lengths.tolist() for item in sample_drafts(always, TEXTS, make, depth=3)] == [[1] * 4, [1] * 2]
