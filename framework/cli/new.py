"""``crossdraft new``: create a plug-in package for a drafter, a verifier or prompts.

`templates/` has one package per kind, called ``example-name``, which is copied and renamed.
"""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .. import plugins
from ..contracts.command import Argument, Command
from ..errors import UsageError, printable, quoted
from ..util.limits import MOST_NAME

KINDS = {"drafter": "drafters", "verifier": "verifiers", "prompts": "prompts"}
TEMPLATES = Path(__file__).with_name("templates")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class New(Command):
    """A plug-in package, copied from its template."""

    name: ClassVar[str] = "new"

    kind: Annotated[Literal["drafter", "verifier", "prompts"], Argument(positional=True)] = Field(
        description="kind of plug-in"
    )
    strategy: Annotated[str, Argument("NAME", positional=True)] = Field(
        description="name in recipes: lower-case letters, digits and single hyphens"
    )
    out: Annotated[Path | None, Argument("DIR")] = Field(None, description="folder to create (default: ./NAME)")

    def run(self) -> int:
        kind, name = self.kind, self.strategy
        folder = write_package(kind, name, self.out or Path(name))
        module = spellings(name)["example_name"]
        print(f"{printable(str(folder))}/")
        for file in _files(folder):
            print(f"  {file.relative_to(folder)}")
        commands = ["pip install -e '.[test]'", "pytest", "crossdraft run recipe.yaml"]
        if kind != "prompts":
            commands.insert(2, f"crossdraft certify --{kind} {name}")
        source = f"src/{module}.py" if kind == "prompts" else f"src/{module}/{kind}.py"
        print(f"\nEdit {source}, then run in that folder:\n")
        print("\n".join(f"  {command}" for command in commands))
        return 0


def write_package(kind: str, name: str, folder: Path) -> Path:
    """Write a package of a kind (one of `KINDS`) into a new ``folder`` and return the folder.

    Raises:
        UsageError: an invalid name or one in use; a folder that exists or cannot be written.
    """
    check_name(kind, name)
    texts = {file.relative_to(TEMPLATES / kind): file.read_text(encoding="utf-8") for file in _files(TEMPLATES / kind)}
    try:
        folder.mkdir(parents=True)
        for file, text in texts.items():
            path = folder / _renamed(str(file), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_renamed(text, name), encoding="utf-8")
    except FileExistsError:
        raise UsageError(f"{printable(str(folder))} already exists; choose another folder with --out") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{printable(str(folder))} cannot be written: {error}") from error
    return folder


def spellings(name: str) -> dict[str, str]:
    """Replacements in a template: the placeholders of name, module and class."""
    return {
        "example-name": name,
        "example_name": name.replace("-", "_"),
        "ExampleName": "".join(part.capitalize() for part in name.split("-")),
    }


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.parent.name != "__pycache__")


def _renamed(text: str, name: str) -> str:
    for old, new in spellings(name).items():
        text = text.replace(old, new)
    return text


def check_name(kind: str, name: str) -> None:
    """Raise UsageError if a name is not valid for package, module and class, or is in use."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{quoted(name)} is not a valid name; use lower-case letters, digits and single hyphens: my-drafter"
        )
    if reason := MOST_NAME.violation(name):
        raise UsageError(f"the name has {len(name)} characters; {reason}")
    if entry := plugins.entries(KINDS[kind]).get(name):
        subject = "prompt set" if kind == "prompts" else kind
        raise UsageError(f"{subject} {name!r} is already provided by {entry.provider}; choose another name")
    replacements = spellings(name)
    module, cls = replacements["example_name"], replacements["ExampleName"]
    if keyword.iskeyword(module) or keyword.iskeyword(cls):
        raise UsageError(f"{name!r} is a Python keyword; choose another name")
    if module in sys.stdlib_module_names or _importable(module):
        raise UsageError(f"Python module {module!r} already exists; choose another name")


def _importable(module: str) -> bool:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a module without a spec
        return module in sys.modules
    return spec is not None and spec.origin is not None  # a plain folder has no origin
