"""Training checkpoints, written atomically and validated on load.

A checkpoint contains weights and buffers of the student, the optimizer state, the next step, time and tokens spent, the
log, and the options and digests it was made with. The order of texts, the learning rate and all random numbers follow
from the step (and, with a time limit, from the time spent), so they have no state.
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

from crossdraft.framework.errors import UsageError

from .files import replace

#: Keys and types of a log entry.
_ENTRY = {"step": int, "minutes": float, "tokens": int, "held_out_acceptance": float, "positions": list}


@dataclass
class Checkpoint:
    """Training state.

    Attributes:
        student: weights and buffers, by name.
        optimizer: its ``state_dict``.
        step: completed steps.
        seconds, tokens: spent in them.
        tenth: progress, in tenths, of the last evaluation.
        log: the evaluations, see `Trainer.log`.
        made_with: options and digests of texts, target and initial weights, which must match on resume.
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
        """Save atomically. Raises CrossdraftError if it cannot be written; an earlier checkpoint is kept."""
        state = {**vars(self), "log": json.dumps(self.log), "made_with": json.dumps(self.made_with)}
        replace(path, lambda file: torch.save(state, file))


def load(path: Path, device: torch.device, made_with: dict[str, Any], free: set[str]) -> Checkpoint:
    """Load a checkpoint, with ``weights_only``.

    Args:
        made_with: options and digests of this run.
        free: keys of it that may differ.

    Raises:
        UsageError: the checkpoint is damaged, or was made with other options.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception:  # a damaged archive may raise anything
        raise _damaged(path, "cannot be read") from None
    if not isinstance(state, dict) or (lacking := Checkpoint.__dataclass_fields__.keys() - state.keys()):
        what = f"lacks {', '.join(sorted(lacking))}" if isinstance(state, dict) else "does not contain a mapping"
        raise _damaged(path, what)
    try:
        loaded = {**state, "log": json.loads(state["log"]), "made_with": json.loads(state["made_with"])}
        _check_shape(loaded)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"is not a checkpoint of crossdraft train: {error}") from None
    stored = loaded["made_with"]
    shared_keys = stored.keys() & made_with.keys()
    equal = {key for key in shared_keys if stored[key] == made_with[key]}
    if differ := sorted((stored.keys() | made_with.keys()) - equal - free):
        raise UsageError(
            f"{path} was made with other options or texts ({', '.join(differ)}); use them again, or another --out"
        )
    return Checkpoint(**{key: loaded[key] for key in Checkpoint.__dataclass_fields__})


def check_weights(path: Path, loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise UsageError if names, shapes or dtypes of a checkpoint differ from the student's."""
    if differ := sorted(map(str, loaded.keys() ^ expected.keys())):
        raise UsageError(f"{path} contains another kind of drafter ({differ[0][:60]}); use another --out")
    for name, tensor in expected.items():
        if (tensor.shape, tensor.dtype) != (loaded[name].shape, loaded[name].dtype):
            raise UsageError(
                f"{path} contains another drafter: {name} is {loaded[name].dtype} {list(loaded[name].shape)}, not "
                f"{tensor.dtype} {list(tensor.shape)}; use another --out"
            )


def load_optimizer(path: Path, optimizer: Any, loaded: dict[str, Any], weights: Sequence[Tensor]) -> None:
    """Load the state of a checkpoint into an optimizer of ``weights``. Raises UsageError if it does not match."""
    own_state = optimizer.state_dict()
    try:
        groups = [list(group["params"]) for group in loaded["param_groups"]]
        fits = groups == [list(group["params"]) for group in own_state["param_groups"]]
        for number, weight in enumerate(weights):
            state = loaded["state"].get(number)
            if state is None:
                continue  # no gradient so far
            fits = fits and {"step", "exp_avg", "exp_avg_sq"} <= state.keys()
            fits = fits and state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
        fits = fits and loaded["state"].keys() <= set(range(len(weights)))
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise _damaged(path, "does not contain a state of this optimizer")
    # Keep this run's options, which were compared before.
    optimizer.load_state_dict({"state": loaded["state"], "param_groups": own_state["param_groups"]})


def _check_shape(state: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for a part of the wrong type."""
    student, log = state["student"], state["log"]
    if not isinstance(student, dict) or not all(isinstance(tensor, Tensor) for tensor in student.values()):
        raise ValueError("student is not a dictionary of tensors")
    for key in ("step", "tokens", "tenth"):
        if type(state[key]) is not int or state[key] < 0:
            raise ValueError(f"{key} is not a count")
    if not isinstance(state["seconds"], int | float) or not 0 <= state["seconds"] < math.inf:
        raise ValueError("seconds is not a duration")
    if not isinstance(state["made_with"], dict) or not isinstance(state["optimizer"], dict):
        raise ValueError("made_with or optimizer is not a mapping")
    for entry in log if isinstance(log, list) and log else [None]:
        if not isinstance(entry, dict) or entry.keys() != _ENTRY.keys():
            raise ValueError("log is not a list of evaluations")
        if not all(isinstance(entry[key], kind) for key, kind in _ENTRY.items()) or not entry["positions"]:
            raise ValueError("log contains values of the wrong type")


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} is damaged: it {what}; delete it to start over, or use another --out")
