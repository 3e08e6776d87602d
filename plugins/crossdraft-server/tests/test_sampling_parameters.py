"""Requests with different sampling parameters: their decoders take turns, one step each, and none starves."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_model

openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from crossdraft_server.decoder_pool import DecoderPool  # noqa: E402
from crossdraft_server.worker import Batch, ChunkQueue, RequestFailedError, Worker  # noqa: E402
from server_thread import serving  # noqa: E402

from crossdraft import generate, load_model  # noqa: E402
from crossdraft.framework.api.generate import pair_decoder  # noqa: E402
from crossdraft.framework.api.output_processor import Output  # noqa: E402
from crossdraft.framework.contracts.sampling import Sampling  # noqa: E402
from crossdraft.framework.contracts.steps import Request  # noqa: E402

PROMPT = "w5 w6 w7 w5 w6"
PARAMETERS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3}, {"temperature": 1}]
A, B, C, D, E = (Sampling(temperature=1 + i) for i in range(5))


def test_concurrent_clients_with_different_parameters(tmp_path: Any) -> None:
    name = save_model(tmp_path / "target")
    target = load_model(name, dtype="float32", device="cpu")
    expected = [
        generate(target, [PROMPT] * 16, chat=False, max_new_tokens=10, seed=4, **{"temperature": 0, **parameters})
        for parameters in PARAMETERS
    ]
    with serving("--target", name, "--slots", "3", "--seed", "4", "--temperature", "0") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)

        def complete(i: int) -> str:
            parameters = PARAMETERS[i % 4]
            response = client.completions.create(model=name, prompt=PROMPT, max_tokens=10, seed=i, **parameters)
            return response.choices[0].text

        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(complete, range(16)))
        assert texts == [expected[i % 4][i].text for i in range(16)]
        assert len(set(texts)) > 8 and running.idle()


def test_incompatible_parameters_are_rejected(tmp_path: Any) -> None:
    name = save_model(tmp_path / "target")
    with serving("--target", name, "--temperature", "0", "--verifier", "greedy") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="temperature 0") as caught:
            client.completions.create(model=name, prompt=PROMPT, temperature=0.7)
        assert caught.value.param == "temperature"
        same = {"temperature": 0, "top_p": 0.5, "extra_body": {"top_k": -1}}
        client.completions.create(model=name, prompt=PROMPT, max_tokens=2, **same)
        assert not running.pool._extra, "greedy requests share the default decoder"


def decoder_pool(build: Any = lambda sampling: SimpleNamespace(sampling=sampling)) -> DecoderPool:
    return DecoderPool(SimpleNamespace(), A, lambda sampling: None, build, 8, 8, "")  # type: ignore[arg-type]


class ResponseCounter(ChunkQueue):
    """A queue without an event loop that counts finished responses."""

    def __init__(self, expected: int = 0) -> None:
        self.responses, self.expected, self.finished = 0, expected, threading.Event()

    def put(self, choice: int, item: Any) -> None:
        assert not isinstance(item, RequestFailedError), item
        self.responses += item.response is not None
        if self.responses == self.expected:
            self.finished.set()


def closed_queue() -> ChunkQueue:
    loop = asyncio.new_event_loop()
    loop.close()
    return ChunkQueue(loop)


def test_least_recently_used_decoders_are_evicted() -> None:
    built: list[Sampling] = []
    pool = decoder_pool(lambda sampling: built.append(sampling) or SimpleNamespace())
    for sampling in (B, C, B, D, E, B, C, A):
        pool.get(sampling)
    assert built == [A, B, C, D, E, C] and pool.get(A) is pool.decoder


def test_batches_take_turns(tmp_path: Any) -> None:
    """Counted in steps: nine requests of one batch finish beside the long queue of another one."""
    target = load_model(save_model(tmp_path / "target"), dtype="float32", device="cpu")
    steps: list[Sampling] = []

    def build(sampling: Sampling) -> Any:
        decoder = pair_decoder(target, "none", None, 60, sampling=sampling, batch_size=4, max_new_tokens=20)
        loop = decoder.step
        decoder.step = lambda: steps.append(sampling) or loop()
        return decoder

    worker = Worker(DecoderPool(target, A, lambda sampling: None, build, 20, 60, ""), 99)
    queues = {A: ResponseCounter(9), B: ResponseCounter(10)}
    for sampling, count, tokens in ((B, 10, 20), (A, 9, 4)):
        requests = [
            (Request((5 + i, 6), i, max_new_tokens=tokens, eos=()), Output(target.tokenizer)) for i in range(count)
        ]
        worker.submit(queues[sampling], sampling, requests)
    worker.start()
    for queue in queues.values():
        assert queue.finished.wait(60)
    worker.close()
    assert queues[A].responses == 9 and queues[B].responses == 10
    # 10 requests of 20 tokens in 4 slots take 60 steps, 9 of 4 tokens take 12, interleaved with 12 of the other batch.
    last = max(i for i, sampling in enumerate(steps) if sampling == A)
    assert steps.count(B) == 60 and steps.count(A) == 12 and last <= 2 * 12


def test_prefill_of_long_prompts_is_interleaved(tmp_path: Any) -> None:
    """A prefill pass counts as a turn: a prompt of ten passes does not block the steps of another batch."""
    target = load_model(save_model(tmp_path / "target"), dtype="float32", device="cpu")
    turns: list[str] = []

    def build(sampling: Sampling) -> Any:
        options: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 20, "prefill_tokens": 8}
        decoder = pair_decoder(target, "none", None, 96, sampling=sampling, **options)
        instance, fed = decoder.step, decoder._prefill._next
        decoder.step = lambda: turns.append("step") or instance()
        decoder._prefill._next = lambda: turns.append("prefill") or fed()
        return decoder

    worker, queue = Worker(DecoderPool(target, A, lambda sampling: None, build, 20, 96, ""), 9), ResponseCounter(2)
    worker.submit(queue, A, [(Request((5, 6), max_new_tokens=20, eos=()), Output(target.tokenizer))])
    worker.submit(queue, B, [(Request((5, 6) * 38, max_new_tokens=1, eos=()), Output(target.tokenizer))])
    worker.start()
    assert queue.finished.wait(60)
    worker.close()
    assert turns.count("prefill") >= 10
    assert "prefill prefill prefill" not in " ".join(turns), turns


def test_more_parameters_than_decoders() -> None:
    """The oldest batch stops admitting, and its queued jobs move to the end."""
    worker, queue = Worker(decoder_pool(), 99), closed_queue()

    def submit(*parameters: Sampling) -> None:
        for sampling in parameters:
            worker.submit(queue, sampling, [(Request((5,)), None)])  # type: ignore[list-item]

    def open_batch() -> Batch:
        sampling = worker._next_sampling()
        assert sampling is not None
        worker.pool.get(sampling, busy=worker._batches)
        worker._batches[sampling] = Batch(sampling)
        return worker._batches[sampling]

    submit(B, B, C, D, E, A)
    batches = {batch.sampling: batch for batch in (open_batch(), open_batch(), open_batch(), open_batch())}
    assert list(batches) == [B, C, D, A], "the default parameters always have a decoder"
    assert worker._next_sampling() is None, "E waits"
    assert not batches[B].admitting and all(batches[sampling].admitting for sampling in (A, C, D))
    assert list(worker._admit(batches[B])) == [], "B admits no more jobs"
    assert worker._next_sampling() is None and batches[C].admitting, "one at a time"
    del worker._batches[B]
    assert open_batch().sampling == E
    assert worker._next_sampling() is None and not batches[C].admitting, "C is evicted next, for B"


def test_decoder_that_fails_to_start() -> None:
    def build(sampling: Sampling) -> Any:
        if sampling == B:
            raise MemoryError("full")
        return SimpleNamespace(sampling=sampling, steps=lambda *_: iter(()))

    worker, queue, other = Worker(decoder_pool(build), 99), closed_queue(), closed_queue()
    worker.submit(queue, B, [(Request((5,)), None)])  # type: ignore[list-item]
    worker.submit(other, C, [(Request((5,)), None)])  # type: ignore[list-item]
    worker._open_batches()
    ((_, item),) = queue._items
    assert isinstance(item, RequestFailedError) and "MemoryError: full" in str(item)
    assert not other._items and list(worker._batches) == [C]
    worker.stop()
    worker._run()
    ((_, item),) = other._items
    assert isinstance(item, RequestFailedError) and str(item) == "the server is shutting down"
