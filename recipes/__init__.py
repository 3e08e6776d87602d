"""The recipes that ship with crossdraft, one YAML file each.

Every ``*.yaml`` here is registered under its path, ``paper/block-table2``; its first comment line is its summary: the
question that it answers. Those in ``paper/`` are experiments of papers, with open models.
"""

from pathlib import Path

from ..framework.contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_recipes(register: Register) -> None:
    directory = Path(__file__).parent
    for path in sorted(directory.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.removeprefix("#").strip() if first.startswith("#") else ""
        register(path.relative_to(directory).with_suffix("").as_posix(), path, summary=summary)
