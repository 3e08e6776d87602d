"""Checkpoints of drafting heads: a config and tensors by name, in any published layout.

Heads read the target's features and are published as bare tensors in a dozen layouts, many as PyTorch files. This
module reads the tensors; drafters recognise the layout by its keys. PyTorch files are read with ``weights_only=True``,
so pickles that could run code are rejected.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.models import Checkpoint
from ..errors import ModelError, first_line
from ..util.input_files import kind_of
from .configs import INDEX, read_config, weight_map
from .digests import weight_files, weights_sha256
from .resolve import listed, resolve

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)
#: Files of all weights, by their writers' usual names.
_MAIN = ("model.safetensors", "pytorch_model.bin")


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
    tensors = _tensors(path, weight_files(path))
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


def _tensors(path: Path, files: list[Path]) -> Mapping[str, Tensor]:
    """The tensors of ``files``; those of safetensors are read lazily, and indexed files are not opened.

    The files of an index or, without one, `_MAIN` take precedence: another file that repeats one of their tensors is
    left out with a remark.
    """
    index = path / INDEX
    lazy = bool(files) and files[0].suffix == ".safetensors"
    file_of = {name: path / shard for name, shard in weight_map(index).items()} if lazy and kind_of(index) else {}
    loaded: dict[Path, dict[str, Tensor]] = {}
    main, left_out = set(file_of.values()) or {path / name for name in _MAIN} & set(files), []
    for file in sorted(set(files) - set(file_of.values()), key=lambda file: (file not in main, file)):
        if not lazy:
            loaded[file] = _load_pytorch(file)
        names = set(_open_safetensors(file).keys() if lazy else loaded[file])
        if duplicates := file_of.keys() & names:
            if not main:
                raise ModelError(
                    f"{path} contains {min(duplicates)} in several files ({file.name} is one); remove the duplicates"
                )
            left_out.append(file.name)
        else:
            file_of |= dict.fromkeys(names, file)
    if left_out:
        kept = listed(file.name for file in main)
        logger.warning("crossdraft: %s: %s is left out, as it repeats tensors of %s", path, listed(left_out), kept)
    return Shards(file_of) if lazy else {name: loaded[file][name] for name, file in file_of.items()}


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
