"""The ``crossdraft`` command.

The larger subcommands are modules of their own with ``add_arguments(parser)`` and ``main(args) -> int``,
imported only when they were asked for, so that ``--help`` and ``list`` answer at once. Errors made for people
(`CrossdraftError`) become one line on standard error and the error's exit code: 2 for a wrong request, 1 for
one that failed.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .errors import CrossdraftError, UnknownNameError

COMMANDS = {
    "run": ("crossdraft.framework.bench.command", "run a recipe: every cell of its matrix, and a report"),
    "report": ("crossdraft.framework.report.results", "write one page of results from the records of finished runs"),
    "certify": (
        "crossdraft.framework.certify_command",
        "check by exact enumeration that a drafter and a verifier keep the target's distribution",
    ),
    "train": ("crossdraft.framework.training.command", "train a drafter for a target"),
    "cost": ("crossdraft.framework.bench.cost_command", "measure what a pass costs, and predict speed-ups from it"),
}
"""Subcommands that live in modules of their own: module, one-line help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(argv[0] if argv else "").parse_args(argv)
        code = args.main(args)
        sys.stdout.flush()
        return code
    except CrossdraftError as error:
        print(f"crossdraft: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("crossdraft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left, as in `crossdraft list | head`; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; of `COMMANDS`, only the `chosen` one declares its arguments."""
    parser = argparse.ArgumentParser(
        prog="crossdraft",
        description="Compare speculative-decoding drafters and verifiers, and certify them lossless.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=_sentence(summary))
        if name == chosen:
            implementation = import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(main=implementation.main)

    summary = "list the drafters, verifiers, models, prompts and recipes that are installed"
    command = commands.add_parser("list", help=summary, description=_sentence(summary))
    kinds = ("drafters", "verifiers", "models", "prompts", "recipes", "trainers")
    command.add_argument("kind", nargs="?", choices=kinds, help="only this kind")
    command.add_argument("name", nargs="?", help="of a drafter or verifier: its options; of a recipe: its file")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=_list)

    summary = "show who provides what, and which plug-ins were skipped and why"
    command = commands.add_parser("plugins", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=_plugins)

    summary = "show versions, the machine and the choices crossdraft makes on it"
    command = commands.add_parser("env", help=summary, description=_sentence(summary))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(main=_env)
    return parser


def _list(args: argparse.Namespace) -> int:
    from . import plugins

    if args.name:
        return _describe(args.kind, args.name, args.json)
    kinds = [args.kind] if args.kind else plugins.KINDS
    found = {kind: sorted(plugins.entries(kind).values(), key=lambda e: e.name) for kind in kinds}
    if args.json:
        _print_json(
            {
                kind: [{"name": e.name, "summary": e.summary, "provider": e.provider} for e in entries]
                for kind, entries in found.items()
            }
        )
        return 0
    for kind, entries in found.items():
        _print_table([kind, "", "from"], [[e.name, e.summary, e.provider] for e in entries])
    return 0


def _describe(kind: str, name: str, as_json: bool) -> int:
    """What there is to know about one drafter, verifier or recipe, for whoever writes a recipe."""
    from . import plugins

    known = plugins.entries(kind)
    if name not in known:
        raise UnknownNameError.among(kind.removesuffix("s"), name, known)
    entry = known[name]
    value: Any = plugins.get(kind, name) if kind in ("drafters", "verifiers", "recipes") else None
    facts: dict[str, Any] = {"name": name, "summary": entry.summary, "provider": entry.provider}
    lines, options = [f"{name}: {entry.summary} ({entry.provider})"], []
    if kind == "recipes":
        facts |= {"path": str(value)}
        lines += [f"file: {value}", "", value.read_text(encoding="utf-8").rstrip()]
    elif value is not None:
        for key, field in value.Config.model_fields.items():
            default = "(required)" if field.is_required() else json.dumps(field.default, default=str)
            options.append({"option": key, "default": default, "meaning": field.description or ""})
        facts |= {"options": options}
        if kind == "verifiers":
            traits = value.traits
            facts |= {"lossless": traits.lossless, "drafts": sorted(traits.drawn)}
            judged = ", ".join(sorted(traits.drawn))
            lines.append(f"{'lossless' if traits.lossless else 'LOSSY'}; judges drafts: {judged}")
    if as_json:
        _print_json(facts)
        return 0
    print("\n".join(lines), end="\n\n")
    if options:
        _print_table(["option", "default", "meaning"], [list(option.values()) for option in options])
    return 0


def _plugins(args: argparse.Namespace) -> int:
    from . import plugins

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
        _print_table(["skipped", "because"], [list(b.values()) for b in broken])
    return 0


def _env(args: argparse.Namespace) -> int:
    from .environment import describe

    found = describe()
    if args.json:
        _print_json(found)
    else:
        _print_table(["", ""], [[key, value] for key, value in _flat(found)])
    return 0


class _Version(argparse.Action):
    """``--version``; argparse's own wants the version before anybody asked."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="show the version and leave")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print("crossdraft", version("crossdraft"))
        parser.exit()


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
    from tabulate import tabulate

    print(tabulate(rows, headers=header, tablefmt="simple", disable_numparse=True))
    print()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
