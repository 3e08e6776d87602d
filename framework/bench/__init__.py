"""Benchmark of a recipe: its matrix of cells, measured in turns, and the cost of model passes."""

from ..contracts.hookspecs import Register, hookimpl


@hookimpl
def crossdraft_register_launchers(register: Register) -> None:
    register("local", f"{__name__}.local_launcher:Local", summary="local processes, one per device of this machine")
