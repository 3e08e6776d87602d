"""Lookahead and Jacobi decoding: whose guesses they are, where they stand, and that the text is the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossdraft_drafters.self_speculation.jacobi import Jacobi
from crossdraft_drafters.self_speculation.lookahead import Guesses, Lookahead
from draft_contexts import GivenContext
from pydantic import ValidationError
from tiny_models import generated

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15]]
NEW = 24


def decoder(
    model: Any, drafter: Any, batch_size: int, temperature: float = 0.0, options: Any = (), **loop: Any
) -> Decoder:
    lm, sampling = TransformersLM(model, batch_size, 160), Sampling(temperature=temperature)
    drafter_ = drafter(drafter.Config(**dict(options)), GivenContext(lm, sampling, 160))
    rule = plugins.get("verifiers", "greedy" if temperature == 0 else "sample-match")
    loop = {"max_new_tokens": NEW, "rng": CounterRng(3), "validate": "always", **loop}
    return Decoder(lm, drafter_, rule(), sampling=sampling, **loop)


def answers(loop: Decoder) -> list[list[int]]:
    return [r.tokens for r in sorted(loop.run(PROMPTS), key=lambda response: response.index)]


@pytest.fixture(scope="module")
def repeating(tiny_model: Callable) -> Any:
    """A model whose greedy text soon goes round in a circle, where guesses come true."""
    return tiny_model("llama", seed=2, copy="repeating")


@pytest.fixture(scope="module")
def expected(repeating: Any) -> list[list[int]]:
    return generated(repeating, PROMPTS, NEW)


CASES = [
    (Jacobi, {"gamma": 4}),
    (Lookahead, {}),
    (Lookahead, {"window": 3, "ngram": 2, "guesses": 2}),
    (Lookahead, {"window": 4, "ngram": 3, "guesses": 3, "from_prompt": True}),
]


@pytest.mark.parametrize("drafter, options", CASES)
def test_greedy_text_is_transformers_own(repeating: Any, expected: Any, drafter: Any, options: Any) -> None:
    events: list[Any] = []
    assert answers(decoder(repeating, drafter, 8, options=options, on_step=events.append)) == expected
    assert any(max(event.accepted) > 0 for event in events), "no guess came true, so nothing was tried"


# -- jacobi --------------------------------------------------------------------------------------------------


def test_pass_is_step_of_jacobi_iteration(repeating: Any) -> None:
    """The next guess equals the model's output after the last one, computed without a cache."""
    loop = decoder(repeating, Jacobi, 1, options={"gamma": 5})
    loop.start(0, PROMPTS[1])
    guess = [PROMPTS[1][-1]] * 5
    for _ in range(6):
        before = list(loop.sequences.history[0])
        with torch.inference_mode():
            outputs = repeating(torch.tensor([before + guess]), use_cache=False).logits[0, len(before) - 1 :].argmax(-1)
        loop.step()
        new = loop.sequences.history[0][len(before) :]
        tau = next((i for i, (a, b) in enumerate(zip(guess, outputs.tolist(), strict=False)) if a != b), 5)
        assert new == [*guess[:tau], int(outputs[tau])]
        rest = loop.drafter._best[0].tolist()[loop.drafter._guess[0].start : loop.drafter._guess[0].stop]
        assert rest == outputs.tolist()[tau + 1 :]
        guess = (rest + (rest or loop.sequences.history[0])[-1:] * 5)[:5]


# -- lookahead -----------------------------------------------------------------------------------------------


