"""MkDocs hook: adds the README and pages generated from the code.

Commands come from their parsers, keys and options from their pydantic models, columns from the list that documents
``summary.csv``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from crossdraft_advisor.simulate.outcome import PolicyResult
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

from crossdraft.framework import plugins
from crossdraft.framework.cli.main import _parser
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.metrics.columns import QUANTITIES
from crossdraft.framework.recipe.recipe import PromptSpec, Recipe

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to plug-ins to their generated pages."""
    return re.sub(r"\]\(\.\./plugins/([\w-]+)/README\.md\)", r"](packages/\1.md)", markdown)


def pages() -> Iterator[tuple[str, str]]:
    """Path and Markdown of every generated page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    yield "index.md", re.sub(r"\]\(plugins\)", "](plugins.md)", re.sub(r"\]\(docs/", "](", readme))
    for package in sorted((ROOT / "plugins").iterdir()):
        if (package / "README.md").is_file():
            yield f"packages/{package.name}.md", _of_package((package / "README.md").read_text(encoding="utf-8"))
    yield "reference/commands.md", "\n\n".join(["# Commands", *map(_command, plugins.entries("commands"))]) + "\n"
    parts = [
        "# Keys of a recipe",
        "[Recipes](../recipes.md) explains how they work together.",
        _fields(Recipe),
        "## `sampling`",
        _fields(Sampling),
        "## `prompts`",
        _fields(PromptSpec),
    ]
    yield "reference/recipes.md", "\n\n".join(parts) + "\n"
    for kind in ("drafters", "verifiers"):
        parts = [f"# {kind.capitalize()} and their options"]
        for name in sorted(plugins.entries(kind)):
            found: Any = plugins.get(kind, name)
            parts += [f"## `{name}`", _summary(found)]
            if found.Config.model_fields:
                parts.append(_fields(found.Config))
        yield f"reference/{kind}.md", "\n\n".join(parts) + "\n"
    rows = "\n".join(f"| `{one.name}` | {_cell(one.meaning)} |" for one in QUANTITIES)
    subject = "Every column of `summary.csv`; estimates have their 95 % interval in `_low` and `_high`."
    columns = get_type_hints(PolicyResult, include_extras=True)
    simulated = "\n".join(f"| `{name}` | {_cell(column.__metadata__[0])} |" for name, column in columns.items())
    tables = [subject, f"| column | meaning |\n|---|---|\n{rows}", "## `crossdraft simulate --csv`"]
    tables.append(f"| column | meaning |\n|---|---|\n{simulated}")
    yield "reference/numbers.md", "\n\n".join(["# Every number", *tables]) + "\n"


def _of_package(readme: str) -> str:
    """The README of a package with its links as they are from ``packages/``; those to its own files become text."""
    readme = readme.replace("](../../docs/", "](../").replace("](../../README.md)", "](../index.md)")
    return re.sub(r"\[([^\]]+)\]\((?!\.\./|https?:|#)[^)]+\)", r"\1", readme)


def _command(name: str) -> str:
    """Markdown of a command: usage and options."""
    top = _parser(name)
    (subparsers,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = subparsers.choices[name]
    lines = [f"## `crossdraft {name}`", parser.description or ""]
    rows = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            shown += f" {action.metavar or action.dest.upper()}"
        words = action.help or ""
        if action.choices:
            words += f" ({', '.join(map(str, action.choices))})"
        rows.append(f"| `{_cell(shown)}` | {_cell(words)} |")
    return "\n\n".join([*lines, "| | |\n|---|---|\n" + "\n".join(rows), _cell(parser.epilog or "")])


def _fields(model: Any) -> str:
    """A model's keys, types, defaults and bounds."""
    rows = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            shown = "needed"
        elif hasattr(default, "model_dump"):
            given = default.model_dump(exclude_defaults=True)
            shown = ", ".join(f"{key}: {value}" for key, value in given.items())
        else:
            shown = "" if default in (None, "", [], {}, ()) else str(default)
        minimum, maximum = (
            next((getattr(m, end) for m in field.metadata if hasattr(m, end)), None) for end in ("ge", "le")
        )
        bounds = "" if minimum is None else f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        words = "; ".join(part for part in (field.description or "", bounds) if part)
        rows.append(f"| `{name}` | {_type(field.annotation)} | {_cell(shown)} | {_cell(words)} |")
    return "| key | type | default | |\n|---|---|---|---|\n" + "\n".join(rows)


def _type(annotation: Any) -> str:
    """Readable type of a value."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in inside)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in inside if one is not NoneType))
    if origin in (list, tuple):
        return f"list of {_type(inside[0])}" if inside else "list"
    if origin is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}.get(
        annotation, getattr(annotation, "__name__", str(annotation)).lower()
    )


def _summary(cls: Any) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
