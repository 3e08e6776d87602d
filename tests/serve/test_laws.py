"""Requests of several laws: one after the other has its turn, nobody is left waiting, and each gets its own law."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from serving import serving  # noqa: E402

from crossdraft import generate, load_model  # noqa: E402
from crossdraft.framework.contracts.rounds import Request  # noqa: E402
from crossdraft.framework.contracts.sampling import Sampling  # noqa: E402
from crossdraft.framework.serve.laws import Served  # noqa: E402
from crossdraft.framework.serve.worker import Client, Failed, Worker  # noqa: E402

PROMPT = "w5 w6 w7 w5 w6"
LAWS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3}, {"temperature": 1}]
A, B, C, D, E = (Sampling(temperature=1 + i) for i in range(5))


def test_clients_at_once_each_at_its_own_law(tmp_path: Any) -> None:
    name = save_model(tmp_path / "target")
    target = load_model(name, dtype="float32", device="cpu")
    wanted = [
        generate(target, [PROMPT] * 16, chat=False, max_new_tokens=10, seed=4, **{"temperature": 0, **law})
        for law in LAWS
    ]
    with serving("--target", name, "--slots", "3", "--seed", "4") as running:
        ask = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)

        def one(i: int) -> str:
            law = LAWS[i % 4]
            return ask.completions.create(model=name, prompt=PROMPT, max_tokens=10, seed=i, **law).choices[0].text

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(one, range(16)))
        assert found == [wanted[i % 4][i].text for i in range(16)]
        assert len(set(found)) > 8 and running.idle()


def test_a_rule_that_does_not_fit_a_law_is_said(tmp_path: Any) -> None:
    name = save_model(tmp_path / "target")
    with serving("--target", name, "--verifier", "greedy") as running:
        ask = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="temperature 0") as caught:
            ask.completions.create(model=name, prompt=PROMPT, temperature=0.7)
        assert caught.value.param == "temperature"
        same = {"temperature": 0, "top_p": 0.5, "extra_body": {"top_k": -1}}
        ask.completions.create(model=name, prompt=PROMPT, max_tokens=2, **same)
        assert not running.served._others, "at temperature 0 there is one law"


def offering(build: Any = lambda law: SimpleNamespace(law=law)) -> Served:
    return Served(SimpleNamespace(), A, lambda law: None, build, 8, 8, "")  # type: ignore[arg-type]


def nobody() -> Client:
    loop = asyncio.new_event_loop()
    loop.close()
    return Client(loop)


def test_decoders_of_the_laws_used_last_are_kept() -> None:
    built: list[Sampling] = []
    served = offering(lambda law: built.append(law) or SimpleNamespace())
    for law in (B, C, B, D, E, B, C, A):
        served.decoder_of(law)
    assert built == [A, B, C, D, E, C] and served.decoder_of(A) is served.decoder


def test_laws_take_turns() -> None:
    worker, client = Worker(offering(), 99), nobody()

    def ask(*laws: Sampling) -> None:
        for law in laws:
            worker.submit(client, law, [(Request((5,)), None)])  # type: ignore[list-item]

    def taken(law: Sampling) -> list[int]:
        return [pair[0].index for pair in worker._requests(law) if pair is not None]

    ask(A, B, A, C, B)
    assert worker._turn() == A
    waiting = worker._requests(A)
    first = [next(waiting), next(waiting)]
    assert [pair and pair[0].index for pair in first] == [0, 2], "those of one law are decoded together"
    ask(A)
    assert list(waiting) == [], "who comes now waits behind the others, though a slot may be free"
    for law, indices in ((B, [1, 4]), (C, [3])):
        worker._running.clear()
        assert worker._turn() == law and taken(law) == indices
    worker._running.clear()
    assert worker._turn() == A
    waiting = worker._requests(A)
    assert next(waiting) and next(waiting) is None, "nobody else waits: who comes joins"
    ask(A)
    assert next(waiting)


def test_a_law_that_cannot_be_decoded_fails_alone() -> None:
    def build(law: Sampling) -> Any:
        if law == B:
            raise MemoryError("full")
        return SimpleNamespace(law=law)

    worker, client, other = Worker(offering(build), 99), nobody(), nobody()
    worker.submit(client, B, [(Request((5,)), None)])  # type: ignore[list-item]
    worker.submit(other, C, [(Request((5,)), None)])  # type: ignore[list-item]
    law = worker._turn()
    assert law == B
    worker._fail("no room", law)
    ((_, piece),) = client._pieces
    assert isinstance(piece, Failed) and not other._pieces and worker._turn() == C
    worker.end()
    assert worker._turn() is None
    worker._fail("the server is ending")
    assert len(other._pieces) == 1
