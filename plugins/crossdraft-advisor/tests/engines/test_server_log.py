"""The cause of a server's end, in logs in the formats of engines."""

from pathlib import Path

import pytest
from crossdraft_advisor.engines.server import cause_of

VLLM = """$ python -m vllm.entrypoints.openai.api_server
(APIServer pid=10) INFO 11-26 13:00:00 [utils.py:233] non-default args: {'model': 'm'}
(APIServer pid=10) WARNING 11-26 13:00:01 [import.py:9] Traceback (most recent call last):
(APIServer pid=10) WARNING 11-26 13:00:01 [import.py:9] ImportError: no optional package
(EngineCore pid=42) ERROR 11-26 13:00:09 [core.py:842] EngineCore failed to start.
(EngineCore pid=42) ERROR 11-26 13:00:09 [core.py:842] Traceback (most recent call last):
(EngineCore pid=42) ERROR 11-26 13:00:09 [core.py:842]   File "core.py", line 833, in run_engine_core
(EngineCore pid=42) ERROR 11-26 13:00:09 [core.py:842]     engine_core = EngineCoreProc(*args, **kwargs)
(APIServer pid=10) INFO 11-26 13:00:09 [utils.py:233] waiting
(EngineCore pid=42) ERROR 11-26 13:00:10 [core.py:842] ValueError: No available memory for the cache blocks.
(EngineCore pid=42) Process EngineCore:
(EngineCore pid=42) Traceback (most recent call last):
(EngineCore pid=42)   File "process.py", line 314, in _bootstrap
(EngineCore pid=42) ValueError: No available memory for the cache blocks.
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "api_server.py", line 1, in <module>
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
LOGS = {
    "vllm": (VLLM, 10, "ValueError: No available memory"),
    "vllm, in colour": (
        VLLM.replace("(EngineCore", "\x1b[0;36m(EngineCore").replace("42)", "42)\x1b[0;0m"),
        10,
        "No available",
    ),
    "vllm, an earlier start": (
        VLLM + "$ python -m vllm\nINFO ready\nKeyError\nTraceback (most recent call last):\n  x\nOSError: y\n",
        23,
        "OSError: y",
    ),
    "vllm, several lines": (
        "Traceback (most recent call last):\n  File x\nValidationError: 1 error\n  max_model_len is too large\n\nmore",
        3,
        "max_model_len is too large",
    ),
    "chained": (
        "Traceback (most recent call last):\n  f\nKeyError: 'first'\n\nThe above exception was the direct cause of the "
        "following exception:\n\nTraceback (most recent call last):\n  f\nRuntimeError: second\n",
        3,
        "KeyError: 'first'",
    ),
    "arguments": ("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo\n", 2, "--foo"),
    "sglang": (
        "[2026-11-26 13:00:00] INFO server_args=ServerArgs()\n[2026-11-26 13:00:05 TP0] Scheduler hit an exception: "
        'Traceback (most recent call last):\n  File "scheduler.py", line 1\nRuntimeError: Not enough memory.\n\n'
        "[2026-11-26 13:00:06] Received sigquit from a child process. It usually means the child failed.\n",
        4,
        "RuntimeError: Not enough memory.",
    ),
    "llama.cpp": (
        "build: 1 (0c1e570)\nmain: loading model\ngguf_init_from_file: failed to open GGUF file 'x.gguf' (No such file "
        "or directory)\nllama_model_load: error loading model\nmain: exiting due to model loading error\nbye\n",
        3,
        "failed to open GGUF file",
    ),
    "llama.cpp, a crash": ("main: ok\n/src/ggml.c:123: GGML_ASSERT(n > 0) failed\nbacktrace:\n", 2, "GGML_ASSERT"),
    "tensorrt-llm": (
        "[11/26/2026-13:00:00] [TRT-LLM] [I] no error here\n"
        "[11/26/2026-13:00:01] [TRT-LLM] [E] Failed to load weights: shape\n",
        2,
        "Failed to load weights",
    ),
    "c++": (
        "ok\nterminate called after throwing an instance of 'std::runtime_error'\n  what():  bad alloc\n",
        2,
        "bad alloc",
    ),
}


@pytest.mark.parametrize("text, line, cause", LOGS.values(), ids=LOGS.keys())
def test_cause_is_shown_with_its_line(text: str, line: int, cause: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(text, encoding="utf-8")
    message = cause_of(log)
    assert cause in message and f"line {line} of {log}:" in message, message
    assert "See root cause above" not in message and "second" not in message and "\x1b" not in message


def test_logs_without_cause(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert cause_of(log) == ""
    log.write_bytes(b"$ start\n" + b"loading \xff\x1b[31m\n" * 40)
    message = cause_of(log)
    assert f"the end of {log}:" in message and message.count("loading") == 12 and "\x1b" not in message
    log.write_text("x" * 10_000 + " error\n", encoding="utf-8")
    assert len(cause_of(log)) < 1000
