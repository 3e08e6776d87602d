"""``crossdraft list``: installed strategies, plug-ins (``list plugins``) and the environment (``list env``)."""

import argparse
import json
import shutil
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from .. import plugins
from ..errors import UnknownNameError, UsageError, quoted
from ..recipe.builtin_recipes import builtin_recipes, summary_of
from ..util.input_files import read_text
from ..util.limits import RECIPE_BYTES

#: Kinds of classes with a ``Config``.
_WITH_OPTIONS = ("drafters", "verifiers", "launchers", "servers")
_KINDS = (*plugins.KINDS, "recipes")
#: Shown for an option without a default.
_REQUIRED = "(required)"


def list_names(args: argparse.Namespace) -> int:
    if args.kind in _OTHERS:
        if args.name:
            raise UsageError(f"list {args.kind} takes no name, got {quoted(args.name)}; remove it")
        return _OTHERS[args.kind](args)
    if args.kind and args.kind not in _KINDS:
        raise UnknownNameError.among("kind of plug-in", args.kind, _KINDS)
    if args.name:
        return _describe(args.kind, args.name, args.json)
    marks = _marks() if args.kind == "verifiers" else {}
    kinds = [args.kind] if args.kind else _KINDS
    entries_by_kind = {kind: sorted(_entries(kind).values(), key=lambda e: e.name) for kind in kinds}
    if args.json:
        _print_json(
            {
                kind: [
                    {"name": e.name, "summary": e.summary, "provider": e.provider}
                    | ({"mark": marks[e.name]} if e.name in marks else {})
                    for e in entries
                ]
                for kind, entries in entries_by_kind.items()
            }
        )
        return 0
    for kind, entries in entries_by_kind.items():
        header = [kind, *(["mark"] if marks else []), "", "from"]
        rows = [[e.name, *([marks[e.name]] if marks else []), e.summary, e.provider] for e in entries]
        _print_table(header, rows)
        missing: dict[str, list[str]] = {}
        for (of_kind, name), companion in plugins.COMPANIONS.items():
            if of_kind == kind and name not in plugins.entries(kind):
                missing.setdefault(companion, []).append(name)
        for companion, names in missing.items():
            print(f"{plugins.installing(companion)} adds {', '.join(names)}\n")
    if not args.kind:  # marks need the classes, which import PyTorch
        print("run crossdraft list verifiers to see which are certified lossless, not certified, FAILED or lossy")
    return 0


def _entries(kind: str) -> dict[str, plugins.Entry]:
    """Names of a kind: registered ones, or recipes."""
    if kind != "recipes":
        return plugins.entries(kind)
    provider = f"crossdraft {version('crossdraft')}"
    return {name: plugins.Entry(name, file, summary_of(file), provider) for name, file in builtin_recipes().items()}


def _marks() -> dict[str, str]:
    """The mark of each verifier with its default options."""
    from ..errors import CrossdraftError
    from ..runs.marks import mark_of_verifier

    marks = {}
    for name in plugins.entries("verifiers"):
        try:
            verifier = plugins.get("verifiers", name)
            required = any(field.is_required() for field in verifier.Config.model_fields.values())
            marks[name] = "depends on its options" if required else str(mark_of_verifier(verifier, verifier.Config()))
        except CrossdraftError:
            marks[name] = "unusable"
    return marks


def _describe(kind: str, name: str, as_json: bool) -> int:
    """Print the options of one name of `_WITH_OPTIONS`, its traits, or the file of a recipe."""
    from ..runs.marks import mark_of_verifier

    known = _entries(kind)
    if name not in known:
        raise UnknownNameError.among("recipe", name, known) if kind == "recipes" else plugins.unknown(kind, name)
    entry = known[name]
    value: Any = plugins.get(kind, name) if kind in _WITH_OPTIONS else None
    facts: dict[str, Any] = {"name": name, "summary": entry.summary, "provider": entry.provider}
    lines, options = [f"{name}: {entry.summary} ({entry.provider})"], []
    if kind == "recipes":
        facts |= {"path": str(entry.ref)}
        lines += [f"file: {entry.ref}", "", read_text(entry.ref, RECIPE_BYTES, subject="the recipe").rstrip()]
    elif value is not None:
        with plugins.guarded(kind, name, "its Config"):
            options = [_option(key, field) for key, field in value.Config.model_fields.items()]
        facts |= {"options": options}
        if kind == "drafters":
            traits_json, traits_lines = _drafter_traits(value)
            facts, lines = facts | traits_json, lines + traits_lines
        if kind == "verifiers" and not any(option["default"] == _REQUIRED for option in options):
            with plugins.guarded(kind, name, "its Config"):
                config = value.Config()
            traits = plugins.traits_of(kind, value, config)
            mark = mark_of_verifier(value, config)
            facts |= {"lossless": traits.lossless, "mark": str(mark), "drafts": traits.kinds}
            kinds = ", ".join(traits.kinds)
            lines.append(f"{' '.join([str(mark), mark.place]).rstrip()}; verifies drafts: {kinds}")
    if as_json:
        _print_json(facts)
        return 0
    print("\n".join(lines), end="\n\n")
    if options:
        _print_table(["option", "default", "meaning"], [list(option.values()) for option in options])
    return 0


