"""Coverage of certificates: pairs of built-in strategies are exercised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import Coverage
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.outcomes import certify_quickly, outcome, unexercised
from crossdraft.framework.certificate.rows import certify_row, with_pair_coverage
from crossdraft.framework.certificate.table_lm import Toy


def test_one_toy_does_not_decide(toys: dict[str, Toy]) -> None:
    """On G3, all q of `tree-greedy-2-1` are equal."""
    draft, verifier = "tree-greedy-2-1", plugins.get("verifiers", "sample-match")
    rows = [certify_row(toys[name], draft, DRAFTS[draft], verifier) for name in ("G3", "T0")]
    assert rows[0].gap == "q is unequal in 0 of 72 drafted steps" and not rows[1].gap
    assert unexercised(rows) == f"draft '{draft}': {rows[0].gap}"
    pairs = with_pair_coverage(rows)
    assert not unexercised(pairs) and [row.coverage for row in pairs] == [row.coverage for row in rows]
    other = replace(rows[0], draft="other", coverage=Coverage(100))
    assert unexercised(with_pair_coverage([*rows, other])) == "draft 'other': q is unequal in 0 of 100 drafted steps"


@pytest.mark.thorough
@pytest.mark.parametrize("name", plugins.entries("verifiers"))
def test_verifiers_are_exercised_before_run(name: str) -> None:
    verifier = plugins.get("verifiers", name)
    certificate = outcome(certify_quickly(verifier, verifier.Config(), lambda: None))
    if not verifier.traits(verifier.Config()).lossless:
        assert certificate is None
    else:
        assert certificate is not None and certificate.lossless and certificate.exercised, certificate
