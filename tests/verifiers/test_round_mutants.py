"""Mistakes that take several steps, and mistakes of drafters, each of which the certificate must catch.

They go on where test_mutants.py ends: M12 and M13 are greedy block verification's, M14 is a drafter's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from golden_numbers import number
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft

TOYS = ("T0", "G1", "G2", "G3", "G4")
GreedyBlock: Any = plugins.get("verifiers", "greedy-block")


# -- greedy block verification: mistakes between steps --------------------------------------------------


class M12(GreedyBlock):
    """Greedy block verification as a drop-in: the targets that follow are not modified."""

    def observe(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        pass


class M13(GreedyBlock):
    """Expired layers deleted before the younger ones are advanced, which then follow a target without them."""

    def _next_r(
        self, draft: Draft, p: Tensor, tau: Tensor, token: Tensor, r: list[Tensor], a: Tensor, m: Tensor
    ) -> Tensor:
        assert draft.q is not None and self._r is not None
        root, after = self._r, super()._next_r(draft, p, tau, token, r, a, m)
        for row, remaining in self._remaining.items():
            accepted = int(tau[row])
            emitted = [*draft.tokens[row, :accepted].tolist(), int(token[row])]
            for k, left in enumerate(remaining):
                if left > len(emitted):
                    older = [m for m in range(k) if remaining[m] > len(emitted)]
                    after[row, k] = self._followed(draft.q[row], p[row], emitted, root[row, [*older, k]])
        return after

    def _followed(self, q: Tensor, p: Tensor, emitted: list[int], r: Tensor) -> Tensor:
        """R of the last of some layers after ``emitted``, their modifications being the only ones."""
        r = r.clone()
        for i, z in enumerate(emitted):
            t = p[i]
            for m in range(len(r)):
                left = (t - r[m] * q[i]).clamp(min=0)
                r[m] *= q[i, z] / t[z]
                t = left / left.sum() if left.sum() > 0 else t
        return r[-1]


@pytest.mark.parametrize(
    "toy, second_tau, tv",
    [
        ("T0", "4/3", "37/243"),
        ("G1", "17970587/14256000", "1060987/9504000"),
        ("G2", "48403199/31104000", "79477169/388800000"),
        ("G3", "2051/2304", "61/10752"),
        ("G4", "90545045003/62208000000", "13716693331/94348800000"),
    ],
)
def test_m12_greedy_block_is_not_drop_in(
    toys: dict[str, Toy], golden: dict, drafts: dict, toy: str, second_tau: str, tv: str
) -> None:
    certificate = certify(toys[toy], drafts["chain"], M12, steps=2, markov=True)
    assert certificate.tv == number(tv)
    first_tau = golden["expected_tau"]["greedy-block"]["chain"][toy][0]
    assert certificate.expected_tau == [number(first_tau), number(second_tau)]


@pytest.mark.parametrize("toy, tv", [("T0", "0"), ("G1", "0"), ("G2", "606499582841/194946523200000")])
def test_m13_layers_deleted_too_soon_take_gamma_three_to_see(
    toys: dict[str, Toy], golden: dict, drafts: dict, toy: str, tv: str
) -> None:
    certificate = certify(toys[toy], drafts["chain"], M13, steps=3, markov=True)
    assert certificate.tv == number(tv)
    assert certificate.lossless == (tv == "0")
    # Only the distribution shows it.
    assert certificate.expected_tau == [number(tau) for tau in golden["expected_tau"]["greedy-block"]["chain"][toy]]


# -- drafters that break the q contract -----------------------------------------------------------------


@pytest.fixture(scope="module")
def discarding() -> Callable:
    """M14: a draft model that stops after an improbable token and discards it."""
    kind = DRAFTS["stop-early"]
    base = plugins.get("drafters", kind.drafter)

    class Discarding(base):
        def propose(self, sequences: Any, rng: Any) -> Draft:
            draft = super().propose(sequences, rng)
            if not draft.width:
                return draft
            probability = draft.q.gather(2, draft.tokens[..., None]).squeeze(2)
            kept = draft.valid & (probability >= self.config.policy.threshold)
            return Draft.chain(draft.tokens, kept.sum(1), draft.q)

    return lambda context, gamma: Discarding(Discarding.Config(**kind.options(gamma)), context)


@pytest.mark.parametrize(
    "verifier, golden_tv",
    [
        ("token", {"T0": "1/9", "G1": "1/12", "G2": "1/12", "G3": "1/8", "G4": "1/6"}),
        ("block", {"T0": "2/27", "G1": "13/160", "G2": "137/2430", "G3": "1/8", "G4": "32/285"}),
    ],
)
@pytest.mark.parametrize("toy", TOYS)
def test_m14_discarded_token_biases_output(
    toys: dict[str, Toy], discarding: Callable, verifier: str, golden_tv: dict[str, str], toy: str
) -> None:
    certificate = certify(toys[toy], discarding, plugins.get("verifiers", verifier))
    assert certificate.tv == number(golden_tv[toy])


@pytest.fixture(scope="module")
def lying() -> Callable:
    """Drafts its argmax and reports the soft distribution as if it had sampled from it."""
    kind = DRAFTS["chain"]
    base = plugins.get("drafters", kind.drafter)

    class Lying(base):
        def propose(self, sequences: Any, rng: Any) -> Draft:
            return super().propose(sequences, Argmax())

    class Argmax:
        def draw(self, weights: Tensor, purpose: str = "draft", index: int = 0) -> Tensor:
            return weights.argmax(-1)

    return lambda context, gamma: Lying(Lying.Config(**kind.options(gamma)), context)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("toy", TOYS)
def test_argmax_drafts_reported_as_samples_are_caught(
    toys: dict[str, Toy], lying: Callable, verifier: str, toy: str
) -> None:
    assert certify(toys[toy], lying, plugins.get("verifiers", verifier)).tv > 0.05
