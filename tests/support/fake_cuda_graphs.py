"""A recorder that stands for a CUDA graph, and a model that replays what it recorded, on a CPU without its rules.

For checks of many architectures; other tests of graphs run on the simulated device.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from crossdraft.framework.lm import ragged_lm
from crossdraft.framework.lm.cuda_graphs import CudaGraphRunner
from crossdraft.framework.lm.idle import free_idle
from crossdraft.framework.lm.transformers_lm import TransformersLM


class Recorder:
    """Stands for `CudaRecorder`."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def warm_up(self, run: Callable) -> tuple:
        return run()

    def record(self, run: Callable) -> Callable:
        """Compute nothing, as a capture; outputs are undefined until the first replay."""
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


class ReplayingLM(TransformersLM):
    def __init__(self, *arguments: Any):
        free_idle()
        self.recorder: Any = Recorder()
        with patch.object(ragged_lm, "runner_for", lambda model: CudaGraphRunner(self.recorder, "test")):
            super().__init__(*arguments)
