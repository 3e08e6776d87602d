"""Reproducible samples of requests without a seed, which the server draws from the system's randomness."""

import random

import pytest
from decoding_fixtures import answers, expected, model  # noqa: F401


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", random.Random(0).randrange)
