"""Compilation of the constraints of requests, off the event loop and with limits of time and memory.

llguidance cannot be interrupted, and a short constraint may take minutes or gigabytes (``{"multipleOf": 999983}``).
Therefore each is tried first in a process that can be killed (`constraint_check`). It is compiled in a thread, without
the lock of the interpreter.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Timer

from crossdraft import Constraint, LoadedModel, UsageError
from crossdraft.framework.models.grammar import (
    TokenGrammar,
    compile_constraint,
    llguidance_source,
    serialized_tokenizer,
)

#: Limits of a constraint, in seconds: of its compilation, and of a token of the response.
MOST_SECONDS, MOST_STEP_SECONDS = 10.0, 1.0
#: Seconds until a process has loaded the tokenizer.
_START_SECONDS = 120.0
#: Constraints compiled at the same time.
_PROCESSES = 2


class ConstraintCompiler:
    """Compiles constraints for the tokens of ``target``, whose logits have ``vocab_size`` entries."""

    def __init__(self, target: LoadedModel, vocab_size: int):
        self._target, self._vocab_size = target, vocab_size
        self._threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="constraints")
        self._trials = [_Trial(target, vocab_size) for _ in range(_PROCESSES)]
        self._idle: SimpleQueue[_Trial] = SimpleQueue()
        for trial in self._trials:
            self._idle.put(trial)

    async def compile(self, constraint: Constraint) -> TokenGrammar:
        """The grammar. Raises UsageError or ModelError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _compile(self, constraint: Constraint) -> TokenGrammar:
        source, trial = llguidance_source(constraint), self._idle.get()
        try:
            reason = trial.refusal(source)
        finally:
            self._idle.put(trial)
        if reason:
            raise UsageError(f"the constraint's {constraint.kind} {reason}; simplify it")
        return compile_constraint(constraint, self._target, self._vocab_size)


class _Trial:
    """A process that tries constraints, started when it is needed."""

    def __init__(self, target: LoadedModel, vocab_size: int):
        self._target, self._vocab_size = target, vocab_size
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, source: str) -> str:
        """The reason to refuse a constraint, or ""."""
        if self._process is None:
            head = serialized_tokenizer(self._target, self._vocab_size)
            command = [sys.executable, str(Path(__file__).with_name("constraint_check.py"))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if not self._answer(json.dumps(head), _START_SECONDS):
                return "cannot be tried: the process for it does not start"
        start = time.monotonic()
        if not (answer := self._answer(json.dumps(source), MOST_SECONDS)):
            if time.monotonic() - start < MOST_SECONDS:
                return "cannot be compiled: llguidance runs out of memory or ends unexpectedly"
            return f"takes more than {MOST_SECONDS:g} s to compile"
        if (seconds := float(answer)) > MOST_STEP_SECONDS:
            return f"takes {seconds:.1f} s for one token; the maximum is {MOST_STEP_SECONDS:g} s"
        return ""

    def close(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.communicate()

    def _answer(self, line: str, seconds: float) -> str:
        """The process's line for ``line``; "" if it ended or was killed after ``seconds``."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self.close()
        return answer
