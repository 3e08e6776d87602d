"""Training checkpoints, written atomically and validated on load.

A checkpoint contains weights and buffers of the student, the optimizer state, the next step, time and tokens spent, the
log, and the options and digests it was made with. The order of texts, the learning rate and all random numbers follow
from the step (and, with a time limit, from the time spent), so they have no state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import TypedDict  # typing's needs Python 3.12 here

from crossdraft import UsageError
from crossdraft.commands import fault

from .files import replace


class Evaluation(TypedDict):
    """An entry of the log."""

    step: int
    minutes: float
    tokens: int
    held_out_acceptance: float
    positions: Annotated[list[float], Field(min_length=1)]


@dataclass(config=ConfigDict(arbitrary_types_allowed=True, strict=True, allow_inf_nan=False))
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
    step: NonNegativeInt
    seconds: NonNegativeFloat
    tokens: NonNegativeInt
    tenth: NonNegativeInt
    log: Annotated[list[Evaluation], Field(min_length=1)]
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
    try:
        texts = {key: json.loads(state[key]) for key in ("log", "made_with")}
        loaded = Checkpoint(**{key: state[key] for key in Checkpoint.__dataclass_fields__} | texts)
    except ValidationError as error:
        problem = error.errors()[0]
        raise _damaged(path, f"has another {'.'.join(map(str, problem['loc']))}: {fault(problem)}") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise _damaged(path, "is not a checkpoint of crossdraft train") from None
    stored = loaded.made_with
    shared_keys = stored.keys() & made_with.keys()
    equal = {key for key in shared_keys if stored[key] == made_with[key]}
    if differ := sorted((stored.keys() | made_with.keys()) - equal - free):
        raise UsageError(
            f"{path} was made with other options or texts ({', '.join(differ)}); use them again, or another --out"
        )
    return loaded


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


def _damaged(path: Path, subject: str) -> UsageError:
    return UsageError(f"{path} is damaged: it {subject}; delete it to start over, or use another --out")
