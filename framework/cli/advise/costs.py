"""Cost curves for ``crossdraft advise`` and ``crossdraft simulate``: tables, stored measurements or the roofline."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import UsageError

if TYPE_CHECKING:
    from ...advise.caveats import Remarks
    from ...cost.curve import Curve


class Costs(NamedTuple):
    """Cost curves given by the options, None if not given."""

    target: Curve | None
    drafter: Curve | None
    by_name: Callable[[str], Curve | None]


def costs_of(args: argparse.Namespace, remarks: Remarks) -> Costs:
    """The cost curves of the options of `options.add_costs`; adds remarks on their origin."""
    if args.cost:
        from ...advise.cost_tables import read_cost_table

        target = read_cost_table(args.cost)
        drafter = read_cost_table(args.draft_cost) if args.draft_cost else None
        remarks.of_tables(target, drafter)
        return Costs(target, drafter, lambda _: drafter)
    if args.on:
        return _roofline(args, remarks)
    if args.target:
        target = _stored_curve(args.target, remarks)
        drafter = _stored_curve(args.draft_model, remarks) if args.draft_model else None
        return Costs(target, drafter, lambda name: _stored_curve(name, remarks))
    if args.draft_model:
        raise UsageError("--draft-model requires --target")
    return Costs(None, None, lambda _: None)


def _roofline(args: argparse.Namespace, remarks: Remarks) -> Costs:
    from ...cost.accelerators import accelerator
    from ...cost.roofline import EFFICIENCY, Roofline, read_shape

    device = accelerator(args.on)
    options: dict[str, Any] = {"devices": args.devices, "weight_bytes": args.weight_bytes}
    options |= {"cache_bytes": args.cache_bytes, "efficiency": tuple(args.efficiency or EFFICIENCY)}
    target = Roofline(read_shape(args.target), device, **options)
    drafter = None
    if args.draft_model:
        shape = read_shape(args.draft_model)
        drafter = Roofline(replace(shape, vocab=args.draft_vocab or shape.vocab), device, **options)
    remarks.of_roofline(target)

    def by_name(name: str) -> Curve | None:
        """The curve of --draft-model, else of the pair's own model if its config is readable."""
        if drafter is not None:
            return drafter
        try:
            return Roofline(read_shape(name), device, **options)
        except UsageError:
            pass
        except Exception as error:  # heads have configs that the roofline does not support
            remarks.warn(f"the cost of {name} is unknown: {error}")
        remarks.assume(f"drafting with {name} is free")
        return None

    return Costs(target, drafter, by_name)


def _stored_curve(name: str, remarks: Remarks) -> Curve:
    """The latest cost curve of a model measured by ``crossdraft cost``."""
    from ...cost.curve import stored_curves

    curves = [curve for curve in stored_curves() if curve.model == name]
    if not curves:
        raise UsageError(f"{name} has no cost curve on this machine; run crossdraft cost --target {name}, or use --on")
    curve = max(curves, key=lambda curve: curve.measured)
    remarks.of_curve(curve)
    return curve
