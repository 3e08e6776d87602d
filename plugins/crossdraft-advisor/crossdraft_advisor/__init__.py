"""Engines that serve models beside crossdraft: recorded responses, advice on drafts, simulated traffic, diagnosis.

The public names, for plug-ins that add engines; each is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines.acceptance import Acceptance
    from .engines.engine import Engine, Schedule, Settings
    from .engines.engine_log import Source
    from .engines.formats import AcceptanceFormat
    from .engines.server import EngineServer, ServedCell, ServerEvent, ServerOptions
    from .replay.response_formats import ResponseFormat

__all__ = [
    "Acceptance",
    "AcceptanceFormat",
    "Engine",
    "EngineServer",
    "ResponseFormat",
    "Schedule",
    "ServedCell",
    "ServerEvent",
    "ServerOptions",
    "Settings",
    "Source",
]

_MODULES = {
    ".engines.acceptance": "Acceptance",
    ".engines.engine": "Engine Schedule Settings",
    ".engines.engine_log": "Source",
    ".engines.formats": "AcceptanceFormat",
    ".engines.server": "EngineServer ServedCell ServerEvent ServerOptions",
    ".replay.response_formats": "ResponseFormat",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module, __name__), name)
    globals()[name] = value  # the next access does not come through here
    return value
