"""Size of a run: the functions of the core that `crossdraft run` enters, once imports and certificates are done."""

from typing import Any

from entered_functions import entered_functions
from tiny_runs import ONE_GROUP

#: Most functions of a run of one pair and its baseline on six prompts, a dozen of which depend on the load of the
#: machine (warnings, estimates); the goal is 500.
FUNCTIONS = 630


def test_run_enters_few_functions(bench: Any) -> None:
    settings = [*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]"]
    assert bench(*settings)[0] == 0
    with entered_functions() as entered:
        assert bench(*settings, flags=["--fresh"])[0] == 0
    assert len(entered) <= FUNCTIONS, (len(entered), sorted(entered))
