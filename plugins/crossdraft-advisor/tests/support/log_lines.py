"""Lines of engines' logs, to be filled in."""

ENGINE = (
    "INFO 03-01 09:{:02d}:{:02d} [loggers.py:1] Engine {:03d}: Avg prompt throughput: {} tokens/s, Avg generation "
    "throughput: {:.1f} tokens/s, Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 3.0%\n"
)
_WINDOW = (
    "INFO 03-01 09:{:02d}:{:02d} [metrics.py:1] SpecDecoding metrics: Mean acceptance length: {:.2f}, {}Accepted: {} "
    "tokens, Drafted: {} tokens, Per-position acceptance rate: {}, Avg Draft acceptance rate: {:.1f}%\n"
)
EVAL = "slot print_timing: id  0 | task {} |        eval time =    1000.00 ms /   {} tokens (   1.0 ms per token)\n"
EVAL += "slot print_timing: id  0 | task {} | draft acceptance rate = 0.5 (  {} accepted /   {} generated)\n"


def metrics_line(
    minute: int, second: int, length: float, rates: str, accepted: float, drafted: float, by_position: str
) -> str:
    """A line of vLLM's metrics; ``rates`` are the throughputs, which old releases do not print."""
    average = 100 * accepted / max(drafted, 1)
    return _WINDOW.format(minute, second, length, rates, accepted, drafted, by_position, average)
