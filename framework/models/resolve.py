"""Resolution of model names to local paths: registered names, directories or files, Hub ids."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..contracts.models import TRANSFORMERS, ModelSource, ResolvedModel
from ..errors import ContractError, ModelError, UnknownNameError, UsageError, first_line, printable, quoted
from ..util.input_files import kind_of, path_of, refuse_special_files
from ..util.limits import SETTINGS_BYTES
from .adapters import CONFIG as ADAPTER_CONFIG
from .adapters import check_adapter, check_base, refuse_adapter, split_adapter
from .configs import INDEX, LEFT_OUT, SHARED, shards_of
from .digests import PYTORCH_FILES
from .gguf import from_gguf, is_gguf
from .quantization import refuse_quantized, split

#: Files that transformers and tokenizers read into memory.
_READ_WHOLE = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def resolve(name: str, *, heads: bool = False) -> ResolvedModel:
    """Resolve the model `name`, downloading it if necessary.

    `name` is, in this order: a registered name, an existing path, any of them followed by ``@int8``, ``@int4`` or
    ``@fp8`` (`models.quantization`), a Hub id ``org/name`` (or ``org/name@revision``); or ``BASE+ADAPTER``, any of
    these and the directory or Hub id of an adapter (`models.adapters`).
    `heads`: resolve drafting heads, which may be PyTorch files (see :mod:`crossdraft.framework.models.checkpoint`).

    Raises:
        UsageError: invalid name.
        ModelError: the model is incomplete, not in safetensors, or cannot be downloaded.
    """
    registered = plugins.entries("models")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{quoted(name)} is not a model name; use a name, a directory, or a Hub id (org/name)")
    if name in registered:
        return _from_registered(name, heads)
    if kind_of(name):
        return from_path(name, path_of(name), heads=heads)
    stem, quantization = split(name)
    if quantization:
        resolved = resolve(stem, heads=heads)
        if heads or resolved.backend != TRANSFORMERS:
            kind = "heads and initial checkpoints of training" if heads else f"models of the backend {resolved.backend}"
            refuse_quantized(name, f"{kind} cannot be quantised on load")
        if resolved.quantization:
            raise UsageError(f"{printable(name)} is quantised twice; remove one of the two suffixes")
        if resolved.adapter is not None:
            refuse_quantized(name, "a model with an adapter cannot be quantised on load")
        source = f"{resolved.source}, quantised to {quantization} on load"
        return replace(resolved, name=name, source=source, quantization=quantization)
    base, adapter = split_adapter(name)
    if adapter:
        return _with_adapter(name, resolve(base, heads=heads), adapter, heads)
    if name.startswith(("/", ".", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1:
        raise UsageError(f"model directory {printable(name)} does not exist; check the path, relative to {Path.cwd()}")
    if _HUB_ID.fullmatch(name):
        return from_hub(name, name, heads=heads)
    possible = [other for other in registered if heads or not _is_heads(other)]
    raise UnknownNameError.among("model", name, possible, "Or give a directory, or a Hub id (org/name).")


def _is_heads(name: str) -> bool:
    """True if a registered name is a directory without tokenizer and embedding, of drafting heads."""
    try:
        path = plugins.get("models", name)
    except ContractError:
        return False
    return isinstance(path, Path) and not any(path.glob("tokenizer*")) and not kind_of(path / SHARED)


def from_path(name: str, path: Path, source: str = "", *, heads: bool = False) -> ResolvedModel:
    """Model at `path`: of the first other backend that accepts it, else of transformers, see `from_directory`.

    GGUF files are converted for transformers, see `from_gguf`.
    """
    if not heads and kind_of(path / "config.json") != "file":
        for backend in plugins.entries("backends"):
            if backend != TRANSFORMERS and _accepts(backend, path):
                kind = "directory" if path.is_dir() else "file"
                return ResolvedModel(name, path, source or f"{kind} {path.resolve()}", backend=backend)
    if kind_of(path) == "file" and is_gguf(path):
        source = f"{source or f'file {path.resolve()}'}, dequantised"
        return from_directory(name, from_gguf(name, path), source)
    if kind_of(path) in ("file", "other"):
        raise UsageError(
            f"{printable(name)} is a file that is not supported by any installed backend; give a directory with "
            "config.json and safetensors weights, or a GGUF file"
        )
    return from_directory(name, path, source, heads=heads)


def from_directory(name: str, path: Path, source: str = "", *, heads: bool = False) -> ResolvedModel:
    """Model in the directory `path`. Raises `ModelError` if it is incomplete, or not in safetensors."""
    if kind_of(path) != "directory":
        raise ModelError(f"the directory of {printable(name)}, {path}, does not exist")
    check_entries(path)
    adapter = kind_of(path / ADAPTER_CONFIG) == "file"
    if adapter or kind_of(path / "config.json") != "file":
        fault = "it holds a LoRA adapter" if adapter else "config.json is missing"
        raise ModelError(f"{path} is not a model directory: {fault}{_advice(path)}")
    index = path / INDEX
    if kind_of(index):
        left_out = {LEFT_OUT} if kind_of(path / SHARED) else set()
        if absent := [shard for shard in shards_of(index) - left_out if not (path / shard).is_file()]:
            raise ModelError(f"{path} is incomplete: missing {listed(absent)}; download it again")
    elif not any(path.glob("*.safetensors")) and not (heads and any(any(path.glob(p)) for p in PYTORCH_FILES)):
        raise ModelError(
            f"{path} does not contain safetensors weights. Pickled weights (.bin, .pt) can run code, so they are not "
            "loaded; if you trust them, convert them once: "
            "AutoModelForCausalLM.from_pretrained(OLD, use_safetensors=False).save_pretrained(NEW)"
        )
    return ResolvedModel(name, path, source or f"directory {path.resolve()}")


def check_entries(path: Path) -> None:
    """Raise ModelError for special or oversized files that would block a library or exhaust memory."""
    refuse_special_files(path, error=ModelError)
    for pattern in _READ_WHOLE:
        for file in path.glob(pattern):
            if file.is_file() and (reason := SETTINGS_BYTES.violation(size := file.stat().st_size)):
                raise ModelError(f"cannot read {printable(str(file))}: it has {size} bytes; {reason}")


def from_hub(name: str, hub_id: str, *, heads: bool = False) -> ResolvedModel:
    """Hub model ``org/name`` or ``org/name@revision``, downloaded unless it is cached."""
    path, source = _download(hub_id, PYTORCH_FILES if heads else ())
    return ResolvedModel(name, from_directory(name, path, heads=heads).path, source, hub_id.partition("@")[0])


def _with_adapter(name: str, base: ResolvedModel, adapter: str, heads: bool) -> ResolvedModel:
    """Model ``base`` with an adapter: a directory, or a Hub id that is downloaded unless it is cached."""
    kind = "heads and initial checkpoints of training" if heads else f"models of the backend {base.backend}"
    if heads or base.backend != TRANSFORMERS:
        refuse_adapter(name, f"{kind} cannot have an adapter")
    if base.quantization or base.adapter is not None:
        already = "is quantised" if base.quantization else "has an adapter"
        raise UsageError(
            f"{printable(name)}: its base {printable(base.name)} {already}, so an adapter cannot be merged into it; "
            "give the directory of the merged model"
        )
    if kind_of(adapter) == "directory":
        path, source = path_of(adapter), f"directory {path_of(adapter).resolve()}"
    elif _HUB_ID.fullmatch(adapter) and not adapter.startswith("."):
        path, source = _download(adapter, ())
    else:
        raise UsageError(
            f"{printable(name)}: the adapter {quoted(adapter)} is neither a directory nor a Hub id (org/name); check "
            f"the path, relative to {Path.cwd()}"
        )
    check_entries(path)
    check_adapter(name, path)
    check_base(base, path)
    return replace(base, name=name, source=f"{base.source}, with the adapter of {source}", hub_id=None, adapter=path)


def _download(hub_id: str, more: Iterable[str]) -> tuple[Path, str]:
    """Snapshot and source of ``org/name`` or ``org/name@revision``; ``more``: patterns of further files."""
    from huggingface_hub import errors, snapshot_download

    match = _HUB_ID.fullmatch(hub_id)
    if match is None:
        raise UsageError(f"{hub_id!r} is not a Hub id; write org/name or org/name@revision")
    try:
        path = snapshot_download(
            match["id"],
            revision=match["revision"],
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", *more],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except errors.GatedRepoError:
        reason = "its licence must be accepted: do so on its Hub page, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "it is not a public model of the Hub; check the spelling, or run `hf auth login` if it is private"
    except errors.RevisionNotFoundError:
        reason = f"revision {match['revision']!r} does not exist"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = (
            "it is not in the local cache and the Hub cannot be reached; connect (and unset HF_HUB_OFFLINE), "
            "or give a directory"
        )
    except Exception as error:  # of the Hub, the network, the disk
        reason = first_line(error)
    else:
        return Path(path), f"Hub {match['id']} at {Path(path).name}"
    raise ModelError(f"the model {hub_id} could not be downloaded: {reason}")


def _accepts(backend: str, path: Path) -> bool:
    backend_class = plugins.get("backends", backend)
    with plugins.guarded("backends", backend, "supports()"):
        return bool(backend_class().supports(path))


def _from_registered(name: str, heads: bool) -> ResolvedModel:
    resolved: Any = plugins.get("models", name)
    with plugins.guarded("models", name):
        # A function returns a ModelSource or a path; a ModelSource may be callable, too.
        resolved = resolved() if callable(resolved) and not isinstance(resolved, ModelSource) else resolved
    if isinstance(resolved, ModelSource):
        with plugins.guarded("models", name, "fetch()"):
            resolved = resolved.fetch(name)
        if not isinstance(resolved, ResolvedModel):
            raise plugins.unusable("models", name, f"fetch() must return a ResolvedModel, not {quoted(resolved)}")
        return resolved
    if not isinstance(resolved, str | Path):
        raise plugins.unusable(
            "models", name, f"its function must return a path or a ModelSource, not {quoted(resolved)}"
        )
    return from_path(name, Path(resolved), f"plug-in {plugins.entries('models')[name].provider}", heads=heads)


#: Files of directories that are not models of transformers, and what to do with them.
_OTHER_FILES = {
    ADAPTER_CONFIG: "name the adapter behind its base model: BASE+{path}, BASE as in its base_model_name_or_path; if "
    f"its weights are merged into this model, remove {ADAPTER_CONFIG}",
    "*.gguf": "it holds GGUF files; give the path of one of them, {file}",
    "model_index.json": "it holds a diffusion model; use a causal language model",
    "params.json": "it holds the authors' own format (params.json); use the files that were converted for transformers",
    "trainer_state.json": "it holds the state of a training run; give the directory of the exported model",
    "*.distcp": "it holds the state of a training run; give the directory of the exported model",
    "optimizer.*": "it holds the state of a training run; give the directory of the exported model",
    "training_state.*": "it holds the state of a training run; give the directory of the exported model",
    "*.onnx": "it holds an ONNX model; use the safetensors files of the model",
    "*_model.xml": "it holds an OpenVINO model; use the safetensors files of the model",
    "tokenizer*": "it holds a tokenizer without a model; give the directory of the model",
    "*.safetensors": "download it again, with its config.json",
    "*/config.json": "give the directory of a model in it, such as {parent}",
}


def _advice(path: Path) -> str:
    """Return the advice for a directory without a model of transformers, from the names of its files."""
    for pattern, advice in _OTHER_FILES.items():
        if file := next(iter(sorted(path.glob(pattern))), None):
            return "; " + advice.format(path=path, file=file, parent=file.parent)
    return "; check the path"


def listed(names: Iterable[str]) -> str:
    """Format at most eight names."""
    shown = sorted(names)
    return (", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")) or "none"
