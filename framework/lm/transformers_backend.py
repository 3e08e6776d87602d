"""The built-in backend: causal language models of transformers, from directories with a ``config.json``.

It and the preparations of its models are registered through the public hooks (see
:mod:`crossdraft.framework.contracts.hookspecs`); PyTorch is imported only when a model is loaded.
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


#: Name: (``module:class`` in this package, summary for ``crossdraft list``).
PREPARATIONS = {
    "sparse-attention": ("attention.sparse:SelectAll", "indexers of sparse attention select all keys"),
    "grouped-attention": ("attention.sdpa:GroupedAttention", "attention that reads shared keys in place"),
}


@hookimpl
def crossdraft_register_preparations(register: Register) -> None:
    for name, (path, summary) in PREPARATIONS.items():
        register(name, f"{__package__}.{path}", summary=summary)


class TransformersBackend(Backend):
    """Causal LMs of transformers that `TransformersLM` supports."""

    name = TRANSFORMERS

    def supports(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def load(self, resolved: ResolvedModel, **options: Any) -> LoadedModel:
        from ..models.load import load_transformers

        return load_transformers(resolved, **options)

    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        from ..models.placement import split_of
        from .transformers_lm import model_slots

        split = split_of(loaded.model)
        return (split.slots if split else model_slots)(loaded.model, batch_size, max_length)
