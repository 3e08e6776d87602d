"""Linear layers for few rows on a CPU: the shape of every verification pass there.

`torch.nn.functional.linear` computes ``x W^T`` and is slow on CPUs for 2 to about 16 rows of ``x``, the usual shape of
drafting and verifying. oneDNN is up to 2.5 times as fast with weights in its own blocked layout. Such a copy is made
at the first pass over few rows; layers with the same input (queries, keys and values; the two halves of an MLP) share
one copy and one product, because a call of oneDNN costs as much as a small product. This holds in float32, and in
bfloat16 on processors with instructions for it (AVX-512, AMX); elsewhere layers in bfloat16 stay plain.

Float32 layers without a copy (see `packed`) compute ``(W x^T)^T`` instead. ``benchmarks/small_linear.py`` compares
all. Layers of fewer than `LEAST_WEIGHTS` stay plain: a call of oneDNN takes longer than their product.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from crossdraft import ModelPreparation
from crossdraft.framework.models.device import cpu_features

logger = logging.getLogger(__name__)

#: Number of rows beyond which `functional.linear` is as fast, in float32 and except for output heads.
MOST_ROWS = 32
#: Weights of the smallest layer that is replaced.
LEAST_WEIGHTS = 2**14
#: Minimum ratio of outputs to inputs at which packed weights are faster for a single row: output heads.
TALL = 8
#: Number of rows to pad a transposed product to, where more rows take less time.
PADDED = {3: 4, 6: 8, 7: 8} | dict.fromkeys(range(9, 16), 16)
#: Names of layers that are called with the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Number of rows that oneDNN chooses a layout for; it is the same for all numbers above 1.
PACKED_ROWS = 16
#: Largest share of the machine's memory for packed weights; 1.5 B in float32 and its draft model fit in 24 GB.
MEMORY_SHARE = 0.4


class SmallBatchLinear(nn.Linear):
    """`nn.Linear` with faster products for few rows; same parameters, same result up to rounding.

    With gradients enabled it computes `functional.linear`.
    """

    siblings: Siblings | None = None

    def forward(self, input: Tensor) -> Tensor:
        rows, tall = input.numel() // self.in_features, self.out_features >= TALL * self.in_features
        wide = rows > MOST_ROWS and not tall and self.weight.dtype != torch.bfloat16
        if rows == 0 or wide or (rows == 1 and not tall) or torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        if rows > 1 and self.siblings is not None and (shared := self.siblings.product(self, input)) is not None:
            return shared
        if (weight := packed(self.weight)) is not None:
            return packed_product(input, weight, self.bias)
        transposed = 1 < rows <= MOST_ROWS and self.weight.dtype == torch.float32
        product = transposed_product if transposed else functional.linear
        return product(input, self.weight, self.bias)


def transposed_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input [.., I]`` times ``weight [O, I]``, plus ``bias [O]``, for 2 to `MOST_ROWS` rows."""
    rows = input.numel() // weight.shape[1]
    # Both contiguous: with a transposed input this product takes the slow path again.
    x = functional.pad(input.reshape(rows, -1), (0, 0, 0, PADDED.get(rows, rows) - rows)).contiguous()
    out = (weight @ x.t()).t()[:rows].contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*input.shape[:-1], -1)


def packed_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input [.., I]`` times a result of `packed` ``[O, I]``, plus ``bias [O]``."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


