"""Matrix products of few rows on a CPU in float32: the shape of every verification pass there.

`torch.nn.functional.linear` computes ``x W^T`` and is slow on CPUs for 2 to about 16 rows of ``x``, the usual shape of
drafting and verifying. The product ``(W x^T)^T`` reads W once in memory order and takes a half to a quarter of the
time. It is fastest for 2, 4, 8 and 16 rows, so fewer are padded. ``benchmarks/small_linear.py`` compares both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Beyond this many rows `functional.linear` is as fast.
MOST_ROWS = 24
#: Number of rows to pad to, where more rows take less time.
PADDED = {1: 2, 3: 4, 6: 8, 7: 8} | dict.fromkeys(range(9, 16), 16)


class SmallBatchLinear(nn.Linear):
    """`nn.Linear` with the faster product for few rows; same parameters, same result up to float32 rounding."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        # A single row costs two copies, which pay off only for tall weights (an MLP's first half, the head).
        low = rows == 1 and self.out_features < 2 * self.in_features
        if rows == 0 or rows > MOST_ROWS or low:
            return functional.linear(input, self.weight, self.bias)
        # Both contiguous: with a transposed input this product takes the slow path again.
        x = input.reshape(rows, self.in_features)
        padded = PADDED.get(rows, rows)
        if rows == 1:
            x = x.expand(padded, -1).contiguous()  # the only copy needed
        else:
            x = functional.pad(x, (0, 0, 0, padded - rows)).contiguous()
        out = (self.weight @ x.t()).t()[:rows].contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


def speed_up_small_batches(model: nn.Module) -> None:
    """Turn every plain `nn.Linear` on a CPU in float32 into a :class:`SmallBatchLinear`; parameters do not change."""
    for module in model.modules():
        if type(module) is not nn.Linear or hasattr(module.weight, "__tensor_flatten__"):  # quantised
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = SmallBatchLinear
