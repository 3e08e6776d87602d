"""Signals end a run, also where Python ignores the exceptions that they raise."""

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from crossdraft.framework.runs import interrupts


class Finalised:
    """An object whose finaliser handles a signal."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "block", [partial(interrupts.handled, signal.default_int_handler), interrupts.saving_interrupts]
)
def test_signal_in_a_finaliser_is_delivered_after_it(block: Callable[[], AbstractContextManager[None]]) -> None:
    late = threading.Event()
    timer = threading.Timer(10, late.set)
    timer.start()
    with block():
        with pytest.raises(KeyboardInterrupt):
            Finalised()
            late.wait()
        assert interrupts.user_interrupted()
    timer.cancel()
    assert not late.is_set()  # it ends a wait
