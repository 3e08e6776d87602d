"""Checkpoints of heads: a config and tensors by name, in whatever layout they were published.

Drafting heads are no models of their own: they read the target's features and come as bare tensors in a dozen
layouts, many of them as PyTorch files. This module reads the tensors; which layout they are in, the drafter that
knows it tells from the keys. PyTorch files are read with ``weights_only=True``: what is more than tensors, and could
run code, is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.models import Checkpoint
from ..errors import ModelError, first_line
from ..util.input_files import kind_of
from .configs import read_config, weight_map
from .digests import weight_files, weights_sha256
from .resolve import resolve

if TYPE_CHECKING:
    from torch import Tensor


def load_checkpoint(name: str) -> Checkpoint:
    """The heads called ``name``: a registered name, a directory or a Hub id, as :func:`resolve` reads it.

    Safetensors are preferred where both forms lie side by side.

    Raises:
        UsageError, UnknownNameError: a name that cannot be any of these.
        ModelError: no such heads, or files that are damaged, incomplete or more than tensors.
    """
    found = resolve(name, heads=True)
    path = found.path
    config = read_config(path)
    files = weight_files(path)
    if files and files[0].suffix == ".safetensors":
        tensors: Mapping[str, Tensor] = Shards(_places(path, files))
    else:
        tensors = {}
        for file in files:
            here = _pytorch(file)
            _once(path, file, here.keys() & tensors.keys())
            tensors |= here
    if not tensors:
        raise ModelError(f"{path} holds no tensors; is it a directory of heads?")
    return Checkpoint(name, path, config, tensors, found.source, weights_sha256(path))


class Shards(Mapping[str, "Tensor"]):
    """The tensors of safetensors files by name, each read when it is asked for, and kept.

    A module that lies in the checkpoint of a large model is read without the model.

    Args:
        places: the file of each tensor.
    """

    def __init__(self, places: Mapping[str, Path]):
        self._places = places
        self._open: dict[Path, Any] = {}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            file = self._places[name]
            if file not in self._open:
                self._open[file] = _opened(file)
            try:
                self._read[name] = self._open[file].get_tensor(name)
            except Exception as error:  # of safetensors, the disk
                raise ModelError(f"{file} is damaged, or lacks {name}: {first_line(error)}") from None
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _places(path: Path, files: list[Path]) -> dict[str, Path]:
    """The file of each tensor; of files that an index names, from the index alone."""
    index, places = path / "model.safetensors.index.json", {}
    if kind_of(index):
        places = {name: path / shard for name, shard in weight_map(index).items()}
    for file in sorted(set(files) - set(places.values())):
        names = list(_opened(file).keys())
        _once(path, file, places.keys() & set(names))
        places |= dict.fromkeys(names, file)
    return places


def _once(path: Path, file: Path, twice: set[str]) -> None:
    if twice:
        raise ModelError(f"{path} holds {min(twice)} in more than one file ({file.name} is one of them)")


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, "pt")
    except Exception as error:  # of safetensors, struct, the disk
        raise ModelError(f"{file} is damaged or no safetensors file: {first_line(error)}") from None


def _pytorch(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"{file} is a pickle of more than tensors, which could run code when it is read; convert it to safetensors "
            "where you trust it"
        ) from None
    except Exception as error:  # of zipfile, struct, the disk, and whatever a pickle's numbers lead to
        raise ModelError(f"{file} is damaged or no PyTorch file: {first_line(error)}") from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise ModelError(f"{file} does not hold tensors by name; heads are a dictionary of tensors")
    return {str(key): tensor for key, tensor in found.items()}
