"""Timing of model passes on this machine, as the decode loop runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import numpy as np
import torch

from ...bench.environment import describe
from ...contracts.sampling import Sampling
from ...cost.curve import BATCH_SIZES, CONTEXTS, REPEATS, WIDTHS, CostCurve, Point
from ...engine.stopwatch import Stopwatch
from ...errors import UsageError
from ...lm.cuda_graphs import CaptureLimits, recording
from ...lm.transformers_lm import TransformersLM


def device_identity(device: Any) -> dict[str, Any]:
    """Conditions of the times of a model on the torch ``device``, besides its weights and dtype."""
    environment = describe()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else environment["cpu"]["model"]
    identity = {"device": f"{device.type} ({hardware})", "torch": environment["versions"]["torch"]}
    return identity | ({"threads": environment["cpu"]["torch_threads"]} if device.type == "cpu" else {})


def measure_passes(
    model: Any,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    advance: Callable[[int], Any] = lambda n: None,
) -> list[Point]:
    """Time `TransformersLM.forward` and the softmax of a loaded transformers model, as in the decode loop.

    W tokens are scored in each of B slots; the longest row has C tokens and the others slightly fewer, since rows of
    the loop differ in length. The cache is not filled, because its content does not affect the time. Each repetition
    visits all points, so that a slow phase of the machine affects each of them once; the slots of all batch sizes are
    allocated at once for that.

    Args:
        advance: called after each pass with the number of new passes, 1.

    Raises:
        UsageError: a context plus a width exceeds the model's context length.
    """
    longest = max(contexts) + max(widths)
    lms = {b: TransformersLM(model, b, longest) for b in batch_sizes}
    device, limit = model.device, lms[batch_sizes[0]].context_length
    if limit is not None and longest > limit:
        raise UsageError(
            f"a context of {max(contexts)} and {max(widths)} new tokens exceed the model's {limit} positions; "
            "use a smaller --context or --width"
        )
    sampling, clock = Sampling(), Stopwatch(device)
    points = list(product(batch_sizes, widths, contexts))
    seconds: dict[tuple[int, int, int], list[float]] = {point: [] for point in points}

    @torch.inference_mode()
    def measure_once(b: int, width: int, context: int) -> float:
        lm = lms[b]
        lm.lengths = [max(context - row, 0) for row in range(b)]
        tokens = torch.randint(lm.vocab_size, (b, width), device=device)
        start = clock.seconds["target"]
        clock.mark()
        sampling.checked_probs(lm.forward(tokens)[0])
        clock.mark("target")
        lm.commit([0] * b)
        return clock.seconds["target"] - start

    order = deque(points)
    for repeat in range(repeats + 1):
        for point in order:
            with recording(None if repeat else CaptureLimits(depth=0, nodes=0)):
                duration = measure_once(*point)
            if repeat:  # the first repetition allocates buffers and captures graphs
                seconds[point].append(duration)
            advance(1)
        order.rotate(len(points) // 3)
    quartiles = {point: np.percentile(duration, [50, 25, 75]) for point, duration in seconds.items()}
    return [Point(*point, *map(float, quartiles[point])) for point in points]


def measure_curve(loaded: Any, **options: Any) -> CostCurve:
    """Measure the cost curve of a `LoadedModel`; ``options`` are those of `measure_passes`.

    Passes are measured again up to twice if one takes much longer than a larger one, and the shorter times are kept.

    Raises:
        UsageError: other programs disturb the passes.
    """
    points: list[Point] = []
    for _ in range(3):
        measured = measure_passes(loaded.model, **options)
        points = [min(pair, key=lambda p: p.median) for pair in zip(points or measured, measured, strict=True)]
        curve = CostCurve(
            model=loaded.name,
            sha256=loaded.sha256,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=device_identity(loaded.model.device),
            points=tuple(points),
            repeats=options.get("repeats", REPEATS),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if not curve.implausible:
            return curve
    raise UsageError(f"the passes of {loaded.name} were disturbed: {curve.implausible}; measure on a quiet machine")
