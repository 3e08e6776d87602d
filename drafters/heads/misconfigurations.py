"""What is usually wrong with heads that are given to a target, each with the heads as they would be without it.

Most of it was shipped by somebody: ids of layers that count from another place, d2t written as ids, a rotary base that
was not written down, the halves of ``fc`` in another order, a target that scales its embedding and heads that do not.
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

#: Rotary bases that models are published with.
_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
_EMBEDDING = "embed_tokens.weight"
#: Of so many hidden states every order is tried.
MOST_PERMUTED = 3
_MEDUSA = re.compile(r"((?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?)(\d+)(\..+)")


def other_layers(read: Sequence[int], depth: int) -> Iterator[Misconfiguration]:
    """Hidden states ``read`` of a target with ``depth`` layers: ids off by one, or (of a few) in another order."""
    for by in (1, -1):
        layers = tuple(i + by for i in read)
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
    """Another base of the heads' rotary embedding: the target's, or one that models are published with."""
    nested = checkpoint.config.get("transformer_layer_config")
    raw = nested if isinstance(nested, dict) else checkpoint.config
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    mine = given.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    text = target.config.get_text_config()
    theirs = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    for base in dict.fromkeys([theirs, *_BASES]):
        if base is None or base == mine:
            continue
        keys: dict[str, Any] = {"rope_theta": base}
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(raw.get(name), dict):
                keys[name] = {**raw[name], "rope_theta": base}
        change = {**raw, **keys} if raw is nested else None
        yield Misconfiguration(
            f"the rotary base is {base:g}, not {mine:g}" + (" (the target's)" if base == theirs else ""),
            f"write rope_theta: {base:g} into the heads' config.json",
            change=methodcaller("with_config", **({"transformer_layer_config": change} if change else keys)),
        )


def draft_vocabulary(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """``d2t`` that holds the target's ids themselves, not offsets."""
    d2t = checkpoint.tensors.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.is_floating_point():
        return
    offsets = d2t.long() - torch.arange(len(d2t))
    yield Misconfiguration(
        "d2t holds the target's ids, and is read as offsets",
        "write d2t[i] = id - i into the heads' tensors",
        change=lambda heads: heads.with_tensors({"d2t": offsets}, ("t2d",)),
    )


def other_embedding(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """The target's embedding instead of the heads' own."""
    if _EMBEDDING in checkpoint.tensors:
        yield Misconfiguration(
            "the heads' own embedding is not the one that they were trained with, the target's is",
            "leave embed_tokens.weight out of the heads' tensors",
            change=lambda heads: heads.with_tensors({}, (_EMBEDDING,)),
        )


def embedding_scales(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Another scale of the embedding; heads that norm it do not see one."""
    own = checkpoint.tensors.get(_EMBEDDING)
    weight: Tensor = target.get_input_embeddings().weight if own is None else own
    root = math.sqrt(weight.shape[1])
    for factor, words in ((root, "times"), (1 / root, "over")):
        yield Misconfiguration(
            f"the embedding lacks a scale: the heads were trained with it {words} the root of its width",
            "put the scaled embedding beside the heads, as embed_tokens.weight",
            change=partial(_scaled, weight=weight, factor=factor),
        )


def _scaled(heads: Checkpoint, weight: Tensor, factor: float) -> Checkpoint:
    return heads.with_tensors({_EMBEDDING: weight.detach().cpu() * factor})


def swapped_inputs(checkpoint: Checkpoint, name: str) -> Iterator[Misconfiguration]:
    """The projection ``name`` of embedding and feature side by side, which stand the other way round."""
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
    """Norms of features of so many ``layers`` that are there or not, and the residual before or after one."""
    config = checkpoint.config
    before = bool(config.get("norm_before_residual", False))
    yield Misconfiguration(
        f"the residual of the first layer is taken {'before' if before else 'after'} the norm of the feature",
        f"write norm_before_residual: {str(not before).lower()} into the heads' config.json",
        change=lambda heads: heads.with_config(norm_before_residual=not before),
    )
    said = config.get("norm_output")
    for mistake, value in (
        ("what is fed back is the normed output", True),
        ("what is fed back is the output before its norm", None),
        ("the head reads the output without its norm", False),
    ):
        if value == said or (value is False and ("speculators_config" in config or "fc_norm" in config)):
            continue  # as it is, or nothing that this key says in heads like these
        yield Misconfiguration(
            mistake,
            f"write norm_output: {json.dumps(value)} into the heads' config.json",
            change=methodcaller("with_config", norm_output=value),
        )
    normed = ("input_norm.", "fc_norm.")
    fc = checkpoint.tensors.get("fc.weight")
    if any(key.startswith(normed) for key in checkpoint.tensors):
        told = {key: False for key in ("norm_before_fc", "fc_norm") if config.get(key)}
        yield Misconfiguration(
            "features are not normed before fc",
            "leave the norm before fc out of the heads' tensors",
            change=lambda heads: heads.with_tensors({}, normed).with_config(**told),
        )
    elif fc is not None:
        width = fc.shape[1] // layers
        one = {"input_norm.weight": torch.ones(fc.shape[1], dtype=fc.dtype)}
        each = {f"fc_norm.{i}.weight": torch.ones(width, dtype=fc.dtype) for i in range(layers)}
        for how, norms in (("together", one), ("layer by layer", each)):
            yield Misconfiguration(
                f"features are normed before fc, {how}",
                f"put the norms beside the heads, as {', '.join(norms)}",
                change=methodcaller("with_tensors", norms),
            )


def shifted_heads(checkpoint: Checkpoint) -> Iterator[Misconfiguration]:
    """Medusa heads of which the first says the next token, which the target says itself."""
    found = {key: match for key in checkpoint.tensors if (match := _MEDUSA.fullmatch(key))}
    heads = {int(match[2]) for match in found.values()}
    if len(heads) < 2:
        return
    tensors = {key: t for key, t in checkpoint.tensors.items() if key not in found}
    for key, match in found.items():
        if int(match[2]) > 0:
            tensors[f"{match[1]}{int(match[2]) - 1}{match[3]}"] = checkpoint.tensors[key]
    counts = {
        key: checkpoint.config[key] - 1
        for key in ("medusa_num_heads", "num_heads")
        if checkpoint.config.get(key) == len(heads)
    }

    def change(given: Checkpoint) -> Checkpoint:
        return given.with_tensors(tensors, tuple(found)).with_config(**counts)

    yield Misconfiguration(
        "the first head says the token that the target says itself: heads are off by one",
        "leave the first head out, and number the others from 0",
        change=change,
    )
