"""Masks of llguidance: functions of the text only, whatever was tried and rolled back before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from text_models import SCHEMA, WIDTH, make_text_tokenizer

pytest.importorskip("llguidance", reason="constraints need the extra constrain")

from crossdraft.framework.contracts.constraint import Constraint, Matcher, permitted_next, walk
from crossdraft.framework.models.grammar import compile_constraint

EOS = 2


@pytest.fixture(scope="module")
def target() -> Any:
    return SimpleNamespace(tokenizer=make_text_tokenizer(), eos_token_ids=(EOS,), name="a model")


def explore(matcher: Matcher, rng: random.Random) -> None:
    """Try random tokens and roll them back."""
    depth = 0
    for _ in range(rng.randrange(5)):
        ids = np.flatnonzero(matcher.permitted()).tolist()
        depth += matcher.advance(rng.choice([*ids, rng.randrange(3, WIDTH)]))
        matcher.implied(8)
    matcher.rollback(depth)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json_schema=SCHEMA),
        Constraint(json_schema=True),
        Constraint(regex="(yes|no) [0-9]{2,4}( [a-z]+)*"),
        Constraint(choice=("yes", "no", 'a "quote"\n')),
        Constraint(grammar='start: "(" start ")" | /[a-z]+/'),
    ],
    ids=str,
)
def test_masks_depend_on_text_only(target: Any, constraint: Constraint) -> None:
    grammar, rng = compile_constraint(constraint, target, WIDTH), random.Random(0)
    for _ in range(10):
        matcher, text = grammar.matcher(), []
        for _ in range(20):
            explore(matcher, rng)
            fresh = grammar.matcher()
            assert all(fresh.advance(token) for token in text)
            permitted = permitted_next(matcher, [EOS])
            assert np.array_equal(permitted, permitted_next(fresh, [EOS])) and permitted.any()
            assert permitted[EOS] == matcher.accepting and not permitted[len(target.tokenizer) :].any()
            ids = [token for token in np.flatnonzero(permitted).tolist() if token != EOS]
            if not ids:
                break
            text.append(rng.choice(ids))
            assert matcher.advance(text[-1])


def test_walk_visits_permitted_nodes(target: Any) -> None:
    matcher = compile_constraint(Constraint(regex="ab|ac|b"), target, WIDTH).matcher()
    a, b, c, d = (target.tokenizer.encode(letter)[0] for letter in "abcd")
    tokens, parents = [a, b, b, c, d, b, EOS, a], [-1, -1, 0, 0, 0, 1, 1, 6]
    texts = {node: matcher.accepting for node in walk(matcher, [EOS], tokens, parents, [True] * 8)}
    assert texts == {-1: False, 0: False, 1: True, 2: True, 3: True}
    assert matcher.advance(a) and not matcher.advance(a)
