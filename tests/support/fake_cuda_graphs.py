"""A recorder that stands for a CUDA graph, and a model that replays what it recorded."""

from collections.abc import Callable
from typing import Any

from crossdraft.framework.lm.cuda_graphs import Graphs
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
NEW = 18
#: What a recorded call may not look at, because a graph would repeat what it saw.
BOOKS = ("lengths", "hidden_layers", "_grown", "_tree", "passes")


class Recorder:
    """Stands for `CudaRecorder`."""

    def __init__(self, lm: TransformersLM | None = None):
        self.lm, self.recorded, self.replayed = lm, 0, 0

    def rehearse(self, run: Callable) -> tuple:
        return run()

    def record(self, run: Callable) -> Callable:
        """Computes nothing: what the outputs hold until the first replay is no number."""
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            books = {name: vars(self.lm).pop(name) for name in BOOKS} if self.lm else {}
            run()
            if self.lm:
                vars(self.lm).update(books)

        return replay


class ReplayingLM(TransformersLM):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.recorder = Recorder(self)
        self._run = Graphs(self.recorder, "test")
