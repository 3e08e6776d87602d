"""The backend ``llama.cpp``: any model that is a ``.gguf`` file."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from crossdraft import LM, Backend, LoadedModel, ModelError, ResolvedModel, UsageError, file_sha256

_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


class LlamaCppBackend(Backend):
    """Decoder-only models in GGUF files, in the precision of the file."""

    name = "llama.cpp"

    def supports(self, path: Path) -> bool:
        """True for GGUF files if llama-cpp-python is installed; else the core converts them for transformers."""
        return path.suffix.lower() == ".gguf" and path.is_file() and find_spec("llama_cpp") is not None

    def load(
        self, resolved: ResolvedModel, *, dtype: Any, device: Any, attn_implementation: str | None = None, **_: Any
    ) -> LoadedModel:
        """Load a GGUF file; ``trust_remote_code`` and ``share_with`` have no effect.

        Raises:
            UsageError: a dtype, a device or an attention implementation is given.
            ModelError: llama.cpp cannot load the file, or its state cannot be rolled back.
        """
        if dtype != "auto":
            raise UsageError(f"{resolved.name} is a GGUF file, which has a fixed precision; leave dtype ({dtype}) out")
        if str(device) not in ("auto", "cpu"):
            raise UsageError(f"the backend llama.cpp runs on the CPU here, not on {device}; leave device out")
        if attn_implementation is not None:
            raise UsageError("llama.cpp has its own attention; leave attn_implementation out")
        if _SPLIT.search(resolved.path.stem):
            raise ModelError(f"{resolved.path} is one part of a model; merge the parts (llama-gguf-split --merge)")
        from .library import GGUFModel
        from .tokenizer import tokenizer_of

        model = GGUFModel(resolved.path)
        return LoadedModel(
            model=model,
            tokenizer=tokenizer_of(model, resolved.name),
            name=resolved.name,
            source=resolved.source,
            sha256=file_sha256(resolved.path),
            eos_token_ids=model.ends,
            context_length=model.context_length or None,
            backend=self.name,
        )

    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        from .lm import LlamaLM

        return cast(LM, LlamaLM(loaded.model, batch_size, max_length))  # properties where the protocol has attributes
