"""Checkpoints of a training: written whole or not at all, and read with every part checked.

A checkpoint holds weights and buffers of the student, the optimiser's state, the number of the next step, time and
tokens spent, the log, and what it was made with. The order of texts, the learning rate and all random numbers follow
from the number of the step (and, in a run that is limited by minutes, from the time spent), so they need no state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .files import replace

#: What an entry of the log holds.
_ENTRY = {"step": int, "minutes": float, "tokens": int, "held_out_acceptance": float, "positions": list}


@dataclass
class Checkpoint:
    """What training goes on from.

    Attributes:
        student: weights and buffers, by name.
        optimizer: its ``state_dict``.
        step: steps made.
        seconds, tokens: spent in them.
        tenth: of the way at which the last evaluation was due.
        log: the evaluations, see `Trainer.log`.
        made_with: options and digests of texts, target and start; training goes on with the same alone.
    """

    student: dict[str, Tensor]
    optimizer: dict[str, Any]
    step: int
    seconds: float
    tokens: int
    tenth: int
    log: list[dict[str, Any]]
    made_with: dict[str, Any]

    def save(self, path: Path) -> None:
        """Raises CrossdraftError where it cannot be written; an earlier one is kept."""
        state = {**vars(self), "log": json.dumps(self.log), "made_with": json.dumps(self.made_with)}
        replace(path, lambda file: torch.save(state, file))


def load(path: Path, device: torch.device, made_with: dict[str, Any], free: set[str]) -> Checkpoint:
    """The checkpoint in a file; tensors alone are read of it, never code.

    Args:
        made_with: what this run is made with.
        free: keys of it that change nothing in the result.

    Raises:
        UsageError: it is damaged, or made with something else (says what).
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception:  # a damaged archive raises whatever its reader stumbles over
        raise _damaged(path, "cannot be read") from None
    if not isinstance(state, dict) or (lacking := Checkpoint.__dataclass_fields__.keys() - state.keys()):
        what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, dict) else "holds no mapping"
        raise _damaged(path, what)
    try:
        found = {**state, "log": json.loads(state["log"]), "made_with": json.loads(state["made_with"])}
        _check_shape(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"is not what crossdraft train writes: {error}") from None
    made = found["made_with"]
    both = made.keys() & made_with.keys()
    alike = {key for key in both if made[key] == made_with[key]}
    if differ := sorted((made.keys() | made_with.keys()) - alike - free):
        raise UsageError(
            f"{path} was made with other options or texts ({', '.join(differ)}); use them again, or another --out"
        )
    return Checkpoint(**{key: found[key] for key in Checkpoint.__dataclass_fields__})


def check_weights(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raise UsageError if the tensors of a checkpoint are not those of the student."""
    if differ := sorted(map(str, found.keys() ^ wanted.keys())):
        raise UsageError(f"{path} holds another kind of drafter ({differ[0][:60]}); use another --out")
    for name, tensor in wanted.items():
        if (tensor.shape, tensor.dtype) != (found[name].shape, found[name].dtype):
            raise UsageError(
                f"{path} holds another drafter: {name} is {found[name].dtype} {list(found[name].shape)}, not "
                f"{tensor.dtype} {list(tensor.shape)}; use another --out"
            )


def load_optimizer(path: Path, optimizer: Any, found: dict[str, Any], weights: Sequence[Tensor]) -> None:
    """Give an optimiser of ``weights`` the state of a checkpoint. Raises UsageError if it does not fit."""
    own = optimizer.state_dict()
    try:
        groups = [list(group["params"]) for group in found["param_groups"]]
        fits = groups == [list(group["params"]) for group in own["param_groups"]]
        for number, weight in enumerate(weights):
            state = found["state"].get(number)
            if state is None:
                continue  # a weight without a gradient so far
            fits = fits and {"step", "exp_avg", "exp_avg_sq"} <= state.keys()
            fits = fits and state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
        fits = fits and found["state"].keys() <= set(range(len(weights)))
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise _damaged(path, "holds no state of this optimiser")
    # The options are this run's own; they were compared.
    optimizer.load_state_dict({"state": found["state"], "param_groups": own["param_groups"]})


def _check_shape(state: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if a part is not of its kind."""
    student, log = state["student"], state["log"]
    if not isinstance(student, dict) or not all(isinstance(tensor, Tensor) for tensor in student.values()):
        raise ValueError("student holds no tensors by name")
    for key in ("step", "tokens", "tenth"):
        if type(state[key]) is not int or state[key] < 0:
            raise ValueError(f"{key} is no count")
    if not isinstance(state["seconds"], int | float) or not 0 <= state["seconds"] < math.inf:
        raise ValueError("seconds is no time")
    if not isinstance(state["made_with"], dict) or not isinstance(state["optimizer"], dict):
        raise ValueError("made_with or optimizer is no mapping")
    for entry in log if isinstance(log, list) and log else [None]:
        if not isinstance(entry, dict) or entry.keys() != _ENTRY.keys():
            raise ValueError("log holds no evaluations")
        if not all(isinstance(entry[key], kind) for key, kind in _ENTRY.items()) or not entry["positions"]:
            raise ValueError("log holds something else than numbers")


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} is damaged: it {what}; delete it to start over, or use another --out")
