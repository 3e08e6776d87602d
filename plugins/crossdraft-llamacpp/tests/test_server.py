"""Requests to llama.cpp's server."""

from __future__ import annotations

from pathlib import Path

import pytest
from crossdraft_advisor import ServedCell
from crossdraft_llamacpp.server import LlamaServer, LlamaServerOptions

from crossdraft import ModelError, Sampling


def encode(text: str, **_: object) -> dict[str, list[int]]:
    """Tokens are bytes; ``é`` is one token, and a text begins with a space of its own."""
    return {"input_ids": [32, *(token for part in text for token in ([300] if part == "é" else part.encode()))]}


def test_all_tokens_of_a_character() -> None:
    """The server sends the last one only, with the whole character."""
    cell = ServedCell(Path("t.gguf"), "auto", Sampling(temperature=0), 0, 1, 64, 0, (), (0,), encode)
    server = LlamaServer(LlamaServerOptions(), cell, Path("logs"))
    events = [([97], "a"), ([0x82], "🙂"), ([300], "é"), ([7], "ü"), ([0], "")]
    sent = [(0.1 * i, server.event({"tokens": t, "content": c, "stop": False})) for i, (t, c) in enumerate(events)]
    assert [event.tokens for _, event in sent] == [[97], [*"🙂".encode()], [300], [7], [0]]
    last = server.event({"tokens": [], "content": "", "stop": True, "stop_type": "eos"})
    response = server._response([*sent, (0.6, last)], 0.0, 16)
    assert len(response.tokens) == 8 and [step.tokens for step in response.steps] == [1] * 8


@pytest.mark.parametrize("total", [5, 9])
def test_character_that_the_limit_cuts(total: int) -> None:
    """The server counts its tokens and does not send them; more cannot be missing than a character has bytes."""
    cell = ServedCell(Path("t.gguf"), "auto", Sampling(temperature=0), 0, 1, 64, 0, (), (0,), encode)
    server = LlamaServer(LlamaServerOptions(), cell, Path("logs"))
    stop = {"tokens": [], "content": "", "stop": True, "stop_type": "limit", "tokens_predicted": total}
    events = [*({"tokens": [97], "content": "a", "stop": False} for _ in range(3)), stop]
    sent = [(0.1 * i, server.event(event)) for i, event in enumerate(events)]
    if total == 5:
        assert server._response(sent, 0.0, total).tokens == [97] * 3
    else:
        with pytest.raises(ModelError, match="'length' after 3 of 9 tokens"):
            server._response(sent, 0.0, total)


def test_warpers_have_the_order_of_transformers() -> None:
    sampling = Sampling(temperature=0.5, top_k=40, top_p=0.6, min_p=0.1)
    cell = ServedCell(Path("t.gguf"), "auto", sampling, 0, 1, 64, 0, (), (), None)
    body = LlamaServer(LlamaServerOptions(), cell, Path("logs")).body([1, 2], 8)
    names = [type(warper).__name__.removesuffix("LogitsWarper") for warper in sampling.warpers()]
    assert names == ["Temperature", "TopK", "TopP", "MinP"]
    assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
