"""Digests: which weights a result was made with."""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..util.output_files import cache_dir, replace_text
from .quantization import quantizer

if TYPE_CHECKING:
    import torch

    from ..contracts.models import ResolvedModel

#: PyTorch's own files, which heads are also published as.
PYTORCH_FILES = ("*.bin", "*.pt", "*.pth")
#: Files that are for people.
_PROSE = (".md", ".gitattributes", ".gitignore")
#: Files of fewer bytes are read again by every process: that takes no longer than it is worth.
_LARGE = 64 * 2**20
#: A file that was changed so few nanoseconds ago may change again without its times showing it.
_SETTLED = 2 * 10**9


def embedding_sha256(weight: torch.Tensor) -> str:
    """The SHA-256 of a weight rounded to bfloat16, row by row, little-endian.

    Rounded, so that a model has one digest whether it is loaded in float32 or in bfloat16.
    """
    import torch

    bits = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
    return hashlib.sha256(bits.astype("<i2", copy=False).tobytes()).hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The files with weights of a model directory: safetensors where there are any, else PyTorch's."""
    return sorted(directory.glob("*.safetensors")) or sorted(f for p in PYTORCH_FILES for f in directory.glob(p))


def weights_sha256(path: Path) -> str:
    """The SHA-256 of a file; of a directory's safetensors file, or of ``sha256sum *.safetensors`` if there are several.

    Heads that have none: of their PyTorch files. A directory of another backend: of all its files.
    Large files are read once, not once a process, see `_remembered_sha256`.
    """
    files = [path] if path.is_file() else weight_files(path)
    files = files or sorted(file for file in path.iterdir() if file.is_file())
    digests = [_remembered_sha256(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def model_sha256(found: ResolvedModel) -> str:
    """What results call the weights of a model: `weights_sha256`, and what they are quantised to, by which version."""
    digest = weights_sha256(found.path)
    return f"{digest}+{found.quantization} by {quantizer()}" if found.quantization else digest


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file; read again only where its size or its time has changed."""
    status = file.stat()
    return _file_sha256(file, status.st_size, status.st_mtime_ns)


def settings_sha256(path: Path) -> str:
    """The SHA-256 of everything in a model's directory that decides what it says, beside the weights: config,
    generation config, tokenizer, chat template, code of its own. Empty for a model that is a file."""
    if not path.is_dir():
        return ""
    weights = {*weight_files(path), *(file for pattern in PYTORCH_FILES for file in path.glob(pattern))}
    files = sorted(f for f in path.iterdir() if f.is_file() and f not in weights and f.suffix.lower() not in _PROSE)
    listing = ((file.name, file_sha256(file)) for file in files)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in listing).encode()).hexdigest()


def _remembered_sha256(file: Path) -> str:
    """`file_sha256`, for large files kept in the cache directory by path, size, times and inode.

    Whoever checks a file for damage takes `file_sha256`, which believes nothing that another process wrote.
    """
    whole = file.resolve()
    before = whole.stat()
    if before.st_size < _LARGE:
        return file_sha256(file)
    # The time of the inode too: a copy over the file may bring the old file's own time along.
    key = (os.fspath(whole), before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino, before.st_dev)
    place = cache_dir() / "digests" / hashlib.sha256(repr(key).encode(errors="surrogatepass")).hexdigest()
    try:
        found = place.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        found = ""
    if re.fullmatch("[0-9a-f]{64}\n", found):
        return found.strip()
    settled = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED
    digest = file_sha256(file)
    after = whole.stat()
    if settled and (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == key[1:4]:
        with suppress(OSError):  # a cache that cannot be written costs time alone
            replace_text(place, digest + "\n")
    return digest


@lru_cache(maxsize=256)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    """The digest of a file; its size and time are in the key, so that a changed file is read again."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
