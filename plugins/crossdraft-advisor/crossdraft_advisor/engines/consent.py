"""Consent to the programs that a recipe starts or steers.

A recipe may come from anywhere, and an engine's options name a program, its arguments and its environment, in which
``LD_PRELOAD`` runs code as well. A program is started only if the user has named it: ``--allow-program``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from crossdraft import UsageError, quoted
from crossdraft.framework import plugins
from crossdraft.runs import CellConfig


def check_programs(cells: Iterable[CellConfig], allowed: Iterable[str]) -> None:
    """Check that every program of the engines of ``cells`` is among the ``allowed`` ones.

    Raises:
        UsageError: a program needs consent, with its options and the argument that gives it; or an allowed one is not a
            program of the recipe.
    """
    programs, allowed = dict[str, str](), set(allowed)
    for engine in {cell.engine.model_dump_json(): cell.engine for cell in cells if cell.engine is not None}.values():
        server = plugins.get("servers", engine.name)
        with plugins.guarded("servers", engine.name, "program()"):
            options = server.Config(**engine.config)
            program, steering = server.program(options), server.steering(options)
        if program:
            settings = ", ".join(f"{key}: {quoted(value, 300)}" for key, value in steering.items() if value != program)
            programs.setdefault(
                program, f"engine {engine.name} starts {quoted(program)}{settings and f' with {settings}'}"
            )
    for program, subject in programs.items():
        if program not in allowed:
            reason = "a recipe cannot start or steer programs by itself"
            cure = f"if you trust this, add --allow-program {shlex.quote(program)}"
            raise UsageError(f"{subject}: {reason}; {cure}")
    if unknown := sorted(allowed - programs.keys()):
        raise UsageError(
            f"--allow-program {quoted(unknown[0])} is not a program of this recipe; its programs: "
            f"{', '.join(map(quoted, programs)) or 'none'}"
        )
