"""Directories with random heads of every kind, in the published layouts, for a target of any size."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from crossdraft.drafters.heads.dflash import DFlashHead
from crossdraft.drafters.heads.dspark import DSparkHead
from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import config_json, make_config, write
from crossdraft.drafters.heads.medusa.weights import MedusaHeads, save_heads
from crossdraft.drafters.heads.mlp_speculator import Speculator
from crossdraft.drafters.heads.mtp import MtpHead
from crossdraft.drafters.heads.p_eagle import PEagleHead
from crossdraft.drafters.self_speculation.pass_weights import save_embeddings
from crossdraft.framework.errors import ModelError


def write_heads(root: Path, target: Any, *, mask_token: int, target_ids: torch.Tensor) -> None:
    """A directory under ``root`` for each drafter that needs one, by its name.

    Args:
        target: a model of transformers.
        mask_token: of the block drafters.
        target_ids: tokens that the EAGLE-3 head knows.
    """
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    vocabulary, width = embedding.shape
    top = min(9, vocabulary - 1)
    config = make_config(
        hidden_size=width,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=target.config.max_position_embeddings,
        vocab_size=vocabulary,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        medusa = MedusaHeads(width, 3, lm_head=target.get_output_embeddings())
        for weight in medusa.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        save_heads(root / "medusa", medusa, {})
        EagleHead(config, embedding, output).save(root / "eagle")
        Eagle3Head(config, embedding, 3 * width, target_ids=target_ids).save(root / "eagle3", layers=(2, 3, 1))
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
            write(root / name, config_json(config, name, **report), tensors)
