"""Detection of prompts of random tokens."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from tiny_models import VOCAB, save_model
from tiny_runs import ONE_GROUP

from crossdraft.framework.recipe.random_tokens import MIN_TOKENS, distance, warning

V = 50_000


@settings(max_examples=20)
@given(st.lists(st.integers(0, 96), min_size=1, max_size=20))
def test_distance_is_that_of_kolmogorov_and_smirnov(tokens: list[int]) -> None:
    """Spread over unit intervals, token ids are continuous: the distance equals scipy's in the limit."""
    fine = [token + (i + 0.5) / 200 for token in tokens for i in range(200)]
    assert distance(tokens, 97) == pytest.approx(kstest(fine, "uniform", args=(0, 97)).statistic, abs=3e-3)


def test_exact_distances() -> None:
    assert distance(range(10), 10) == pytest.approx(0)
    assert distance([0], 10) == pytest.approx(0.9)
    assert distance([9], 10) == pytest.approx(0.9)
    assert distance([4, 4], 10) == pytest.approx(0.5)


@pytest.mark.parametrize("n", [MIN_TOKENS, 256, 2048])
def test_drawn_tokens_are_found(n: int) -> None:
    chance = random.Random(n)
    prompts = [[chance.randrange(V) for _ in range(n)] for _ in range(20)]
    result = warning(prompts, V)
    assert result is not None and result.startswith("20 of 20 prompts look like random tokens")


@pytest.mark.parametrize("n", [MIN_TOKENS, 256, 2048])
def test_tokens_as_often_as_words_are_not(n: int) -> None:
    """Zipf distributions over all token ids and over a block of them, as for a non-Latin script."""
    chance = np.random.default_rng(n)
    latin = [np.minimum(chance.zipf(1.2, n), V) - 1 for _ in range(20)]
    other = [40_000 + chance.integers(0, 5_000, n) for _ in range(20)]
    assert warning([*map(list, latin)], V) is None and warning([*map(list, other)], V) is None


def test_short_or_minority_texts_are_ignored() -> None:
    chance = random.Random(0)
    drawn = [[chance.randrange(V) for _ in range(200)] for _ in range(2)]
    written = [[i % 500 for i in range(200)]] * 2
    assert warning([item[: MIN_TOKENS - 1] for item in drawn], V) is None and warning([], V) is None
    assert warning([*drawn, *written], V) is None
    assert str(warning([*drawn, written[0]], V)).startswith("2 of 3 prompts")


def test_run_reports_random_tokens(bench: Any, tmp_path: Path) -> None:
    words = [word for word in VOCAB if word.startswith("w")]
    chance = random.Random(0)
    rows = [{"prompt": " ".join(chance.choice(words) for _ in range(140))} for _ in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    target = save_model(tmp_path / "long", context=160)
    code, out, err = bench(*ONE_GROUP, f"target={target}", "drafters=[prompt-lookup]", "max_new_tokens=4")
    assert code == 0 and "note: 2 of 2 prompts look like random tokens; results on them" in out
    assert "note: 2 of 2 prompts look like random tokens" in err
