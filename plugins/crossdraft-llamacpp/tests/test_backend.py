"""The choice of the backend for a GGUF file; llama.cpp itself is not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import save_gguf

from crossdraft.framework.models.resolve import resolve


def test_without_llama_cpp_the_core_reads_the_file(installed: None, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    resolved = resolve(str(save_gguf(tmp_path / "m.gguf")))
    assert resolved.backend == "transformers" and resolved.source.endswith("m.gguf, dequantised")
