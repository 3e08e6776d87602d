"""The built-in backend: causal language models of transformers, from directories with a ``config.json``.

Registered through the public hook (see :mod:`crossdraft.framework.contracts.hookspecs`); imports PyTorch only when a
model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.hookspecs import Register, hookimpl
from ..contracts.models import TRANSFORMERS, Backend, LoadedModel, ResolvedModel

if TYPE_CHECKING:
    from ..contracts.lm import LM


@hookimpl
def crossdraft_register_backends(register: Register) -> None:
    register(TRANSFORMERS, TransformersBackend, summary="directories with config.json and safetensors weights")


class TransformersBackend(Backend):
    """Causal LMs of transformers that `TransformersLM` supports."""

    name = TRANSFORMERS

    def takes(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def load(self, resolved: ResolvedModel, **options: Any) -> LoadedModel:
        from ..models.load import load_transformers

        return load_transformers(resolved, **options)

    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        from ..models.placement import is_split
        from .tensor_parallel_lm import SplitLM
        from .transformers_lm import model_slots

        return (SplitLM if is_split(loaded.model) else model_slots)(loaded.model, batch_size, max_length)
