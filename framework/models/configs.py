"""``config.json`` and the index of shards, read before anything is built from them.

transformers builds every layer that a config asks for before it looks at a weight, and reads most numbers without
looking: a text for a number, a zero or a layer count of 10^9 would end in whatever happens then.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted
from ..util.input_files import UNPRINTABLE, flaw, kind_of, read_json
from ..util.limits import CONFIG_BYTES, INDEX_BYTES, MOST_LAYERS, MOST_WIDTH, Limit

#: What families call the number of their layers, and the sides of their matrices.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_nextn_predict_layers")
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "dim", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"),
    *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("word_embed_proj_dim", "shared_expert_intermediate_size", "max_position_embeddings", "n_positions"),
)
#: Those of matrices that every model of the family has.
_SIDES = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "vocab_size", "n_positions")
#: Counts that may be none, or 0: experts of a model without, a window that is off.
_COUNTS = ("num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step", "sliding_window")
_MOST_POSITIONS = Limit(2**31 - 1, "positions are counted in 32 bits")


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model directory. Raises ModelError, with the key, for one that no model can have."""
    file = directory / "config.json"
    return checked_config(read_json(file, CONFIG_BYTES, error=ModelError), str(file))


def checked_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """``config``, if its sizes can be those of a model, in the configs inside it too (``text_config``)."""
    waiting = [("", config)]
    while waiting:
        above, found = waiting.pop()
        for key, value in found.items():
            path = f"{above}{key}"
            if problem := _problem(key, value):
                raise ModelError(f"{where}: {path} is {quoted(value)}; {problem}")
            if isinstance(value, dict):
                waiting.append((f"{path}.", value))
    return config


def _problem(key: str, value: Any) -> str | None:
    if key == "rope_theta" and value is not None:
        positive = type(value) in (int, float) and 0 < value < math.inf
        return None if positive else "it has to be a positive number"
    if key not in (*_LAYERS, *_WIDTHS, *_COUNTS) or value is None:
        return None
    if key in _COUNTS and value is False:
        return None
    least = 0 if key in _COUNTS or key == "num_nextn_predict_layers" else 1
    if type(value) is not int or value < least:
        return f"it has to be a whole number, {least} at least"
    most = MOST_LAYERS if key in _LAYERS else _MOST_POSITIONS if "position" in key or "window" in key else MOST_WIDTH
    return most.refusal(value)


def check_against_weights(directory: Path, config: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
    """Refuse a config that asks for more layers than there are tensors, or for a matrix larger than any of them.

    transformers fills what it does not find with numbers of its own before it complains, however large it is.

    Args:
        without: sizes of what the weights leave out.

    Raises:
        ModelError. Damaged files are for the loader to tell.
    """
    from safetensors import safe_open

    layers = max((config[key] for key in _LAYERS if config.get(key) is not None), default=0)
    shapes: dict[str, list[int]] = {}
    try:
        for file in directory.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except Exception:
        return
    where, longest = directory / "config.json", max((side for shape in shapes.values() for side in shape), default=0)
    if layers > len(shapes):
        raise ModelError(f"{where} says {layers} layers, but its weights are {len(shapes)} tensors")
    for key, size in config.items():
        if key in _SIDES and key not in without and size is not None and size > longest:
            raise ModelError(
                f"{where} says {key} {size}, but no tensor of its weights has a side longer than {longest}"
            )


def check_files(directory: Path) -> None:
    """Refuse what transformers would do without: files of settings that are there and cannot be read. ModelError."""
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if kind_of(directory / name):
            read_json(directory / name, CONFIG_BYTES, error=ModelError)


def shards_of(index: Path) -> set[str]:
    """The files that ``model.safetensors.index.json`` names. Raises ModelError for an index that is none."""
    return set(weight_map(index).values())


def weight_map(index: Path) -> dict[str, str]:
    """The file of each weight, by ``model.safetensors.index.json``. Raises ModelError for an index that is none."""
    found = read_json(index, INDEX_BYTES, error=ModelError).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index}: it has no weight_map, the mapping of every weight to its file")
    for weight, shard in found.items():
        if not isinstance(shard, str) or flaw(shard, UNPRINTABLE) or Path(shard).name != shard or len(shard) > 255:
            raise ModelError(
                f"{index}: the file of the weight {quoted(weight)} is {quoted(shard)}; it names one beside it"
            )
    return found