def _drafter_traits(drafter: Any) -> tuple[dict[str, Any], list[str]]:
    """Traits of a drafter with its default options, its certificate and compatible verifiers, as JSON and as lines."""
    from ..api.build import compatible_verifiers, configured, default_verifier
    from ..contracts.sampling import Sampling
    from ..runs.marks import mark_of_strategy

    fields = drafter.Config.model_fields.items()
    try:  # options without a default are model names, which traits do not use
        strategy = configured("drafters", {"name": drafter.name} | {key: "?" for key, f in fields if f.is_required()})
    except UsageError:
        return {}, ["its drafts depend on its options"]
    zero = plugins.traits_of("drafters", *strategy, Sampling(temperature=0)).temperature_zero_only
    sampling = Sampling(temperature=0 if zero else 1)
    traits = plugins.traits_of("drafters", *strategy, sampling)
    marks, fitting = _marks(), compatible_verifiers(strategy, sampling)
    default = default_verifier(strategy, sampling)[0].name
    failed = [f"{name} {marks[name]}" for name in fitting if marks[name].startswith("FAILED")]
    fitting = [name for name in fitting if not marks[name].startswith("FAILED")]
    with plugins.guarded("drafters", drafter.name, "its Config, written as JSON,"):
        own = mark_of_strategy(*strategy)
    facts = {"kind": traits.kind and traits.kind.name, "point_mass": traits.point_mass, "nodes": traits.nodes}
    facts |= {"temperature_zero_only": zero, "verifiers": fitting, "default_verifier": default}
    facts |= {"mark": None if own is None else str(own)}
    kind = f"{traits.kind} drafts{' of point masses' * traits.point_mass}, at most {traits.nodes} nodes"
    return facts, [
        f"with its default options: {'no drafts' if traits.kind is None else kind}{', temperature 0 only' * zero}",
        f"compatible lossless verifiers: {', '.join(fitting) or 'none'}",
        *([f"compatible verifiers that are not lossless: {', '.join(failed)}"] if failed else []),
        *([f"certificate: {' '.join([str(own), own.place]).rstrip()}"] if own is not None else []),
        f"default verifier: {default}{'' if zero else ' (greedy at temperature 0)'}",
    ]


def _option(key: str, field: Any) -> dict[str, str]:
    default = _REQUIRED
    if not field.is_required():
        default = json.dumps(field.get_default(call_default_factory=True), default=_plain)
    return {"option": key, "default": default, "meaning": str(field.description or "")}


def _plain(value: Any) -> Any:
    """A JSON-compatible form of a default value."""
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def list_plugins(args: argparse.Namespace) -> int:
    names = [(e.provider, kind, e.name) for kind in plugins.KINDS for e in plugins.entries(kind).values()]
    providers: dict[str, dict[str, list[str]]] = {}
    for provider, kind, name in names:
        providers.setdefault(provider, {}).setdefault(kind, []).append(name)
    broken = [{"provider": b.provider, "error": b.error} for b in plugins.broken()]
    if args.json:
        _print_json({"plugins": providers, "broken": broken})
        return 0
    rows = [[p, kind, ", ".join(names)] for p, kinds in providers.items() for kind, names in kinds.items()]
    _print_table(["plug-in", "kind", "names"], rows)
    if broken:
        _print_table(["skipped", "reason"], [list(b.values()) for b in broken])
    return 0


def show_environment(args: argparse.Namespace) -> int:
    from ..bench.environment import describe

    environment = describe()
    if args.json:
        _print_json(environment)
    else:
        _print_table(["", ""], [[key, value] for key, value in _flat(environment)])
    return 0


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key} ")
        elif isinstance(value, list):
            rows.append((prefix + key, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((prefix + key, "none" if value is None else str(value)))
    return rows


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from ..util.table import Table

    widths: list[int | None] = [None] * len(header)
    if sys.stdout.isatty() and len(header) > 2:  # a wrapped line cannot be searched in a file
        longest = max(range(len(header)), key=lambda i: max((len(row[i]) for row in rows), default=0))
        others = (max([len(title), *(len(row[i]) for row in rows)]) for i, title in enumerate(header) if i != longest)
        widths[longest] = max(shutil.get_terminal_size().columns - sum(others) - 2 * (len(header) - 1), 24)
    print(Table(header, rows, widths=widths).text(), end="\n\n")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


#: Kinds that are not names of strategies, models, prompts, recipes or commands.
_OTHERS = {"plugins": list_plugins, "env": show_environment}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = (
        f"only this kind: {', '.join(_KINDS)}; plugins: distributions, what they provide, and why some were "
        "skipped; env: versions, hardware and the defaults chosen for it"
    )
    parser.add_argument("kind", nargs="?", metavar="KIND", help=kinds)
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="show the options of a drafter, verifier or launcher, or the file of a recipe",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


# Not a subclass of `Command`: it starts without pydantic.
command = SimpleNamespace(add_arguments=_add_arguments, main=lambda args: list_names(args))
