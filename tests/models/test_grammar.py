"""Masks of llguidance: functions of the text only, whatever was tried and rolled back before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from text_models import ENDLESS, SCHEMA, WIDTH, make_text_tokenizer

pytest.importorskip("llguidance", reason="constraints need the extra constrain")

from crossdraft.framework.contracts.constraint import Constraint, Matcher, permitted_next, walk
from crossdraft.framework.errors import UsageError
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


@pytest.mark.parametrize(
    "constraint, path, reason",
    [
        (Constraint(grammar='start: /[ab]/ ("c" | "z" T)\nT: /b/ & /c/'), "az", None),  # T has no text
        (Constraint(json_schema=ENDLESS), '{"b": ' * 5, "Too many items"),
        (Constraint(regex="((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"), "a" * 40, "too many expressions"),
    ],
    ids=["dead end", "parser", "lexer"],
)
def test_failed_states_permit_nothing_and_can_be_left(
    target: Any, constraint: Constraint, path: str, reason: str | None
) -> None:
    """Matchers at an earlier state, of the same one or of another sequence, go on as if it had never been tried."""
    grammar = compile_constraint(constraint, target, WIDTH)
    tokens = [target.tokenizer.encode(letter)[0] for letter in path]
    matcher, other = grammar.matcher(), grammar.matcher()
    masks = [permitted_next(other, [EOS])]
    for _ in range(3):
        count = 0
        while permitted_next(matcher, [EOS]).any():
            assert matcher.advance(tokens[count])
            count += 1
        assert not matcher.accepting and not matcher.advance(tokens[0]) and not matcher.implied(4)
        assert (reason in (matcher.failure or "")) if reason else matcher.failure is None
        masks.append(permitted_next(other, [EOS]))
        matcher.rollback(0)
        assert not permitted_next(matcher, [EOS]).any()
        matcher.rollback(count)
        masks.append(permitted_next(matcher, [EOS]))
    assert all(np.array_equal(mask, masks[0]) for mask in masks) and masks[0].any()
    assert list(walk(matcher, [EOS], tokens, range(-1, len(tokens) - 1), [True] * len(tokens)))[:2] == [-1, 0]


def test_choices_of_any_number_and_text(target: Any) -> None:
    rng = random.Random(0)
    unusual = ["\x7f", "a\x00b", "\u2028", "😀", "😀!", "é", "(a|b)*", "\\", '"', "/", "]", " ", "\n", "a" * 500]
    texts = ["".join(rng.choice("abcdefgh") for _ in range(rng.randrange(1, 9))) for _ in range(10_000)]
    choice = (*unusual, *texts, *texts[:10])
    grammar = compile_constraint(Constraint(choice=choice), target, WIDTH)

    def accepted(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.advance(token) for token in target.tokenizer.encode(text)) and matcher.accepting

    assert all(accepted(text) for text in [*unusual, *texts[:100]])
    absent = {text + letter for text in texts[:50] for letter in "ab"} - set(choice)
    assert len(absent) > 50 and not any(map(accepted, ["", "é!", "(", *absent]))


@pytest.mark.parametrize(
    "constraint, reason",
    [
        ({"regex": "[^\\s\\S]"}, "no text matches it"),
        ({"grammar": 'start: start "a"'}, "no text matches it"),
        ({"grammar": 'start: "z" T\nT: /b/ & /c/'}, "no text matches it"),
        (
            {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
            "no text matches it",
        ),
        ({"json_schema": {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}}, "Too many items"),
    ],
    ids=str,
)
def test_empty_languages_are_refused(target: Any, constraint: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=f"permits no response: .*{reason}"):
        compile_constraint(Constraint(**constraint), target, WIDTH)


def test_long_references_do_not_overflow_the_stack(target: Any) -> None:
    """An overflow in llguidance would end the process."""
    count = 6000
    schema = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "integer"}}
    grammar = compile_constraint(Constraint(json_schema={"$ref": "#/$defs/d0", "$defs": schema}), target, WIDTH)
    assert grammar.matcher().advance(target.tokenizer.encode("7")[0])


def test_long_messages_keep_both_ends(target: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)^the constraint's regex cannot be compiled: .*unclosed group") as caught:
        compile_constraint(Constraint(regex="(" + "ab" * 5000), target, WIDTH)
    assert len(str(caught.value)) < 1000
