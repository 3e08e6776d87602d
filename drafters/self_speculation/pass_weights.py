"""Look-ahead embeddings: the file that holds them, and what is refused of one.

``embeddings [L, H]`` in a safetensors file; ``config.json`` names the target and the digest of its weights. To another
target, fine-tuned from the same one perhaps, they mean nothing that anybody trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...framework.util.limits import MOST_LEVELS

if TYPE_CHECKING:
    from ...framework.contracts.models import Checkpoint

#: What the tensor is called.
KEY = "embeddings"


def save_embeddings(directory: Path, embeddings: Tensor, *, target: str, sha256: str) -> None:
    """Write ``embeddings [L, H]``, made for the target of that name whose weights have that digest."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensor = embeddings.detach().float().cpu().contiguous()
    save_file({KEY: tensor}, directory / "look_ahead.safetensors", metadata={"format": "pt"})
    length, size = tensor.shape
    config = {"base_model_name_or_path": target, "target_sha256": sha256, "look_ahead": length, "hidden_size": size}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_embeddings(checkpoint: Checkpoint, *, size: int | None, sha256: str) -> Tensor:
    """The embeddings ``[L, H]`` in ``checkpoint``, on the CPU.

    Args:
        size: H of the target; ``None`` = not known.
        sha256: digest of the target's weights, empty where it has none.

    Raises:
        ModelError: other tensors, another width, another target, more embeddings than a draft may have tokens, or
            numbers that are not finite.
    """
    found = checkpoint.tensors.get(KEY)
    if found is None or len(checkpoint.tensors) > 1 or found.dim() != 2 or not found.is_floating_point():
        shown = ", ".join(sorted(checkpoint.tensors)[:4])
        raise checkpoint.refused(
            f"look-ahead embeddings are one tensor, {KEY} [L, H], and these hold {shown}; crossdraft train pass makes "
            "some"
        )
    made_for = checkpoint.config.get("target_sha256")
    if sha256 and isinstance(made_for, str) and made_for and made_for != sha256:
        raise checkpoint.refused(
            f"they were trained for other weights than the target's: for {made_for[:12]!a}, these are "
            f"{sha256[:12]!a}; take that target, or make some for this one with crossdraft train pass"
        )
    if size is not None and found.shape[1] != size:
        raise checkpoint.refused(
            f"they are vectors of {found.shape[1]}, but the target's embeddings are vectors of {size}; take those that "
            "were made for this target"
        )
    if not len(found):
        raise checkpoint.refused("there is none among them")
    if reason := MOST_LEVELS.refusal(len(found)):
        raise checkpoint.refused(f"they are {len(found)}, and {reason}")
    if not found.isfinite().all():
        raise checkpoint.refused(f"{KEY} holds numbers that are not finite")
    return found
