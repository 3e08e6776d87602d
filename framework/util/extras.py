"""Optional dependencies, which extras of crossdraft install."""

from __future__ import annotations

from importlib import import_module

from ..errors import CrossdraftError, UsageError


def need(subject: str, extra: str, *modules: str, of: str = ".", error: type[CrossdraftError] = UsageError) -> None:
    """Raise ``error`` if any of ``modules`` cannot be imported, with the extra that installs them."""
    if missing := [module for module in modules if not importable(module)]:
        raise error(f"{subject} needs {', '.join(missing)}; in a clone of crossdraft: pip install -e '{of}[{extra}]'")


def importable(module: str) -> bool:
    """True if ``module`` is installed and can be imported."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True
