"""Every drafter, and every option that changes what it drafts, through the contract kit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters import DRAFTERS
from further_heads import write_further_heads
from head_contract import Heads

from crossdraft.framework.certificate.table_lm import ToyContext
from crossdraft.framework.certificate.toys import toys_of_two_vocabularies
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.testing import DrafterContract, TinyModel, Toys


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Path:
    """Directories with heads of every kind."""
    root = tmp_path_factory.mktemp("heads")
    write_further_heads(root, TinyModel.model(), mask_token=12)
    return root


class TestTokenRecycling(DrafterContract):
    drafter = "token-recycling"
    options = {"nodes": 6, "width": 3}
    remembers = True


@pytest.mark.slow
class TestTokenRecyclingChain(DrafterContract):
    drafter = "token-recycling"
    options = {"width": 1}
    remembers = True


@pytest.mark.slow
class TestOnline(DrafterContract):
    """Each step changes what the next one draws from."""

    drafter = "online"
    options = {"model": "toy", "gamma": 3, "every": 1, "learning_rate": 0.05}
    remembers = True


class TestEarlyExit(DrafterContract):
    drafter = "early-exit"
    options = {"exit_layer": 2, "gamma": 3}
    setting = TinyModel()


@pytest.mark.slow
class TestEarlyExitOnTables(DrafterContract):
    drafter = "early-exit"
    options = {"gamma": 3}


@pytest.mark.slow
class TestLayerSkip(DrafterContract):
    drafter = "layer-skip"
    options = {"skip_attention": (1, 2), "skip_mlp": (2, 3), "gamma": 3}
    setting = TinyModel()


class OtherTokens(Toys):
    """The target of `Toys`, whose drafter has six tokens, four of them the target's."""

    words = (("a", "b", " a", " b", "ba"), ("b", " a", "ab", "a", "ba", " "))
    toys = property(lambda self: toys_of_two_vocabularies())

    def context(self, batch_size: int, sampling: Sampling, device: str = "cpu") -> ToyContext:
        generator = torch.Generator().manual_seed(5)
        tables = [
            (1.5 * torch.randn(n + 1, n, generator=generator, dtype=torch.float64)).softmax(-1).to(device)
            for n in map(len, self.words)
        ]
        return ToyContext(*tables, sampling, batch_size, token_texts=self.words)


class TestUniversal(DrafterContract):
    drafter = "universal"
    options = {"model": "toy", "gamma": 3}
    setting = OtherTokens()


@pytest.mark.slow
class TestUniversalText(DrafterContract):
    drafter = "universal"
    options = {"model": "toy", "gamma": 3, "mode": "slem"}
    setting = OtherTokens()


@pytest.mark.slow
class TestUniversalUnderConfidence(DrafterContract):
    drafter = "universal"
    options = {"model": "toy", "gamma": 3, "policy": {"name": "confidence", "threshold": 0.35}}
    setting = OtherTokens()


class TestPass(DrafterContract):
    drafter = "pass"
    options = {"model": "toy", "gamma": 3}


class TestJacobi(DrafterContract):
    drafter = "jacobi"
    options = {"gamma": 3}


class TestLookahead(DrafterContract):
    drafter = "lookahead"
    options = {"window": 3, "ngram": 3, "guesses": 2, "from_prompt": True}


@pytest.mark.slow  # the quicker one is on tables
class TestPassOfModel(Heads):
    drafter = "pass"


@pytest.mark.slow  # as EAGLE-3
class TestMtp(Heads):
    drafter = "mtp"
    options = {"gamma": 2}


@pytest.mark.slow  # as EAGLE-3
class TestDSpark(Heads):
    drafter = "dspark"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestDSparkUntilItExpectsLittle(Heads):
    drafter = "dspark"
    options = {"layers": [1, 2, 3], "gamma": 3, "confidence": 0.5}


@pytest.mark.slow
class TestDFlash(Heads):
    drafter = "dflash"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestDFlash2(Heads):
    drafter, directory = "dflash", "dflash-2"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestPEagle(Heads):
    drafter = "p-eagle"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestMlpSpeculator(Heads):
    drafter = "mlp-speculator"


def test_every_drafter_has_contract_test() -> None:
    classes = [c for c in globals().values() if isinstance(c, type) and issubclass(c, DrafterContract)]
    assert set(DRAFTERS) <= {getattr(c, "drafter", None) for c in classes}
