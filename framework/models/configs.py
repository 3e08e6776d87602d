"""Validation of ``config.json`` and the shard index before a model is built.

transformers builds all layers of a config before it reads weights, and does not validate most numbers: a string, a zero
or 10^9 layers would fail in arbitrary ways.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted
from ..util.input_files import UNPRINTABLE, describe_forbidden_char, kind_of, read_json
from ..util.limits import CONFIG_BYTES, INDEX_BYTES, MOST_LAYERS, MOST_WIDTH, Limit

#: Config keys of the number of layers, and of matrix sizes.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_nextn_predict_layers")
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "dim", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"),
    *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("word_embed_proj_dim", "shared_expert_intermediate_size", "max_position_embeddings", "n_positions"),
)
#: Keys of sizes that appear as a tensor side.
_SIDES = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "vocab_size", "n_positions")
#: Counts that may be null or 0, such as experts or sliding windows.
_COUNTS = ("num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step", "sliding_window")
#: Files of a model without its token embedding, see `shared_embedding`: a reference to the embedding's owner, the
#: weights, and the index that lists the embedding in a file that does not exist, so that other loaders fail.
SHARED = "crossdraft.json"
COMPACT_WEIGHTS = "model-without-embedding.safetensors"
INDEX = "model.safetensors.index.json"
LEFT_OUT = "embedding-left-out-run-crossdraft-train-export.safetensors"
_MOST_POSITIONS = Limit(2**31 - 1, "positions are counted in 32 bits")


def read_config(place: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a model directory, or this file, and check its sizes, those of nested configs, too.

    Raises ModelError with the key of an invalid value.
    """
    file = place / "config.json" if place.is_dir() else place
    config = read_json(file, CONFIG_BYTES, error=ModelError)
    stack = [("", config)]
    while stack:
        prefix, nested = stack.pop()
        for key, value in nested.items():
            path = f"{prefix}{key}"
            if error := _error_of(key, value):
                raise ModelError(f"{file}: {path} is {quoted(value)}; {error}")
            if isinstance(value, dict):
                stack.append((f"{path}.", value))
    return config


def _error_of(key: str, value: Any) -> str | None:
    if key == "rope_theta" and value is not None:
        positive = type(value) in (int, float) and 0 < value < math.inf
        return None if positive else "it must be a positive number"
    if key not in (*_LAYERS, *_WIDTHS, *_COUNTS) or value is None:
        return None
    if key in _COUNTS and value is False:
        return None
    lowest = 0 if key in _COUNTS or key == "num_nextn_predict_layers" else 1
    if type(value) is not int or value < lowest:
        return f"it must be an integer of at least {lowest}"
    highest = MOST_LAYERS if key in _LAYERS else _MOST_POSITIONS if "position" in key or "window" in key else MOST_WIDTH
    return highest.violation(value)


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in the files that transformers loads, from their headers.

    Empty if a file is damaged, which is left to the loader.
    """
    from safetensors import safe_open

    index, single = directory / INDEX, directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if kind_of(index) and not single.is_file():
        files = [directory / name for name in shards_of(index) if (directory / name).is_file()]
    shapes: dict[str, list[int]] = {}
    try:
        for file in files:
            with safe_open(file, "pt") as shard:
                shapes |= {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118
    except Exception:
        return {}
    return shapes


def check_against_weights(
    directory: Path, config: dict[str, Any], shapes: dict[str, list[int]], *, without: tuple[str, ...] = ()
) -> None:
    """Reject a config with more layers than tensors, or with a size larger than any tensor.

    transformers allocates and initialises missing weights of any size before it reports them.

    Args:
        shapes: `tensor_shapes` of ``directory``.
        without: size keys of tensors that are omitted from the weights.

    Raises:
        ModelError: the config does not match the weights.
    """
    if not shapes:
        return
    layers = max((config[key] for key in _LAYERS if config.get(key) is not None), default=0)
    source, longest = directory / "config.json", max((side for shape in shapes.values() for side in shape), default=0)
    if layers > len(shapes):
        raise ModelError(f"{source} has {layers} layers, but the weights have only {len(shapes)} tensors")
    for key, size in config.items():
        if key in _SIDES and key not in without and size is not None and size > longest:
            raise ModelError(f"{source} has {key} {size}, but the largest dimension of its weights is {longest}")


def check_files(directory: Path) -> None:
    """Raise ModelError for unreadable settings files, which transformers would ignore."""
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if kind_of(directory / name):
            read_json(directory / name, CONFIG_BYTES, error=ModelError)


def shards_of(index: Path) -> set[str]:
    """Files listed in ``model.safetensors.index.json``. Raises ModelError for an invalid index."""
    return set(weight_map(index).values())


def weight_map(index: Path) -> dict[str, str]:
    """Weight -> file, from ``model.safetensors.index.json``. Raises ModelError for an invalid index."""
    files = read_json(index, INDEX_BYTES, error=ModelError).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{index}: weight_map, the mapping from weights to files, is missing or empty")
    for weight, shard in files.items():
        if (
            not isinstance(shard, str)
            or describe_forbidden_char(shard, UNPRINTABLE)
            or Path(shard).name != shard
            or len(shard) > 255
        ):
            raise ModelError(
                f"{index}: the file of the weight {quoted(weight)} is {quoted(shard)}; it must be a file name in the "
                "same directory"
            )
    return files
