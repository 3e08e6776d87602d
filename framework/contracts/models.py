"""Resolved and loaded models, backends, and checkpoints of heads.

Imports nothing heavy, since plug-ins use these classes at registration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ModelError, quoted
from .checkpoint_kinds import identify

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .lm import LM

#: The backend for model directories in the format of transformers.
TRANSFORMERS = "transformers"
#: Last parts of the names of a quantised weight's other tensors.
_SCALES = {
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_packed", "input_scale"),
    *("qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB"),
}


@dataclass(frozen=True)
class ResolvedModel:
    """A model on the local disk.

    Attributes:
        name: name as the user wrote it.
        path: directory or file of its weights.
        source: origin of the weights, for display: a directory, the Hub, a wheel.
        hub_id: ``org/name`` if they came from the Hub.
        backend: registered name of its `Backend`.
        quantization: quantisation of its linear layers at load time, "" = none (`models.quantization`).
        adapter: directory of the adapter that is merged into it at load time (`models.adapters`).
    """

    name: str
    path: Path
    source: str
    hub_id: str | None = None
    backend: str = TRANSFORMERS
    quantization: str = ""
    adapter: Path | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, ready for inference, with its provenance.

    Attributes:
        model: object of the backend; a transformers model in eval mode for the built-in one.
        tokenizer: tokenizer of transformers, or an object with its methods.
        name, source: as in `ResolvedModel`; ``sha256``: digest of its weights.
        eos_token_ids: all end-of-sequence ids.
        context_length: maximum number of positions, or None if unknown.
        backend: registered name of its `Backend`.
    """

    model: Any
    tokenizer: Any
    name: str
    source: str
    sha256: str
    eos_token_ids: tuple[int, ...]
    context_length: int | None
    backend: str = TRANSFORMERS


class ModelSource(ABC):
    """Source of a registered model. Construction must be cheap, since it happens at registration."""

    @abstractmethod
    def fetch(self, name: str) -> ResolvedModel:
        """Download the model unless it is on disk. Raises ModelError if that fails."""


class Backend(ABC):
    """Detection, loading and running of models of one kind. Registered through ``crossdraft_register_backends``.

    The built-in one, ``transformers``, loads directories with a ``config.json``. Others (llama.cpp, an engine) load
    other files; targets and draft models are then given by the path of such a file.
    """

    name: ClassVar[str]

    @abstractmethod
    def supports(self, path: Path) -> bool:
        """Return True if the file or directory ``path`` is a model of this kind; load nothing."""

    @abstractmethod
    def load(
        self,
        resolved: ResolvedModel,
        *,
        dtype: str | torch.dtype,
        device: str | torch.device,
        trust_remote_code: bool,
        attn_implementation: str | None,
        share_with: LoadedModel | None,
    ) -> LoadedModel:
        """Load a model for which `supports` returned True.

        Args:
            dtype, device: as the user wrote them, ``"auto"`` by default.
            share_with: loaded target with which a draft model may share tensors.

        Raises:
            UsageError: an option that this backend does not support.
            ModelError: a damaged or incomplete model.
        """

    @abstractmethod
    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        """``batch_size`` slots of ``max_length`` tokens each, speculative ones included."""


