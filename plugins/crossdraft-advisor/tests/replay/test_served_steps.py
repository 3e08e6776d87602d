"""Steps of an engine against those of replay, where the ends of steps are recorded and where they are inferred."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.samples.engine_checks import ServedSteps

#: Accepted tokens of a step that starts at each of ten tokens; the first belongs to the prefill.
TAU = [0, 2, 0, 0, 1, 0, 0, 2, 0, 0]


def survival() -> np.ndarray:
    return (np.arange(1, 4) <= np.array(TAU)[:, None]).astype(float)


def records(*taus: int) -> list[Any]:
    steps, limit = [], 8
    for tau in taus:
        steps.append(SimpleNamespace(tau=tau, emitted=tau + 1, limit=limit))
        limit -= tau + 1
    return steps


def steps(*taus: int, inferred: bool = False) -> ServedSteps:
    served = ServedSteps()
    served.add("a", records(*taus), survival(), inferred)
    return served


@pytest.mark.parametrize("inferred", [False, True])
def test_steps_of_replay_are_equal(inferred: bool) -> None:
    served = steps(2, 1, 0, 2, inferred=inferred)
    assert (served.equal, served.decided, served.unequal, served.p_value) == (3, 3, [], 1)


def test_token_of_a_neighbouring_step_differs_only_if_ends_are_recorded() -> None:
    """The first step has a token of the second."""
    served = steps(1, 2, 0, 2)
    assert served.equal == 1 and served.unequal[0] == ("a", 2, 1, 2)
    served = steps(1, 2, 0, 2, inferred=True)
    assert (served.equal, served.decided, served.unequal, served.p_value) == (3, 3, [], 1)


@pytest.mark.parametrize("taus", [(2, 2, 2), (0, 0, 0, 0, 0, 0, 2)])
def test_other_number_of_accepted_tokens_differs(taus: tuple[int, ...]) -> None:
    served = steps(*taus, inferred=True)
    assert served.equal < served.decided


def test_accepted_last_token_is_a_step_less() -> None:
    """The text ends inside of the last draft: three steps, and two of an engine that counts the last token."""
    ended = survival()[:9]
    served = ServedSteps()
    served.add("a", records(2, 4), ended, inferred=True)
    assert served.equal == served.decided == 1
