"""GGUF files as models: transformers' reader dequantises a file once, into a directory of the cache.

A directory is keyed by the digest of the file and the version of transformers. It appears in one rename, so another
process or an interrupted conversion never leaves part of a model; the digests of its files are recorded and checked
whenever it is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ModelError, first_line, printable
from ..plugins import installing
from ..util.extras import need
from ..util.output_files import cache_dir
from .digests import weights_sha256

_MANIFEST = "crossdraft-source.json"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BACKEND = f"or install crossdraft-llamacpp, which runs the file as it is ({installing('crossdraft-llamacpp')})"
#: Keys of the metadata that change what a model computes, and which transformers does not read for each architecture.
_COMPUTES = re.compile(r"\.(?:rope\.scaling\.(?:type|factor)|\w+_scale|attention\.sliding_window)$|softcapping$")
_ENDS = ("eos", "eot", "eom")  # that end a text, the tokenizer's own first


def is_gguf(path: Path) -> bool:
    """True if the file ``path`` begins as GGUF files do."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def from_gguf(name: str, file: Path) -> Path:
    """Return the directory of the model in the GGUF file ``file``, converted if the cache does not have it.

    Raises:
        ModelError: gguf is not installed, or transformers cannot convert the file rightly.
    """
    import transformers

    if _PART.search(file.stem):
        raise ModelError(f"{printable(name)} is one part of a GGUF model; merge the parts (llama-gguf-split --merge)")
    source = {"sha256": weights_sha256(file), "transformers": transformers.__version__}
    directory = cache_dir() / "gguf" / f"{source['sha256'][:32]}-{source['transformers']}"
    try:
        return cached_directory(directory, source, lambda into: convert(file, into))
    except OSError as error:
        raise ModelError(
            f"{printable(name)} could not be converted: {error}; CROSSDRAFT_CACHE sets another directory, {_BACKEND}"
        ) from None


def convert(file: Path, into: Path) -> None:
    """Write the model of a GGUF file to the directory ``into``, dequantised.

    The model is in memory once, in float32. Its files are in bfloat16 or float16 if that represents every weight
    exactly, else in float32.

    Raises:
        ModelError: as `from_gguf`.
        OSError: the disk is full.
    """
    try:
        need(f"{printable(file.name)} is a GGUF file: reading it", "gguf", "gguf", "accelerate", error=ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; {_BACKEND}") from None
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        # In a directory of its own: transformers would read the files beside it, too.
        options: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
        Path(folder, "model.gguf").symlink_to(file.resolve())
        try:
            reader = GGUFReader(file)
            _announce(file, into.parent, 4 * sum(int(tensor.n_elements) for tensor in reader.tensors))
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model: Any
            model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                dtype=torch.float32,
                # Otherwise the dense model is marked as quantised and cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                use_safetensors=True,  # no pickled file beside it
                **options,
            )
        except ModelError:
            raise
        except Exception as error:  # readers raise various errors for unknown files
            raise _unreadable(file, first_line(error)) from error
        if lost := sorted({*loading["missing_keys"], *_unread(reader, model.config.to_dict())}):
            raise _unreadable(file, f"transformers does not read {', '.join(lost[:3])}, which changes the logits")
        fields = (reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
        if ends := list(dict.fromkeys(int(field.contents()) for field in fields if field is not None)):
            model.generation_config.eos_token_id = ends
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
        weights = list(model.parameters())
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(weight, weight.to(dtype).to(weight.dtype)) for weight in weights):
                model.to(dtype)
                break
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)


def _announce(file: Path, folder: Path, size: int) -> None:
    """Print that ``file`` is converted. Raises ModelError if ``folder`` does not have ``size`` bytes left."""
    free, needed = shutil.disk_usage(folder).free, f"up to {size / 1e9:.1f} GB in {folder}"
    if size > free:
        raise ModelError(
            f"converting {file} takes {needed}, which has {free / 1e9:.1f} GB left; set CROSSDRAFT_CACHE to a "
            f"directory on another disk, {_BACKEND}"
        )
    print(f"crossdraft: converting {printable(file.name)} to safetensors, once: {needed}", file=sys.stderr, flush=True)


def _unreadable(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} could not be converted: {why}; use the safetensors files of the model, {_BACKEND}")


def _unread(reader: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of metadata and tensors that change what the model computes and are not in ``config``."""
    values = [value for section in (config, config.get("rope_parameters") or {}) for value in section.values()]
    numbers = [value for value in values if isinstance(value, float)]
    for name, field in reader.fields.items():
        value = field.contents() if _COMPUTES.search(name) else None
        read = value in values or (isinstance(value, float) and any(abs(x - value) < 1e-6 for x in numbers))
        if value not in (None, 0, 1, "none") and not read:
            yield f"{name} ({value})"
    if values.count("default") and any(tensor.name.startswith("rope_f") for tensor in reader.tensors):
        yield "the factors of its rotary frequencies (rope_freqs)"


def cached_directory(directory: Path, source: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return ``directory``, built if it is missing, of another source or changed. One process builds it at a time.

    Args:
        source: what the files depend on, as JSON.
        build: creates the directory that it receives, and its files.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    if not _is_valid(directory, source):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            _remove_unfinished(directory)
            if not _is_valid(directory, source):  # not created by another process in the meantime
                _build(directory, source, build)
    elif _unfinished(directory):
        # Recreated by another process, or owned by another user: usable as it is.
        with suppress(Timeout, OSError), lock.acquire(timeout=0):
            _remove_unfinished(directory)
    return directory


def _is_valid(directory: Path, source: Mapping[str, Any]) -> bool:
    """True if the directory is from this source and all files are unchanged."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["source"] != source or manifest["files"].keys() != manifest["sha256"].keys():
            return False
        return all(
            (directory / file).stat().st_size == size and weights_sha256(directory / file) == manifest["sha256"][file]
            for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(directory: Path, source: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    """Build in a temporary directory, then rename it to ``directory``."""
    work = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        build(work / "model")
        files = sorted((work / "model").iterdir())
        manifest = {
            "source": source,
            "files": {file.name: file.stat().st_size for file in files},
            "sha256": {file.name: weights_sha256(file) for file in files},
        }
        (work / "model" / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if directory.exists():
            os.replace(directory, work / "broken")
        os.replace(work / "model", directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unfinished(directory: Path) -> list[Path]:
    """Temporary directories of unfinished builds next to ``directory``, of this user."""
    name = re.compile(rf"\.{re.escape(directory.name)}-[a-z0-9_]{{8}}")  # names of mkdtemp
    own = getattr(os, "getuid", lambda: None)()
    results = []
    for path in directory.parent.iterdir():
        with suppress(OSError):  # removed by its process
            if name.fullmatch(path.name) and path.is_dir() and own in (None, path.stat().st_uid):
                results.append(path)
    return results


def _remove_unfinished(directory: Path) -> None:
    """Remove temporary directories of killed processes. The caller holds the lock, so no build is running."""
    for path in _unfinished(directory):
        shutil.rmtree(path, ignore_errors=True)
