"""Columns of ``crossdraft simulate --csv``."""

#: Columns of ``crossdraft simulate``; an estimate also has ``<name>_low`` and ``<name>_high``. Those of a run have the
#: meaning that they have there.
SIMULATION_COLUMNS = {
    "policy": "Policy of the draft lengths.",
    "arrivals": "Arrival process.",
    "requests": "Number of simulated requests.",
    "block_efficiency_all_steps": "Tokens emitted per decoding row and step, the prefill's token excluded.",
    "drafted_per_step": "Drafted tokens per decoding row and step.",
    "batch_size": "Mean number of decoding rows of a step.",
    "tokens_per_second": "Output tokens per second from the first arrival to the last token, prefill included.",
    "first_token_seconds": "Mean seconds from the arrival of a request to its first token.",
    "token_seconds": "Mean seconds per token of a response after its first.",
    "latency_seconds": "Mean seconds from the arrival of a request to its last token.",
    "first_token_seconds_p95": "95th percentile of first_token_seconds over requests.",
    "token_seconds_p95": "95th percentile of token_seconds over requests.",
    "goodput": "Requests per second that meet the service-level objective; empty without one.",
    "regret": "Relative excess of latency_seconds over the oracle's, paired by simulation.",
}
