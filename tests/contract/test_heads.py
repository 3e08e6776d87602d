"""The drafters that read the target's hidden states through the contract kit, with random heads of a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.drafters.heads.dflash import DFlashHead
from crossdraft.drafters.heads.dspark import DSparkHead
from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import config_json, make_config, write
from crossdraft.drafters.heads.medusa_weights import MedusaHeads, save_heads
from crossdraft.drafters.heads.mlp_speculator import Speculator
from crossdraft.drafters.heads.mtp import MtpHead
from crossdraft.drafters.heads.p_eagle import PEagleHead
from crossdraft.drafters.self_speculation.pass_weights import save_embeddings
from crossdraft.testing import DrafterContract, TinyModel

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Path:
    """Directories with heads of every kind."""
    root, target = tmp_path_factory.mktemp("heads"), TinyModel.model()
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = make_config(
        **shape, num_key_value_heads=1, num_hidden_layers=1, max_position_embeddings=128, vocab_size=13
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        medusa = MedusaHeads(16, 3, lm_head=target.get_output_embeddings())
        for weight in medusa.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        save_heads(root / "medusa", medusa, {})
        EagleHead(config, embedding, output).save(root / "eagle")
        ids = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 11])
        Eagle3Head(config, embedding, 3 * 16, target_ids=ids).save(root / "eagle3", layers=LAYERS[1:] + LAYERS[:1])
        MtpHead(target).save(root / "mtp")
        block: dict[str, Any] = {"head": output, "block_size": 4, "mask_token": 12}
        made: dict[str, Any] = {
            "dflash": DFlashHead(config, embedding, 3 * 16, **block),
            "dspark": DSparkHead(
                config, embedding, 3 * 16, **block, from_anchor=True, kind="gated", rank=4, confidence=20
            ),
            "p-eagle": PEagleHead(config, embedding, 3 * 16, head=output),
            "mlp-speculator": Speculator(3, 13, 16, 8),
        }
        save_embeddings(root / "pass", 0.4 * torch.randn(3, 16), target="tiny", sha256="")
        said = {"block_size": 4, "mask_token_id": 12, "markov_head_type": "gated", "n_predict": 3}
        for name, module in made.items():
            tensors = {
                k: t for k, t in module.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")
            }
            write(root / name, config_json(config, name, **said), tensors)
    return root


class Heads(DrafterContract):
    """Options are completed with the directory of the heads."""

    setting = TinyModel()

    @pytest.fixture(autouse=True)
    def _model(self, heads: Path) -> None:
        type(self).options = {**self.options, "model": str(heads / str(self.drafter))}


@pytest.mark.slow  # the quicker one is on tables
class TestPass(Heads):
    drafter = "pass"


class TestMedusa(Heads):
    drafter = "medusa"


@pytest.mark.slow
class TestMedusaTree(Heads):
    drafter = "medusa"
    options = {"branching": [2, 2]}


@pytest.mark.slow  # as EAGLE-3
class TestEagle(Heads):
    drafter = "eagle"
    options = {"gamma": 3}


@pytest.mark.slow
class TestEagleUnderAConfidencePolicy(Heads):
    drafter = "eagle"
    options = {"gamma": 3, "policy": {"name": "confidence", "threshold": 0.3}}
    asks_device = True


@pytest.mark.slow
class TestEagleUnderTheHeuristic(Heads):
    drafter = "eagle"
    options = {"gamma": 4, "policy": "heuristic"}


@pytest.mark.slow
class TestEagleTree(Heads):
    drafter = "eagle"
    options = {"tree": "static", "siblings": "without-replacement", "branching": [2, 1]}


@pytest.mark.slow
class TestEagle3(Heads):
    drafter = "eagle3"
    options = {"gamma": 2, "layers": [2, 3, 1]}


@pytest.mark.slow  # TestDynamicTree is the quicker one
class TestEagle3DynamicTree(Heads):
    drafter = "eagle3"
    options = {"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 5, "layers": [2, 3, 1]}


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
    asks_device = True


@pytest.mark.slow
class TestDFlash(Heads):
    drafter = "dflash"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestPEagle(Heads):
    drafter = "p-eagle"
    options = {"layers": [1, 2, 3], "gamma": 3}


@pytest.mark.slow
class TestMlpSpeculator(Heads):
    drafter = "mlp-speculator"
