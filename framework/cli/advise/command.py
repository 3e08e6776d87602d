"""``crossdraft advise``: from acceptance and cost to a decision, and to the settings of an engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import plugins
from ...errors import UsageError
from ...util.input_files import kind_of
from ..cost.options import option
from .options import BATCH_SIZES, check
from .options import add_arguments as add_arguments

if TYPE_CHECKING:
    from ...advise.acceptance import Acceptance
    from ...advise.candidates import Candidate, Machine
    from ...advise.caveats import Remarks
    from ...cost.curve import Curve

CONTEXT = 1024


class _Costs(NamedTuple):
    """What the options say of costs: the two curves, if they say so."""

    target: Curve | None
    drafter: Curve | None
    by_name: Callable[[str], Curve | None]


def main(args: argparse.Namespace) -> int:
    """0: done; 2 (as UsageError): options that do not fit, numbers that cannot carry an answer."""
    check(args)
    from ...advise.caveats import Remarks
    from ...advise.decision import decide
    from .output import as_json, as_text

    remarks = Remarks()
    groups = _groups(args, remarks)
    sizes: list[int] = sorted(set(args.batch_size or BATCH_SIZES))
    steps = {
        title: [decide(mine, b, c) for c in args.context or [None] for b in sizes] for title, mine in groups.items()
    }
    for found in steps.values():
        remarks.of_steps(found)
    settings = _settings(args, groups, sizes, remarks) if args.export else None
    if args.json:
        print(json.dumps(as_json(steps, remarks, settings), indent=2))
    elif settings is not None:
        print(settings.text)
        for line in remarks.lines():
            print(line, file=sys.stderr)
    else:
        print(as_text(steps, remarks))
    return 0


# -- what there is to choose from --------------------------------------------------------------------------------


def _groups(args: argparse.Namespace, remarks: Remarks) -> dict[str, list[Candidate]]:
    """The candidates by what they share: target and sampling."""
    from ...advise.candidates import imported

    runs = [source for source in args.sources if kind_of_source(source) == "directory"]
    texts = [source for source in args.sources if source not in runs]
    if args.since and len(texts) != 1:
        raise UsageError("--since is an earlier scrape of one other; give one file or URL to count up to")
    if (
        runs
        and not texts
        and (idle := [name for name in ("drafter", "verifier", "gamma") if getattr(args, name) is not None])
    ):
        raise UsageError(f"{option(idle[0])} says what an engine's numbers do not; a finished run knows it")
    costs = _costs(args, remarks)
    candidates: list[Candidate] = []
    for run in runs:
        candidates += _of_run(args, run, costs, remarks)
    replays = bool(args.replay or args.prompts)
    if replays:
        from .replay import acceptances as replayed

        acceptances = replayed(args, remarks)
    else:
        acceptances = [found for source in texts for found in _imported(args, source, remarks)]
    if acceptances:
        if costs.target is None:
            raise UsageError(
                "nothing says what a pass of the target costs: give --target with --on, --target alone if crossdraft "
                "cost measured it, or --cost FILE"
            )
        drafting = [_drafting(args, one, costs, replays) for one in acceptances]
        remarks.free(drafting=not replays and costs.drafter is None)
        context = (args.context or [CONTEXT])[0]
        for one, curve in zip(acceptances, drafting, strict=True):
            candidates += imported([one], costs.target, curve, context)
    if args.overlap:
        remarks.overlapped()
        candidates = [replace(candidate, overlap=True) for candidate in candidates]
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if args.temperature is None or candidate.acceptance.temperature == args.temperature:
            groups.setdefault(candidate.group, []).append(candidate)
    if not groups:
        asked = "" if args.temperature is None else f" at temperature {args.temperature:g}"
        why = "; ".join(remarks.warnings) or f"nothing drafts{asked}"
        raise UsageError(f"there is no pair to choose from: {why}")
    return groups


def _drafting(args: argparse.Namespace, found: Acceptance, costs: _Costs, replayed: bool) -> Curve | None:
    """The curve of what drafts: of a replayed drafter by its own model, none where it has none."""
    if not replayed:
        return costs.drafter
    if not found.model:
        return None
    return costs.drafter or costs.by_name(found.model)


def kind_of_source(source: str) -> str:
    """``directory``, ``file``, or ``url``. Raises UsageError where there is nothing."""
    if source.startswith(("http://", "https://")):
        return "url"
    kind = kind_of(source)
    if not kind:
        raise UsageError(f"there is no file or directory {source}; give a finished run, or what an engine wrote")
    return kind


def _of_run(args: argparse.Namespace, source: str, costs: _Costs, remarks: Remarks) -> list[Candidate]:
    from ...advise.candidates import Machine, of_run
    from ...cost.curve import stored_curves
    from ...report.load_run import read_run

    run = read_run(Path(source))
    machine: Machine | None = None
    if costs.target is not None:
        machine = Machine(costs.target, costs.by_name)
        remarks.free(drafting=False)
    curves = [*run.summary.curves, *stored_curves()]
    found, notes = of_run(run.summary.results, run.name, curves, machine)
    remarks.of_run(run.summary.results, run.name, notes, own_seconds=machine is None)
    return found


def _imported(args: argparse.Namespace, source: str, remarks: Remarks) -> list[Acceptance]:
    """What the engines' formats find in a file, with what the options say of it."""
    from ...advise.acceptance import Acceptance
    from ...advise.engine_log import read_source

    given = read_source(source)
    before = read_source(args.since) if args.since else None
    found: list[Acceptance] = []
    for name in plugins.entries("engines"):
        engine = plugins.get("engines", name)()
        with plugins.guarded("engines", name, "read()"):
            read = list(engine.read(given, before))
        if not all(isinstance(one, Acceptance) for one in read):
            raise plugins.unusable("engines", name, "read() must return a list of crossdraft.Acceptance")
        found += read
    if not found:
        what = "two scrapes of counters" if before else "a log, scrape or responses"
        raise UsageError(f"{source} has no acceptance in any known format of {what} (crossdraft list engines)")
    remarks.of_source(given)
    if "prompt-lookup" in (_only(args.drafter), *(one.drafter for one in found)):
        remarks.warn(
            f"{source}: engines count steps with a draft alone, prompt-lookup often has none; over all it gains less"
        )
    said = {"drafter": _only(args.drafter), "verifier": _only(args.verifier), "temperature": args.temperature}
    said |= {"model": args.draft_path or args.draft_model}
    return [replace(_with_rates(args, one), **{k: v for k, v in said.items() if v is not None}) for one in found]