def test_window_matches_model(repeating: Any) -> None:
    """A token of row r and column c follows row 0 up to c and the later rows of c: passes of plain texts, no cache."""
    loop = decoder(repeating, Lookahead, 2, options={"window": 3, "ngram": 4, "guesses": 3})
    for row in range(2):
        loop.start(row, PROMPTS[row + 1], row, row)
    for _ in range(5):
        before = [list(history) for history in loop.sequences.history]
        windows = [[list(line) for line in guesses.rows] for guesses in loop.drafter.guesses]
        loop.step()
        for row, (history, window) in enumerate(zip(before, windows, strict=True)):
            guesses, tau = loop.drafter.guesses[row], len(loop.sequences.history[row]) - len(history) - 1
            for column in range(3):
                text = [*history, *window[0][: column + 1], *(line[column] for line in window[1:])]
                with torch.inference_mode():
                    outputs = int(repeating(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
                if column >= tau:
                    assert guesses.rows[-1][column - tau] == outputs
            kept = 3 - tau
            assert [line[:kept] for line in guesses.rows[:-1]] == [line[tau:] for line in window[1:]]


def guesses(**options: Any) -> Guesses:
    return Guesses(**{"prompt": [1, 2], "window": 2, "ngram": 3, "guesses": 2, "from_prompt": False, **options})


def test_ngrams_enter_pool_after_target_output_them() -> None:
    """N-gram of a column: its first token, the outputs since, and the new one."""
    own = guesses()
    first = own.rows[0][0]
    own.move([30, 31], 0, [1, 2, 9])
    assert not own.pool, "the second token of the window was nobody's guess"
    second = own.rows[0][0]
    assert own.rows == [[second, own.rows[0][1]], [30, 31]]
    own.move([40, 41], 0, [1, 2, 9, 9])
    assert own.pool.get(second) is not None and (30, 40) in own.pool[second]
    own.move([50, 51], 1, [1, 2, 9, 9, 9, 9])
    assert (40, 50) in own.pool[30] and (41, 51) in own.pool[31]
    assert own.rows[0][0] == 41 and own.rows[1][0] == 51, "one accepted token moves the window by a column"
    assert all(row[1] in (1, 2, 9) for row in own.rows), "what is new in it is some token of the text"
    assert first in (1, 2)


def test_pool_keeps_latest_and_drafts_them_as_tree() -> None:
    own = guesses(guesses=3)
    for ngram in ((7, 1, 2), (7, 1, 3), (7, 4, 4), (7, 1, 2), (7, 5, 6)):
        own.learn(ngram)
    assert list(own.pool[7]) == [(4, 4), (1, 2), (5, 6)], "(1, 3) was the oldest when the fourth came"
    assert own.tree(7, 9) == ([5, 6, 1, 2, 4, 4], [-1, 0, -1, 2, -1, 4])
    own.learn((7, 1, 8))
    assert own.tree(7, 9) == ([1, 8, 5, 6, 2], [-1, 0, -1, 2, 0]), "equal beginnings are one node"
    assert own.tree(7, 1) == ([1, 5], [-1, -1]) and own.tree(7, 0) == ([], []) == own.tree(8, 2)


def test_prompts_own_ngrams() -> None:
    own = guesses(prompt=[1, 2, 3, 1, 2, 4], from_prompt=True)
    assert own.pool == {1: {(2, 3): None, (2, 4): None}, 2: {(3, 1): None}, 3: {(1, 2): None}}


def test_initial_window_depends_only_on_prompt() -> None:
    long = {"prompt": list(range(50)), "window": 6}
    assert guesses(**long).rows == guesses(**long).rows != guesses(**{**long, "prompt": list(range(1, 51))}).rows


@pytest.mark.parametrize(
    "name, options", [("jacobi", {"gamma": 2}), ("lookahead", {"window": 2, "ngram": 3, "guesses": 2})]
)
@pytest.mark.parametrize("toy", ["T0", "G2"])
def test_lossless_with_every_rule_that_fits(toys: dict[str, Toy], toy: str, name: str, options: Any) -> None:
    """By enumeration over three steps, because guesses come from steps before."""
    drafter = plugins.get("drafters", name)
    rules = ["token", "block"] if name == "jacobi" else ["sample-match", "specinfer", "traversal"]
    for rule in rules:
        certificate = certify(
            toys[toy], lambda context, _: drafter(drafter.Config(**options), context), plugins.get("verifiers", rule),
            steps=3, gamma=[1, 1, 1],
        )  # fmt: skip
        assert certificate.tv <= TOLERANCE
        assert certificate.coverage.drafted or name == "lookahead", "n-grams of three tokens may be none so early"


def test_probes_are_counted_as_target_rows(repeating: Any) -> None:
    """The cost of the window is recorded: every step evaluates it."""
    loop = decoder(repeating, Lookahead, 1, options={"window": 3, "ngram": 3, "guesses": 2}, max_new_tokens=9)
    (response,) = loop.run(PROMPTS[:1])
    assert all(r.width >= 6 for r in response.steps[:-1]) and all(r.nodes <= 4 for r in response.steps)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"ngram": 1}, "greater than or equal to 2"),
        ({"window": 0}, "greater than or equal to 1"),
        ({"window": 1024, "ngram": 9}, "make drafts of 8248 nodes; the maximum is 4096"),
    ],
)
def test_sizes_that_cannot_be(options: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Lookahead.Config(**options)
