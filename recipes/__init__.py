"""The recipes that ship with crossdraft, one YAML file each.

Every ``*.yaml`` here is registered under its file name; its first comment line is its summary: the question
that it answers.
"""

from pathlib import Path

from ..framework.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_recipes(register: Register) -> None:
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        register(path.stem, path, summary=first.removeprefix("#").strip() if first.startswith("#") else "")
