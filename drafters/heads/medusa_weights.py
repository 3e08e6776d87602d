"""Medusa heads: the module, and the layouts they are published in.

T. Cai, Y. Li, Z. Geng, H. Peng, J. D. Lee, D. Chen, T. Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024, equation 1. Layouts are told apart by their keys:

- v0.1: ``{i}.{j}.linear.weight [H, H]``, ``.bias [H]`` for block j of head i, then ``{i}.{layers}.weight [V, H]``;
- version 2: the same without the projection, so logits go through the target's own head;
- Medusa-2: the same behind ``medusa_head.``, inside the checkpoint of a whole fine-tuned model (which is the target);
- vLLM: ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight`` (or one for all heads), ``token_map`` where the
  heads know only part of the vocabulary, all of it perhaps behind ``medusa_heads.``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...framework.errors import ModelError

if TYPE_CHECKING:
    from ...framework.contracts.models import Checkpoint

_INSIDE, _PREFIX = "medusa_head.", "medusa_heads."
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight")
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
#: What configs call the number of heads and of blocks; vLLM's own names mean something else in a whole model's config.
_HEADS, _LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, the identity until it is trained."""

    def __init__(self, size: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads on the target's last hidden state; head i, counted from 0, predicts the token i + 2 places on.

    The state dict has the keys of layout v0.1, or of version 2 if the heads have no projection of their own.

    Args:
        hidden_size: H.
        heads: how many.
        layers: residual blocks of each head.
        lm_head: the target's own module ``[.., H] -> [.., V]``, if the heads share it; no part of their state.
        vocab_size: rows of the heads' own projections, if not.
        bias: whether the blocks have one.
        one_projection: all heads have the same projection.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        layers: int = 1,
        *,
        lm_head: Any = None,
        vocab_size: int | None = None,
        bias: bool = True,
        one_projection: bool = False,
    ):
        if (lm_head is None) == (vocab_size is None):
            raise ValueError("Medusa heads need either the target's lm_head or a vocab_size for projections of theirs")
        projections: list[nn.Linear] = []
        if vocab_size is not None:
            projections = [
                nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(1 if one_projection else heads)
            ]
        super().__init__(
            nn.Sequential(
                *(ResidualBlock(hidden_size, bias) for _ in range(layers)),
                *(projections[i : i + 1] if len(projections) == heads else projections),
            )
            for i in range(heads)
        )
        self.hidden_size, self.layers = hidden_size, layers
        #: Entries of a head's logits.
        self.vocab_size: int = lm_head.weight.shape[0] if vocab_size is None else vocab_size
        self._lm_head = (lm_head,)  # in a tuple it is no submodule: it belongs to the target

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """``hidden [.., H]``, after the target's final norm -> logits ``[heads, .., V]`` of the first ``heads``."""
        out = torch.stack([head(hidden) for head in islice(self, heads)])
        (lm_head,) = self._lm_head
        return out if lm_head is None else lm_head(out)


