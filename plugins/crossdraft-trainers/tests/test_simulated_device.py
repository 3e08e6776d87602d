"""Training on the simulated CUDA device, killed and resumed: losses and tensors of an undisturbed run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from crossdraft_trainers.trainer import Trainer
from on_both_devices import on_both_devices
from test_resume import COMMON, RECIPES, Killed, ended, texts  # noqa: F401  (texts is a fixture)
from training_target import tied_llama

from crossdraft.framework.contracts.models import LoadedModel

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("kind", RECIPES)
def test_losses_are_those_of_cpu(kind: str, texts: Any, tmp_path: Path) -> None:  # noqa: F811
    def train(place: str, steps: int | None = None) -> Trainer:
        AcceleratorState._reset_state(True)
        target = LoadedModel(tied_llama().to(place), None, "tiny", "made here", "0" * 64, (1,), 128)  # type: ignore[arg-type]
        run = Trainer(target, RECIPES[kind](epochs=1), tmp_path / place)
        step = run._train

        def killed(*arguments: Any) -> Any:
            if run.step == steps:
                raise Killed
            return step(*arguments)

        run._train = killed  # type: ignore[method-assign]
        run.run(*texts)
        return run

    def losses(place: str) -> Any:
        if place == "cuda":
            with pytest.raises(Killed):
                train(place, 2)
        numbers, tensors = ended(train(place))
        return numbers, {name: tensor.cpu().tolist() for name, tensor in tensors.items()}

    on_both_devices(losses)
