"""Common misconfigurations of heads, each with the corrected heads.

Most of them occurred in published checkpoints: layer ids off by one, d2t written as ids, a missing rotary base, the
halves of ``fc`` in another order, a target that scales its embedding and heads that do not, channels that are rotated
in training only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from crossdraft import Checkpoint, Misconfiguration
from crossdraft.drafters.heads.config_keys import FEEDS_NORMED
from crossdraft.drafters.heads.rotary import INTERLEAVED, interleaved
from crossdraft.heads import layer_section, merged_config, with_options

_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # rotary bases of published models
_EMBEDDING = "embed_tokens.weight"
MOST_PERMUTED = 3  # maximum number of hidden states whose permutations are tried
_MEDUSA = re.compile(r"((?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?)(\d+)(\..+)")


def _other_layers(read: Sequence[int], depth: int) -> Iterator[Misconfiguration]:
    """Yield other ids than ``read`` for a target of ``depth`` layers: off by one, or (if few) permuted."""
    for offset in (1, -1):
        layers = tuple(i + offset for i in read)
        if layers and min(layers) >= 0 and max(layers) <= depth:
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


def _other_last_state(read: Sequence[int], depth: int) -> Iterator[Misconfiguration]:
    """Yield the last layer's output before the final norm in place of that after it, and the reverse."""
    for state, other, side in ((depth, -1, "after"), (-1, depth, "before")):
        if state in read:
            layers = tuple(other if i == state else i for i in read)
            yield Misconfiguration(
                f"the head was trained on the target's last state {side} the final norm",
                f"write layers: {list(layers)}",
                {"layers": layers},
            )


def _layer_change(checkpoint: Checkpoint, **keys: Any) -> Callable[[Checkpoint], Checkpoint]:
    """A change of keys in the part of the config that describes the layers."""
    nested = layer_section(checkpoint)
    change = keys if nested is checkpoint.config else {"transformer_layer_config": {**nested, **keys}}
    return methodcaller("with_config", **change)


