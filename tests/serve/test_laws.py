"""Requests of several laws: decoders take turns step by step, nobody is left waiting, and each gets its own law."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import serving  # noqa: E402

from crossdraft import generate, load_model  # noqa: E402
from crossdraft.framework.api.generate import pair_decoder  # noqa: E402
from crossdraft.framework.api.output_processor import Output  # noqa: E402
from crossdraft.framework.contracts.sampling import Sampling  # noqa: E402
from crossdraft.framework.contracts.steps import Request  # noqa: E402
from crossdraft.framework.serve.decoder_pool import Served  # noqa: E402
from crossdraft.framework.serve.worker import Client, Failed, Session, Worker  # noqa: E402

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
    with serving("--target", name, "--slots", "3", "--seed", "4", "--temperature", "0") as running:
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
    with serving("--target", name, "--temperature", "0", "--verifier", "greedy") as running:
        ask = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="temperature 0") as caught:
            ask.completions.create(model=name, prompt=PROMPT, temperature=0.7)
        assert caught.value.param == "temperature"
        same = {"temperature": 0, "top_p": 0.5, "extra_body": {"top_k": -1}}
        ask.completions.create(model=name, prompt=PROMPT, max_tokens=2, **same)
        assert not running.served._others, "at temperature 0 there is one law"


def offering(build: Any = lambda law: SimpleNamespace(law=law)) -> Served:
    return Served(SimpleNamespace(), A, lambda law: None, build, 8, 8, "")  # type: ignore[arg-type]


class Counting(Client):
    """A client without a loop: it counts whole answers."""

    def __init__(self, expected: int = 0) -> None:
        self.texts, self.expected, self.finished = 0, expected, threading.Event()

    def put(self, choice: int, piece: Any) -> None:
        assert not isinstance(piece, Failed), piece
        self.texts += piece.response is not None
        if self.texts == self.expected:
            self.finished.set()


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


def test_laws_share_time_step_by_step(tmp_path: Any) -> None:
    """Counted in steps: nine requests of one law finish beside the long queue of another one."""
    target = load_model(save_model(tmp_path / "target"), dtype="float32", device="cpu")
    steps: list[Sampling] = []

    def build(law: Sampling) -> Any:
        decoder = pair_decoder(target, "none", None, 60, sampling=law, batch_size=4, max_new_tokens=20)
        made = decoder.step
        decoder.step = lambda: steps.append(law) or made()
        return decoder

    worker, clients = (
        Worker(Served(target, A, lambda law: None, build, 20, 60, ""), 99),
        {A: Counting(9), B: Counting(10)},
    )
    for law, requests, tokens in ((B, 10, 20), (A, 9, 4)):
        several = [(Request((5 + i, 6), i, most=tokens, eos=()), Output(target.tokenizer)) for i in range(requests)]
        worker.submit(clients[law], law, several)
    worker.start()
    for client in clients.values():
        assert client.finished.wait(60)
    worker.close()
    assert clients[A].texts == 9 and clients[B].texts == 10
    # 10 requests of 20 tokens in 4 slots are 60 steps; 9 of 4 tokens are 12, and so many of the others are between.
    last = max(i for i, law in enumerate(steps) if law == A)
    assert steps.count(B) == 60 and steps.count(A) == 12 and last <= 2 * 12


def test_long_prompts_of_one_law_let_others_step(tmp_path: Any) -> None:
    """A prefill pass is a turn of its own: a prompt of ten passes does not stop the steps of another law."""
    target = load_model(save_model(tmp_path / "target"), dtype="float32", device="cpu")
    turns: list[str] = []

    def build(law: Sampling) -> Any:
        options: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 20, "prefill_tokens": 8}
        decoder = pair_decoder(target, "none", None, 96, sampling=law, **options)
        made, fed = decoder.step, decoder._prefill._next
        decoder.step = lambda: turns.append("step") or made()
        decoder._prefill._next = lambda: turns.append("prefill") or fed()
        return decoder

    worker, client = Worker(Served(target, A, lambda law: None, build, 20, 96, ""), 9), Counting(2)
    worker.submit(client, A, [(Request((5, 6), most=20, eos=()), Output(target.tokenizer))])
    worker.submit(client, B, [(Request((5, 6) * 38, most=1, eos=()), Output(target.tokenizer))])
    worker.start()
    assert client.finished.wait(60)
    worker.close()
    assert turns.count("prefill") >= 10
    assert "prefill prefill prefill" not in " ".join(turns), turns


def test_more_laws_than_decoders_take_turns() -> None:
    """The oldest decoder makes room: it admits nobody, and who waits for it goes behind the others."""
    worker, client = Worker(offering(), 99), nobody()

    def submit(*laws: Sampling) -> None:
        for law in laws:
            worker.submit(client, law, [(Request((5,)), None)])  # type: ignore[list-item]

    def opened() -> Session:
        law = worker._openable()
        assert law is not None
        worker.served.decoder_of(law, busy=worker._sessions)
        worker._sessions[law] = Session(law)
        return worker._sessions[law]

    submit(B, B, C, D, E, A)
    sessions = {session.law: session for session in (opened(), opened(), opened(), opened())}
    assert list(sessions) == [B, C, D, A], "the server's own law has a decoder in any case"
    assert worker._openable() is None, "E waits"
    assert not sessions[B].admits and all(sessions[law].admits for law in (A, C, D))
    assert list(worker._admitted(sessions[B])) == [], "B admits nothing more"
    assert worker._openable() is None and sessions[C].admits, "one at a time"
    del worker._sessions[B]
    assert opened().law == E
    assert worker._openable() is None and not sessions[C].admits, "then it is C's turn to make room for B"


def test_a_law_that_cannot_be_decoded_fails_alone() -> None:
    def build(law: Sampling) -> Any:
        if law == B:
            raise MemoryError("full")
        return SimpleNamespace(law=law, steps=lambda *_: iter(()))

    worker, client, other = Worker(offering(build), 99), nobody(), nobody()
    worker.submit(client, B, [(Request((5,)), None)])  # type: ignore[list-item]
    worker.submit(other, C, [(Request((5,)), None)])  # type: ignore[list-item]
    worker._open_sessions()
    ((_, piece),) = client._pieces
    assert isinstance(piece, Failed) and "MemoryError: full" in str(piece)
    assert not other._pieces and list(worker._sessions) == [C]
    worker.end()
    worker._run()
    ((_, piece),) = other._pieces
    assert isinstance(piece, Failed) and str(piece) == "the server is ending"
