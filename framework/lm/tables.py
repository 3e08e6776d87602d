"""Embedding and head of a target larger than one device, whole and in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..models.placement import input_device


class Tables:
    """The part of a target larger than one device that draft heads may read: embedding and head, on one device."""

    def __init__(self, model: Any):
        self.config, self.dtype, self.device = model.config, model.dtype, input_device(model)
        self._model, self._gathered = model, list[Tensor]()

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self._tables[0], freeze=True)

    def get_output_embeddings(self) -> nn.Linear:
        weight = self._tables[1]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._gathered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def _tables(self) -> list[Tensor]:
        if not self._gathered:
            self._gathered = self._gather()
        return self._gathered

    def _gather(self) -> list[Tensor]:
        return [table.to(self.device) for table in self.tables_of(self._model)]

    @staticmethod
    @torch.no_grad()
    def tables_of(model: Any) -> list[Tensor]:
        """Embedding and head ``[V, H]`` of a model, whole; one tensor if they are tied."""
        owners = model.get_input_embeddings(), model.get_output_embeddings()
        if owners[0].weight is owners[1].weight:
            return [_whole(owners[0])] * 2
        return [_whole(owner) for owner in owners]


def _whole(owner: nn.Module) -> Tensor:
    weight: Any = owner.weight
    if hasattr(weight, "full_tensor"):
        return weight.full_tensor()
    if weight.device.type == "meta":  # offloaded
        from accelerate.utils import align_module_device

        with align_module_device(owner):
            return owner.weight.detach().clone()  # type: ignore[operator]
    return weight.detach()
