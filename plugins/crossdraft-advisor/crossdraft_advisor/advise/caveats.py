"""Remarks on a recommendation: what is measured, computed and assumed, and warnings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod

from crossdraft.runs import CellResult, CostCurve, estimate_text

from ..engines.acceptance import EACH_LENGTH, WINDOWS, Acceptance
from ..engines.engine import Engine, Settings
from ..engines.engine_log import Source
from ..roofline.roofline import Roofline
from .candidates import Candidate
from .decision import EngineChoice, Step

_MIN_PIECES, _MIN_DRAFTS = 10, 300  # fewer prompts or drafts than this raise a warning
_POOR = 0.15  # an acceptance at position 1 below which a fault is likely
_RANDOM = re.compile(r"dataset[-_]name['\"]?\s*[=: ]\s*['\"]?random\b")  # settings in a benchmark's log
_IGNORE_EOS = re.compile(r"ignore[-_]eos['\"]?\s*[=: ]\s*['\"]?(true|1)\b|--ignore-eos\b", re.IGNORECASE)


@dataclass
class Remarks:
    """Remarks by kind, without duplicates, in order; ``first`` are warnings that change the advice."""

    read: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)

    def add(self, kind: str, *remarks: str) -> None:
        """Add the remarks of a kind that are not there."""
        getattr(self, kind).extend(remark for remark in dict.fromkeys(remarks) if remark not in getattr(self, kind))

    assume = partialmethod(add, "assumed")
    measure = partialmethod(add, "measured")
    warn = partialmethod(add, "warnings")

    def lines(self) -> list[str]:
        """One line per remark but the first, prefixed with its kind."""
        kinds = {"read": self.read, "measured": self.measured, "computed": self.computed, "assumed": self.assumed}
        kinds |= {"settings": self.settings, "warning": self.warnings}
        return [f"{kind}: {remark}" for kind, remarks in kinds.items() for remark in remarks]

    def first_lines(self) -> list[str]:
        """The warnings that stand before everything else."""
        return [f"warning: {remark}" for remark in self.first]

    # -- costs -------------------------------------------------------------------------------------------------

    def of_costs(self, candidates: Sequence[Candidate]) -> None:
        """Note where the seconds of steps with drafts are from."""
        for candidate in candidates:
            points, a = candidate.speeds, candidate.acceptance
            title = " × ".join(filter(None, (a.drafter, a.verifier))) or "drafts"
            if points and all(point.gamma for point in points):
                self.warn(
                    f"{title}: no speed of plain decoding is known, so speed-ups over it are uncertain; give a log or "
                    "benchmark of the same server without drafts as a further SOURCE"
                )
            elif not points and candidate.measured_passes:
                self.assume("a step takes as long as its measured passes, within the usual 15 %")
            elif not points:
                at_least = "" if candidate.target is None else ", and at least as long as its passes"
                self.assume(
                    f"steps of {title} take as long as in published series{at_least} (docs/predictions.md); "
                    "a log or benchmark of plain decoding, and one of a draft length, make the interval narrower"
                )

    def of_roofline(self, target: Roofline) -> None:
        memory, compute = target.efficiency
        device = f"{target.devices} x {target.accelerator.name}"
        self.add(
            "computed",
            f"passes of {target.shape.name} by the roofline of {device}, {100 * memory:.0f} % of its bandwidth and "
            f"{100 * compute:.0f} % of its FLOP rate; engines are less efficient beyond B = 8 (docs/cost.md)",
        )
        if target.caveat:
            self.assume(target.caveat)
        if target.shape.experts:
            self.assume(
                f"the router of {target.shape.name} spreads tokens evenly over its {target.shape.experts} experts"
            )

    def of_curve(self, curve: CostCurve) -> None:
        device = ", ".join(f"{key} {value}" for key, value in curve.device.items())
        self.measure(f"passes of {curve.model}, {curve.dtype}, {device}, {curve.measured}")

    # -- acceptance --------------------------------------------------------------------------------------------

    def of_source(self, source: Source, acceptances: Sequence[Acceptance], speeds: Sequence[str]) -> None:
        """Add what was read and skipped, and warn about unrealistic traffic recorded in a log."""
        self.measure(*speeds)
        self.add("read", *(f"{acceptance.source}, as {acceptance.format}" for acceptance in acceptances))
        if source.skipped:
            self.warn(f"{len(source.skipped)} records are skipped; the first is {source.skipped[0]}")
        if _RANDOM.search(source.text):
            self.warn(f"{source.name} has random prompts; acceptance on real text will differ")
        if _IGNORE_EOS.search(source.text):
            self.warn(f"{source.name} ignores end-of-sequence tokens; the repetitive text after them raises acceptance")

    def of_run(self, results: Sequence[CellResult], name: str, notes: Sequence[str], *, own_seconds: bool) -> None:
        """Add remarks on a run; ``own_seconds``: the measured times of verification and bookkeeping are used."""
        self.warn(*notes)
        if own_seconds:
            self.measure(f"{name}: verification, bookkeeping and drafting without a model, on its machine")
            self.add("computed", f"{name}: steps, from the cost curves of its machine")
        responses = [response for result in results for response in result.responses]
        if responses and all(response.get("finish_reason") == "length" for response in responses):
            self.warn(f"{name}: all responses are truncated; acceptance may differ with a greater max_new_tokens")

    def of_steps(self, steps: Sequence[Step], candidates: Sequence[Candidate]) -> None:
        """Add remarks on the best pairs and the runners-up of ``candidates``."""
        for step in steps:
            for choice in (step.best, step.runner_up):
                if choice is not None:
                    self._of_acceptance(choice.candidate.acceptance.cut(choice.gamma))
            best = step.best
            acceptance = best.candidate.acceptance
            longest = max(c.acceptance.gamma for c in candidates if c.pair == best.candidate.pair)
            if step.draft and not acceptance.refusal and best.gamma == longest:
                pair = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier))) or "drafts"
                self.warn(f"{pair}: drafts of more than {best.gamma} tokens were not measured and may be faster")
            curve = best.candidate.target
            if isinstance(curve, CostCurve) and step.batch_size > max(curve.batch_sizes):
                self.warn(f"passes of {curve.model} are extrapolated beyond B = {max(curve.batch_sizes)}")

    def _of_acceptance(self, acceptance: Acceptance) -> None:
        pair = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier)))
        of_pair = f" of {pair}" if pair else ""
        measured = acceptance.longer or acceptance
        self.add(
            "measured" if acceptance.longer is None else "computed",
            f"acceptance{of_pair} ({acceptance.source}): {estimate_text(measured.block_efficiency())} tokens a step; "
            f"{acceptance.interval_assumes}",
        )
        if acceptance.longer is not None:
            self.assume(
                "shorter drafts: a drafted token is right or wrong wherever its step starts, and as often beyond the "
                "measured positions as at the last one; intervals include the usual error of that (docs/advise.md)"
            )
        elif acceptance.refusal and acceptance.refusal != EACH_LENGTH and acceptance.gamma > 1:
            fewer = f"drafts of fewer than {acceptance.gamma} tokens are left out"
            self.warn(f"{acceptance.source}: {fewer}: {acceptance.refusal}")
        for remark in acceptance.remarks:
            kind, _, rest = remark.partition("assumed: ")
            if rest and not kind:
                self.assume(f"{acceptance.source}: {rest}")
            else:
                self.warn(f"{acceptance.source}: {remark}")
        if not measured.every_step:
            self.add(
                "first",
                f"{measured.source} does not count steps without a draft: if the drafter looks its drafts up, a step "
                f"emits fewer than {measured.block_efficiency().value:.2f} tokens; name the drafter as --drafter, or "
                "give counters that have the generated tokens and finished requests, too",
            )
        drafting = 1 - measured.idle
        if drafting and measured.marginal[0] < _POOR * drafting:
            self.warn(
                f"{measured.source}: {100 * measured.marginal[0] / drafting:.1f} % of the first drafted tokens are "
                "accepted, as of a drafter with a fault; see crossdraft diagnose --counters FILE"
            )
        if acceptance.temperature is None:
            self.warn(f"{acceptance.source} does not record the temperature; acceptance depends on it")
        if acceptance.rows and acceptance.pieces != WINDOWS and 1 < len(acceptance.rows) < _MIN_PIECES:
            self.warn(f"{acceptance.source}: {len(acceptance.rows)} {acceptance.pieces} are few; use more")
        if acceptance.drafts is not None and (drafts := acceptance.drafts * drafting) < _MIN_DRAFTS:
            self.warn(f"{acceptance.source}: {drafts:.0f} drafts are few; use more")

    # -- an engine -----------------------------------------------------------------------------------------------

    def of_schedule(self, choice: EngineChoice, engine: Engine, best: Mapping[int, Step]) -> None:
        """Add remarks on the speed-up lost to the engine's limitations, by batch size."""
        candidate = choice.candidate
        acceptance = candidate.acceptance
        if acceptance.point_mass is None and acceptance.temperature != 0 and choice.schedule.gamma:
            unknown = f"{acceptance.source} does not record whether drafts were sampled or greedy"
            self.add("settings", f"{unknown}; {engine.name} uses its default")
        for b, step in best.items():
            actual, possible = choice.schedule.speed_ups[b], max(step.best.speed_up.value, 1.0)
            if actual.value >= possible * (1 - 1e-9):
                continue
            other = step.best.candidate
            pair = f"{other.title} × {other.acceptance.verifier or 'its verifier'} at gamma {step.best.gamma}"
            if reason := choice.unsupported.get(other.pair):
                reason = f"{engine.name} does not support {pair}: {reason}"
            elif other.pair != candidate.pair:
                reason = f"{pair} would be faster, but a server has one drafter"
            else:
                faster = pair if possible > 1 else "plain decoding"
                reason = f"{faster} would be faster, but {engine.name} has one draft length"
            self.add("settings", f"B = {b}: {actual.value:.2f} instead of {possible:.2f}: {reason}")

    def of_settings(self, engine: Engine, settings: Settings) -> None:
        self.add("settings", f"option names of {engine.read_from}", *settings.remarks)