def save_heads(directory: Path | str, heads: MedusaHeads, config: Mapping[str, Any]) -> None:
    """Write ``heads`` as ``medusa_lm_head.safetensors`` and ``config.json``: version 2, or v0.1 with projections.

    Args:
        config: what else the file should say, e.g. ``base_model_name_or_path`` and ``medusa_accuracies`` (per head,
            the probability that the token it ranks 0, 1, .. is right).
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Copies, because a projection that all heads have is in the state once for each of them.
    state = {key: tensor.detach().cpu().clone() for key, tensor in heads.state_dict().items()}
    save_file(state, directory / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    counts = {"medusa_num_heads": len(heads), "medusa_num_layers": heads.layers, "hidden_size": heads.hidden_size}
    (directory / "config.json").write_text(json.dumps({**config, **counts}, indent=2) + "\n", encoding="utf-8")


def read_heads(checkpoint: Checkpoint, target: Any, heads: int | None = None) -> tuple[MedusaHeads, Tensor | None]:
    """The heads in ``checkpoint``, on the device and in the dtype of ``target`` (a causal LM of transformers).

    Args:
        heads: how many of them to use. It has to be said where the config names another number than there are
            tensors for, as in the first uploads (which say 2 and hold 5).

    Returns:
        the heads, and the target's id of each row of their logits, ``[rows]`` int64, or None if row = id.

    Raises:
        ModelError: no known layout, names or shapes that do not fit, a number of heads or blocks that the config
            contradicts, ids outside of the vocabulary, or numbers that are not finite.
    """
    lm_head = target.get_output_embeddings()
    vocab_size, hidden_size = lm_head.weight.shape
    tensors, token_map, vllm, shared = _renamed(checkpoint)
    blocks = [match for match in map(_LINEAR.fullmatch, tensors) if match]
    if not blocks:
        shown = ", ".join(sorted(tensors)[:4]) or "none"
        raise checkpoint.refused(
            f"no layout of Medusa heads has these keys: {shown}; known are 0.0.linear.weight (perhaps behind "
            "medusa_head.) and blocks.0.layers.0.weight"
        )
    layers = 1 + max(checkpoint.number(match[2], match[0]) for match in blocks)
    number = {key: _head(checkpoint, key) for key in tensors}
    there = 1 + max(number.values())
    names = slice(None if vllm else 1)
    _check_count(checkpoint, "block", _LAYERS[names], layers)
    if heads is None:
        _check_count(checkpoint, "head", _HEADS[names], there)
    elif heads > there:
        raise checkpoint.refused(f"the drafter's config asks for heads: {heads}, but the tensors hold {there}")
    used = there if heads is None else heads
    tensors = {key: t for key, t in tensors.items() if number[key] < used}

    if (weight := tensors.get("0.0.linear.weight")) is not None and weight.shape[-1] != hidden_size:
        raise checkpoint.refused(
            f"they read features of size {weight.shape[-1]}, but those of the target have size {hidden_size}; take "
            "the heads that were made for this target"
        )
    projections = [key for key in tensors if key.endswith(f".{layers}.weight")]
    rows = len(tensors[projections[0]]) if projections else None
    if token_map is not None:
        token_map = _checked_map(checkpoint, token_map, rows, vocab_size)
        # Whole projections next to a map are cut down to its ids.
        tensors |= {key: tensors[key][token_map] for key in projections if len(tensors[key]) > len(token_map)}
        rows = len(token_map)
    if rows is not None and rows > vocab_size:
        raise checkpoint.refused(f"their logits have {rows} entries, but the target's vocabulary has {vocab_size}")
    scale = checkpoint.config.get("logit_scale", 1.0)
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise checkpoint.refused(f"logit_scale is {scale!r:.80} in their config, which is no number")
    if projections and scale != 1:
        tensors |= {key: tensors[key] * scale for key in projections}
    if broken := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise checkpoint.refused(f"{broken[0]} holds numbers that are not finite")

    bias = checkpoint.config.get("medusa_fc_bias") is True or any(match[3] == "bias" for match in blocks)
    with torch.device("meta"):  # no time spent on numbers that are replaced at once
        module = MedusaHeads(
            hidden_size,
            used,
            layers,
            lm_head=lm_head if rows is None else None,
            vocab_size=rows,
            bias=bias,
            one_projection=shared,
        )
    module = module.to(target.dtype).to_empty(device=target.device)
    repeated = [f"{i}.{layers}.weight" for i in range(1, used)] if shared else []
    try:
        checkpoint.fill(module, tensors, shared=repeated)
    except ModelError as error:
        names = f"blocks.{{i}}.layers.{{j}} and lm_heads.{{i}} are {{i}}.{{j}}.linear and {{i}}.{layers} here"
        raise ModelError(f"{error}; {names}" if vllm else str(error)) from None
    return module.requires_grad_(False).eval(), None if token_map is None else token_map.to(target.device)


def _renamed(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Tensor | None, bool, bool]:
    """Tensors by their names in v0.1; the token map; is the layout vLLM's; do all heads share one projection?"""
    inside = {key: t for key, t in checkpoint.tensors.items() if key.startswith(_INSIDE)}
    tensors = {key.removeprefix(_INSIDE).removeprefix(_PREFIX): t for key, t in (inside or checkpoint.tensors).items()}
    layers = [checkpoint.number(match[2], match[0]) for match in map(_BLOCK.fullmatch, tensors) if match]
    if not layers:
        return tensors, None, False, False
    config = checkpoint.config
    token_map, part = tensors.pop("token_map", None), config.get("truncated_vocab_size")
    if part is not None and part == config.get("vocab_size"):
        token_map = None  # there is one, but it is not used
    elif part is not None and token_map is None:
        raise checkpoint.refused(f"their config says that they know {part} tokens, but no token_map says which")

    def name(key: str) -> str:
        if match := _BLOCK.fullmatch(key):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        return f"{match[1]}.{max(layers) + 1}.weight" if (match := _PROJECTION.fullmatch(key)) else key

    shared = config.get("original_lm_head") is True and sum(map(bool, map(_PROJECTION.fullmatch, tensors))) == 1
    return {name(key): t for key, t in tensors.items()}, token_map, True, shared


def _check_count(checkpoint: Checkpoint, what: str, names: tuple[str, ...], there: int) -> None:
    """Refuse a config that says, under one of ``names``, another number of heads or blocks than ``there`` are."""
    for name in names:
        said = checkpoint.config.get(name)
        if isinstance(said, int) and said != there:
            advice = f"; if the tensors are right, say heads: {there} in the drafter's config" if what == "head" else ""
            raise checkpoint.refused(
                f"their config says {said} {what}{'s' * (said != 1)} ({name}), but the tensors hold {there}{advice}"
            )


def _checked_map(checkpoint: Checkpoint, token_map: Tensor, rows: int | None, vocab_size: int) -> Tensor:
    """``[ids]`` int64: the target's ids that the heads know; the projections have a row for each, or for all ids."""
    ids = token_map.long()
    if ids.dim() != 1 or rows is None or not 0 < len(ids) <= rows:
        raise checkpoint.refused(f"token_map {list(token_map.shape)} does not fit projections of {rows or 0} rows")
    end, lowest, highest = vocab_size if rows == len(ids) else min(rows, vocab_size), int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= end:
        raise checkpoint.refused(
            f"token_map holds ids from {lowest} to {highest}, but they go from 0 to {end - 1}; it lists the target's "
            "ids themselves"
        )
    if len(ids.unique()) < len(ids):
        raise checkpoint.refused("token_map names an id twice")
    return ids


def _head(checkpoint: Checkpoint, key: str) -> int:
    """The head a key in the names of v0.1 belongs to, -1 if none."""
    first = key.partition(".")[0]
    return checkpoint.number(first, key) if first.isdecimal() else -1
