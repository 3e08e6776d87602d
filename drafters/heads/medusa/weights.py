"""Medusa heads: the module, and its published layouts.

T. Cai, Y. Li, Z. Geng, H. Peng, J. D. Lee, D. Chen, T. Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024, equation 1. Layouts are detected by their keys:

- v0.1: ``{i}.{j}.linear.weight [H, H]``, ``.bias [H]`` for block j of head i, then ``{i}.{layers}.weight [V, H]``;
- version 2: the same without the projection; logits come from the target's own head;
- Medusa-2: the same with the prefix ``medusa_head.``, in the checkpoint of the fine-tuned target;
- vLLM: ``blocks.{i}.layers.{j}.weight``, ``lm_heads.{i}.weight`` (or one for all heads), ``token_map`` if the
  heads have a reduced vocabulary; optional prefix ``medusa_heads.``.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....framework.contracts.models import Checkpoint
from ....framework.errors import ModelError
from ..config_keys import LAYOUTS, check_head_config
from ..eagle_weights import checked_ids, logit_scale

_INSIDE, _PREFIX = "medusa_head.", "medusa_heads."
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_PROJECTION = re.compile(r"lm_heads\.(\d+)\.weight")
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
#: Config keys of the numbers of heads and blocks; vLLM's names have another meaning in a full model's config.
_HEADS, _LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, initialised to the identity."""

    def __init__(self, size: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Heads on the target's last hidden state; head i, counted from 0, predicts token t + i + 2.

    The state dict has the keys of layout v0.1, or of version 2 if the heads have no projection of their own.

    Args:
        hidden_size: H.
        heads: number of heads.
        layers: residual blocks of each head.
        lm_head: the target's module ``[.., H] -> [.., V]``, if the heads share it; not in their state dict.
        vocab_size: rows of the heads' own projections, if not.
        bias: blocks have a bias.
        one_projection: all heads share one projection.
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
            raise ValueError("Medusa heads need either the target's lm_head or a vocab_size for their own projections")
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
        #: Number of logits of a head.
        self.vocab_size: int = lm_head.weight.shape[0] if vocab_size is None else vocab_size
        self._lm_head = (lm_head,)  # in a tuple, so that it is not a submodule

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """Compute logits ``[heads, .., V]`` of the first ``heads`` from ``hidden [.., H]``, after the target's norm."""
        out = torch.stack([head(hidden) for head in islice(self, heads)])
        (lm_head,) = self._lm_head
        return out if lm_head is None else lm_head(out)


def read_heads(checkpoint: Checkpoint, target: Any, heads: int | None = None) -> tuple[MedusaHeads, Tensor | None]:
    """Read the heads of ``checkpoint``, on the device and in the dtype of ``target`` (a causal LM of transformers).

    Args:
        heads: number of heads to use; required if the config has another number than the tensors, as in the first
            uploads (2 instead of 5).

    Returns:
        the heads, and the target's id of each row of their logits, ``[rows]`` int64, or None if row = id.

    Raises:
        ModelError: unknown layout; names or shapes do not fit; the config has another number of heads or blocks; ids
            are outside the vocabulary; or values are not finite.
    """
    check_head_config(checkpoint, "medusa", LAYOUTS["medusa"])
    lm_head = target.get_output_embeddings()
    vocab_size, hidden_size = lm_head.weight.shape
    tensors, token_map, vllm, shared = _renamed(checkpoint)
    blocks = [match for match in map(_LINEAR.fullmatch, tensors) if match]
    if not blocks:
        shown = ", ".join(sorted(tensors)[:4]) or "none"
        raise checkpoint.refused(
            f"their keys are not a known layout of Medusa heads: {shown}; known are 0.0.linear.weight (optional prefix "
            "medusa_head.) and blocks.0.layers.0.weight"
        )
    layers = 1 + max(checkpoint.number(match[2], match[0]) for match in blocks)
    number = {key: _head(checkpoint, key) for key in tensors}
    available = 1 + max(number.values())
    names = slice(None if vllm else 1)
    _check_count(checkpoint, "block", _LAYERS[names], layers)
    if heads is None:
        _check_count(checkpoint, "head", _HEADS[names], available)
    elif heads > available:
        raise checkpoint.refused(f"heads is {heads}, but the tensors hold {available}; write at most {available}")
    used = available if heads is None else heads
    tensors = {key: t for key, t in tensors.items() if number[key] < used}

    if (weight := tensors.get("0.0.linear.weight")) is not None and weight.shape[-1] != hidden_size:
        raise checkpoint.refused(
            f"they read features of size {weight.shape[-1]}, but those of the target have size {hidden_size}; use "
            "heads that were trained for this target"
        )
    projections = [key for key in tensors if key.endswith(f".{layers}.weight")]
    rows = len(tensors[projections[0]]) if projections else None
    if token_map is not None:
        token_map = _checked_map(checkpoint, token_map, rows, vocab_size)
        # Reduce full projections to the ids of the map.
        tensors |= {key: tensors[key][token_map] for key in projections if len(tensors[key]) > len(token_map)}
        rows = len(token_map)
    if rows is not None and rows > vocab_size:
        raise checkpoint.refused(f"their logits have {rows} entries, but the target's vocabulary has {vocab_size}")
    scale = logit_scale(checkpoint, checkpoint.config)
    if projections and scale != 1:
        tensors |= {key: tensors[key] * scale for key in projections}
    if invalid := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise checkpoint.refused(f"{invalid[0]} holds numbers that are not finite")

    bias = checkpoint.config.get("medusa_fc_bias") is True or any(match[3] == "bias" for match in blocks)
    with torch.device("meta"):  # no initialisation: the values are replaced below
        options: dict[str, Any] = {"lm_head": lm_head if rows is None else None, "vocab_size": rows}
        module = MedusaHeads(hidden_size, used, layers, bias=bias, one_projection=shared, **options)
    module = module.to(target.dtype).to_empty(device=target.device)
    repeated = [f"{i}.{layers}.weight" for i in range(1, used)] if shared else []
    try:
        checkpoint.fill(module, tensors, shared=repeated)
    except ModelError as error:
        names = f"blocks.{{i}}.layers.{{j}} and lm_heads.{{i}} are {{i}}.{{j}}.linear and {{i}}.{layers} here"
        raise ModelError(f"{error}; {names}" if vllm else str(error)) from None
    return module.requires_grad_(False).eval(), None if token_map is None else token_map.to(target.device)


def _renamed(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Tensor | None, bool, bool]:
    """Tensors by their names in v0.1; the token map; True for vLLM's layout; True for one shared projection."""
    inside = {key: t for key, t in checkpoint.tensors.items() if key.startswith(_INSIDE)}
    tensors = {key.removeprefix(_INSIDE).removeprefix(_PREFIX): t for key, t in (inside or checkpoint.tensors).items()}
    layers = [checkpoint.number(match[2], match[0]) for match in map(_BLOCK.fullmatch, tensors) if match]
    if not layers:
        return tensors, None, False, False
    config = checkpoint.config
    token_map, part = tensors.pop("token_map", None), config.get("truncated_vocab_size")
    if part is not None and part == config.get("vocab_size"):
        token_map = None  # present, but not used
    elif part is not None and token_map is None:
        raise checkpoint.refused(
            f"their config has {part} tokens (truncated_vocab_size), but token_map, which lists them, is missing"
        )

    def name(key: str) -> str:
        if match := _BLOCK.fullmatch(key):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        return f"{match[1]}.{max(layers) + 1}.weight" if (match := _PROJECTION.fullmatch(key)) else key

    shared = config.get("original_lm_head") is True and sum(map(bool, map(_PROJECTION.fullmatch, tensors))) == 1
    return {name(key): t for key, t in tensors.items()}, token_map, True, shared


def _check_count(checkpoint: Checkpoint, part: str, names: tuple[str, ...], count: int) -> None:
    """Raise ModelError if the config has, under one of ``names``, another number of heads or blocks than ``count``."""
    for name in names:
        configured = checkpoint.config.get(name)
        if isinstance(configured, int) and configured != count:
            advice = f"; if the tensors are right, write heads: {count} in the recipe" if part == "head" else ""
            raise checkpoint.refused(
                f"their config has {configured} {part}{'s' * (configured != 1)} ({name}), but the tensors hold {count}"
                f"{advice}"
            )


def _checked_map(checkpoint: Checkpoint, token_map: Tensor, rows: int | None, vocab_size: int) -> Tensor:
    """Check the map and return the target's ids ``[n]`` int64; the projections have ``rows`` = n or all V."""
    ids = token_map.long()
    if ids.dim() != 1 or rows is None or not 0 < len(ids) <= rows:
        raise checkpoint.refused(f"token_map {list(token_map.shape)} does not fit projections of {rows or 0} rows")
    end = vocab_size if rows == len(ids) else min(rows, vocab_size)
    return checked_ids(checkpoint, ids, end, "token_map", "it must list the target's ids")


def _head(checkpoint: Checkpoint, key: str) -> int:
    """Index of the head of a key in the names of v0.1, -1 if it has none."""
    first = key.partition(".")[0]
    return checkpoint.number(first, key) if first.isdecimal() else -1
