"""Files of Medusa heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossdraft.drafters.heads.medusa.weights import MedusaHeads


def save_heads(directory: Path | str, heads: MedusaHeads, config: Mapping[str, Any]) -> None:
    """Write ``heads`` as ``medusa_lm_head.safetensors`` and ``config.json``: version 2, or v0.1 with projections.

    Args:
        config: further entries, e.g. ``base_model_name_or_path`` and ``medusa_accuracies`` (per head, the accuracy of
            its token of rank 0, 1, ..).
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Copies: a shared projection occurs once per head.
    state = {key: tensor.detach().cpu().clone() for key, tensor in heads.state_dict().items()}
    save_file(state, directory / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    counts = {"medusa_num_heads": len(heads), "medusa_num_layers": heads.layers, "hidden_size": heads.hidden_size}
    (directory / "config.json").write_text(json.dumps({**config, **counts}, indent=2) + "\n", encoding="utf-8")
