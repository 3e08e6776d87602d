"""A faulty strategy fails only its own cell."""

import os
import signal
import sys
import time
from typing import Any

import pytest
from tiny_runs import ONE_GROUP

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.runs import interrupts
from crossdraft.verifiers.token import Token

SETTINGS = [*ONE_GROUP[:-1], "verifiers=[token]"]


class Worst(BaseException):
    """An exception that `except Exception` does not catch."""


def exits() -> None:
    sys.exit(0)


def interrupts_itself() -> None:
    raise KeyboardInterrupt


def hangs() -> None:
    while True:
        time.sleep(0.01)


def is_worst() -> None:
    raise Worst("the worst")


def generator() -> None:
    raise GeneratorExit


class Bad(PromptLookup):
    name = "bad"
    deed: Any = None
    at = "propose"

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        self._do("init")

    def _do(self, place: str) -> None:
        if place == type(self).at:
            type(self).deed()

    def propose(self, sequences: Any, rng: Any) -> Any:
        self._do("propose")
        return super().propose(sequences, rng)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self._do("free")
        super().free(row, finish_reason)


@pytest.mark.parametrize(
    "deed, at, output",
    [
        (exits, "propose", "SystemExit: 0"),
        (exits, "init", "SystemExit: 0"),
        (interrupts_itself, "free", "KeyboardInterrupt"),
        (interrupts_itself, "init", "KeyboardInterrupt"),
        (is_worst, "propose", "Worst: the worst"),
        (generator, "propose", "GeneratorExit"),
    ],
)
def test_others_go_on(bench: Any, install: Any, monkeypatch: Any, at: str, deed: Any, output: str) -> None:
    monkeypatch.setattr(Bad, "deed", staticmethod(deed))
    monkeypatch.setattr(Bad, "at", at)
    install("drafters", ("bad", Bad))
    code, out, err = bench(*SETTINGS, "drafters=[{name: bad}, prompt-lookup]", "limit=2")
    assert code == 1 and f"failed: bad × token (not certified): {output}\n" in err and "1 of 3 cells failed" in err
    assert "prompt-lookup  token" in out and "failed: bad × token (temperature 1, batch size 1): " in out


def test_step_that_never_ends(bench: Any, install: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Bad, "deed", staticmethod(hangs))
    install("drafters", ("bad", Bad))
    code, out, err = bench(*SETTINGS, "drafters=[{name: bad}, prompt-lookup]", "limit=2", flags=["--step-limit", "2.0"])
    assert code == 1 and "failed: bad × token (not exercised): a step exceeded the limit of 2 s (--step-limit)" in err
    assert "prompt-lookup  token" in out


class Counting(PromptLookup):
    name = "counting"
    passes: Any = "many"


def test_invalid_pass_counts_fail(bench: Any, install: Any) -> None:
    install("drafters", ("counting", Counting))
    code, out, err = bench(*SETTINGS, "drafters=[{name: counting}, prompt-lookup]", "limit=2")
    assert code == 1 and "drafter 'counting' has passes = 'many'; it must be an int" in err
    assert "prompt-lookup  token" in out


class Quitting(Token):
    name = "quitting"

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        sys.exit("enough")


def test_verifier_that_quits(bench: Any, install: Any) -> None:
    install("verifiers", ("quitting", Quitting))
    code, out, err = bench(*ONE_GROUP[:-1], "verifiers=[quitting, token]", "drafters=[prompt-lookup]", "limit=2")
    assert code == 1 and "failed: prompt-lookup × quitting (not certified): SystemExit: enough" in err
    assert "prompt-lookup  token" in out


class Swallowing(Token):
    """Like native code that runs Python: an exception raised in it becomes one of its own."""

    name = "swallowing"

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise RuntimeError("KeyboardInterrupt: <EMPTY MESSAGE>") from error
        return super().verify(draft, p, rng)


def test_signal_inside_of_native_code_ends_the_run(bench: Any, install: Any) -> None:
    install("verifiers", ("swallowing", Swallowing))
    code, _, err = bench(*ONE_GROUP[:-1], "verifiers=[swallowing, token]", "drafters=[prompt-lookup]", "limit=2")
    assert code == 130 and "failed:" not in err


def test_second_signal_waits_for_summary(capsys: Any) -> None:
    with interrupts.saving_interrupts():
        assert not interrupts.user_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.user_interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert "saving partial results; press Ctrl-C again to quit now" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.user_interrupted() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
