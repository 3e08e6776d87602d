"""Every registered verifier through the contract kit."""

import pytest

from crossdraft.framework import plugins
from crossdraft.testing import VerifierContract

#: Walks every outcome of two sequences; `specinfer` does the same in half the time.
SLOW = {"spectr"}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in sorted(plugins.entries("verifiers"))
]
#: A draft of each shape, with a distribution and without: chains, sequences and trees.
SHAPES = ("chain", "point-mass", "iid-2", "tree-wor-2-1", "tree-top-2-1")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestVerifiers(VerifierContract):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        type(self).verifier = name

    def test_lossless_by_enumeration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Enumerate drafts that `tests/verifiers/test_golden.py` does not, on the same toys."""
        first, *others = self.labels()
        monkeypatch.setattr(type(self), "labels", lambda self: [first, *(o for o in others if o == "iid-3")])
        super().test_lossless_by_enumeration()

    def test_large_vocabulary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        labels = self.labels()
        monkeypatch.setattr(type(self), "labels", lambda self: [one for one in labels if one in SHAPES] or labels)
        super().test_large_vocabulary()

    @pytest.mark.slow
    def test_large_vocabulary_with_every_draft(self) -> None:
        super().test_large_vocabulary()
