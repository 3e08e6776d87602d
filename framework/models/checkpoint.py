"""Checkpoints of heads: a config and tensors by name, in whatever layout they were published.

Drafting heads are no models of their own: they read the target's features and come as bare tensors in a dozen
layouts, many of them as PyTorch files. This module reads the tensors; which layout they are in, the drafter that
knows it tells from the keys. PyTorch files are read with ``weights_only=True``: what is more than tensors, and could
run code, is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from ..contracts.errors import ModelError, first_line
from ..contracts.models import Checkpoint
from .configs import read_config
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
    tensors: dict[str, Tensor] = {}
    for file in files:
        here = _safetensors(file) if file.suffix == ".safetensors" else _pytorch(file)
        if twice := sorted(here.keys() & tensors.keys()):
            raise ModelError(f"{path} holds {twice[0]} in more than one file ({file.name} is one of them)")
        tensors |= here
    if not tensors:
        raise ModelError(f"{path} holds no tensors; is it a directory of heads?")
    return Checkpoint(name, path, config, tensors, found.source, weights_sha256(path))


def _safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(file)
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
