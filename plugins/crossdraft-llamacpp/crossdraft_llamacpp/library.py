"""The llama.cpp library, through llama-cpp-python, and models in memory."""

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
#: The last errors logged by the library, for messages; and its callback, kept alive for the process.
_errors: deque[str] = deque(maxlen=3)
_callbacks: list[Any] = []


@cache
def library() -> Any:
    """Load llama.cpp and return its functions. Raises ModelError if it cannot be loaded."""
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]  # not among the tools of the core
    except Exception as error:  # not installed, or its shared library does not load
        raise ModelError(
            f"GGUF models need llama.cpp, which cannot be loaded: {error}; pip install llama-cpp-python"
        ) from error
    if not hasattr(llama_cpp, "llama_memory_seq_rm"):
        raise ModelError("this llama-cpp-python is too old to run token trees; install version 0.3.36 or later")
    callback = llama_cpp.llama_log_callback(_log)
    _callbacks.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _log(level: int, text: bytes, user_data: Any) -> None:
    """Forward llama.cpp's log to Python's logging, and keep its errors."""
    line = text.decode("utf-8", "replace").strip()
    if level == _ERROR and line:
        _errors.append(line)
    logger.debug("%s", line)


def logged_errors() -> str:
    """Return the errors logged by llama.cpp since the last call, for a message."""
    text = "; ".join(_errors) or "it logged no error"
    _errors.clear()
    return text


class GGUFModel:
    """A GGUF file in memory.

    Attributes:
        handle: ``llama_model *``, freed with this object. ``vocab``: its ``llama_vocab *``.
        vocab_size: number of logits.
        context_length: training context length.

    Raises:
        ModelError: not a GGUF file, damaged, or a model whose state cannot be rolled back token by token.
    """

    def __init__(self, path: Path):
        api = library()
        _check_file(path)
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        # llama.cpp's kernels for AMX end the process with a segmentation fault (ggml-org/llama.cpp#20824).
        options.use_extra_bufts = b"AMX_INT8 = 1" not in api.llama_print_system_info()
        logged_errors()
        self.path = path
        self.handle = api.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise ModelError(f"llama.cpp cannot load {path}: {logged_errors()}")
        weakref.finalize(self, api.llama_model_free, self.handle)
        for test, kind in (
            (api.llama_model_is_recurrent, "is a recurrent model"),
            (api.llama_model_is_hybrid, "has recurrent layers"),
            (api.llama_model_is_diffusion, "is a diffusion model"),
            (api.llama_model_has_encoder, "has an encoder"),
        ):
            if test(self.handle):
                raise ModelError(
                    f"{path} {kind}, which is not supported: use a decoder-only model with attention layers only"
                )
        self.vocab = api.llama_model_get_vocab(self.handle)
        self.vocab_size: int = api.llama_vocab_n_tokens(self.vocab)
        self.context_length: int = api.llama_model_n_ctx_train(self.handle)

    def text(self, key: str) -> str | None:
        """Return a value of the file's metadata as text, or None."""
        api, buffer = library(), ctypes.create_string_buffer(256)
        size = api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    @property
    def chat_template(self) -> str | None:
        template = library().llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    @property
    def ends(self) -> tuple[int, ...]:
        """All end-of-generation tokens of llama.cpp."""
        api = library()
        return tuple(i for i in range(self.vocab_size) if api.llama_vocab_is_eog(self.vocab, i))


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is called .gguf, but does not begin as a GGUF file; check the download")
