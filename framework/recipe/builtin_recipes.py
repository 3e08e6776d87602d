"""Recipes that ship with crossdraft, named by their paths; those in ``paper/`` are experiments of papers."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "recipes"


def builtin_recipes() -> dict[str, Path]:
    """Files of the recipes by name, in alphabetical order."""
    files = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*.yaml")}
    return dict(sorted(files.items()))


def summary_of(recipe: Path) -> str:
    """The first comment line of a recipe, the question that it answers; empty without one."""
    first = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
