"""Directories with random heads of the companion's drafters, in the published layouts, for a target of any size."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from crossdraft_drafters.heads.dflash import DFlashHead
from crossdraft_drafters.heads.dspark import DSparkHead
from crossdraft_drafters.heads.mlp_speculator import Speculator
from crossdraft_drafters.heads.mtp import MtpHead
from crossdraft_drafters.heads.p_eagle import PEagleHead
from crossdraft_drafters.self_speculation.pass_weights import save_embeddings
from head_checkpoints import layer_config

from crossdraft.drafters.heads.eagle_weights import config_json, save_head_files
from crossdraft.framework.errors import ModelError


def write_further_heads(root: Path, target: Any, *, mask_token: int) -> None:
    """A directory under ``root`` for each drafter that needs one, by its name.

    Args:
        target: a model of transformers.
        mask_token: of the block drafters.
    """
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    vocabulary, width = embedding.shape
    top, config = min(9, vocabulary - 1), layer_config(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        with suppress(ModelError):  # a target without decoder layers of this kind
            MtpHead(target).save(root / "mtp")
        block: dict[str, Any] = {"head": output, "block_size": 4, "mask_token": mask_token}
        gated: dict[str, Any] = {"from_anchor": True, "kind": "gated", "rank": 4, "confidence": width + 4}
        instance: dict[str, Any] = {
            "dflash": DFlashHead(config, embedding, 3 * width, **block),
            "dflash-2": DFlashHead(config, embedding, 3 * width, **block, convolution=(2, 2), selector=(4, top)),
            "dspark": DSparkHead(config, embedding, 3 * width, **block, **gated),
            "p-eagle": PEagleHead(config, embedding, 3 * width, head=output),
            "mlp-speculator": Speculator(3, vocabulary, width, 8),
        }
        upcoming = 0.4 * torch.randn(3, width)
        save_embeddings(root / "pass", upcoming, target="tiny", sha256="")
        report = {"block_size": 4, "mask_token_id": mask_token, "markov_head_type": "gated", "n_predict": 3}
        report |= {"conv_kernel_size": 2, "conv_group_size": 2, "selector_rank": 4, "selector_top_k": top}
        for name, module in instance.items():
            tensors = {
                k: t for k, t in module.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")
            }
            save_head_files(root / name, config_json(config, name, **report), tensors)
