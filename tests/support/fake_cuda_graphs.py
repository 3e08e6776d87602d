"""A recorder that stands for a CUDA graph, and a model that replays what it recorded."""

from collections.abc import Callable
from typing import Any

from crossdraft.framework.lm.cuda_graphs import CudaGraphRunner
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
NEW = 18


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
        self.recorder = Recorder()
        super().__init__(*arguments, graphs=CudaGraphRunner(self.recorder, "test"))
