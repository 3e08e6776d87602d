"""Targets split over the processes of ``torchrun``: what `crossdraft.framework.models.placement` loads for ``tp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from crossdraft import LoadedModel, ModelError, UsageError, printable
from crossdraft.framework.models.placement import SPLIT, SPREAD, Spread, process_count

from . import processes
from .split_lm import SplitModel, follow


class Split(Spread):
    """Placement of a target over all processes: a shard of each layer in each."""

    @staticmethod
    def lead(command: Callable[[], int]) -> int:
        """Run the command in rank 0, and what it broadcasts in the other processes; returns the exit code."""
        if processes.rank():
            return follow()
        with processes.lead_processes():
            return command()

    def first_device(self) -> torch.device:
        return torch.device("cuda", processes.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    def description(self) -> str:
        return f" split over {process_count()} processes"

    def options(self, name: str) -> dict[str, Any]:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=process_count(), tp_plan="auto")}

    def check_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Raise ModelError if the number of attention heads is not divisible by the number of processes."""
        nested, n = config.get("text_config"), process_count()
        text_config = nested if isinstance(nested, Mapping) else config
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = text_config.get(key)
            if isinstance(heads, int) and heads % n:
                raise ModelError(
                    f"{printable(name)} has {heads} heads ({key}), which is not divisible by {n} processes; start "
                    "another number of processes"
                )

    def check_model(self, name: str, model: Any) -> None:
        """Raise ModelError if transformers does not have a tensor-parallel plan for the architecture."""
        if not any(hasattr(weight, "placements") for weight in model.parameters()):
            raise ModelError(
                f"{printable(name)} cannot be split: transformers does not have a plan for {type(model).__name__}; use "
                f"device {SPREAD}, or one device"
            )

    def load(self, load: Callable[[], LoadedModel], name: str, options: Mapping[str, Any]) -> LoadedModel:
        """``load()`` in every process; rank 0 gets hooks against passes outside of collective operations."""
        if process_count() == 1:
            raise UsageError(
                f"device {SPLIT} needs several processes, but only one is running; start them with "
                "torchrun --nproc-per-node N -m crossdraft ..."
            )
        if not processes.initialized():
            raise UsageError(
                f"device {SPLIT} is supported by the crossdraft command only; use another device in scripts"
            )
        key = processes.next_key()
        loaded = processes.run_everywhere(load, "load", key, name, options)
        if processes.rank() == 0:
            model: Any = loaded.model
            model._crossdraft_split = SplitModel(key)
            for part in (model, model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
                part.register_forward_pre_hook(_require_collective)
        return loaded


def _require_collective(module: Any, arguments: Any) -> None:
    if not processes.in_collective():
        raise ModelError(
            f"the target is split over {process_count()} processes (device {SPLIT}) and runs in collective passes "
            "only; use a target on one device"
        )
