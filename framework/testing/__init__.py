"""Contract tests of drafters, verifiers and prompts, for crossdraft's own and third-party ones.

    from crossdraft.testing import DrafterContract

    class TestMine(DrafterContract):
        drafter = MyDrafter
        options = {"gamma": 3}

Run it with pytest. Nothing is downloaded: models are small tables of probabilities, or a tiny model with random weights
(`TinyModel`) for drafters that read a target's hidden states. Failures describe the mistake.
"""

from .drafter_contract import DrafterContract
from .prompts_contract import PromptsContract
from .settings import Setting, TinyModel, Toys
from .verifier_contract import VerifierContract

__all__ = ["DrafterContract", "PromptsContract", "Setting", "TinyModel", "Toys", "VerifierContract"]
