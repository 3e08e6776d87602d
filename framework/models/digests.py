"""SHA-256 digests of weights and settings, for provenance."""

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

#: PyTorch files of published heads.
SAFETENSORS, PYTORCH_FILES = ("*.safetensors",), ("*.bin", "*.pt", "*.pth")
#: Files beside weights: the state of a training, and the same weights by Mistral's names.
_NOT_WEIGHTS = re.compile("training_|trainer_|optimizer|scheduler|rng_state|random_states|consolidated")
#: Suffixes of files without influence on the model.
_PROSE = (".md", ".gitattributes", ".gitignore")
#: Minimum bytes of files whose digests are cached on disk.
_LARGE = 64 * 2**20
#: Nanoseconds after a change in which a file may change again without new timestamps.
_SETTLED = 2 * 10**9


def embedding_sha256(weight: torch.Tensor) -> str:
    """SHA-256 of a weight rounded to bfloat16 (row-major, little-endian), equal for float32 and bfloat16 models."""
    import torch

    bits = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
    return hashlib.sha256(bits.astype("<i2", copy=False).tobytes()).hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """Weight files of a model directory: safetensors if there are any, else PyTorch files; `_NOT_WEIGHTS` last."""
    kinds = [sorted({f for p in patterns for f in directory.glob(p)}) for patterns in (SAFETENSORS, PYTORCH_FILES)]
    own = [[file for file in files if not _NOT_WEIGHTS.match(file.name)] for files in kinds]
    return next((files for files in (*own, *kinds) if files), [])


def weights_sha256(path: Path) -> str:
    """SHA-256 of a file or of a directory's safetensors file; of ``sha256sum *.safetensors`` for several files.

    Without safetensors, of the PyTorch files; otherwise of all files. Digests of large files are cached, see
    `_cached_sha256`.
    """
    files = [path] if path.is_file() else weight_files(path)
    files = files or sorted(file for file in path.iterdir() if file.is_file())
    digests = [_cached_sha256(file) for file in files]
    if len(digests) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def model_sha256(model: ResolvedModel) -> str:
    """`weights_sha256` of a model, for results; with quantization and the version of the quantizer, or the adapter.

    The digest of an adapter is that of its weights and settings.
    """
    digest = weights_sha256(model.path)
    if model.adapter is not None:
        parts = f"{weights_sha256(model.adapter)}\n{settings_sha256(model.adapter)}\n"
        return f"{digest}+{hashlib.sha256(parts.encode()).hexdigest()}"
    return f"{digest}+{model.quantization} by {quantizer()}" if model.quantization else digest


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, cached in memory by size and time."""
    status = file.stat()
    return _file_sha256(file, status.st_size, status.st_mtime_ns)


def settings_sha256(path: Path) -> str:
    """SHA-256 of all files besides the weights that influence the output; empty for a model that is a file.

    These are config, generation config, tokenizer, chat template and custom code.
    """
    if not path.is_dir():
        return ""
    weights = {file for pattern in (*SAFETENSORS, *PYTORCH_FILES) for file in path.glob(pattern)}
    files = sorted(f for f in path.iterdir() if f.is_file() and f not in weights and f.suffix.lower() not in _PROSE)
    listing = ((file.name, file_sha256(file)) for file in files)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in listing).encode()).hexdigest()


def _cached_sha256(file: Path) -> str:
    """`file_sha256`, cached on disk for large files by path, size, times and inode.

    Integrity checks use `file_sha256`, which does not trust the disk cache.
    """
    resolved_file = file.resolve()
    status = resolved_file.stat()
    if status.st_size < _LARGE:
        return file_sha256(file)
    # ctime too: a copy over the file may preserve mtime.
    key = (
        os.fspath(resolved_file),
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )
    cache_file = cache_dir() / "digests" / hashlib.sha256(repr(key).encode(errors="surrogatepass")).hexdigest()
    try:
        digest = cache_file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        digest = ""
    if re.fullmatch("[0-9a-f]{64}\n", digest):
        return digest.strip()
    settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED
    digest = file_sha256(file)
    status_after = resolved_file.stat()
    if settled and (status_after.st_size, status_after.st_mtime_ns, status_after.st_ctime_ns) == key[1:4]:
        with suppress(OSError):  # an unwritable cache costs only time
            replace_text(cache_file, digest + "\n")
    return digest


@lru_cache(maxsize=256)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    """Digest of a file; size and time are part of the cache key."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
