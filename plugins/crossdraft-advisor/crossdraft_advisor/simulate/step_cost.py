"""Seconds of an engine's step, from cost curves.

A step is one pass of the target over the decoding rows, each with its draft, and the prompt tokens that are prefilled
with them; before it, the draft model takes one pass for each drafted token of the longest draft. Unless both curves are
measured, drafts cost at least as much as in published series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossdraft.framework.cost.curve import Curve

#: Contexts are rounded to multiples of this many tokens.
CONTEXT_STEP = 16


@dataclass
class StepCost:
    """Seconds of a step.

    Attributes:
        target: curve of the target.
        drafter: curve of the draft model; None if it has none, or if it is unknown.
        prefill: seconds of a prefill by its tokens, as the curve of a batch of 1; by default that of ``target``, plus
            that of the draft model in proportion to the models' passes over one token.
        overhead: further seconds of a step.
        padded: rows are padded to the widest and drafted for as long as it; else a pass costs its tokens.
        separate: prompts are prefilled in a pass of their own before the step; else with the step's rows.
        floor: seconds of a step over those of a plain one at batch size 1, by drafted tokens of a row; None for those
            of the curves.
    """

    target: Curve
    drafter: Curve | None = None
    prefill: Curve | None = None
    overhead: float = 0.0
    padded: bool = False
    separate: bool = False
    floor: Callable[[float], float] | None = None
    _seconds: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False)

    def seconds(self, lengths: Sequence[int], context: float, prefill_tokens: int = 0, prefill_rows: int = 0) -> float:
        """Seconds of a step.

        Args:
            lengths: drafted tokens of each decoding row.
            context: mean length of these rows.
            prefill_tokens, prefill_rows: prompt tokens prefilled in the step, and their rows.

        Raises:
            UsageError: a cost curve with too few batch sizes or widths.
        """
        rows, place = len(lengths), round(context / CONTEXT_STEP) * CONTEXT_STEP
        deepest = max(lengths, default=0)
        nodes = rows * deepest if self.padded else sum(lengths)
        key = (rows, nodes, place, prefill_tokens, prefill_rows)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._passes(*key)
        drafting = 0.0
        if self.drafter is not None and deepest:
            for depth in range(1, deepest + 1):
                drafting += self._draft_pass(rows if self.padded else sum(length >= depth for length in lengths), place)
        if self.floor is not None and nodes:
            drafting = max(drafting, self._floor_draft(rows, nodes, place))
        return seconds + drafting + self.overhead

    def _floor_draft(self, rows: int, nodes: int, context: int) -> float:
        """Least seconds of drafting ``nodes`` tokens: what ``floor`` has beyond the curve at batch size 1."""
        key = (-1, rows, nodes, context)
        if key not in self._seconds:
            assert self.floor is not None
            drafted = nodes / rows
            ratio = self.target.seconds(1, 1 + drafted, context) / self.target.seconds(1, 1, context)
            self._seconds[key] = (self.floor(drafted) - ratio) * self.target.seconds(rows, 1, context)
        return self._seconds[key]

    def _draft_pass(self, rows: int, context: int) -> float:
        key = (rows, context)
        if key not in self._seconds:
            assert self.drafter is not None
            self._seconds[key] = self.drafter.seconds(rows, 1, context)
        return self._seconds[key]

    def _passes(self, rows: int, nodes: int, context: int, prefill_tokens: int, prefill_rows: int) -> float:
        decoding = 0.0
        if rows:  # more positions do not take less time
            decoding = max(self.target.seconds(rows, width, context) for width in (1, 1 + nodes / rows))
        if not prefill_tokens:
            return decoding
        if self.prefill is not None:
            seconds = self.prefill.seconds(1, prefill_tokens, 0)
            if rows and not self.separate:  # the weights are read once for both
                seconds = max(seconds - self.target.seconds(1, 1, context), 0.0)
            return decoding + seconds
        if rows and not self.separate:
            tokens, all_rows = rows + nodes + prefill_tokens, rows + prefill_rows
            seconds = max(self.target.seconds(all_rows, tokens / all_rows, context) - decoding, 0.0)
        else:
            seconds = self.target.seconds(prefill_rows, prefill_tokens / prefill_rows, 0)
        if self.drafter is not None:
            seconds *= 1 + self.drafter.seconds(1, 1, context) / self.target.seconds(1, 1, context)
        return decoding + seconds
