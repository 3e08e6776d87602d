"""Compilation of layers in a process of low priority, one at a time, while their passes run uncompiled.

Tracing and compiling are Python for the greater part: in a thread, they would take turns with the passes.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

#: Added to the priority of the process: beside passes on all processors it hardly runs, in their pauses it does.
NICE = 19
#: Compilers that PyTorch looks for, unless ``CXX`` is set.
COMPILERS = ("g++", "clang++")


class Job:
    """A process that compiles a layer for a call into ``path``, of arguments of `compiled_layers.compile_layer`."""

    def __init__(self, *arguments: Any):
        with tempfile.TemporaryFile() as file:
            pickle.dump(arguments, file)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        atexit.register(self._process.terminate)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def result(self) -> str:
        """Wait for the end; return why it failed, or an empty text."""
        output = self._process.communicate()[0].strip()
        atexit.unregister(self._process.terminate)
        return output or (f"its compilation ended with {self._process.returncode}" if self._process.returncode else "")


_jobs: dict[Path, Job] = {}
_lock = threading.Lock()


def job_for(path: Path, arguments: Callable[[], tuple[Any, ...]]) -> Job | None:
    """The job that compiles into ``path``, or another one that must end first; None if there is no compiler.

    Args:
        arguments: those of `compiled_layers.compile_layer`, but for ``path``.

    Raises:
        Exception: the layer cannot be sent to another process.
    """
    with _lock:
        running = next((job for job in _jobs.values() if job.runs), None)
        if path not in _jobs and running is None and _compiler():
            _jobs[path] = Job(*arguments(), path)
        return _jobs.get(path, running)


@cache
def _compiler() -> bool:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return any(map(shutil.which, names))


def main() -> None:
    """Compile what the standard input describes; print why that is not possible."""
    with suppress(AttributeError, OSError):  # Windows has no priorities
        os.nice(NICE)
    import torch

    from .compiled_layers import compile_layer

    try:
        layer, call, path = pickle.load(sys.stdin.buffer)  # of the parent process
        torch.set_num_threads(call.threads)
        compile_layer(layer, call, path)
    except Exception as error:
        print(str(error).strip().partition("\n")[0] or type(error).__name__)


if __name__ == "__main__":
    main()