def _rotary_embeddings(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield other rotary embeddings of the heads: bases, and the target's scaling, share of channels and pairs."""
    raw = layer_section(checkpoint)
    section = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    section = section if isinstance(section, dict) else {}
    base = {"rope_theta": raw.get("rope_theta") or 10_000.0, "partial_rotary_factor": raw.get("partial_rotary_factor")}
    rope = base | section
    text = target.config.get_text_config()
    targets = getattr(text, "rope_parameters", None) or {}
    kind, its_kind = (scaling.get("rope_type") or scaling.get("type") or "default" for scaling in (rope, targets))

    def trial(mistake: str, key: str, value: Any, parameters: dict[str, Any]) -> Misconfiguration:
        parameters = {name: scaling for name, scaling in parameters.items() if scaling is not None}
        keys = {"rope_parameters": parameters, "rope_scaling": None, "partial_rotary_factor": None}
        change = _layer_change(checkpoint, rope_theta=parameters["rope_theta"], **keys)
        return Misconfiguration(mistake, f"write {key}: {value} into the heads' config.json", change=change)

    current = rope["rope_theta"]
    for theta in dict.fromkeys([targets.get("rope_theta"), *_BASES]):
        if theta is not None and theta != current:
            whose = " (the target's)" if theta == targets.get("rope_theta") else ""
            mistake = f"the rotary base is {theta:g}, not {current:g}{whose}"
            yield trial(mistake, "rope_theta", f"{theta:g}", {**rope, "rope_theta": theta})
    factor = rope.get("partial_rotary_factor") or 1.0
    for other in dict.fromkeys([targets.get("partial_rotary_factor") or 1.0, 1.0]):
        if other != factor:
            mistake = f"{other:g} of each head's channels are rotated, not {factor:g}"
            yield trial(mistake, "partial_rotary_factor", f"{other:g}", {**rope, "partial_rotary_factor": other})
    if its_kind not in ("default", kind):
        scaled = {**targets, "rope_theta": current, "partial_rotary_factor": rope.get("partial_rotary_factor")}
        mistake = f"positions are scaled as the target's ({its_kind}), not as {kind}"
        yield trial(mistake, "rope_scaling", json.dumps(targets, default=str), scaled)
    if kind != "default":
        kept = {key: rope.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        yield trial(f"positions are not scaled, but read as {kind}", "rope_scaling", "null", kept)
    paired = interleaved(raw)
    flip = {key: None for key in INTERLEAVED} | ({} if paired else {"is_neox_style": False})
    yield Misconfiguration(
        f"channels are rotated in pairs of {'halves' if paired else 'neighbours'}",
        f"{'leave out is_neox_style' if paired else 'write is_neox_style: false'} in the heads' config.json",
        change=_layer_change(checkpoint, **flip),
    )


def _other_logits(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield other scales of the logits: the target's, and none."""
    current = checkpoint.config.get("logit_scale")
    current = 1.0 if current is None else current
    for scale in dict.fromkeys([getattr(target.config.get_text_config(), "logit_scale", None) or 1.0, 1.0]):
        if scale != current:
            yield Misconfiguration(
                f"logits are multiplied by {scale:g}, not by {current!r:.20}",
                f"write logit_scale: {scale:g} into the heads' config.json",
                change=methodcaller("with_config", logit_scale=scale),
            )


def _other_window(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield layers that attend to the whole text instead of a window."""
    kinds = layer_section(checkpoint).get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        yield Misconfiguration(
            "the heads attend to the whole text, not to a window",
            "write layer_types: null into the heads' config.json",
            change=_layer_change(checkpoint, layer_types=None, sliding_window=None, use_sliding_window=False),
        )


def _draft_vocabulary(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
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


def _name(checkpoint: Checkpoint, key: str) -> str:
    """Name of the tensor ``key`` in the file: NeMo's names have a prefix."""
    return f"model.{key}" if f"model.{key}" in checkpoint.tensors else key


def _other_embedding(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield the target's embedding instead of the heads' own, and the other one of them as output head."""
    name = _name(checkpoint, _EMBEDDING)
    if name not in checkpoint.tensors:
        return
    yield Misconfiguration(
        "the heads were trained with the target's embedding, not with their own",
        f"leave {name} out of the heads' tensors",
        change=lambda heads: heads.with_tensors({}, (name,)),
    )
    if not any(key.removeprefix("model.") in ("lm_head.weight", "d2t") for key in checkpoint.tensors):
        tied = bool(checkpoint.config.get("tie_word_embeddings"))
        yield Misconfiguration(
            f"the output head is {'the target' if tied else 'the heads own embedding, not the target'}'s",
            f"write tie_word_embeddings: {str(not tied).lower()} into the heads' config.json",
            change=methodcaller("with_config", tie_word_embeddings=not tied),
        )


def _embedding_scales(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield other scales of the embedding; heads that norm it are invariant."""
    name = _name(checkpoint, _EMBEDDING)
    own = checkpoint.tensors.get(name)
    weight: Tensor = target.get_input_embeddings().weight if own is None else own
    root = math.sqrt(weight.shape[1])
    for factor, text in ((root, "times"), (1 / root, "over")):
        yield Misconfiguration(
            f"the embedding lacks a scale: the heads were trained with it {text} the root of its width",
            f"add the scaled embedding to the heads' tensors, as {name}",
            change=lambda heads, factor=factor: heads.with_tensors({name: weight.detach().cpu() * factor}),
        )


def _swapped_inputs(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield the projection of [embedding; feature] with its halves swapped."""
    for key in [
        key for key in checkpoint.tensors if key.endswith(("fc.weight", "eh_proj.weight", "input_proj.weight"))
    ]:
        weight = checkpoint.tensors[key]
        if weight.dim() == 2:
            halves = torch.cat(list(weight.chunk(2, 1))[::-1], 1)
            yield Misconfiguration(
                f"the inputs of {key} are swapped: it reads the feature first, then the embedding",
                f"swap the halves of the columns of {key}",
                change=lambda heads, key=key, halves=halves: heads.with_tensors({key: halves}),
            )


def _eagle3_norms(checkpoint: Checkpoint, layers: int) -> Iterator[Misconfiguration]:
    """Yield heads with and without norms of the features of ``layers`` layers, and with another residual."""
    config = merged_config(checkpoint)
    before = bool(config.get("norm_before_residual", False))
    yield Misconfiguration(
        f"the residual of the first layer is taken {'before' if before else 'after'} the norm of the feature",
        f"write norm_before_residual: {str(not before).lower()} into the heads' config.json",
        change=lambda heads: with_options(heads, norm_before_residual=not before),
    )
    configured = config.get("norm_output")
    for mistake, value in (
        ("the normed output is fed back", True),
        ("the output before its norm is fed back", None),
        ("the head reads the output without its norm", False),
    ):
        if value == configured or (value is False and any(key in config for key in FEEDS_NORMED)):
            continue  # the current value, or one without meaning in these heads
        yield Misconfiguration(
            mistake,
            f"write norm_output: {json.dumps(value)} into the heads' config.json",
            change=partial(with_options, norm_output=value),
        )
    normed = ("input_norm.", "fc_norm.", "model.input_norm.", "model.fc_norm.")
    fc = checkpoint.tensors.get(_name(checkpoint, "fc.weight"))
    if any(key.startswith(normed) for key in checkpoint.tensors):
        disabled = {key: False for key in ("norm_before_fc", "fc_norm") if config.get(key)}
        yield Misconfiguration(
            "features are not normed before fc",
            "leave the norm before fc out of the heads' tensors",
            change=lambda heads: with_options(heads.with_tensors({}, normed), **disabled),
        )
    elif fc is not None:
        width = fc.shape[1] // layers
        ones_norm = {"input_norm.weight": torch.ones(fc.shape[1], dtype=fc.dtype)}
        each = {f"fc_norm.{i}.weight": torch.ones(width, dtype=fc.dtype) for i in range(layers)}
        for how, norms in (("together", ones_norm), ("layer by layer", each)):
            yield Misconfiguration(
                f"features are normed before fc, {how}",
                f"add the norms to the heads' tensors, as {', '.join(norms)}",
                change=methodcaller("with_tensors", norms),
            )


def _shifted_heads(checkpoint: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
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


#: Functions of the heads and the target that yield misconfigurations, by drafter.
_OF_LAYERS = (_rotary_embeddings, _draft_vocabulary, _other_embedding, _other_logits)
_TRIED: dict[str, tuple[Callable[[Checkpoint, Any], Iterator[Misconfiguration]], ...]] = {
    "medusa": (_shifted_heads,),
    "eagle": (_swapped_inputs, _rotary_embeddings, _other_embedding, _other_logits, _other_window, _embedding_scales),
    "mtp": (_swapped_inputs, _other_embedding),
    "eagle3": (*_OF_LAYERS, _other_window),
    "p-eagle": (*_OF_LAYERS, _other_window),
    "dflash": _OF_LAYERS,
    "dspark": _OF_LAYERS,
}


def misconfigurations(drafter: Any, config: Any, heads: Checkpoint, target: Any) -> Iterator[Misconfiguration]:
    """Yield common misconfigurations of published heads, then those that the class of the drafter adds."""
    if drafter.name in ("eagle3", "p-eagle", "dflash", "dspark"):
        depth = target.config.get_text_config().num_hidden_layers
        read = [
            int(i * depth) if isinstance(i, float) else i if i == -1 else i % (depth + 1)
            for i in drafter.layers(config)
        ]
        yield from _other_layers(read, depth)
        yield from _other_last_state(read, depth)
        if drafter.name in ("eagle3", "p-eagle"):
            yield from _eagle3_norms(heads, len(read))
    for tried in _TRIED.get(drafter.name, ()):
        yield from tried(heads, target)
    yield from drafter.misconfigurations(config, heads, target)
