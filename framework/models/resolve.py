"""Finding a model by name: a registered name, a directory or another backend's file, or a Hub id.

`resolve` turns a name into a path on this machine, fetching it if it must.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..contracts.models import TRANSFORMERS, ModelSource, ResolvedModel
from ..errors import ModelError, UnknownNameError, UsageError, first_line, printable, quoted
from ..util.input_files import kind_of, path_of, refuse_special_files
from ..util.limits import SETTINGS_BYTES
from .configs import shards_of
from .digests import PYTORCH_FILES
from .quantization import refuse_quantized, split

#: Files that transformers and tokenizers read whole.
_READ_WHOLE = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def resolve(name: str, *, heads: bool = False) -> ResolvedModel:
    """Find the model called `name`, fetching it if necessary.

    `name` is, in this order: a registered name, an existing path, any of them with ``@int8``, ``@int4`` or ``@fp8``
    behind it (`models.quantization`), a Hub id ``org/name`` (or ``org/name@revision``).
    `heads`: what is wanted is not a model of its own but heads for another one, which are published as PyTorch files
    too (see :mod:`crossdraft.framework.models.checkpoint`).

    Raises:
        UsageError: a name that cannot be any of these.
        ModelError: a model that is not whole, not safetensors, or cannot be fetched.
    """
    registered = plugins.entries("models")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{quoted(name)} is no name of a model; write a name, a directory, or a Hub id (org/name)")
    if name in registered:
        return _from_registered(name, heads)
    if kind_of(name):
        return from_path(name, path_of(name), heads=heads)
    stem, quantization = split(name)
    if quantization:
        found = resolve(stem, heads=heads)
        if heads or found.backend != TRANSFORMERS:
            what = "heads and what training starts from" if heads else f"models of the backend {found.backend}"
            refuse_quantized(name, f"{what} cannot be quantised as they are loaded")
        if found.quantization:
            raise UsageError(f"{printable(name)} is quantised twice; leave out one of the two")
        source = f"{found.source}, quantised to {quantization} as it is loaded"
        return replace(found, name=name, source=source, quantization=quantization)
    if name.startswith(("/", ".", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1:
        here = f"check the path (it is relative to {Path.cwd()})"
        raise UsageError(f"there is no model directory {printable(name)}; {here}")
    if _HUB_ID.fullmatch(name):
        return from_hub(name, name, heads=heads)
    raise UnknownNameError.among("model", name, registered, "Or give a directory, or a Hub id (org/name).")


def from_path(name: str, path: Path, source: str = "", *, heads: bool = False) -> ResolvedModel:
    """The model at `path`: of the backend that takes it, else a directory of transformers, see `from_directory`."""
    if not heads and kind_of(path / "config.json") != "file":
        for backend in plugins.entries("backends"):
            if backend != TRANSFORMERS and _takes(backend, path):
                what = "directory" if path.is_dir() else "file"
                return ResolvedModel(name, path, source or f"{what} {path.resolve()}", backend=backend)
    if kind_of(path) in ("file", "other"):
        raise UsageError(
            f"{printable(name)} is a file that no installed backend takes; a model is a directory with config.json and "
            "safetensors weights"
        )
    return from_directory(name, path, source, heads=heads)


def from_directory(name: str, path: Path, source: str = "", *, heads: bool = False) -> ResolvedModel:
    """The model in the directory `path`. Raises `ModelError` if it is not whole, or not safetensors."""
    if kind_of(path) != "directory":
        raise ModelError(f"the directory of {printable(name)}, {path}, does not exist")
    check_entries(path)
    if kind_of(path / "config.json") != "file":
        raise ModelError(f"{path} is no model directory: it has no config.json")
    index = path / "model.safetensors.index.json"
    if kind_of(index):
        if absent := [shard for shard in shards_of(index) if not (path / shard).is_file()]:
            raise ModelError(f"{path} is not whole: it lacks {listed(absent)}")
    elif not any(path.glob("*.safetensors")) and not (heads and any(any(path.glob(p)) for p in PYTORCH_FILES)):
        raise ModelError(
            f"{path} has no safetensors weights. Pickled weights (.bin, .pt) can run code, so they are not "
            "loaded; where you trust them, convert them once: "
            "AutoModelForCausalLM.from_pretrained(OLD, use_safetensors=False).save_pretrained(NEW)"
        )
    return ResolvedModel(name, path, source or f"directory {path.resolve()}")


def check_entries(path: Path) -> None:
    """Refuse a model directory in which a library would wait for ever or fill the memory. Raises ModelError."""
    refuse_special_files(path, error=ModelError)
    for pattern in _READ_WHOLE:
        for file in path.glob(pattern):
            if file.is_file() and (reason := SETTINGS_BYTES.refusal(size := file.stat().st_size)):
                raise ModelError(f"cannot read {printable(str(file))}: it has {size} bytes; {reason}")


def from_hub(name: str, hub_id: str, *, heads: bool = False) -> ResolvedModel:
    """The Hub model ``org/name`` or ``org/name@revision``, downloaded if the Hub's cache lacks it."""
    from huggingface_hub import errors, snapshot_download

    parts = _HUB_ID.fullmatch(hub_id)
    if parts is None:
        raise UsageError(f"{hub_id!r} is not a Hub id; write org/name or org/name@revision")
    try:
        path = snapshot_download(
            parts["id"],
            revision=parts["revision"],
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", *PYTORCH_FILES * heads],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except errors.GatedRepoError:
        reason = "its owner asks you to accept a licence: do so on its page, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such public model; check the spelling, or run `hf auth login` if it is private"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {parts['revision']!r}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = (
            "it is not in the local cache and the Hub cannot be reached; connect (and unset HF_HUB_OFFLINE), "
            "or give a directory"
        )
    except Exception as error:  # the Hub's, the network's and the disk's
        reason = first_line(error)
    else:
        return ResolvedModel(
            name,
            from_directory(name, Path(path), heads=heads).path,
            f"Hub {parts['id']} at {Path(path).name}",
            parts["id"],
        )
    raise ModelError(f"the model {hub_id} could not be fetched: {reason}")


def _takes(backend: str, path: Path) -> bool:
    made = plugins.get("backends", backend)
    with plugins.guarded("backends", backend, "takes()"):
        return bool(made().takes(path))


def _from_registered(name: str, heads: bool) -> ResolvedModel:
    found: Any = plugins.get("models", name)
    with plugins.guarded("models", name):
        # A ModelSource may well be callable; a function gives one, or a path.
        found = found() if callable(found) and not isinstance(found, ModelSource) else found
    if isinstance(found, ModelSource):
        with plugins.guarded("models", name, "fetch()"):
            found = found.fetch(name)
        if not isinstance(found, ResolvedModel):
            raise plugins.unusable("models", name, f"fetch() must return a ResolvedModel, not {quoted(found)}")
        return found
    if not isinstance(found, str | Path):
        raise plugins.unusable("models", name, f"its function must give a path or a ModelSource, not {quoted(found)}")
    return from_path(name, Path(found), f"plug-in {plugins.entries('models')[name].provider}", heads=heads)


def listed(names: Iterable[str]) -> str:
    """At most eight names, for a sentence."""
    shown = sorted(names)
    return (", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")) or "none"
