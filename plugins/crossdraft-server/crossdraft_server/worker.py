"""The decoding thread: continuous batching of queued requests.

A batch has one set of sampling parameters. Requests with different parameters run in separate batches, each with its
own decoder; the batches take turns, one step each. If more sets of parameters are requested than decoders are kept, the
oldest batch stops admitting requests, finishes the ones it runs, and its decoder is evicted.

Clients never block the thread: chunks are buffered until they are fetched (at most the client's whole responses), and
a slot is freed when its response is decoded, not when it is read.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from crossdraft import Chunk, CrossdraftError, Sampling, first_line
from crossdraft.framework.api.output_processor import Output, Outputs
from crossdraft.framework.contracts.steps import Request

from .decoder_pool import MAX_EXTRA_DECODERS, DecoderPool


class RequestFailedError(CrossdraftError):
    """A request that failed while the server keeps running."""


class UnavailableError(CrossdraftError):
    """The queue is full or the server is shutting down."""


class ChunkQueue:
    """The chunks of one HTTP request, passed from the decoding thread to the event loop ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._ready = loop, asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[tuple[int, Chunk | RequestFailedError]] = []

    def put(self, choice: int, item: Chunk | RequestFailedError) -> None:
        """Add an item without blocking, from any thread."""
        with self._lock:
            self._items.append((choice, item))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ready.set)

    async def get(self) -> list[tuple[int, Chunk | RequestFailedError]]:
        """Wait for items and return all of them, each with the index of its choice."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            items, self._items = self._items, []
        return items


@dataclass(eq=False)
class Job:
    """One prompt of an HTTP request, whose response is its choice number ``choice``."""

    queue: ChunkQueue
    choice: int
    sampling: Sampling
    request: Request
    output: Output


@dataclass(eq=False)
class Batch:
    """The running jobs with the same sampling parameters.

    Attributes:
        running: jobs that have a slot, by the index of their request.
        admitting: False once the batch takes no more jobs.
        steps: a generator that runs one decoding step per `next`.
    """

    sampling: Sampling
    running: dict[int, Job] = field(default_factory=dict)
    admitting: bool = True
    steps: Generator[list[Chunk], None, None] = field(init=False)


class Worker:
    """The decoding thread and its queue.

    Args:
        pool: the decoders.
        max_waiting: the limit of the queue.
    """

    def __init__(self, pool: DecoderPool, max_waiting: int):
        self.pool, self.max_waiting = pool, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._batches: dict[Sampling, Batch] = {}
        self._closing = False
        self._next_index = 0
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    @property
    def stats(self) -> dict[str, int]:
        """Slots per decoder, running responses of all decoders, and queued requests."""
        return {
            "slots": self.pool.decoder.target.batch_size,
            "running": sum(len(batch.running) for batch in list(self._batches.values())),
            "waiting": len(self._waiting),
        }

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step. Unfinished jobs fail, and no more jobs are accepted."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """`stop`, and join the thread."""
        self.stop()
        self._thread.join()

    def submit(self, queue: ChunkQueue, sampling: Sampling, requests: Sequence[tuple[Request, Output]]) -> list[Job]:
        """Queue requests, all or none, and assign their ``index``. Raises `UnavailableError`."""
        with self._changed:
            if self._closing:
                raise UnavailableError("the server is shutting down")
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise UnavailableError(
                    f"the queue is full: {len(self._waiting)} of at most {self.max_waiting} requests wait; retry later"
                )
            jobs = []
            for choice, (request, output) in enumerate(requests):
                jobs.append(Job(queue, choice, sampling, request._replace(index=self._next_index), output))
                self._next_index += 1
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    def abort(self, jobs: Sequence[Job]) -> None:
        """Remove jobs from the queue; running ones end with the current step."""
        with self._changed:
            for job in jobs:
                job.output.aborted = True
                with suppress(ValueError):
                    self._waiting.remove(job)

    def _run(self) -> None:
        while not self._closing:
            self._open_batches()
            for batch in list(self._batches.values()):
                if not self._closing:
                    self._step(batch)
        for batch in list(self._batches.values()):
            with suppress(BaseException):  # a strategy may raise while its slots are freed
                batch.steps.close()
        self._fail("the server is shutting down")

    def _open_batches(self) -> None:
        """Wait for jobs, then open a batch for all sampling parameters in the queue that may get a decoder."""
        with self._changed:
            while not (self._waiting or self._batches or self._closing):
                self._changed.wait()
        while not self._closing and (sampling := self._next_sampling()) is not None:
            try:
                outputs = Outputs(self.pool.get(sampling, busy=self._batches))
            except BaseException as error:  # such as out of memory
                self._fail(f"the decoder for these sampling parameters failed to start: {first_line(error)}", sampling)
                continue
            batch = Batch(sampling)
            batch.steps = outputs.steps(self._admit(batch), interleaved=lambda: len(self._batches) > 1)
            self._batches[sampling] = batch

    def _next_sampling(self) -> Sampling | None:
        """The first sampling parameters in the queue that have no batch and may get one.

        If all decoders are in use, the oldest batch besides the default one stops admitting, and its queued jobs move
        to the end.
        """
        with self._changed:
            default = self.pool.sampling
            extra = [batch for sampling, batch in self._batches.items() if sampling != default]
            for sampling in dict.fromkeys(job.sampling for job in self._waiting if job.sampling not in self._batches):
                if sampling == default or len(extra) < MAX_EXTRA_DECODERS:
                    return sampling
                if all(batch.admitting for batch in extra):
                    oldest = extra[0]
                    oldest.admitting = False
                    self._waiting = deque(sorted(self._waiting, key=lambda job: job.sampling == oldest.sampling))
            return None

    def _admit(self, batch: Batch) -> Iterator[tuple[Request, Output] | None]:
        """Yield queued jobs of a batch, or None while others run; end if none runs."""
        while True:
            with self._changed:
                matching = (job for job in self._waiting if job.sampling == batch.sampling)
                job = next(matching, None) if batch.admitting and not self._closing else None
                if job is not None:
                    self._waiting.remove(job)
                    batch.running[job.request.index] = job
                elif not batch.running:
                    return
            yield None if job is None else (job.request, job.output)

    def _step(self, batch: Batch) -> None:
        """Run one step of a batch; remove the batch if it is finished or if the step raises."""
        try:
            chunks = next(batch.steps, None)
        except BaseException as error:  # of a strategy or a model, SystemExit included
            with self._changed:
                del self._batches[batch.sampling]
            failure = RequestFailedError(f"decoding failed; all running requests were aborted: {first_line(error)}")
            for job in batch.running.values():
                job.queue.put(job.choice, failure)
            return
        if chunks is None:
            with self._changed:
                del self._batches[batch.sampling]
            return
        for chunk in chunks:
            job, response = batch.running[chunk.index], chunk.response
            if response is not None:
                del batch.running[chunk.index]
            error = None if response is None else response.error
            job.queue.put(job.choice, chunk if error is None else RequestFailedError(str(error)))

    def _fail(self, reason: str, sampling: Sampling | None = None) -> None:
        """Fail the queued jobs with these sampling parameters; if None, all jobs, running ones included."""
        with self._changed:
            jobs = []
            if sampling is None:
                jobs = [job for batch in self._batches.values() for job in batch.running.values()]
                self._batches.clear()
            jobs += [job for job in self._waiting if sampling in (None, job.sampling)]
            self._waiting = deque(job for job in self._waiting if sampling not in (None, job.sampling))
        for job in jobs:
            job.queue.put(job.choice, RequestFailedError(reason))
