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
    """Seconds of a pass by its rows."""

    def seconds(self, batch_size: float, width: float, context: float) -> float:
        return 0.04 + 0.01 * batch_size


class Free:
    def seconds(self, batch_size: float, width: float, context: float) -> float:
        return 0.0


@pytest.fixture
def url(tmp_path: Path, monkeypatch: Any) -> Any:
    """The address of ``crossdraft serve``, each of whose steps is as long as `Paced`."""
    step = Decoder.step

    def paced(decoder: Decoder) -> Any:
        end = time.perf_counter() + Paced().seconds(decoder.occupied, 1, 0)
        result = step(decoder)
        time.sleep(max(end - time.perf_counter(), 0))
        return result

    monkeypatch.setattr(Decoder, "step", paced)
    options = ("--target", str(save_model(tmp_path / "target")), "--slots", str(SLOTS), "--max-new-tokens", str(TOKENS))
    drafter = f"{{name: prompt-lookup, gamma: {GAMMA}, min_ngram: 1, max_ngram: 2}}"
    with serving(*options, "--drafter", drafter) as running:
        yield running.url


def measured(url: str, prompts: list[list[int]], arrivals: np.ndarray) -> tuple[list[ServedResponse], dict[str, float]]:
    cell: Any = SimpleNamespace(sampling=SAMPLING, gamma=GAMMA)
    client = OpenAiServer(OpenAiServer.Config(url=url, token_ids=True), cell, Path())
    client.url = url
    client.complete(prompts[0], 4)
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
    ordered = [responses[i] for i in range(len(prompts))]
    first = np.array([r.steps[0].seconds for r in ordered])
    last = np.array([r.steps[-1].seconds for r in ordered])
    tokens = np.array([len(r.tokens) for r in ordered])
    end = max(r.sent + r.steps[-1].seconds for r in ordered)
    return ordered, {
        "tokens_per_second": tokens.sum() / (end - start - arrivals[0]),
        "token_seconds": (last - first).sum() / (tokens - 1).sum(),
        "first_token_seconds": float(first.mean()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.7, 1.5, 3.0])
def test_simulation_agrees_with_server_of_known_steps(url: str, rate: float) -> None:
    """Within 15 % in throughput and time per token, from arrivals, responses and step times only."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 60, 8).tolist() for _ in range(24)]
    arrivals = random.exponential(1 / rate, len(prompts)).cumsum()
    responses, real = measured(url, prompts, arrivals)
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
    cost = StepCost(Paced(), prefill=Free(), padded=True, separate=True)
    requests = [
        SimulatedRequest(Arrival(float(t)), item, random) for t, item in zip(arrivals, pool.responses, strict=True)
    ]
    counts = simulate(requests, LengthSchedule("", ((1, GAMMA),)), cost, EngineSettings(SLOTS, first_token=False))
    assert counts.rows == sum(len(r.steps) for r in responses)
    times = RequestTimes.of(requests, counts)
    assert times.tokens.sum() / times.seconds == pytest.approx(real["tokens_per_second"], rel=0.15)
    assert times.later.sum() / (times.tokens - 1).sum() == pytest.approx(real["token_seconds"], rel=0.15)
    # HTTP, the prefill and threads that wait for a processor are not simulated.
    assert 0 < real["first_token_seconds"] - times.first.mean() < 0.1
