"""crossdraft: any speculative-decoding drafter x any verifier, compared and certified.

The public face. Nothing is defined here: each name is imported from its module when it is first used
(PEP 562), so that ``import crossdraft`` and the command line stay fast and do not load PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .framework.bench.recipe import load_recipe
    from .framework.decoding.sampling import Sampling
    from .framework.draft import Draft, Scores, Verdict
    from .framework.drafter import Drafter
    from .framework.generate import custom_generate, generate
    from .framework.models import load_model
    from .framework.verifier import Verifier

    __version__: str

__all__ = [
    "Draft",
    "Drafter",
    "Sampling",
    "Scores",
    "Verdict",
    "Verifier",
    "__version__",
    "custom_generate",
    "generate",
    "load_model",
    "load_recipe",
]

_HOME = {
    "Draft": ".framework.draft",
    "Drafter": ".framework.drafter",
    "Sampling": ".framework.decoding.sampling",
    "Scores": ".framework.draft",
    "Verdict": ".framework.draft",
    "Verifier": ".framework.verifier",
    "custom_generate": ".framework.generate",
    "generate": ".framework.generate",
    "load_model": ".framework.models",
    "load_recipe": ".framework.bench.recipe",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("crossdraft")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
