"""Requests to llama.cpp's server."""

from __future__ import annotations

from pathlib import Path

from crossdraft_advisor import ServedCell
from crossdraft_llamacpp.server import LlamaServer, LlamaServerOptions

from crossdraft import Sampling


def test_warpers_have_the_order_of_transformers() -> None:
    sampling = Sampling(temperature=0.5, top_k=40, top_p=0.6, min_p=0.1)
    cell = ServedCell(Path("t.gguf"), "auto", sampling, 0, 1, 64, 0, (), (), None)
    body = LlamaServer(LlamaServerOptions(), cell, Path("logs")).body([1, 2], 8)
    names = [type(warper).__name__.removesuffix("LogitsWarper") for warper in sampling.warpers()]
    assert names == ["Temperature", "TopK", "TopP", "MinP"]
    assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