class ModelPreparation:
    """A change to the modules of loaded transformers models, for passes over a ragged cache.

    Registered through ``crossdraft_register_preparations``. Each registered class is offered every model that gets
    slots, in the order of registration; all other uses of the model must stay as they were.
    """

    name: ClassVar[str]

    @classmethod
    def slots(cls, model: nn.Module, batch_size: int, max_length: int) -> LM | str | None:
        """Return slots to use instead of a `TransformersLM`; None, or what computes passes and why, for reports."""
        return None

    @classmethod
    def prepare(cls, model: nn.Module) -> ModelPreparation | None:
        """Change modules of ``model``, which may have been prepared before.

        Returns:
            an instance if the passes of the model need `new_cache` or `around_pass`, otherwise None.
        """
        return None

    @classmethod
    def prepare_head(cls, model: nn.Module) -> None:
        """Change layers of ``model``, the head of a drafter, whose calls have no cache."""

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        """Return the `KVCache` that the model requires; None if any one fits."""
        return None

    def around_pass(self, cache: Any, visibility: Any) -> AbstractContextManager[object]:
        """Return the context of one pass over ``cache``; ``visibility``: see `lm.attention_masks.Visibility`."""
        return nullcontext()


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a directory of heads.

    Attributes:
        name: as the user wrote it.
        path: the directory.
        config: contents of ``config.json``.
        tensors: by key, on the CPU, in the stored dtype; from safetensors they are read lazily.
        source: origin of the files, for display.
        sha256: digest of the files, see `models.weights_sha256`.
    """

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    source: str
    sha256: str

    def number(self, digits: str, key: str) -> int:
        """Parse ``digits``, the index of a head, a layer or a block in the name ``key`` of a tensor.

        Raises:
            ModelError: the index is not below the number of tensors.
        """
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 9 or int(digits) >= len(self.tensors):
            raise self.refused(f"the index in {quoted(key)} is not below {len(self.tensors)}, the number of tensors")
        return int(digits)

    def with_tensors(self, tensors: Mapping[str, Tensor], without: tuple[str, ...] = ()) -> Checkpoint:
        """A copy with other tensors, without those whose name starts with one of ``without``."""
        kept = {key: t for key, t in self.tensors.items() if not any(map(key.startswith, without))}
        return replace(self, tensors={**kept, **tensors})

    def with_config(self, **keys: Any) -> Checkpoint:
        """A copy with other keys in its config."""
        return replace(self, config={**self.config, **keys})

    def refused(self, why: str) -> ModelError:
        """Return the error for a checkpoint that does not fit, with the reason ``why``."""
        return ModelError(f"the heads '{self.name}' do not load: {why} ({self.path})")

    def check_kind(self, drafter: str) -> None:
        """Raise ModelError if these are not files that ``drafter`` reads, with what they are and what reads them."""
        identity = identify(self.config, self.tensors)
        if identity is not None and identity.misused(drafter):
            raise self.refused(f"they are {identity}, which drafter '{drafter}' does not read; {identity.remedy}")

    def refuse_quantized(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ModelError if ``tensors`` are quantised: of one byte per number, packed, or with scales."""
        scales = [key for key in tensors if key.rsplit(".", 1)[-1] in _SCALES]
        packed = [
            f"{key} is {tensor.dtype}"
            for key, tensor in tensors.items()
            if tensor.dtype.itemsize == 1 and (tensor.is_floating_point() or key.endswith("weight"))
        ]
        if scales or packed:
            raise self.refused(
                f"they are quantised ({', '.join((packed + scales)[:2])}), which is not supported; use heads with "
                "weights in bfloat16, float16 or float32"
            )

    def fill(self, module: nn.Module, tensors: dict[str, Tensor], *, shared: Iterable[str] = ()) -> None:
        """Copy ``tensors``, renamed to the keys of ``module``, into it; keys in ``shared`` may be absent.

        Raises:
            ModelError: a missing or unexpected key, another shape, or quantised tensors; with names and shapes.
        """
        import torch

        self.refuse_quantized(tensors)
        state = module.state_dict(keep_vars=True)
        missing = sorted(state.keys() - tensors.keys() - set(shared))
        unexpected = sorted(tensors.keys() - state.keys())
        shapes = [
            f"{key} is {list(tensors[key].shape)}, not {list(state[key].shape)}"
            for key in sorted(state.keys() & tensors.keys())
            if state[key].shape != tensors[key].shape
        ]
        problems = [
            f"missing {', '.join(f'{key} {list(state[key].shape)}' for key in missing)}" if missing else "",
            f"unexpected {', '.join(f'{key} {list(tensors[key].shape)}' for key in unexpected)}" if unexpected else "",
            f"of another shape: {', '.join(shapes)}" if shapes else "",
        ]
        if any(problems):
            raise self.refused("; ".join(problem for problem in problems if problem))
        with torch.no_grad():
            for key, tensor in tensors.items():
                state[key].copy_(tensor)
