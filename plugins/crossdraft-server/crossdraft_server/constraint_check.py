"""A process that tries constraints: a program of its own, as `constraint_compiler` starts it.

It reads lines of JSON: first a tokenizer, then constraints, and answers each with a line: seconds of the slowest step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

#: Stack of a compilation, and limit of the memory of this process.
_STACK_BYTES, _MEMORY_BYTES = 512 * 2**20, 4 * 2**30
#: Tokens of a response that are tried.
_STEPS = 8


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # not on this system, or a lower limit holds
        pass
    head = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(head["tokenizer"], n_vocab=head["vocab_size"], eos_token=head["eos"])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_slowest_step(_compiled(tokenizer, json.loads(line)))), flush=True)


def _compiled(tokenizer: Any, source: str) -> Any:
    matchers: list[Any] = []
    threading.stack_size(_STACK_BYTES)
    limits = LLParserLimits(verbose_errors=False)
    thread = threading.Thread(target=lambda: matchers.append(LLMatcher(tokenizer, source, log_level=0, limits=limits)))
    thread.start()
    thread.join()
    return matchers[0]


def _slowest_step(matcher: Any) -> float:
    slowest = 0.0
    for _ in range(_STEPS):
        start = time.perf_counter()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.compute_ff_tokens()
        if matcher.is_error() or not mask:
            break
        matcher.try_consume_tokens([mask.bit_length() - 1])
        slowest = max(slowest, time.perf_counter() - start)
    return slowest


if __name__ == "__main__":
    main()
