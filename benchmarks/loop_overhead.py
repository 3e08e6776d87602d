"""Overhead of a step outside the models: the share of its wall time that is not inside a model's forward pass.

    python benchmarks/loop_overhead.py [--device cuda] [--batch 1 8] [--steps 40]

Forward hooks on the target and on the draft model time ``model(...)``; the loop's own clock times the phases. A phase
minus the pass inside it is overhead: *draft* (catching up, masks, the drafter's distributions and draws), *target*
(masks, the distribution p), *verify* (the verifier), *rest* (host bookkeeping and the step's one synchronization).
Every number is the median over steps with all slots occupied, so shares need not sum to 100.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from typing import Any, cast

import torch
from pair_options import pair_options
from tabulate import tabulate

from crossdraft import Sampling, load_model, load_prompts
from crossdraft.framework.lm.cuda_graphs import CudaGraphRunner
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.models import Decoder, encode, pair_decoder

DRAFTERS = ("none", "prompt-lookup", "draft-model")
PHASES = ("draft", "target", "verify", "rest")
#: Results of `measure`.
COLUMNS = ("ms", "target pass", "draft pass", *PHASES, "outside")
#: Warm-up steps of a cell, in which buffers are allocated.
WARM_UP = 3


class ForwardClock:
    """Seconds inside the forward passes of ``lm``'s model since `take` was last called; of None, 0.

    Replays of its CUDA graphs are timed, too, masks included: module hooks do not run in a replay.
    """

    def __init__(self, lm: Any):
        self._seconds = self._start = 0.0
        self._depth, self._hooks, self._lm = 0, [], None
        if lm is not None:
            device = lm.model.device
            self._synchronise = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
            self._hooks = [lm.model.register_forward_pre_hook(self._enter), lm.model.register_forward_hook(self._leave)]
            if lm.graphs.records:
                self._lm, self._graphs = lm, lm.graphs
                lm.graphs = lm._buckets.graphs = cast(CudaGraphRunner, _TimedGraphs(lm.graphs, lm, self))

    def close(self) -> None:
        """Remove the clock from the model and its graphs."""
        for hook in self._hooks:
            hook.remove()
        if self._lm is not None:
            self._lm.graphs = self._lm._buckets.graphs = self._graphs

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._synchronise()
            self._start = time.perf_counter()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._synchronise()
            self._seconds += time.perf_counter() - self._start

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass
class _TimedGraphs:
    """The CUDA graphs of ``lm``, timed by ``clock``."""

    graphs: CudaGraphRunner
    lm: TransformersLM
    clock: ForwardClock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graphs, name)

    def __call__(self, function: Callable, *rest: Any) -> Any:
        if function != self.lm.forward_pass.score:
            return self.graphs(function, *rest)
        self.clock._enter()
        out = self.graphs(function, *rest)
        self.clock._leave()
        return out


def clocks_of(decoder: Decoder) -> tuple[ForwardClock, ForwardClock]:
    """Clocks of a decoder's target, and of its draft model or head; one that stands still if it has neither."""
    drafter: Any = decoder.drafter
    target, lm = decoder.target, getattr(getattr(drafter, "model", drafter), "lm", None)
    while hasattr(lm, "_lm"):
        lm = lm._lm
    return ForwardClock(target), ForwardClock(lm)


class _Enough(Exception):
    """Raised to end a decoder after the last step."""


def measure(decoder: Decoder, prompts: list[list[int]], step_count: int) -> dict:
    """Medians over steps with every slot occupied: ``ms``; per cent of it in ``passes`` and, outside them, by phase."""
    results, clocks, own, maximum = [], clocks_of(decoder), decoder.step, WARM_UP + step_count

    def timed() -> Any:
        if len(results) == maximum:
            raise _Enough
        before = dict(decoder.stopwatch.seconds)
        for clock in clocks:
            clock.take()
        out = own()
        seconds = decoder.stopwatch.seconds
        spent = {phase: seconds[phase] - before[phase] for phase in PHASES}
        passes = {"target": clocks[0].take(), "draft": clocks[1].take()}
        total = sum(spent.values())
        outside = {phase: 100 * (spent[phase] - passes.get(phase, 0.0)) / total for phase in PHASES}
        inside = {f"{phase} pass": 100 * passes[phase] / total for phase in passes}
        results.append({"ms": 1e3 * total, **inside, **outside, "outside": sum(outside.values())})
        return out

    decoder.step = timed
    try:
        with suppress(_Enough):  # as many prompts as the steps could finish, so that no slot stays empty
            list(decoder.run(list(islice(cycle(prompts), decoder.target.batch_size * (maximum + 1)))))
    finally:
        decoder.step = own
        for clock in clocks:
            clock.close()
    kept = results[WARM_UP:]
    return {key: statistics.median(row[key] for row in kept) for key in kept[0]}


def main() -> None:
    parser = pair_options(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=40, help="number of measured steps per cell")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--verifier", default="token")
    args = parser.parse_args()
    target = load_model(args.target, device=args.device, dtype=args.dtype)
    small = load_model(args.model, dtype=target.model.dtype, share_with=target)
    target = replace(target, eos_token_ids=())  # sequences do not end early
    prompts = [encode(target.tokenizer, p.turns[:1]) for p in load_prompts(args.prompts)[: max(args.batch)]]
    longest = max(map(len, prompts)) + args.max_new_tokens
    common = {"max_new_tokens": args.max_new_tokens, "load": lambda name, target: small}
    common |= {"sampling": Sampling(temperature=args.temperature)}
    place = torch.cuda.get_device_name() if target.model.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"{target.name} ({str(target.model.dtype)[6:]}, {place}), {args.verifier}, temperature {args.temperature:g}, "
        f"gamma {args.gamma}, medians of {args.steps} steps; per cent of a step"
    )
    rows = []
    for batch, name in product(args.batch, DRAFTERS):
        options = {"none": {}, "prompt-lookup": {"gamma": args.gamma}}
        drafter = {"name": name} | options.get(name, {"gamma": args.gamma, "model": args.model})
        decoder = pair_decoder(target, drafter, args.verifier, longest, batch_size=batch, **common)
        rows.append([name, batch, *measure(decoder, prompts, args.steps).values()])
    print(tabulate(rows, ["drafter", "B", *COLUMNS], floatfmt=".1f"))


if __name__ == "__main__":
    main()
