"""A launcher whose processes are calls in this one: what the parent makes of them takes no time to find out."""

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from crossdraft_cluster.launcher import Launcher, LauncherConfig, Work, Worker

from crossdraft.framework.cli import main as cli


class Called(Worker):
    def __init__(self, how: str):
        self.how, self.stopped = how, False

    def poll(self) -> str:
        return self.how

    def stop(self, force: bool = False) -> None:
        self.stopped = True


class Config(LauncherConfig):
    speed: int = 1


class Here(Launcher):
    """Runs each group when it starts. ``before(work)`` may return the exit message of a process that did nothing."""

    name = "here"
    Config = Config
    many: int | None = 1
    before: Callable[[Work], str | None] = staticmethod(lambda work: None)
    started: ClassVar[list[tuple[str, ...]]] = []

    def devices(self) -> int | None:
        return self.many

    def start(self, work: Work) -> Worker:
        type(self).started.append(work.arguments)
        if (how := type(self).before(work)) is not None:
            return Called(how)
        out, err = contextlib.redirect_stdout, contextlib.redirect_stderr
        with work.log.open("a", encoding="utf-8") as log, out(log), err(log):
            return Called(f"ended with exit code {cli.main(list(work.arguments))}")


def fresh() -> Any:
    """A class of its own for a test."""
    return type("Here", (Here,), {"started": [], "before": staticmethod(lambda work: None)})
