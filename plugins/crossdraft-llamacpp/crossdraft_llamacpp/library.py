"""llama.cpp itself: its functions, as llama-cpp-python hands them out, and a model in memory."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from crossdraft import ModelError

logger = logging.getLogger("crossdraft_llamacpp")

_ERROR = 4  # of ggml_log_level
#: The last errors that the library logged, for sentences; and the callback, which has to outlive the library.
_complaints: deque[str] = deque(maxlen=3)
_kept: list[Any] = []


@cache
def library() -> Any:
    """The functions of llama.cpp. Raises ModelError where they cannot be had."""
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]  # not among the tools of the core
    except Exception as error:  # it is missing, or its shared library does not load
        raise ModelError(
            f"GGUF models are run by llama.cpp, which cannot be loaded: {error}; pip install llama-cpp-python"
        ) from error
    if not hasattr(llama_cpp, "llama_memory_seq_rm"):
        raise ModelError("this llama-cpp-python is too old to run token trees; install version 0.3.36 or later")
    heard = llama_cpp.llama_log_callback(_heard)
    _kept.append(heard)
    llama_cpp.llama_log_set(heard, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _heard(level: int, text: bytes, user_data: Any) -> None:
    """What llama.cpp logs: to Python's logging, and errors into sentences."""
    said = text.decode("utf-8", "replace").strip()
    if level == _ERROR and said:
        _complaints.append(said)
    logger.debug("%s", said)


def complaint() -> str:
    """What llama.cpp logged as errors since this was last called, for the end of a sentence."""
    said = "; ".join(_complaints) or "it does not say why"
    _complaints.clear()
    return said


class GGUFModel:
    """A GGUF file in memory.

    Attributes:
        handle: ``llama_model *``, freed with this object. ``vocab``: its ``llama_vocab *``.
        vocab_size: width of the logits.
        context_length: positions that it was trained for.

    Raises:
        ModelError: no GGUF file, damaged, or of a kind whose state cannot be taken back node by node.
    """

    def __init__(self, path: Path):
        api = library()
        _check_file(path)
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        complaint()
        self.path = path
        self.handle = api.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise ModelError(f"llama.cpp cannot load {path}: {complaint()}")
        weakref.finalize(self, api.llama_model_free, self.handle)
        for test, kind in (
            (api.llama_model_is_recurrent, "is a recurrent model"),
            (api.llama_model_is_hybrid, "has recurrent layers"),
            (api.llama_model_is_diffusion, "is a diffusion model"),
            (api.llama_model_has_encoder, "has an encoder"),
        ):
            if test(self.handle):
                raise ModelError(
                    f"{path} {kind}: crossdraft decodes models that attend over tokens, and takes tokens back"
                )
        self.vocab = api.llama_model_get_vocab(self.handle)
        self.vocab_size: int = api.llama_vocab_n_tokens(self.vocab)
        self.context_length: int = api.llama_model_n_ctx_train(self.handle)

    def text(self, key: str) -> str | None:
        """A value of the file's metadata, as text; None if it is not there."""
        api, buffer = library(), ctypes.create_string_buffer(256)
        size = api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    @property
    def chat_template(self) -> str | None:
        found = library().llama_model_chat_template(self.handle, None)
        return found.decode("utf-8", "replace") if found else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Every token that llama.cpp ends a text at."""
        api = library()
        return tuple(i for i in range(self.vocab_size) if api.llama_vocab_is_eog(self.vocab, i))


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is called .gguf, but its first bytes are not those of a GGUF file")
