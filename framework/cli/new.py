"""``crossdraft new``: a working package for a drafter, a verifier or prompts, to start from.

`templates/` holds one such package of each kind, called ``example-name``; a new one is that with another name.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from .. import plugins
from ..errors import UsageError, printable, quoted
from ..util.limits import MOST_NAME

KINDS = {"drafter": "drafters", "verifier": "verifiers", "prompts": "prompts"}
TEMPLATES = Path(__file__).with_name("templates")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to write")
    parser.add_argument("name", help="its name in recipes: lower-case letters, digits and single hyphens")
    parser.add_argument("--out", metavar="DIR", help="the folder to make for it (default: ./NAME)")


def main(args: argparse.Namespace) -> int:
    folder = write(args.kind, args.name, Path(args.out if args.out is not None else args.name))
    module = spellings(args.name)["example_name"]
    print(f"{printable(str(folder))}/")
    for file in _files(folder):
        print(f"  {file.relative_to(folder)}")
    commands = ["pip install -e '.[test]'", "pytest", "crossdraft run recipe.yaml"]
    if args.kind != "prompts":
        commands.insert(2, f"crossdraft certify --{args.kind} {args.name}")
    begins = f"src/{module}.py" if args.kind == "prompts" else f"src/{module}/{args.kind}.py"
    print(f"\nYours begins in {begins}. Then, in that folder:\n")
    print("\n".join(f"  {command}" for command in commands))
    return 0


def write(kind: str, name: str, folder: Path) -> Path:
    """Write the package ``name`` of a kind (one of `KINDS`) into a new ``folder``, and return that.

    Raises:
        UsageError: a name that cannot be one or is taken, or a folder that is there already or cannot be written.
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
        raise UsageError(f"{printable(str(folder))} is there already; give another folder with --out") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{printable(str(folder))} cannot be written: {error}") from error
    return folder


def spellings(name: str) -> dict[str, str]:
    """What stands in a template for the name, the module and the class, and what ``name`` makes of it."""
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
    """Raise UsageError for a name that no package, module and class could have, or that is taken."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{quoted(name)} is no name here; take lower-case letters, digits and single hyphens: my-drafter"
        )
    if reason := MOST_NAME.refusal(name):
        raise UsageError(f"the name has {len(name)} characters; {reason}")
    if entry := plugins.entries(KINDS[kind]).get(name):
        what = "set of prompts" if kind == "prompts" else kind
        raise UsageError(f"there is a {what} {name!r} already, of {entry.provider}; choose another name")
    spelt = spellings(name)
    module, cls = spelt["example_name"], spelt["ExampleName"]
    if keyword.iskeyword(module) or keyword.iskeyword(cls):
        raise UsageError(f"{name!r} would be a word of Python's own; choose another name")
    if module in sys.stdlib_module_names or _importable(module):
        raise UsageError(f"there is a Python module {module!r} already; choose another name")


def _importable(module: str) -> bool:
    try:
        found = find_spec(module)
    except (ImportError, ValueError):  # of a module that was made by hand
        return module in sys.modules
    return found is not None and found.origin is not None  # a bare folder in the working directory has none
