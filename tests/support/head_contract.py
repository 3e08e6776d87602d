"""The contract kit with heads of a tiny model, which a fixture `heads` of the module writes."""

from pathlib import Path

import pytest

from crossdraft.testing import DrafterContract, TinyModel


class Heads(DrafterContract):
    """Options are completed with the directory of the heads."""

    setting = TinyModel()
    #: Of the heads, if not the drafter's name.
    directory = ""

    @pytest.fixture(autouse=True)
    def _model(self, heads: Path) -> None:
        self.use(heads)

    @classmethod
    def use(cls, heads: Path) -> None:
        cls.options = {**cls.options, "model": str(heads / (cls.directory or str(cls.drafter)))}
