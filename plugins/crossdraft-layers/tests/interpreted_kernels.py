"""Liger's kernels in Triton's interpreter, on the CPU; prints a line a case.

A process of its own, as Triton reads ``TRITON_INTERPRET`` when it is loaded. A case is an operator with inputs of a
dtype; its line has the largest difference from the reference, relative to the largest output, the number of Triton
kernels launched, and the operations of PyTorch beside them that are neither views nor allocations.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import torch
import triton.language as tl
from crossdraft_layers.fused_layers import OPERATORS
from liger_kernel.ops import fused_add_rms_norm, rms_norm
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

launched: list[str] = []
others: list[str] = []


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func) and not interpreting:
            others.append(str(func))
        return func(*args, **(kwargs or {}))


interpreting: list[bool] = []  # filled while a kernel runs: the interpreter itself works on tensors
plain, converted = interpreter.GridExecutor.__call__, interpreter._implicit_cvt


def number(value):
    """Arguments that are floats as tensors, as compiled kernels get them; the interpreter leaves them as they are."""
    if not isinstance(value, float):
        return converted(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


def counted(self, *args, **kwargs):
    launched.append(self.fn.__name__)
    interpreting.append(True)
    try:
        return plain(self, *args, **kwargs)
    finally:
        interpreting.pop()


interpreter.GridExecutor.__call__, interpreter._implicit_cvt = counted, number
for module in (rms_norm, fused_add_rms_norm):
    module.rsqrt = lambda x: tl.math.rsqrt(x, _semantic=interpreter.interpreter_semantic)  # CUDA's own returns None


def inputs(name: str, dtype: torch.dtype, rows: int, width: int, rotations: int) -> list:
    torch.manual_seed(rows + width)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    if name == "rotate":  # three queries and two keys of dimension 24 among seven heads
        return [
            noise(rows, width, 7, 24),
            3,
            2,
            noise(rotations, width, 12).repeat(1, 1, 2),
            noise(rotations, width, 12).repeat(1, 1, 2),
        ]
    x = noise(rows, width, 72)
    further = {"rms_norm": [noise(72), 1e-5], "add_rms_norm": [noise(rows, width, 72), noise(72), 1e-5]}
    return [x, *further.get(name, [noise(rows, width, 72)])]


for name, (_, reference, kernel) in OPERATORS.items():
    for dtype in (torch.float32, torch.float16):
        for rows, width, rotations in ((1, 1, 1), (3, 5, 3), (2, 4, 1)):
            first, second = (inputs(name, dtype, rows, width, rotations) for _ in range(2))
            launched.clear(), others.clear()
            with _Operations():
                output = kernel(*first)
            expected = reference(*second)
            if output is None:
                output, expected = first[0], second[0]
            pairs = zip(output, expected, strict=True) if isinstance(output, tuple) else [(output, expected)]
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            print(json.dumps([name, str(dtype), error, len(launched), others]))
