"""Optional dependencies, which extras of crossdraft install."""

from __future__ import annotations

from importlib import import_module

from ..errors import CrossdraftError, UsageError


def need(
    subject: str, extra: str, *modules: str, of: str = "crossdraft", error: type[CrossdraftError] = UsageError
) -> None:
    """Raise ``error`` if any of ``modules`` cannot be imported, with the extra that installs them."""
    missing = [module for module in modules if not importable(module)]
    if missing:
        packages = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        noun = "packages" if missing[1:] else "package"
        raise error(f"{subject} needs the {noun} {packages}; install with: pip install '{of}[{extra}]'")


def importable(module: str) -> bool:
    """True if ``module`` is installed and can be imported."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True
