"""A streamer that records its inputs."""

from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert not value.is_inference()
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")