class Siblings:
    """Layers that a model calls one after the other with the same input; the first call computes all products.

    Calls are recognised by the identity of their input. If a layer is called with another input, or in another order,
    each layer computes its own product from then on.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        # Not the layers themselves: models in a reference cycle would keep their memory until a garbage collection.
        self.weights: list[Tensor] = [layer.weight for layer in layers]
        self._biases: list[Tensor] = [layer.bias for layer in layers]
        self._apart = False

    def product(self, layer: SmallBatchLinear, input: Tensor) -> Tensor | None:
        """The output of ``layer``; None if it must be computed separately."""
        weights, biases = self.weights, self._biases
        index = next((i for i, weight in enumerate(weights) if weight is layer.weight), None)
        if self._apart or index is None or biases[index] is not layer.bias:  # parameters were replaced
            return None
        if index == 0:
            if (weight := packed(*weights)) is None:
                return None
            bias = None if layer.bias is None else torch.cat(biases)
            first, *others = packed_product(input, weight, bias).split([len(part) for part in weights], -1)
            _thread.pending = _Pending(self, input, others)
            return first
        pending: _Pending | None = getattr(_thread, "pending", None)
        due = len(weights) - len(pending.outputs) if pending is not None else 0
        if pending is None or pending.siblings is not self or pending.input is not input or index != due:
            self._apart = packed(*weights) is not None
            return None
        output = pending.outputs.pop(0)
        if not pending.outputs:
            _thread.pending = None
        return output


@dataclass
class _Pending:
    """Products that were computed with the first one of ``siblings``, in order."""

    siblings: Siblings
    input: Tensor
    outputs: list[Tensor]


#: ``pending``: the last `_Pending` of this thread.
_thread = threading.local()


@dataclass
class _Copy:
    """A packed copy of weights; it is dropped with the tensors that it was made for, ``owners``."""

    weight: Tensor
    versions: list[int]
    owners: list[weakref.ref[Tensor]]

    def is_valid(self, weights: Sequence[Tensor]) -> bool:
        """True if the memory of ``weights`` is still that of the owners, and was not written to."""
        owners = [owner() for owner in self.owners]
        return self.versions == [weight._version for weight in weights] and all(
            owner is not None and owner.data_ptr() == weight.data_ptr()
            for owner, weight in zip(owners, weights, strict=True)
        )


#: Packed copies by the addresses and shapes of their weights.
_copies: dict[tuple[int | torch.Size, ...], _Copy] = {}


def packed(*weights: Tensor) -> Tensor | None:
    """Weights ``[O_i, I]``, one below the other, in oneDNN's layout; copied at the first call, and after a change.

    Tensors that share memory share the copy. None if oneDNN is not available, if changes of a weight cannot be detected
    (it was created in inference mode), or if copies would take more than `MEMORY_SHARE` of the machine's memory.
    """
    if not _available(weights[0].dtype) or any(weight.is_inference() for weight in weights):
        return None
    key = tuple(part for weight in weights for part in (weight.data_ptr(), weight.shape))
    copy = _copies.get(key)
    if copy is not None and copy.is_valid(weights):
        return copy.weight
    size = sum(weight.nbytes for weight in weights)
    if copy is None and size + packed_nbytes() > MEMORY_SHARE * _memory():
        _warn_of_memory()
        return None
    with torch.inference_mode():
        rows = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        weight = torch.ops.mkldnn._reorder_linear_weight(rows.contiguous(), PACKED_ROWS)

    def drop(_: object) -> None:
        _copies.pop(key, None)

    _copies[key] = _Copy(weight, [part._version for part in weights], [weakref.ref(part, drop) for part in weights])
    return weight


def packed_nbytes() -> int:
    """Bytes of all packed copies in this process."""
    return sum(copy.weight.nbytes for copy in list(_copies.values()))


@cache
def _available(dtype: torch.dtype) -> bool:
    """True if oneDNN has kernels for blocked weights of ``dtype`` on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@cache
def _memory() -> float:
    """Bytes of memory of this machine; infinite if unknown."""
    if not hasattr(os, "sysconf"):
        return float("inf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def _warn_of_memory() -> None:
    logger.warning(
        "crossdraft: packed copies of weights would take more than %d %% of the memory; other layers run without one, "
        "which makes passes over few tokens slower",
        100 * MEMORY_SHARE,
    )


@cache
def _warn_of_bfloat16() -> None:
    if not any("bf16" in feature for feature in cpu_features()):
        logger.warning(
            "crossdraft: this processor has no instructions for bfloat16: a pass over a few tokens takes several times "
            "as long as one over a single token, in float32 about as long; leave dtype out"
        )


class SmallBatchLayers(ModelPreparation):
    """The preparation ``small-batch-linear``."""

    name = "small-batch-linear"

    @classmethod
    def prepare(cls, model: nn.Module) -> None:
        speed_up_small_batches(model)

    prepare_head = prepare


def speed_up_small_batches(model: nn.Module) -> None:
    """Turn plain `nn.Linear` layers on a CPU into :class:`SmallBatchLinear`; parameters do not change."""
    for module in model.modules():
        if type(module) is not nn.Linear or hasattr(module.weight, "__tensor_flatten__"):  # quantised
            continue
        if module.weight.numel() < LEAST_WEIGHTS:
            continue
        dtype = module.weight.dtype
        if module.weight.device.type == "cpu" and dtype == torch.bfloat16:
            _warn_of_bfloat16()
        if module.weight.device.type == "cpu" and (dtype == torch.float32 or _available(dtype)):
            module.__class__ = SmallBatchLinear
    for module in model.modules():
        for names in SIBLINGS:
            _join([module._modules.get(name) for name in names])


def _join(modules: list[nn.Module | None]) -> None:
    layers = [layer for layer in modules if isinstance(layer, SmallBatchLinear) and layer.siblings is None]
    alike = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}
    if len(layers) == len(modules) and len(alike) == 1:
        siblings = Siblings(layers)
        for layer in layers:
            layer.siblings = siblings
