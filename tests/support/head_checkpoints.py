"""Directories with random heads of the core's drafters, in the published layouts, for a target of any size."""

from pathlib import Path
from typing import Any

import torch
from crossdraft_trainers.medusa_files import save_heads

from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.drafters.heads.medusa.weights import MedusaHeads


def layer_config(target: Any) -> Any:
    """A config of one small decoder layer of the width of ``target``."""
    vocabulary, width = target.get_input_embeddings().weight.shape
    return make_config(
        hidden_size=width,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=target.config.max_position_embeddings,
        vocab_size=vocabulary,
    )


def write_heads(root: Path, target: Any, *, target_ids: torch.Tensor) -> None:
    """A directory under ``root`` for each drafter that needs one, by its name.

    Args:
        target: a model of transformers.
        target_ids: tokens that the EAGLE-3 head knows.
    """
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    width, config = embedding.shape[1], layer_config(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        medusa = MedusaHeads(width, 3, lm_head=target.get_output_embeddings())
        for weight in medusa.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        save_heads(root / "medusa", medusa, {})
        EagleHead(config, embedding, output).save(root / "eagle")
        Eagle3Head(config, embedding, 3 * width, target_ids=target_ids).save(root / "eagle3", layers=(2, 3, 1))
