"""The contract of a verifier, for all shapes; and rejected verifiers."""

from __future__ import annotations

import pytest
from crossdraft_by_shape.verifier import ByShape
from pydantic import ValidationError

from crossdraft import make_verifier
from crossdraft.testing import VerifierContract


class TestByShape(VerifierContract):
    verifier = ByShape

    def test_it_decides_as_rule_of_shape(self) -> None:
        """Draft for draft, with the same random numbers."""
        shapes = set()
        for _, draft, p, numbers, streams, position in self.recorded(2):
            steps = [numbers.for_step(streams, [position] * len(streams), p.device) for _ in range(2)]
            output = self.verdict_of(self.make(), draft, p, steps[0])
            separate = self.verdict_of(make_verifier(getattr(ByShape.Config(), draft.kind.name)), draft, p, steps[1])
            assert (
                output.length.tolist() == separate.length.tolist() and output.token.tolist() == separate.token.tolist()
            )
            shapes.add(draft.kind.name)
        assert shapes == set(ByShape.Config.model_fields), "a shape was never judged"


@pytest.mark.parametrize(
    "shape, rule, reason",
    [
        ("iid", "block", "it supports chain"),
        ("chain", "greedy", "it needs temperature 0"),
        ("chain", "greedy-block", "it keeps state between steps"),
        ("chain", "lenient", "it is lossy"),
        ("chain", "nothing", "there is no verifier named 'nothing'"),
    ],
)
def test_rules_that_cannot_be_wrapped(shape: str, rule: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"'{rule}' cannot verify '{shape}' drafts here: {reason}"):
        ByShape.Config(**{shape: rule})
