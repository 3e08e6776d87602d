"""Rapid-MLX: counters of its server.

https://github.com/raullenchai/Rapid-MLX: spec_decode/mtp/accept_counter.py, routes/metrics.py. Attempts are drafted
tokens; newer versions count the verifications, and both kinds of tokens by their depth in the draft.
"""

from __future__ import annotations

from ..acceptance import Acceptance
from ..engine_log import Source
from ..formats import AcceptanceFormat
from ..prometheus import by_model
from ..step_counts import StepCounts, acceptances_of, full_drafts

_DRAFTED, _ACCEPTED, _STEPS, _DRAFTED_AT, _ACCEPTED_AT = (
    f"rapid_mlx_spec_decode_{name}_total"
    for name in ("attempts", "accepts", "verify_calls", "drafted_by_depth", "accepted_by_depth")
)


class RapidMlxCounters(AcceptanceFormat):
    """Counters of Rapid-MLX."""

    name = "rapid-mlx"
    definition = "steps with a draft"
    subtracts = True

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        names, depth = (_DRAFTED, _ACCEPTED, _STEPS, _DRAFTED_AT, _ACCEPTED_AT), "depth"
        labels = {_DRAFTED_AT: depth, _ACCEPTED_AT: depth}
        counters = by_model(source, names, earlier, labels).get("", {})
        if not (_DRAFTED in counters and _ACCEPTED in counters):
            return []
        drafted, accepted = counters[_DRAFTED][0], counters[_ACCEPTED][0]
        if not drafted.value:
            raise source.error(drafted.line, "nothing was drafted; send requests to the server first")
        if _STEPS not in counters:
            item = full_drafts(source, accepted.line, accepted.value, drafted.value)
            return acceptances_of([item], source, "runs", source.name)
        steps, tokens_at = counters[_STEPS][0], counters.get(_ACCEPTED_AT, {})
        at_least = tuple(tokens_at[i].value if i in tokens_at else 0.0 for i in range(1, max(tokens_at, default=0) + 1))
        if accepted.value > drafted.value or (at_least and sum(at_least) != accepted.value):
            raise source.error(
                accepted.line,
                f"{accepted.value:g} accepted of {drafted.value:g} tokens do not match {sum(at_least):g} by depth",
            )
        item = StepCounts(steps.value, accepted.value, at_least, drafted.value)
        return acceptances_of([item], source, "runs", source.name)
