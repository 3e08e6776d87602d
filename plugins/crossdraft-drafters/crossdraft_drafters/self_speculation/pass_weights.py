"""Look-ahead embeddings: reading, checking and writing their checkpoint.

``embeddings [L, H]`` in a safetensors file; ``config.json`` has the name of the target and the digest of its weights,
because embeddings do not transfer to another target, even one fine-tuned from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from crossdraft import MOST_LEVELS

if TYPE_CHECKING:
    from crossdraft import Checkpoint

#: Name of the tensor.
KEY = "embeddings"


def save_embeddings(directory: Path, embeddings: Tensor, *, target: str, sha256: str) -> None:
    """Write ``embeddings [L, H]`` of the target with this name and this digest of its weights."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensor = embeddings.detach().float().cpu().contiguous()
    save_file({KEY: tensor}, directory / "look_ahead.safetensors", metadata={"format": "pt"})
    length, size = tensor.shape
    config = {"base_model_name_or_path": target, "target_sha256": sha256, "look_ahead": length, "hidden_size": size}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_embeddings(checkpoint: Checkpoint, *, size: int | None, sha256: str) -> Tensor:
    """Read the embeddings ``[L, H]`` of ``checkpoint``, on the CPU.

    Args:
        size: H of the target; ``None`` = unknown.
        sha256: digest of the target's weights, empty if it has none.

    Raises:
        ModelError: the tensors, the width or the target differ, there are too many embeddings, or values are not
            finite.
    """
    checkpoint.check_kind("pass")
    embeddings = checkpoint.tensors.get(KEY)
    if embeddings is None or len(checkpoint.tensors) > 1 or embeddings.dim() != 2 or not embeddings.is_floating_point():
        shown = ", ".join(sorted(checkpoint.tensors)[:4])
        raise checkpoint.refused(
            f"look-ahead embeddings are one tensor, {KEY} [L, H], but these hold {shown}; crossdraft train pass writes "
            "some"
        )
    trained_for = checkpoint.config.get("target_sha256")
    if sha256 and isinstance(trained_for, str) and trained_for and trained_for != sha256:
        raise checkpoint.refused(
            f"they were trained for weights {trained_for[:12]!a}, but the target's are {sha256[:12]!a}; use that "
            "target, or train some for this one with crossdraft train pass"
        )
    if size is not None and embeddings.shape[1] != size:
        raise checkpoint.refused(
            f"they are vectors of {embeddings.shape[1]}, but the target's embeddings are vectors of {size}; use those "
            "trained for this target"
        )
    if not len(embeddings):
        raise checkpoint.refused("they are empty")
    if reason := MOST_LEVELS.violation(len(embeddings)):
        raise checkpoint.refused(f"they are {len(embeddings)}, and {reason}")
    if not embeddings.isfinite().all():
        raise checkpoint.refused(f"{KEY} holds numbers that are not finite")
    return embeddings
