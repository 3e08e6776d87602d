"""Import of crossdraft from this checkout if it is not installed: its folder and entry points on the module path."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def link(folder: Path) -> None:
    """Link the checkout in ``folder`` as an installed package, for this process and its children."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (folder / "crossdraft").symlink_to(ROOT, target_is_directory=True)
    metadata = folder / f"crossdraft-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: crossdraft\nVersion: {project['version']}\n")
    points = (f"{name} = {value}" for name, value in project["entry-points"]["crossdraft"].items())
    (metadata / "entry_points.txt").write_text("\n".join(["[crossdraft]", *points]))
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


if find_spec("crossdraft") is None:
    _folder = tempfile.TemporaryDirectory(prefix="crossdraft-")
    link(Path(_folder.name))