def _only(given: list[str] | None) -> str | None:
    return given[0] if given else None


def _with_rates(args: argparse.Namespace, found: Acceptance) -> Acceptance:
    """Acceptance by position, assumed if it has to be."""
    if found.marginal:
        if args.gamma is not None:
            raise UsageError(f"{found.source} tells the acceptance by position; --gamma is for where it does not")
        return found
    if args.gamma is None:
        raise UsageError(
            f"{found.source} tells that a step emits {found.length:.2f} tokens and not of how many drafted ones; "
            "give the draft length as --gamma"
        )
    return found.with_constant_rate(args.gamma)


# -- costs -------------------------------------------------------------------------------------------------------


def _costs(args: argparse.Namespace, remarks: Remarks) -> _Costs:
    if args.cost:
        from ...advise.cost_tables import read_cost_table

        target = read_cost_table(args.cost)
        drafter = read_cost_table(args.draft_cost) if args.draft_cost else None
        remarks.of_tables(target, drafter)
        return _Costs(target, drafter, lambda _: drafter)
    if args.on:
        return _roofline(args, remarks)
    if args.target:
        target = _kept(args.target, remarks)
        drafter = _kept(args.draft_model, remarks) if args.draft_model else None
        return _Costs(target, drafter, lambda name: _kept(name, remarks))
    if args.draft_model:
        raise UsageError("--draft-model needs --target: what a draft costs is set against a pass of the target")
    return _Costs(None, None, lambda _: None)


def _roofline(args: argparse.Namespace, remarks: Remarks) -> _Costs:
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
        """The model that was named for all of a run's pairs, or the pair's own if its shape is known here."""
        if drafter is not None:
            return drafter
        try:
            return Roofline(read_shape(name), device, **options)
        except UsageError:
            pass
        except Exception as error:  # a config of no family that the roofline knows: heads
            remarks.warn(f"the shape of {name} is not known: {error}")
        remarks.assume(f"drafting with {name} counts as free")
        return None

    return _Costs(target, drafter, by_name)


def _kept(name: str, remarks: Remarks) -> Curve:
    """The curve that `crossdraft cost` kept of a model, the latest one."""
    from ...cost.curve import stored_curves

    mine = [curve for curve in stored_curves() if curve.model == name]
    if not mine:
        raise UsageError(f"no cost curve of {name} was measured here: crossdraft cost --target {name}, or give --on")
    curve = max(mine, key=lambda curve: curve.measured)
    remarks.of_curve(curve)
    return curve


# -- settings ----------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace, groups: dict[str, list[Candidate]], sizes: list[int], remarks: Remarks) -> Any:
    """Of the engine, and remarks on what it cannot do, with the price."""
    from ...advise.decision import decide, schedule_for
    from ...advise.engine import Settings

    if len(groups) > 1:
        raise UsageError(f"--export is for one of: {'; '.join(groups)}; choose with --temperature")
    ((_, candidates),) = groups.items()
    engine = plugins.get("engines", args.export)()
    context = args.context[0] if args.context else None
    if args.draft_path:
        named = [replace(one.acceptance, model=args.draft_path) for one in candidates]
        candidates = [replace(c, acceptance=a) for c, a in zip(candidates, named, strict=True)]
    with plugins.guarded("engines", args.export, "cannot() or scheduled()"):
        found = schedule_for(candidates, engine, sizes, context)
    remarks.of_schedule(found, engine, {b: decide(candidates, b, context) for b in found.schedule.speed_ups})
    with plugins.guarded("engines", args.export, "export()"):
        settings = engine.export(found.schedule)
    if not isinstance(settings, Settings):
        raise plugins.unusable("engines", args.export, "export() must return crossdraft.Settings")
    remarks.of_settings(engine, settings)
    return settings
