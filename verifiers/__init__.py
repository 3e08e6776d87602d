"""The built-in verification rules, one file each, registered through the same door as everyone else's."""

from ..framework.hookspecs import hookimpl


@hookimpl
def crossdraft_register_verifiers(register):
    register("greedy", f"{__name__}.greedy:Greedy", summary="exact match with the target's argmax (temperature 0)")
    register(
        "token",
        f"{__name__}.token:Token",
        summary="token verification (Leviathan et al. 2023, Chen et al. 2023)",
    )
    register("block", f"{__name__}.block:Block", summary="block verification (Sun et al. 2024)")
