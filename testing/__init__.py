"""The contract kit for drafters, verifiers and prompts of your own, under its public name: ``crossdraft.testing``."""

from ..framework.testing import *  # noqa: F403
from ..framework.testing import __all__ as __all__
