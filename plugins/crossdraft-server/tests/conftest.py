"""Reproducible samples of requests without a seed, which the server draws from the system's randomness."""

import random

import pytest


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", random.Random(0).randrange)
