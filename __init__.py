"""crossdraft: any speculative-decoding drafter x any verifier, compared and certified.

The public face. Nothing is defined here: ``__init__.pyi`` lists each name with its home, which is imported when the
name is first used, so that ``import crossdraft`` and the command line stay fast and do not load PyTorch.
"""

from typing import Any

from ._published import published

_get, _names = published(__name__)
__all__ = [*_names, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll] -- the stub has them


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("crossdraft")
    return _get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
