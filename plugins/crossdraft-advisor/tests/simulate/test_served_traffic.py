"""Simulated traffic against a real server whose steps take a known time, at three request rates."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import save_model

pytest.importorskip("crossdraft_server", reason="its endpoint is the engine")

from crossdraft_advisor.engines.builtin.openai import OpenAiServer
from crossdraft_advisor.engines.server import ServedResponse
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.simulate.arrivals import Arrival
from crossdraft_advisor.simulate.outcome import RequestTimes
from crossdraft_advisor.simulate.policies import LengthSchedule, StepCost
from crossdraft_advisor.simulate.replica import EngineSettings, simulate
from crossdraft_advisor.simulate.request import SimulatedRequest, read_pool
from server_thread import serving

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder

SLOTS, TOKENS, GAMMA = 4, 24, 4
SAMPLING = Sampling(temperature=0)


class Paced:
    """Seconds of a step by its rows: at least these, and the mean of those that took longer on a busy machine."""

    def __init__(self) -> None:
        self.measured: dict[int, list[float]] = {}

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        return float(np.mean(self.measured.get(round(batch_size), [self.minimum(batch_size)])))

    @staticmethod
    def minimum(batch_size: float) -> float:
        return 0.04 + 0.01 * batch_size


class Free:
    def seconds(self, batch_size: float, width: float, context: float) -> float:
        return 0.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: Any) -> Any:
    """The address of ``crossdraft serve``, and the seconds of its steps, which are those of `Paced` at least."""
    step, pace = Decoder.step, Paced()

    def paced(decoder: Decoder) -> Any:
        start, rows = time.perf_counter(), decoder.occupied
        result = step(decoder)
        time.sleep(max(start + pace.minimum(rows) - time.perf_counter(), 0))
        pace.measured.setdefault(rows, []).append(time.perf_counter() - start)
        return result

    monkeypatch.setattr(Decoder, "step", paced)
    options = ("--target", str(save_model(tmp_path / "target")), "--slots", str(SLOTS), "--max-new-tokens", str(TOKENS))
    drafter = f"{{name: prompt-lookup, gamma: {GAMMA}, min_ngram: 1, max_ngram: 2}}"
    with serving(*options, "--drafter", drafter) as running:
        yield running.url, pace


def measured(server: Any, prompts: list[list[int]], arrivals: np.ndarray) -> list[ServedResponse]:
    """Responses to requests that are sent at ``arrivals``, or when the machine lets them."""
    url, pace = server
    cell: Any = SimpleNamespace(sampling=SAMPLING, gamma=GAMMA, end_tokens=(), vocab_size=None)
    client = OpenAiServer(OpenAiServer.Config(url=url, token_ids=True), cell, Path())
    client.url = url
    client.complete(prompts[0], 4)
    pace.measured.clear()  # first steps allocate
    responses: dict[int, ServedResponse] = {}
    start = time.perf_counter()

    def send(i: int) -> None:
        time.sleep(max(start + arrivals[i] - time.perf_counter(), 0))
        responses[i] = client.complete(prompts[i], TOKENS)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [responses[i] for i in range(len(prompts))]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.7, 1.5, 3.0])
def test_simulation_agrees_with_server_of_known_steps(server: Any, rate: float) -> None:
    """Within 15 % in throughput and time per token, from the times of arrival, the responses and the steps' seconds.

    A busy machine delays requests and steps, in the simulation as in the server. What it delays besides, HTTP and the
    loop around the steps, is not simulated: hence the limits.
    """
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 60, 8).tolist() for _ in range(24)]
    responses = measured(server, prompts, random.exponential(1 / rate, len(prompts)).cumsum())
    sent, tokens = np.array([r.sent for r in responses]), np.array([len(r.tokens) for r in responses])
    first, last = (np.array([r.steps[i].seconds for r in responses]) for i in (0, -1))
    drafter = f"{{name: prompt-lookup, gamma: {GAMMA}, min_ngram: 1, max_ngram: 2}}"
    (candidate,) = candidates_of([drafter], ["token"], (GAMMA,), sampling=SAMPLING, target="")
    pool = read_pool(
        [
            Response(str(i), "", prompt, r.tokens, None, r.finish_reason == "stop", TOKENS, SAMPLING)
            for i, (prompt, r) in enumerate(zip(prompts, responses, strict=True))
        ],
        candidate,
        start=0,
    )
    assert pool.tokens_per_step[GAMMA] > 1.1
    pace = server[1]
    cost = StepCost(pace, prefill=Free(), padded=True, separate=True)
    order = np.argsort(sent)
    requests = [SimulatedRequest(Arrival(sent[i] - sent.min()), pool.responses[i], random) for i in order]
    counts = simulate(requests, LengthSchedule("", ((1, GAMMA),)), cost, EngineSettings(SLOTS, first_token=False))
    assert counts.rows == sum(len(r.steps) for r in responses)
    times = RequestTimes.of(requests, counts)
    throughput = tokens.sum() / ((sent + last).max() - sent.min())
    assert times.tokens.sum() / times.seconds == pytest.approx(throughput, rel=0.15)
    assert times.later.sum() / (times.tokens - 1).sum() == pytest.approx(
        (last - first).sum() / (tokens - 1).sum(), rel=0.15
    )
    # HTTP, the prefill and threads that wait for a processor: of most requests less than two steps.
    assert 0 < np.median(first[order] - times.first) < 2 * pace.minimum(SLOTS)
