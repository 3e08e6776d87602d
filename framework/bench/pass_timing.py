"""Measuring what a pass of a model costs on this machine, as the decode loop makes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import numpy as np
import torch

from ..contracts.sampling import Sampling
from ..cost.curve import BATCH_SIZES, CONTEXTS, REPEATS, WIDTHS, CostCurve, Point
from ..engine.stopwatch import Stopwatch
from ..errors import UsageError
from ..lm.cuda_graphs import CaptureLimits, recording
from ..lm.transformers_lm import TransformersLM
from ..models.environment import describe


def device_identity(device: Any) -> dict[str, Any]:
    """What the times of a model on the torch ``device`` depend on beside its weights and dtype."""
    found = describe()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else found["cpu"]["model"]
    identity = {"device": f"{device.type} ({hardware})", "torch": found["versions"]["torch"]}
    return identity | ({"threads": found["cpu"]["torch_threads"]} if device.type == "cpu" else {})


def measure_passes(
    model: Any,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    advance: Callable[[int], Any] = lambda n: None,
) -> list[Point]:
    """Time a loaded transformers model as the decode loop uses it: `TransformersLM.forward` and the softmax.

    W tokens are grown in each of B slots; the longest row holds C tokens and every other one a few less, as in the
    loop, where no two rows are equally long. What is in the cache does not change the time: it is not filled.
    Repetitions go round all points, so that a slow minute of the machine hits each of them once; the slots of all
    batch sizes are held at once for that.

    Args:
        advance: told the number of passes made since it was last told.

    Raises:
        UsageError: a context and a width together exceed the model's context.
    """
    longest = max(contexts) + max(widths)
    lms = {b: TransformersLM(model, b, longest) for b in batch_sizes}
    device, limit = model.device, lms[batch_sizes[0]].context_length
    if limit is not None and longest > limit:
        raise UsageError(
            f"a context of {max(contexts)} and {max(widths)} new tokens exceed the model's {limit} positions; "
            "give a smaller --context or --width"
        )
    sampling, clock = Sampling(), Stopwatch(device)
    points = list(product(batch_sizes, widths, contexts))
    seconds: dict[tuple[int, int, int], list[float]] = {point: [] for point in points}

    @torch.inference_mode()
    def once(b: int, width: int, context: int) -> float:
        lm = lms[b]
        lm.lengths = [max(context - row, 0) for row in range(b)]
        tokens = torch.randint(lm.vocab_size, (b, width), device=device)
        before = clock.seconds["target"]
        clock.start()
        sampling.checked_probs(lm.forward(tokens)[0])
        clock.mark("target")
        lm.commit([0] * b)
        return clock.seconds["target"] - before

    order = deque(points)
    for repeat in range(repeats + 1):
        for point in order:
            with recording(None if repeat else CaptureLimits(depth=0, nodes=0)):
                taken = once(*point)
            if repeat:  # the first time step, buffers are made and graphs recorded
                seconds[point].append(taken)
            advance(1)
        order.rotate(len(points) // 3)
    quartiles = {point: np.percentile(taken, [50, 25, 75]) for point, taken in seconds.items()}
    return [Point(*point, *map(float, quartiles[point])) for point in points]


def measure_curve(loaded: Any, **options: Any) -> CostCurve:
    """The curve of a `LoadedModel`; ``options`` are those of `measure_passes`."""
    points = measure_passes(loaded.model, **options)
    return CostCurve(
        model=loaded.name,
        sha256=loaded.sha256,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=device_identity(loaded.model.device),
        points=tuple(points),
        repeats=options.get("repeats", REPEATS),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )
