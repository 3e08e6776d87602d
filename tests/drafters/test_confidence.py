"""The policy ``confidence``: draft lengths, losslessness, and a lossy variant as the negative control."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from crossdraft.drafters.autoregressive.policies import Confidence, ConfidenceLength, LengthPolicy
from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.drafters.none import NoDrafter
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy, ToyContext
from crossdraft.framework.contracts.draft import Draft, Sequences
from crossdraft.framework.contracts.drafter import DraftContext
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling

TOYS = ("T0", "G1", "G2", "G3", "G4")
#: Less 1e-9, so that the rounding of a probability equal to the threshold does not decide.
EDGE = 1e-9


def make(
    drafter: type[DraftModelChain] = DraftModelChain, temperature: float | None = None, **policy: Any
) -> Callable[[DraftContext, int], Any]:
    def build(context: DraftContext, gamma: int) -> DraftModelChain:
        options = {"temperature": temperature, "policy": {"name": "confidence", **policy}}
        return drafter(drafter.Config.model_validate({"model": "toy", "gamma": gamma, **options}), context)

    return build


def drafted_and_accepted(toy: Toy, threshold: float, temperature: float) -> tuple[float, float]:
    """Tokens drafted and tokens accepted by token verification in a step, without decoding."""
    drafted = accepted = 0.0
    p, q = toy.target.tolist(), toy.drafter.tolist()
    for depth in range(1, toy.gamma + 1):
        for x in itertools.product(range(toy.vocab_size), repeat=depth):
            reach = keep = 1.0
            for last, token in itertools.pairwise((toy.vocab_size, *x)):
                best = q[last].index(max(q[last]))
                probability = q[last][token] if temperature else float(token == best)
                if max(q[last]) < threshold or not probability:
                    reach = 0.0  # the draft ended before this token, or it is never drawn
                    break
                reach *= probability
                keep *= min(1.0, p[last][token] / probability)
            drafted += reach
            accepted += reach * keep
    return drafted, accepted


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7])
@pytest.mark.parametrize("toy", TOYS)
def test_stopping_before_unsure_distribution_is_lossless(
    toys: dict[str, Toy], toy: str, threshold: float, temperature: int
) -> None:
    build = make(stop="before", threshold=threshold - EDGE, temperature=temperature)
    for verifier in ("token", "block"):
        certificate = certify(toys[toy], build, plugins.get("verifiers", verifier), steps=2, markov=True)
        assert certificate.tv <= TOLERANCE
        if verifier == "token":
            want = drafted_and_accepted(toys[toy], threshold - EDGE, temperature)[1]
            assert certificate.expected_tau[0] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("toy", TOYS)
def test_greedy_is_exact_after_early_stop(toys: dict[str, Toy], toy: str) -> None:
    build = make(stop="before", threshold=0.6 - EDGE)
    certificate = certify(toys[toy], build, plugins.get("verifiers", "greedy"), steps=2, temperature=0, markov=True)
    assert certificate.tv <= TOLERANCE


class DiscardingLength(ConfidenceLength):
    """Wrong on purpose: looks at the token it drew and throws it away for being improbable."""

    def should_continue(self, logits: torch.Tensor, q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return q.gather(1, token[:, None]).squeeze(1) >= self.threshold


class Discarding(DraftModelChain):
    class Config(DraftModelChain.Config):
        def lengths(self, batch_size: int) -> LengthPolicy:
            policy = self.policy
            assert isinstance(policy, Confidence) and policy.stop == "before" and policy.threshold is not None
            return DiscardingLength(self.gamma, batch_size, policy.threshold, policy.stop)


@pytest.mark.parametrize(
    "toy, token, block",
    [
        ("T0", "1/9", "2/27"),
        ("G1", "1/12", "13/160"),
        ("G2", "1/12", "137/2430"),
        ("G3", "1/8", "1/8"),
        ("G4", "1/6", "32/285"),
    ],
)
def test_throwing_token_away_is_not_lossless(toys: dict[str, Toy], toy: str, token: str, block: str) -> None:
    """A stop decision must not depend on the token: the certificate measures the exact error."""
    build = make(Discarding, stop="before", threshold=0.4 - EDGE, temperature=1)
    for verifier, tv in (("token", token), ("block", block)):
        certificate = certify(toys[toy], build, plugins.get("verifiers", verifier), markov=True)
        assert certificate.tv == pytest.approx(float(Fraction(tv)), abs=1e-12)


# -- where a draft ends ---------------------------------------------------------------------------------

#: Distributions of a drafter over three tokens: sure after 0, not quite after 1, unsure after 2; sure at the start.
LAWS = [[0.8, 0.1, 0.1], [0.25, 0.5, 0.25], [0.4, 0.3, 0.3], [0.1, 0.2, 0.7]]


def propose(
    distributions: list[list[float]], starts: list[list[int]], limit: int = 9, **options: Any
) -> tuple[Draft, Any]:
    """At most four tokens drafted by a table model, a row for each of ``starts``; 3 is the token before the first."""
    table = torch.tensor(distributions, dtype=torch.float64)
    b = len(starts)
    context = ToyContext(table, table, Sampling(temperature=1), batch_size=b, max_length=32)
    drafter = make(**options)(context, 4)
    tokens = torch.zeros(b, 32, dtype=torch.long)
    sequences = Sequences([[] for _ in starts], tokens, [limit] * b, list(range(b)))
    for row, start in enumerate(starts):
        drafter.start(row, start)
        sequences.append(row, start)
    rng = CounterRng(0).for_step(range(b), [0] * b, torch.device("cpu"))
    return drafter.propose(sequences, rng), drafter


@pytest.mark.parametrize(
    "threshold, tokens",
    [(0.75, []), (0.7, [2]), (0.45, [2]), (0.4, [2, 0, 0, 0]), (0, [2, 0, 0, 0])],
)
def test_argmax_draft_length(threshold: float, tokens: list[int]) -> None:
    """Start -> 2 (0.7) -> 0 (0.4) -> 0 (0.8) -> 0 (0.8); at temperature 0 the confidence is the model's own."""
    draft, drafter = propose(LAWS, [[3]], stop="before", threshold=threshold - EDGE * (threshold > 0), temperature=0)
    assert draft.point_mass
    assert draft.tokens[0, : int(draft.count)].tolist() == tokens
    assert draft.width == len(tokens)  # tokens that are not proposed are not scored
    assert drafter.passes == min(len(tokens) + 1, 4)  # one pass for the uncertain distribution


def test_stopping_after_keeps_token_that_stopping_before_leaves_out() -> None:
    for stop, tokens in (("after", [2, 0]), ("before", [2])):
        draft, _ = propose(LAWS, [[3]], stop=stop, threshold=0.5, temperature=0)
        assert draft.tokens.tolist() == [tokens]
        assert draft.count.tolist() == [len(tokens)]


def test_rows_stop_by_themselves() -> None:
    draft, _ = propose(LAWS, [[3, 0], [3, 1], [3, 2]], stop="before", threshold=0.45, temperature=0)
    assert draft.count.tolist() == [4, 4, 0]
    assert draft.tokens[:2].tolist() == [[0] * 4, [1] * 4]
    separate, _ = propose(LAWS, [[3, 2]], stop="before", threshold=0.45, temperature=0)
    assert separate.width == 0 and separate.valid.shape == (1, 0)


def test_sampled_draft_reports_its_draft_probs() -> None:
    draft, _ = propose(LAWS, [[3]] * 256, stop="before", threshold=0.45, temperature=1)
    assert draft.q is not None and draft.q.shape == (256, draft.width, 3)
    table = torch.tensor(LAWS, dtype=torch.float64)
    for row, count in enumerate(draft.count.tolist()):
        tokens = [3, *draft.tokens[row].tolist()]
        for i in range(count):
            assert table[tokens[i]].max() >= 0.45
            torch.testing.assert_close(draft.q[row, i], table[tokens[i]])
        assert count == 4 or table[tokens[count]].max() < 0.45
    assert set(draft.count.tolist()) == {1, 2, 3, 4}


def test_limit_of_row_holds() -> None:
    draft, _ = propose(LAWS, [[3, 0]], limit=2, stop="before", threshold=0.45, temperature=0)
    assert draft.count.tolist() == [2]
    draft, _ = propose(LAWS, [[3, 0]], limit=0, stop="before", threshold=0.45, temperature=0)
    assert draft.width == 0


def test_default_threshold() -> None:
    def threshold(**options: Any) -> float:
        policy = Confidence(**options).make(10, 1)
        assert isinstance(policy, ConfidenceLength)
        return policy.threshold

    assert (Confidence().stop, threshold()) == ("after", 0.4)
    assert threshold(stop="before") == 0.6
    assert threshold(stop="before", threshold=0.3) == 0.3
    assert threshold(stop="before", threshold=0) == 0
    with pytest.raises(ValidationError, match="after"):
        DraftModelChain.Config.model_validate({"model": "m", "policy": {"name": "confidence", "stop": "never"}})


# -- with transformers models ---------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.05, 0.1])
def test_batch_of_real_caches(tiny_model: Any, decoder: Callable, threshold: float) -> None:
    """Rows stop at different depths, fed nodes are dropped, and the output is unchanged."""
    target, drafting = tiny_model("llama"), tiny_model("llama", noise=0.2)
    prompts = [[5, 6, 7], [8, 9], [11, 12, 13, 14], [3], [21, 22]]
    greedy = plugins.get("verifiers", "greedy")
    policy = {"name": "confidence", "stop": "before", "threshold": threshold}
    options = {"model": "noisy", "gamma": 4, "policy": policy}
    ours = decoder(target, DraftModelChain, options, greedy, batch_size=3, drafting=drafting, max_new_tokens=20)
    plain = decoder(target, NoDrafter, {}, greedy, batch_size=3, max_new_tokens=20)
    responses, expected = list(ours.run(prompts)), list(plain.run(prompts))
    assert {r.index: r.tokens for r in responses} == {r.index: r.tokens for r in expected}
    steps = [each for r in responses for each in r.steps]
    assert {0, 1, 2} <= {each.nodes for each in steps}
    assert any(each.tau for each in steps) and any(each.tau < each.nodes for each in steps)
