"""Rotary embeddings of heads: the types that published configs name, full or partial, paired by halves or in turn."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.contracts.models import Checkpoint

#: Types by their names in configs. The three positions of M-RoPE are equal for text, so it is plain there.
TYPES = {name: name for name in ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")}
TYPES |= {"mrope": "default", "su": "longrope"}
#: Config keys for channels that are paired in turn (0 with 1), not by halves, and the value for this.
INTERLEAVED = {"is_neox_style": False, "rope_is_neox_style": False, "rope_interleave": True}
_ROTATED = re.compile(r"layers\.\d+\.self_attn\.[qk]_(proj|norm)\.(weight|bias)")


def rope_parameters(checkpoint: Checkpoint, raw: Mapping[str, Any], kinds: list[str] | None) -> dict[str, Any]:
    """Make the ``rope_parameters`` of transformers from ``raw``, the config of decoder layers of types ``kinds``.

    ``rope_theta`` defaults to 10000, not to the target's.

    Raises:
        ModelError: an unknown type, or parameters that contradict each other.
    """
    sections = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise checkpoint.refused(f"{key} is {section!r:.80} in config.json; it must be a mapping")
    key, section = next(iter(sections.items()), ("rope_parameters", {}))
    if nested := {kind: scaling for kind, scaling in section.items() if isinstance(scaling, dict)}:
        used = [nested.get(kind) for kind in kinds or ["full_attention"]]
        if used[0] is None or any(scaling != used[0] for scaling in used):
            raise checkpoint.refused(f"{key} differs between their layers in config.json, which is not supported")
        section = used[0]
    rope = {name: value for name, value in section.items() if not name.startswith("mrope_")}
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    if kind not in TYPES:
        raise checkpoint.refused(
            f"config.json has {kind!r:.80} for the type in {key}, a rotary embedding that is not supported; known are "
            f"{', '.join(TYPES)}"
        )
    if len(sections) == 2 and sections["rope_scaling"] != sections["rope_parameters"]:
        other = sections["rope_scaling"].get("rope_type") or sections["rope_scaling"].get("type") or "default"
        if TYPES.get(other) != TYPES[kind]:
            raise checkpoint.refused(f"config.json has two rotary types, {kind!r} and {other!r:.80}; leave one out")
    rope = {"rope_type": TYPES[kind], "rope_theta": raw.get("rope_theta") or 10000.0, **rope}
    if "partial_rotary_factor" not in rope and raw.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = raw["partial_rotary_factor"]
    if raw.get("original_max_position_embeddings") is not None:  # Phi-3's place
        rope.setdefault("original_max_position_embeddings", raw["original_max_position_embeddings"])
    return rope


def rotary_size(config: Any) -> int:
    """Number of rotated channels of a head. Raises ValueError for a factor that gives no even number of them."""
    rope, size = config.rope_parameters, config.head_dim
    factor = rope.get("partial_rotary_factor")
    if factor is None or rope["rope_type"] == "proportional":  # the latter rotates the rest by an angle of 0
        return size
    rotated = int(size * factor)
    if not 0 < factor <= 1 or rotated % 2 or not rotated:
        raise ValueError(f"partial_rotary_factor {factor} of {size} channels is not an even number of channels")
    return rotated


def interleaved(raw: Mapping[str, Any]) -> bool:
    """True if the config pairs channels in turn."""
    return any(raw.get(key) is value for key, value in INTERLEAVED.items())


def by_halves(
    config: Any, tensors: Mapping[str, Tensor], *, interleaved: bool, back: bool = False
) -> dict[str, Tensor]:
    """Permute the channels of queries and keys so that channel i is paired with i + D / 2, as transformers pairs them.

    Scores are invariant to it. Channels that are not rotated fill up both halves.

    Args:
        tensors: by `renamed` names; ``back``: return to the order of the file.
    """
    size, rotated = config.head_dim, rotary_size(config)
    half, rest = rotated // 2, (size - rotated) // 2
    ends = (range(0, rotated, 2), range(1, rotated, 2)) if interleaved else (range(half), range(half, rotated))
    order = torch.tensor([*ends[0], *range(rotated, rotated + rest), *ends[1], *range(rotated + rest, size)])
    order = order.argsort() if back else order
    if torch.equal(order, torch.arange(size)):
        return dict(tensors)

    def permuted(key: str, tensor: Tensor) -> Tensor:
        if not _ROTATED.fullmatch(key) or not tensor.dim() or len(tensor) % size:
            return tensor
        return tensor.unflatten(0, (-1, size))[:, order.to(tensor.device)].flatten(0, 1)

    return {key: permuted(key, tensor) for key, tensor in tensors.items()}


class Rotary(nn.Module):
    """Cosines and sines ``[B, W, D]`` of positions ``[B, W]``; those of channels that are not rotated are 1 and 0."""

    def __init__(self, config: Any):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotated = rotary_size(config)
        self._rest = (config.head_dim - rotated) // 2
        if self._rest:
            config = copy.deepcopy(config)
            config.head_dim = rotated
            del config.rope_parameters["partial_rotary_factor"]
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, position_ids)
        if self._rest:
            halves = cos.shape[-1] // 2
            cos, sin = (
                torch.cat([part, part.new_full((*part.shape[:-1], self._rest), fill)] * 2, -1)
                for part, fill in ((cos[..., :halves], 1.0), (sin[..., :halves], 0.0))
            )
        return cos, sin
