"""Enumeration of constrained targets: verifiers keep the masked distribution, and misplaced masks are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from token_automata import Automaton, automaton_of

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, Certificate, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.draft import Draft, DraftLists, Verdict
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.constraints import Constraints
from crossdraft.framework.errors import ContractError

Text = tuple[int, ...]
PAIRS = [
    ("chain", "token"),
    ("chain", "block"),
    ("chain", "greedy-block"),
    ("point-mass", "sample-match"),
    ("iid-2", "spectr"),
    ("iid-2", "specinfer"),
    ("tree-wor-2-1", "traversal"),
    ("tree-greedy-2-1", "greedy-draft-optimal"),
    ("tree-top-2-1", "sample-match"),
]


def certificate_of(toy: Toy, draft: Callable, verifier: str, steps: int = 2, **options: Any) -> Certificate:
    grammar = Automaton(automaton_of(toy.vocab_size), toy.vocab_size, lenient=options.pop("lenient", False))
    grammar.mask_drafts = options.pop("mask_drafts", False)
    gamma = min(toy.gamma, 2)
    rule = plugins.get("verifiers", verifier)
    certificate = certify(toy, draft, rule, steps=steps, gamma=gamma, constraint=grammar, **options)
    sampling = Sampling(temperature=options.get("temperature", 1.0))
    return replace(certificate, tv=variation(certificate.outputs, toy, sampling, grammar, steps * (gamma + 1)))


def variation(outputs: dict[Text, float], toy: Toy, sampling: Sampling, grammar: Automaton, length: int) -> float:
    """Total variation of outputs, completed to ``length`` tokens, from the target that is masked after each text."""
    output, target = dict(outputs), {(): 1.0}
    for n in range(length):
        for text in {text for text in (*output, *target) if len(text) == n}:
            following = masked_probs(toy, sampling, grammar, text)
            for side in (output, target):
                weight = side.pop(text, 0.0)
                for token, probability in enumerate(following):
                    if weight * probability:
                        side[*text, token] = side.get((*text, token), 0.0) + weight * probability
    return sum(abs(output.get(text, 0.0) - target.get(text, 0.0)) for text in {*output, *target}) / 2


def masked_probs(toy: Toy, sampling: Sampling, grammar: Automaton, text: Text) -> list[float]:
    """Probabilities of the token after ``text``; zeros if the grammar does not permit ``text``."""
    matcher = grammar.matcher()
    if not all(matcher.advance(token) for token in text):
        return [0.0] * toy.vocab_size
    logits = toy.target[text[-1] if text else toy.vocab_size].log()
    return sampling.probs(logits.masked_fill(~torch.from_numpy(matcher.permitted()), -torch.inf)).tolist()


@pytest.mark.parametrize("draft, verifier", PAIRS)
@pytest.mark.parametrize("name, mask_drafts", [("T0", False), ("G1", True), ("G2", False)])
def test_verifiers_keep_masked_distribution(
    toys: dict[str, Toy], drafts: dict[str, Callable], name: str, draft: str, verifier: str, mask_drafts: bool
) -> None:
    steps = 1 if draft.startswith("iid") else 2
    certificate = certificate_of(toys[name], drafts[draft], verifier, steps, mask_drafts=mask_drafts)
    assert certificate.coverage.drafted and certificate.tv <= TOLERANCE


@pytest.mark.parametrize("draft", ["chain", "point-mass", "tree-top-2-1"])
def test_greedy_decoding_keeps_masked_argmax(toys: dict[str, Toy], drafts: dict[str, Callable], draft: str) -> None:
    assert certificate_of(toys["G1"], drafts[draft], "greedy", temperature=0.0).tv <= TOLERANCE


def test_grammar_drafts_are_always_accepted(toys: dict[str, Toy]) -> None:
    drafter = plugins.get("drafters", "grammar")
    drafted: list[int] = []

    class Watched(drafter):
        def observe(self, sequences: Any, draft: Draft, verdict: Verdict, accepted: Any, scores: Any) -> None:
            assert accepted == draft.count.tolist()
            drafted.append(draft.width)

    def build(context: Any, gamma: int) -> Any:
        return Watched(drafter.Config(gamma=gamma), context)

    assert certificate_of(toys["G2"], build, "token", 3).tv <= TOLERANCE
    assert max(drafted) > 0


def test_masked_drafts_are_accepted_more_often(toys: dict[str, Toy], drafts: dict[str, Callable]) -> None:
    plain, masked = (
        certificate_of(toys["G1"], drafts["chain"], "block", mask_drafts=mask_drafts).expected_tau
        for mask_drafts in (False, True)
    )
    assert masked[0] > plain[0] + 0.05


@pytest.mark.parametrize("draft, verifier", PAIRS)
def test_mask_of_another_node_is_caught(
    toys: dict[str, Toy], drafts: dict[str, Callable], draft: str, verifier: str, monkeypatch: Any
) -> None:
    right = Constraints.forbidden
    monkeypatch.setattr(Constraints, "forbidden", lambda self, nodes: np.roll(right(self, nodes), 1, 1))
    assert certificate_of(toys["G1"], drafts[draft], verifier, 1, lenient=True).tv > 1e-3
    with pytest.raises(ContractError, match="which the constraint does not permit"):
        certificate_of(toys["G1"], drafts[draft], verifier, 1)


def test_mask_of_sibling_is_caught(toys: dict[str, Toy], drafts: dict[str, Callable], monkeypatch: Any) -> None:
    right = Constraints.forbidden

    def swapped(self: Constraints, nodes: DraftLists) -> np.ndarray:
        bits, width = right(self, nodes), len(nodes.tokens[0])
        return bits if width < 2 else bits[:, [0, 2, 1, *range(3, width + 1)]]

    monkeypatch.setattr(Constraints, "forbidden", swapped)
    assert certificate_of(toys["G1"], drafts["tree-wor-2-1"], "traversal", 1, lenient=True).tv > 1e-3


def test_unset_constraint_runs_no_mask(toys: dict[str, Toy], drafts: dict[str, Callable], monkeypatch: Any) -> None:
    monkeypatch.setattr(Constraints, "forbidden", None)
    monkeypatch.setattr(Constraints, "advance", None)
    assert certify(toys["T0"], drafts["chain"], plugins.get("verifiers", "block")).lossless
