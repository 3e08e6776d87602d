"""Cost curves of ``crossdraft advise`` and ``crossdraft simulate``: tables, stored measurements or the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from crossdraft import Argument, UsageError
from crossdraft.commands import MOST_TOKENS, Options

from ..limits import MOST_BYTES, MOST_DEVICES

if TYPE_CHECKING:
    from crossdraft.runs import Curve

    from ..advise.caveats import Remarks
    from ..roofline.roofline import Roofline

_GROUP, _MACHINE = "cost of a step", "another machine"


class MachineOptions(Options):
    """Options of the roofline model; those of a command that inherits from this."""

    on: Annotated[str | None, Argument("NAME", group=_MACHINE)] = Field(
        None, description="accelerator (h100, a100-80g, ...), or a YAML file with one"
    )
    devices: Annotated[int, Argument("N", group=_MACHINE, requires="on"), MOST_DEVICES] = Field(
        1, ge=1, description="tensor-parallel devices"
    )
    weight_bytes: Annotated[float, Argument(group=_MACHINE, requires="on")] = Field(
        2, gt=0, le=MOST_BYTES, description="bytes per weight (2: bfloat16)"
    )
    cache_bytes: Annotated[float, Argument(group=_MACHINE, requires="on")] = Field(
        2, gt=0, le=MOST_BYTES, description="bytes per key or value element"
    )
    efficiency: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], Argument("M,C", group=_MACHINE, requires="on", commas=True)
    ] = Field(
        (0.8, 0.7), min_length=2, max_length=2, description="attained fractions of the peak bandwidth and FLOP rate"
    )

    def modelled(self, model: str) -> Roofline:
        """The roofline of a model on the machine of ``--on``. Raises as `accelerator` and `read_shape` do."""
        from ..roofline.accelerators import accelerator
        from ..roofline.roofline import Roofline, read_shape

        assert self.on is not None
        machine: dict[str, Any] = self.model_dump(include={"devices", "weight_bytes", "cache_bytes", "efficiency"})
        return Roofline(read_shape(model), accelerator(self.on), **machine)


class Costs(NamedTuple):
    """Cost curves given by the options, None if not given."""

    target: Curve | None
    drafter: Curve | None
    by_name: Callable[[str], Curve | None]


class CostOptions(MachineOptions):
    """Options of the cost of a step. Raises UsageError for options that cannot be combined."""

    target: Annotated[str, Argument("MODEL", group=_GROUP)] = Field(
        "", description="target measured by crossdraft cost; with --on its config.json"
    )
    draft_model: Annotated[str, Argument("MODEL", group=_GROUP, requires="target")] = Field(
        "", description="draft model, likewise (default: as in published series)"
    )
    draft_vocab: Annotated[int | None, Argument("N", group=_GROUP, requires="on draft_model"), MOST_TOKENS] = Field(
        None, ge=1, description="with --on: vocabulary size of the draft model's head"
    )
    cost: Annotated[str, Argument("FILE", group=_GROUP)] = Field(
        "", description="CSV of batch_size,width,context,seconds for passes of the target"
    )
    draft_cost: Annotated[str, Argument("FILE", group=_GROUP, requires="cost")] = Field(
        "", description="the same for the draft model, measured on the same machine"
    )

    @model_validator(mode="after")
    def _one_cost_each(self) -> CostOptions:
        for first, second, of in (("on", "cost", "the target"), ("draft_model", "draft_cost", "a draft")):
            if getattr(self, first) and getattr(self, second):
                names = " and ".join(f"--{name.replace('_', '-')}" for name in (first, second))
                raise UsageError(f"{names} cannot be combined: both give the cost of {of}; remove one of them")
        if self.on and not self.target:
            raise UsageError("--on requires --target: a config.json, or a directory with one")
        return self

    def costs(self, remarks: Remarks) -> Costs:
        """The cost curves; adds remarks on their origin."""
        if self.cost:
            from ..cost.tables import read_cost_table

            target = read_cost_table(self.cost)
            drafter = read_cost_table(self.draft_cost) if self.draft_cost else None
            for curve in filter(None, (target, drafter)):
                remarks.measure(f"passes of {curve.model}, from its table")
            return Costs(target, drafter, lambda _: drafter)
        if self.on:
            return self._roofline(remarks)
        if self.target:
            target = _stored_curve(self.target, remarks)
            drafter = _stored_curve(self.draft_model, remarks) if self.draft_model else None
            return Costs(target, drafter, lambda name: _stored_curve(name, remarks))
        return Costs(None, None, lambda _: None)

    def _roofline(self, remarks: Remarks) -> Costs:
        target, drafter = self.modelled(self.target), None
        if self.draft_model:
            drafter = self.modelled(self.draft_model)
            drafter = replace(drafter, shape=drafter.shape.of_vocabulary(self.draft_vocab or drafter.shape.vocab))
        remarks.of_roofline(target)

        def by_name(name: str) -> Curve | None:
            """The curve of --draft-model, else of the pair's own model if its config is readable."""
            if drafter is not None:
                return drafter
            try:
                return self.modelled(name)
            except UsageError:
                pass
            except Exception as error:  # heads have configs that the roofline does not support
                remarks.warn(f"the cost of {name} is unknown: {error}")
            return None

        return Costs(target, drafter, by_name)


def _stored_curve(name: str, remarks: Remarks) -> Curve:
    """The latest cost curve of a model measured by ``crossdraft cost``."""
    from crossdraft.runs import stored_curves

    curves = [curve for curve in stored_curves() if curve.model == name]
    if not curves:
        raise UsageError(f"{name} has no cost curve on this machine; run crossdraft cost --target {name}, or use --on")
    curve = max(curves, key=lambda curve: curve.measured)
    if curve.implausible:
        raise UsageError(f"the cost curve of {name}: {curve.implausible}; run crossdraft cost --target {name} --fresh")
    remarks.of_curve(curve)
    return curve
