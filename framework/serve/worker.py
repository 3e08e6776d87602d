"""One thread that decodes: requests wait in a queue, join the running batch as slots free up, and leave pieces behind.

A batch has one law. Where requests of several wait, one law after the other has its turn: all that waited for it when
the turn began, and then whoever comes while nobody waits for another.

Nothing that a client does holds the thread up. A piece is appended to what its client has not fetched yet, which is at
most the client's whole answers; a slot is free when its answer is decoded, whether it was read or not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from ..contracts.errors import CrossdraftError, first_line
from ..contracts.rounds import Chunk, Request
from ..contracts.sampling import Sampling
from ..decoding.outputs import Output, Outputs
from .laws import Served


class Failed(CrossdraftError):
    """A request could not be answered; the server goes on."""


class Full(CrossdraftError):
    """As many requests wait as may, or the server is ending."""


class Client:
    """One HTTP request: the pieces of its answers, from the decoding thread to the event loop ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._news = loop, asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, Chunk | Failed]] = []

    def put(self, choice: int, piece: Chunk | Failed) -> None:
        """From any thread; never waits for the client."""
        with self._lock:
            self._pieces.append((choice, piece))
        with suppress(RuntimeError):  # the loop is closed: nobody will ask
            self._loop.call_soon_threadsafe(self._news.set)

    async def fetch(self) -> list[tuple[int, Chunk | Failed]]:
        """All that came since the last time, at least one: which answer, and a piece of it or why it failed."""
        await self._news.wait()
        self._news.clear()
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return pieces


@dataclass(eq=False)
class Job:
    """A prompt that a client wants answered, as its answer number ``choice``."""

    client: Client
    choice: int
    law: Sampling
    request: Request
    output: Output


class Worker:
    """Decodes in a thread of its own.

    Args:
        served: the pair, with a decoder for each law.
        most_waiting: how many requests may wait for a slot.
    """

    def __init__(self, served: Served, most_waiting: int):
        self.served, self.most_waiting = served, most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._closing = False
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    @property
    def counts(self) -> dict[str, int]:
        """Slots there are, answers in work, and requests that wait."""
        return {
            "slots": self.served.decoder.target.batch_size,
            "running": len(self._running),
            "waiting": len(self._waiting),
        }

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End after the round under way; what is not answered fails, and nothing is taken any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """`end`, and wait for it."""
        self.end()
        self._thread.join()

    def submit(self, client: Client, law: Sampling, requests: Sequence[tuple[Request, Output]]) -> list[Job]:
        """Put prompts of one law into the queue, all or none; their ``index`` is given here. Raises `Full`."""
        with self._changed:
            if self._closing:
                raise Full("the server is ending")
            if len(self._waiting) + len(requests) > self.most_waiting:
                raise Full(f"{len(self._waiting)} requests wait already, and {self.most_waiting} may; ask again later")
            jobs = []
            for choice, (request, output) in enumerate(requests):
                jobs.append(Job(client, choice, law, request._replace(index=self._next), output))
                self._next += 1
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    def give_up(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these answers any more: those in work end with the round under way."""
        with self._changed:
            for job in jobs:
                job.output.given_up = True
                with suppress(ValueError):
                    self._waiting.remove(job)

    def _run(self) -> None:
        while (law := self._turn()) is not None:
            try:
                outputs = Outputs(self.served.decoder_of(law))
            except BaseException as error:  # out of memory, say
                self._fail(f"a request of this law cannot be decoded: {first_line(error)}", law)
                continue
            try:
                with closing(outputs.rounds(self._requests(law))) as rounds:
                    for pieces in rounds:
                        self._hand_out(pieces)
                        if self._closing:
                            break
            except BaseException as error:  # of a strategy or a model; SystemExit, too
                self._fail(f"decoding failed, and all that was in work with it: {first_line(error)}")
        self._fail("the server is ending")

    def _turn(self) -> Sampling | None:
        """The law of who has waited longest, and all who wait for it to the front; None when the server ends."""
        with self._changed:
            while not (self._waiting or self._closing):
                self._changed.wait()
            if self._closing:
                return None
            law = self._waiting[0].law
            self._waiting = deque(sorted(self._waiting, key=lambda job: job.law != law))
            return law

    def _requests(self, law: Sampling) -> Iterator[tuple[Request, Output] | None]:
        """What waits for ``law``, None while others run, and the end when the next one waits for another law or the
        server ends; asked by the decoding thread."""
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing or (self._waiting and self._waiting[0].law != law):
                    return
                job = self._waiting.popleft() if self._waiting else None
                if job is not None:
                    self._running[job.request.index] = job
            yield None if job is None else (job.request, job.output)

    def _hand_out(self, pieces: Sequence[Chunk]) -> None:
        for piece in pieces:
            job, response = self._running[piece.index], piece.response
            if response is not None:
                del self._running[piece.index]
            failed = response is not None and response.error is not None
            job.client.put(job.choice, Failed(str(response.error)) if failed and response is not None else piece)

    def _fail(self, why: str, law: Sampling | None = None) -> None:
        """What is in work fails; so does what waits for ``law``, or, when the server ends, for any."""
        with self._changed:
            jobs = list(self._running.values())
            self._running.clear()
            jobs += [job for job in self._waiting if self._closing or job.law == law]
            self._waiting = deque(job for job in self._waiting if not self._closing and job.law != law)
        for job in jobs:
            job.client.put(job.choice, Failed(why))
