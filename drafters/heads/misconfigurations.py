"""Common misconfigurations of heads, each with the corrected heads.

Most of them occurred in published checkpoints: layer ids off by one, d2t written as ids, a missing rotary base, the
halves of ``fc`` in another order, a target that scales its embedding and heads that do not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from ...framework.contracts.misconfiguration import Misconfiguration
from ...framework.contracts.models import Checkpoint

#: Rotary bases of published models.
_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
_EMBEDDING = "embed_tokens.weight"
#: Maximum number of hidden states whose permutations are tried.
MOST_PERMUTED = 3
_MEDUSA = re.compile(r"((?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?)(\d+)(\..+)")


def other_layers(read: Sequence[int], depth: int) -> Iterator[Misconfiguration]:
    """Yield other ids than ``read`` for a target of ``depth`` layers: off by one, or (if few) permuted."""
    for offset in (1, -1):
        layers = tuple(i + offset for i in read)
        if min(layers) >= 0 and max(layers) <= depth:
            yield Misconfiguration(
                f"ids of hidden layers are off by one: the head was trained on {list(layers)}, not {list(read)}",
                f"write layers: {list(layers)}",
                {"layers": layers},
            )
    if len(read) > MOST_PERMUTED:
        return
    for layers in permutations(read):
        if layers != tuple(read):
            yield Misconfiguration(
                f"the inputs of fc are permuted: the head reads {list(layers)} in this order",
                f"write layers: {list(layers)}",
                {"layers": layers},
            )


def rotary_bases(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield other rotary bases of the heads: the target's, and those of published models."""
    nested = checkpoint.config.get("transformer_layer_config")
    raw = nested if isinstance(nested, dict) else checkpoint.config
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    current = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    text = target.config.get_text_config()
    target_base = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    for base in dict.fromkeys([target_base, *_BASES]):
        if base is None or base == current:
            continue
        keys: dict[str, Any] = {"rope_theta": base}
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(raw.get(name), dict):
                keys[name] = {**raw[name], "rope_theta": base}
        change = {**raw, **keys} if raw is nested else None
        yield Misconfiguration(
            f"the rotary base is {base:g}, not {current:g}" + (" (the target's)" if base == target_base else ""),
            f"write rope_theta: {base:g} into the heads' config.json",
            change=methodcaller("with_config", **({"transformer_layer_config": change} if change else keys)),
        )


