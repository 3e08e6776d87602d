"""The decoding thread: requests wait in a queue, join running batches as slots free up, and leave chunks behind.

A batch has one sampling setting, because its drafts and verdicts do. Requests of several settings run side by side, in
decoders of their own that take turns, one step each. Where more settings are requested than decoders are kept, the
oldest decoder admits nothing more, finishes what it runs, and makes room.

Nothing that a client does holds the thread up. A piece is appended to what its client has not fetched yet, which is at
most the client's whole answers; a slot is free when its answer is decoded, whether it was read or not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..api.output_processor import Output, Outputs
from ..contracts.sampling import Sampling
from ..contracts.steps import Chunk, Request
from ..errors import CrossdraftError, first_line
from .decoder_pool import MOST_OTHERS, Served


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


@dataclass(eq=False)
class Session:
    """The running requests of one sampling setting.

    Attributes:
        running: jobs that have a slot, by the index of their request.
        admits: whether waiting jobs may join.
        steps: decodes them, one step for each `next`.
    """

    law: Sampling
    running: dict[int, Job] = field(default_factory=dict)
    admits: bool = True
    steps: Generator[list[Chunk], None, None] = field(init=False)


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
        self._sessions: dict[Sampling, Session] = {}
        self._closing = False
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    @property
    def counts(self) -> dict[str, int]:
        """Slots of each decoder, running answers of all decoders, and requests that wait for a slot."""
        return {
            "slots": self.served.decoder.target.batch_size,
            "running": sum(len(session.running) for session in list(self._sessions.values())),
            "waiting": len(self._waiting),
        }

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End after the step under way; what is not answered fails, and nothing is accepted any more."""
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
        """Nobody wants these answers any more: those in work end with the step under way."""
        with self._changed:
            for job in jobs:
                job.output.aborted = True
                with suppress(ValueError):
                    self._waiting.remove(job)

    def _run(self) -> None:
        while not self._closing:
            self._open_sessions()
            for session in list(self._sessions.values()):
                if not self._closing:
                    self._step(session)
        for session in list(self._sessions.values()):
            with suppress(BaseException):  # a strategy's code may raise while its slots are freed
                session.steps.close()
        self._fail("the server is ending")

    def _open_sessions(self) -> None:
        """Wait for work, then open a session for each waiting setting for which a decoder may be kept."""
        with self._changed:
            while not (self._waiting or self._sessions or self._closing):
                self._changed.wait()
        while not self._closing and (law := self._openable()) is not None:
            try:
                outputs = Outputs(self.served.decoder_of(law, busy=self._sessions))
            except BaseException as error:  # out of memory, say
                self._fail(f"requests with these sampling parameters cannot be decoded: {first_line(error)}", law)
                continue
            session = Session(law)
            session.steps = outputs.steps(self._admitted(session), interleaved=lambda: len(self._sessions) > 1)
            self._sessions[law] = session

    def _openable(self) -> Sampling | None:
        """The first waiting setting that has no session and may get one.

        If there is no room for it, the oldest session that occupies room stops to admit jobs; its own waiting jobs go
        behind all others.
        """
        with self._changed:
            own = self.served.sampling
            others = [session for law, session in self._sessions.items() if law != own]
            for law in dict.fromkeys(job.law for job in self._waiting if job.law not in self._sessions):
                if law == own or len(others) < MOST_OTHERS:
                    return law
                if all(session.admits for session in others):
                    others[0].admits = False
                    self._waiting = deque(sorted(self._waiting, key=lambda job: job.law == others[0].law))
            return None

    def _admitted(self, session: Session) -> Iterator[tuple[Request, Output] | None]:
        """Waiting jobs of a session's setting; None while there are none and others run; ends when none runs."""
        while True:
            with self._changed:
                found = (job for job in self._waiting if job.law == session.law)
                job = next(found, None) if session.admits and not self._closing else None
                if job is not None:
                    self._waiting.remove(job)
                    session.running[job.request.index] = job
                elif not session.running:
                    return
            yield None if job is None else (job.request, job.output)

    def _step(self, session: Session) -> None:
        """One step of a session, which is over when nothing is left of it, or when its strategies fail."""
        try:
            pieces = next(session.steps, None)
        except BaseException as error:  # of a strategy or a model; SystemExit, too
            with self._changed:
                del self._sessions[session.law]
            failed = Failed(f"decoding failed; all requests that ran beside this one were aborted: {first_line(error)}")
            for job in session.running.values():
                job.client.put(job.choice, failed)
            return
        if pieces is None:
            with self._changed:
                del self._sessions[session.law]
            return
        for piece in pieces:
            job, response = session.running[piece.index], piece.response
            if response is not None:
                del session.running[piece.index]
            failed = response is not None and response.error is not None
            job.client.put(job.choice, Failed(str(response.error)) if failed and response is not None else piece)

    def _fail(self, why: str, law: Sampling | None = None) -> None:
        """Fail the jobs that wait for ``law``; without one, all jobs."""
        with self._changed:
            jobs = (
                []
                if law is not None
                else [job for session in self._sessions.values() for job in session.running.values()]
            )
            jobs += [job for job in self._waiting if law is None or job.law == law]
            self._waiting = deque(job for job in self._waiting if law is not None and job.law != law)
            if law is None:
                self._sessions.clear()
        for job in jobs:
            job.client.put(job.choice, Failed(why))
