"""Checkpoints of drafting heads: a config and tensors by name, in any published layout.

Heads read the target's features and are published as bare tensors in a dozen layouts, many as PyTorch files. This
module reads the tensors; drafters recognise the layout by its keys. PyTorch files are read with ``weights_only=True``,
so pickles that could run code are rejected.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.models import Checkpoint
from ..errors import ModelError, first_line
from ..util.input_files import kind_of
from .configs import INDEX, read_config, weight_map
from .digests import weight_files, weights_sha256
from .resolve import resolve

if TYPE_CHECKING:
    from torch import Tensor


def load_checkpoint(name: str) -> Checkpoint:
    """Load the heads ``name``: a registered name, a directory or a Hub id, see :func:`resolve`.

    Safetensors take precedence over PyTorch files.

    Raises:
        UsageError, UnknownNameError: invalid or unknown name.
        ModelError: missing heads, or files that are damaged, incomplete or contain more than tensors.
    """
    resolved = resolve(name, heads=True)
    path = resolved.path
    config = read_config(path)
    files = weight_files(path)
    if files and files[0].suffix == ".safetensors":
        tensors: Mapping[str, Tensor] = Shards(_files(path, files))
    else:
        tensors = {}
        for file in files:
            file_tensors = _load_pytorch(file)
            _check_duplicates(path, file, file_tensors.keys() & tensors.keys())
            tensors |= file_tensors
    if not tensors:
        raise ModelError(f"{path} does not contain tensors; give a directory of heads")
    return Checkpoint(name, path, config, tensors, resolved.source, weights_sha256(path))


class Shards(Mapping[str, "Tensor"]):
    """Lazily read tensors of safetensors files by name, so that a module of a large checkpoint is read by itself.

    Args:
        files: tensor name -> file.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._files = files
        self._open: dict[Path, Any] = {}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            file = self._files[name]
            if file not in self._open:
                self._open[file] = _open_safetensors(file)
            try:
                self._read[name] = self._open[file].get_tensor(name)
            except Exception as error:  # of safetensors, the disk
                raise ModelError(f"{file} is damaged, or {name} is missing: {first_line(error)}") from None
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files(path: Path, files: list[Path]) -> dict[str, Path]:
    """Tensor name -> file; indexed files are not opened."""
    index, file_of = path / INDEX, {}
    if kind_of(index):
        file_of = {name: path / shard for name, shard in weight_map(index).items()}
    for file in sorted(set(files) - set(file_of.values())):
        names = list(_open_safetensors(file).keys())
        _check_duplicates(path, file, file_of.keys() & set(names))
        file_of |= dict.fromkeys(names, file)
    return file_of


def _check_duplicates(path: Path, file: Path, duplicates: set[str]) -> None:
    if duplicates:
        raise ModelError(
            f"{path} contains {min(duplicates)} in several files ({file.name} is one); remove the duplicates"
        )


def _open_safetensors(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, "pt")
    except Exception as error:  # of safetensors, struct, the disk
        raise ModelError(f"{file} is damaged or not a safetensors file: {first_line(error)}") from None


def _load_pytorch(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"{file} is a pickle of more than tensors, which could run code when loaded; if you trust it, convert it "
            "to safetensors"
        ) from None
    except Exception as error:  # of zipfile, struct, the disk, pickle
        raise ModelError(f"{file} is damaged or not a PyTorch file: {first_line(error)}") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ModelError(f"{file} is not a dictionary of tensors, as heads must be")
    return {str(key): tensor for key, tensor in tensors.items()}