def draft_vocabulary(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """Yield ``d2t`` read as the target's ids instead of offsets."""
    d2t = checkpoint.tensors.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.is_floating_point():
        return
    offsets = d2t.long() - torch.arange(len(d2t))
    yield Misconfiguration(
        "d2t holds the target's ids, but is read as offsets",
        "write d2t[i] = id - i into the heads' tensors",
        change=lambda heads: heads.with_tensors({"d2t": offsets}, ("t2d",)),
    )


def other_embedding(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """Yield the target's embedding instead of the heads' own."""
    if _EMBEDDING in checkpoint.tensors:
        yield Misconfiguration(
            "the heads were trained with the target's embedding, not with their own",
            "leave embed_tokens.weight out of the heads' tensors",
            change=lambda heads: heads.with_tensors({}, (_EMBEDDING,)),
        )


def embedding_scales(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield other scales of the embedding; heads that norm it are invariant."""
    own = checkpoint.tensors.get(_EMBEDDING)
    weight: Tensor = target.get_input_embeddings().weight if own is None else own
    root = math.sqrt(weight.shape[1])
    for factor, words in ((root, "times"), (1 / root, "over")):
        yield Misconfiguration(
            f"the embedding lacks a scale: the heads were trained with it {words} the root of its width",
            "add the scaled embedding to the heads' tensors, as embed_tokens.weight",
            change=partial(_scaled, weight=weight, factor=factor),
        )


def _scaled(heads: Checkpoint, weight: Tensor, factor: float) -> Checkpoint:
    return heads.with_tensors({_EMBEDDING: weight.detach().cpu() * factor})


def swapped_inputs(checkpoint: Checkpoint, name: str) -> Iterator[Misconfiguration]:
    """Yield the projection ``name`` of [embedding; feature] with its halves swapped."""
    for key in [key for key in checkpoint.tensors if key.endswith(name)]:
        weight = checkpoint.tensors[key]
        if weight.dim() == 2:
            halves = torch.cat(list(weight.chunk(2, 1))[::-1], 1)
            yield Misconfiguration(
                f"the inputs of {key} are swapped: it reads the feature first, then the embedding",
                f"swap the halves of the columns of {key}",
                change=lambda heads, key=key, halves=halves: heads.with_tensors({key: halves}),
            )


def eagle3_norms(checkpoint: Checkpoint, layers: int) -> Iterator[Misconfiguration]:
    """Yield heads with and without norms of the features of ``layers`` layers, and with another residual."""
    config = checkpoint.config
    before = bool(config.get("norm_before_residual", False))
    yield Misconfiguration(
        f"the residual of the first layer is taken {'before' if before else 'after'} the norm of the feature",
        f"write norm_before_residual: {str(not before).lower()} into the heads' config.json",
        change=lambda heads: heads.with_config(norm_before_residual=not before),
    )
    configured = config.get("norm_output")
    for mistake, value in (
        ("the normed output is fed back", True),
        ("the output before its norm is fed back", None),
        ("the head reads the output without its norm", False),
    ):
        if value == configured or (value is False and ("speculators_config" in config or "fc_norm" in config)):
            continue  # the current value, or one without meaning in these heads
        yield Misconfiguration(
            mistake,
            f"write norm_output: {json.dumps(value)} into the heads' config.json",
            change=methodcaller("with_config", norm_output=value),
        )
    normed = ("input_norm.", "fc_norm.")
    fc = checkpoint.tensors.get("fc.weight")
    if any(key.startswith(normed) for key in checkpoint.tensors):
        disabled = {key: False for key in ("norm_before_fc", "fc_norm") if config.get(key)}
        yield Misconfiguration(
            "features are not normed before fc",
            "leave the norm before fc out of the heads' tensors",
            change=lambda heads: heads.with_tensors({}, normed).with_config(**disabled),
        )
    elif fc is not None:
        width = fc.shape[1] // layers
        one = {"input_norm.weight": torch.ones(fc.shape[1], dtype=fc.dtype)}
        each = {f"fc_norm.{i}.weight": torch.ones(width, dtype=fc.dtype) for i in range(layers)}
        for how, norms in (("together", one), ("layer by layer", each)):
            yield Misconfiguration(
                f"features are normed before fc, {how}",
                f"add the norms to the heads' tensors, as {', '.join(norms)}",
                change=methodcaller("with_tensors", norms),
            )


def shifted_heads(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """Yield Medusa heads without the first one, which predicts the target's own next token if heads are off by one."""
    matches = {key: match for key in checkpoint.tensors if (match := _MEDUSA.fullmatch(key))}
    indices = {int(match[2]) for match in matches.values()}
    if len(indices) < 2:
        return
    tensors = {key: t for key, t in checkpoint.tensors.items() if key not in matches}
    for key, match in matches.items():
        if int(match[2]) > 0:
            tensors[f"{match[1]}{int(match[2]) - 1}{match[3]}"] = checkpoint.tensors[key]
    counts = {
        key: checkpoint.config[key] - 1
        for key in ("medusa_num_heads", "num_heads")
        if checkpoint.config.get(key) == len(indices)
    }

    def change(heads: Checkpoint) -> Checkpoint:
        return heads.with_tensors(tensors, tuple(matches)).with_config(**counts)

    yield Misconfiguration(
        "the first head predicts the target's own next token: heads are off by one",
        "leave out the first head, and number the others from 0",
        change=change,
    )
