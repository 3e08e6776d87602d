"""Compilation of functions of tensors by PyTorch, just in time or ahead of time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._aoti import AOTIModelPackageLoader
from torch.export import ExportedProgram

from .shared_patch import SharedPatch
from .stored_code import own_directory, own_path

#: Compiled code: a list of tensors to a sequence of tensors.
TensorFunction = Callable[[list[Tensor]], Sequence[Tensor]]


def compile_function(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> TensorFunction:
    """Compile ``function`` for tensors laid out like ``inputs``. Raises, now or in a call, if that is not possible.

    Ahead of time on a CPU: the guards that `torch.compile` evaluates on every call take longer than a small step.
    """
    return (aot_compile if inputs[0].device.type == "cpu" else trace_and_compile)(function, inputs)


def trace_and_compile(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> TensorFunction:
    """Trace ``function`` before `torch.compile`, which refuses constant tensors, and in PyTorch 2.11 many objects."""
    traced = export_function(function, inputs).module()
    return jit_compile(lambda *tensors: traced(*tensors))


def jit_compile(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    _check_compiler_caches()
    # Compiled code is looked up by code object, one entry after the other; a copy of the code object has one entry.
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    compiled = torch.compile(own, fullgraph=True)
    return lambda tensors: compiled(*tensors)


def aot_compile(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> TensorFunction:
    with TemporaryDirectory(prefix="crossdraft-") as directory:
        path = package_program(export_function(function, inputs), Path(directory) / "step.pt2")
        # Not `aoti_load_package`, which does the same: importing torch._inductor takes seconds.
        name, single_threaded, runners, device = "model", False, 1, -1
        return AOTIModelPackageLoader(str(own_path(path, "TMPDIR")), name, single_threaded, runners, device).run


def export_function(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> ExportedProgram:
    with _no_future_warnings:
        return torch.export.export(_FunctionModule(function), tuple(inputs), strict=False)


def package_program(program: ExportedProgram, path: Path) -> Path:
    """Compile ``program``; writes and returns ``path``, which ends in ``.pt2``."""
    from torch._inductor import aoti_compile_and_package

    _check_compiler_caches()
    with _no_future_warnings:
        # Calls between kernels are a small share of a run, but optimising them takes a quarter of the compilation.
        options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        return Path(aoti_compile_and_package(program, package_path=str(path), inductor_configs=options))


def _check_compiler_caches() -> None:
    """Create PyTorch's cache of compiled code, by default in ``/tmp``, for this user only. Raises ForeignCodeError."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    variable, triton = "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR")
    directory = own_directory(Path(os.environ.get(variable) or default_cache_dir()), variable)
    os.environ[variable] = str(directory)
    if triton and not Path(triton).is_relative_to(directory):
        own_directory(Path(triton), "TRITON_CACHE_DIR")


def _ignore_future_warnings() -> Callable[[], None]:
    """Silence warnings about PyTorch's own code."""
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore", FutureWarning)
    return lambda: caught.__exit__(None, None, None)


_no_future_warnings = SharedPatch(_ignore_future_warnings)


class _FunctionModule(nn.Module):
    """A function as `torch.export` takes it."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(*tensors)
