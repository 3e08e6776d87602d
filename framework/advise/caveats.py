"""What to know of an answer: what was measured, computed and assumed, and where the input cannot carry it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost.curve import CostCurve
from ..cost.roofline import Roofline
from ..runs.records import CellResult
from .acceptance import Acceptance
from .decision import Scheduled, Step
from .engine import Engine, Settings
from .engine_log import Source

#: Fewer prompts, and fewer drafts, than this are few.
_FEW_PIECES, _FEW_DRAFTS = 10, 300
#: What a benchmark's log says of itself.
_RANDOM = re.compile(r"dataset[-_]name['\"]?\s*[=: ]\s*['\"]?random\b")
_ENDLESS = re.compile(r"ignore[-_]eos['\"]?\s*[=: ]\s*['\"]?(true|1)\b|--ignore-eos\b", re.IGNORECASE)


@dataclass
class Remarks:
    """Sentences by kind, each once, in the order in which they were said."""

    measured: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One a line, with its kind in front."""
        kinds = {"measured": self.measured, "computed": self.computed, "assumed": self.assumed}
        kinds |= {"settings": self.settings, "warning": self.warnings}
        return [f"{kind}: {sentence}" for kind, found in kinds.items() for sentence in found]

    def assume(self, sentence: str) -> None:
        _once(self.assumed, sentence)

    def warn(self, sentence: str) -> None:
        _once(self.warnings, sentence)

    # -- costs -------------------------------------------------------------------------------------------------

    def free(self, *, drafting: bool) -> None:
        """Nobody says what these take."""
        self.assume("verification and bookkeeping count as free")
        if drafting:
            self.assume("drafting counts as free; give the draft model as --draft-model, or its passes as --draft-cost")

    def overlapped(self) -> None:
        self.assume(
            "drafts are made while the target verifies: a step takes as long as the longer of the two, at best; a "
            "draft that follows one which was not accepted whole has to be made again"
        )

    def of_roofline(self, target: Roofline) -> None:
        memory, compute = target.efficiency
        device = f"{target.devices} x {target.accelerator.name}"
        _once(
            self.computed,
            f"passes of {target.shape.name} by the roofline of {device}, {100 * memory:.0f} % of its bandwidth and "
            f"{100 * compute:.0f} % of its FLOP rate; beyond B = 8 engines lose more than that (docs/cost.md)",
        )
        if target.shape.experts:
            self.assume(
                f"the router of {target.shape.name} spreads tokens evenly over its {target.shape.experts} experts"
            )

    def of_curve(self, curve: CostCurve) -> None:
        device = ", ".join(f"{key} {value}" for key, value in curve.device.items())
        _once(self.measured, f"passes of {curve.model}, {curve.dtype}, {device}, {curve.measured}")

    def of_tables(self, target: CostCurve, drafter: CostCurve | None) -> None:
        for curve in (target, drafter):
            if curve is not None:
                _once(self.measured, f"passes of {curve.model}, as its table says")

    # -- acceptance --------------------------------------------------------------------------------------------

    def of_source(self, given: Source) -> None:
        """What a log says of the traffic behind it."""
        if _RANDOM.search(given.text):
            self.warn(
                f"{given.name} speaks of random prompts: what follows them is no text, and its acceptance no guide"
            )
        if _ENDLESS.search(given.text):
            self.warn(
                f"{given.name} speaks of an ignored end of text: beyond it a model repeats itself, and drafts do well"
            )

    def of_run(self, results: Sequence[CellResult], name: str, notes: Sequence[str], *, own_seconds: bool) -> None:
        """What a run's records say; ``own_seconds``: verification and bookkeeping count as they were measured."""
        for note in notes:
            self.warn(note)
        if own_seconds:
            _once(self.measured, f"{name}: verification, bookkeeping and drafting without a model, where it ran")
            _once(self.computed, f"{name}: steps from the cost curves of the machine where it ran")
        responses = [response for result in results for response in result.responses]
        if responses and all(response.get("finish_reason") == "length" for response in responses):
            self.warn(f"{name}: no response reached its end; with a greater max_new_tokens acceptance may differ")

    def of_steps(self, steps: Sequence[Step]) -> None:
        """What holds for the chosen pairs and the runners-up."""
        for step in steps:
            for choice in (step.best, step.runner_up):
                if choice is not None:
                    self._of_acceptance(choice.candidate.acceptance)
            self._of_ends(step)
        self.assume("intervals are those of the acceptance alone, as if costs were known exactly")

    def _of_acceptance(self, found: Acceptance) -> None:
        what = " × ".join(filter(None, (found.drafter, found.verifier)))
        _once(self.measured, f"acceptance{' of ' if what else ''}{what} ({found.source}): {found.interval_assumes}")
        for remark in found.remarks:
            kind, _, rest = remark.partition("assumed: ")
            if rest and not kind:
                self.assume(f"{found.source}: {rest}")
            else:
                self.warn(f"{found.source}: {remark}")
        if found.temperature is None:
            self.warn(f"{found.source} does not say at which temperature; at another one acceptance differs")
        if found.rows and found.pieces != "windows of the log" and 1 < len(found.rows) < _FEW_PIECES:
            self.warn(f"{found.source}: {len(found.rows)} {found.pieces} are few; ask for more before deciding")
        if found.drafts is not None and found.drafts < _FEW_DRAFTS:
            self.warn(f"{found.source}: {found.drafts:.0f} drafts are few; ask for more before deciding")

    def _of_ends(self, step: Step) -> None:
        best = step.best
        acceptance = best.candidate.acceptance
        if step.draft and acceptance.cuttable and best.gamma == acceptance.gamma:
            what = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier))) or "drafts"
            self.warn(f"{what}: longer drafts than {best.gamma} tokens were not measured, and may pay more")
        curve = best.candidate.target
        if isinstance(curve, CostCurve) and step.batch_size > max(curve.batch_sizes):
            self.warn(
                f"beyond B = {max(curve.batch_sizes)} passes of {curve.model} were not measured; its line goes on"
            )

    # -- an engine -----------------------------------------------------------------------------------------------

    def of_schedule(self, found: Scheduled, engine: Engine, best: Mapping[int, Step]) -> None:
        """What one server gets, and what that costs against the best pair of each batch size."""
        mine = found.candidate
        if mine.acceptance.point_mass is None and mine.acceptance.temperature != 0 and found.schedule.gamma:
            what = f"{mine.acceptance.source} does not say whether drafts were sampled or greedy"
            _once(self.settings, f"{what}; {engine.name} keeps its default")
        for b, step in best.items():
            got, most = found.schedule.speed_ups[b], max(step.best.speed_up.value, 1.0)
            if got.value >= most * (1 - 1e-9):
                continue
            other = step.best.candidate
            about = f"{other.title} × {other.acceptance.verifier or 'its rule'} at gamma {step.best.gamma}"
            if reason := found.left_out.get(other.pair):
                why = f"{engine.name} cannot do {about}: {reason}"
            elif other.pair != mine.pair:
                why = f"{about} would be faster; a server drafts with one of them"
            else:
                why = f"{about if most > 1 else 'plain decoding'} would be faster; {engine.name} has one draft length"
            _once(self.settings, f"B = {b}: {got.value:.2f} instead of {most:.2f}: {why}")

    def of_settings(self, engine: Engine, settings: Settings) -> None:
        _once(self.settings, f"names as of {engine.read_from}")
        for remark in settings.remarks:
            _once(self.settings, remark)


def _once(sentences: list[str], sentence: str) -> None:
    if sentence not in sentences:
        sentences.append(sentence)
