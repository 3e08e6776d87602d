"""``crossdraft cost --on``: the roofline model of a machine that is not at hand, and the speed-ups that follow."""

from __future__ import annotations

from dataclasses import replace

from crossdraft import UsageError
from crossdraft.framework.cli.cost.command import Cost, Parts
from crossdraft.framework.cost.finished_cells import statistics
from crossdraft.framework.cost.prediction import CellStatistics
from crossdraft.runs import pair_title, read_run

from ..advise.shorter_drafts import cut, shorter_refusal
from .costs import MachineOptions

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024


class CostAnywhere(MachineOptions, Cost):
    """Latency of passes, measured or modelled, and the speed-ups that follow from it."""

    def parts(self) -> Parts:
        """The parts of the report."""
        return self._modelled() if self.on else super().parts()

    def check(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        if self.on:
            self.trusted(())
            if not self.target:
                raise UsageError("cost requires --target: a model to measure, or with --on its config.json")
            if len(self.context) > 1:
                raise UsageError("--context takes one value with --on")
        super().check()

    def _modelled(self) -> Parts:
        """Predictions for a target and a draft model on a named accelerator."""
        context = (self.context or [CONTEXT])[0]
        target, drafter = self.modelled(self.target), self.modelled(self.drafter) if self.drafter else None
        batch_sizes = self.batch_size or list(BATCH_SIZES)
        pairs, gamma, remarks = _pairs(self, context) if self.run_ else self.chains(context)
        sizes = {b: sum(r.memory_bytes(b, context) for r in (target, drafter) if r) for b in batch_sizes}
        names = {"target": target.shape.name, "accelerator": target.accelerator.name, "devices": target.devices}
        yield names | {"context": context, "bytes_held": sizes}, target.description(context)
        yield from self.by_batch_size(pairs, gamma, target, drafter, batch_sizes, context)
        if not self.run_:
            yield self.schedules(target, drafter, batch_sizes, context)
        yield {}, "\n".join(filter(None, [*remarks, self.free()]))
        if full := [b for b, bytes_ in sizes.items() if bytes_ > target.accelerator.memory]:
            size = f"{target.accelerator.memory / 1e9:.0f} GB"
            yield {}, f"weights and KV cache exceed the device memory of {size} from B = {full[0]} on"


def _pairs(options: CostAnywhere, context: float) -> tuple[dict[str, CellStatistics], int, list[str]]:
    """The pairs of a run, with their acceptance and without the seconds measured on this machine."""
    pairs: dict[str, CellStatistics] = {}
    remarks = ["verification and bookkeeping are free"]
    assert options.run_ is not None
    for result in read_run(options.run_).summary.results:
        cell = statistics(result)
        if cell is None or result.config.is_baseline:
            continue
        if options.gamma is not None and options.gamma != len(cell.acceptance):
            if refusal := shorter_refusal(result.config):
                raise UsageError(f"--gamma {options.gamma}: {refusal}")
            cell = cut(cell, options.gamma)
        config = result.config
        name = f"pair {len(pairs) + 1}"
        settings = f"temperature {config.sampling.temperature:g}, batch size {config.batch_size}"
        settings += f", {cell.tokens_per_step:.2f} tokens per step"
        remarks.append(f"{name}: {pair_title(result)}, {settings}")
        pairs[name] = replace(cell, draft_seconds=0.0, other_seconds=0.0, context=context)
    if not pairs:
        raise UsageError(f"{options.run_} has no finished cell with a drafter; run a recipe with drafters")
    return pairs, int(max(max(cell.widths) for cell in pairs.values())), remarks
