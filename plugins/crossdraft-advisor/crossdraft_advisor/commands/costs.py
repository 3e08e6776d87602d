"""Cost curves of ``crossdraft advise`` and ``crossdraft simulate``: tables, stored measurements or the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, model_validator

from crossdraft import Argument, UsageError
from crossdraft.commands import MOST_TOKENS

from ..roofline.options import MachineOptions

if TYPE_CHECKING:
    from crossdraft.runs import Curve

    from ..advise.caveats import Remarks

_GROUP = "cost of a step"


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
        from ..roofline.roofline import modelled

        target, drafter = modelled(self, self.target), None
        if self.draft_model:
            drafter = modelled(self, self.draft_model)
            drafter = replace(drafter, shape=drafter.shape.of_vocabulary(self.draft_vocab or drafter.shape.vocab))
        remarks.of_roofline(target)

        def by_name(name: str) -> Curve | None:
            """The curve of --draft-model, else of the pair's own model if its config is readable."""
            if drafter is not None:
                return drafter
            try:
                return modelled(self, name)
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
