"""Cost of a verifier: its time over that of one float32 softmax of the same logits [B, N+1, V], in one run.

    python benchmarks/verifier_cost.py [--device cuda] [--batch 1 8 32] [--vocab 32000 152064] [--rules block ...]
                                       [--compile]

Every step computes a softmax of the target's logits, whatever the verifier, so the ratio is a verifier's relative extra
cost. Distributions are synthetic: token verification accepts between two and three of eight tokens (E[tau] is
printed). Every repeat is a new step with new drafts: the softmax and all verifiers of one draft shape run in turn on
the same tensors, and verifiers with state observe their outcomes, as in a real sequence. With ``--compile`` each
verifier also runs compiled (`CompiledVerifier`), with a longer warm-up. Prints medians over the repeats. Combinations
beyond ``--limit-gib`` are skipped with a message.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from crossdraft import (
    CHAIN,
    GREEDY_DRAFT,
    IID,
    WITHOUT_REPLACEMENT,
    CounterRng,
    Draft,
    DraftKind,
    Sampling,
    StepRng,
    Verifier,
)
from crossdraft.drafters.autoregressive.trees import TreeTemplate, grow_static
from crossdraft.framework import plugins
from crossdraft.framework.engine.compiled_verifier import CompiledVerifier

GAMMA, LENGTH, BRANCHING = 8, 4, (2, 2, 1)
#: Draft shapes: draft kind, and maximum number of nodes per row.
SHAPES: dict[str, tuple[DraftKind, int]] = {
    f"chain {GAMMA}": (CHAIN, GAMMA),
    f"iid 2 x {LENGTH}": (IID, 2 * LENGTH),
    f"iid 4 x {LENGTH}": (IID, 4 * LENGTH),
    f"tree {list(BRANCHING)}": (WITHOUT_REPLACEMENT, TreeTemplate.branching(BRANCHING).nodes),
    f"greedy tree {list(BRANCHING)}": (GREEDY_DRAFT, TreeTemplate.branching(BRANCHING).nodes),
}


class SyntheticLM:
    """A synthetic target and drafter whose logits depend on the prefix through one of a few states."""

    STATES = 32

    def __init__(self, vocab: int, device: torch.device, spread: float = 4.2, disagreement: float = 0.7):
        generator = torch.Generator(device).manual_seed(0)

        def normal() -> Tensor:
            return torch.randn(self.STATES, vocab, generator=generator, device=device)

        self.target = normal() * spread
        self.drafter = self.target + normal() * disagreement
        self.p, self.q = self.target.softmax(-1), self.drafter.softmax(-1)

    def after(self, state: Tensor, token: Tensor) -> Tensor:
        return (state * 5 + token + 1) % self.STATES

    def states(self, draft: Draft, start: Tensor) -> Tensor:
        """``[B, N+1]``: the state of the root, ``start [B]``, and of every node."""
        states = [start[:, None]]
        for node in range(draft.width):
            known = torch.cat(states, 1)
            one = slice(node, node + 1)
            states.append(self.after(known.gather(1, draft.parents[:, one] + 1), draft.tokens[:, one]))
        return torch.cat(states, 1)

    def draft(self, shape: str, start: Tensor, rng: StepRng) -> Draft:
        drawn, nodes = SHAPES[shape]
        b, device = len(start), start.device
        if drawn in (CHAIN, IID):
            length = GAMMA if drawn is CHAIN else LENGTH
            k = nodes // length
            states, tokens, distributions = start[:, None].expand(b, k), [], []
            for level in range(length):
                distributions.append(self.q[states if level else states[:, :1]])
                drawn_now = [
                    rng.draw(distributions[-1][:, j if level else 0], "draft", level * k + j) for j in range(k)
                ]
                tokens.append(torch.stack(drawn_now, 1))
                states = self.after(states, tokens[-1])
            full = torch.full((b,), length, device=device)
            q = torch.cat(distributions, 1)
            if drawn is CHAIN:
                return Draft.chain(torch.cat(tokens, 1), full, q)
            return Draft.iid(torch.stack(tokens, 2), full, q)
        states = start[:, None]

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            new = self.after(states.gather(1, parents + 1), tokens)
            states = torch.cat([states, new], 1)
            return self.drafter[new]

        siblings = "greedy" if drawn is GREEDY_DRAFT else "without-replacement"
        tree, levels = TreeTemplate.branching(BRANCHING), len(BRANCHING)
        limit = torch.full((b,), levels, device=device)
        return grow_static(tree, levels, siblings, self.drafter[start], expand, Sampling(), limit, rng)[0]


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    wait = (lambda: None) if device.type == "cpu" else getattr(torch, device.type).synchronize
    wait()
    start = time.perf_counter()
    out = run()
    wait()
    return time.perf_counter() - start, out


def gibibytes(shape: str, batch: int, vocab: int) -> float:
    """Logits, p, its softmax, q and about three tensors of their size inside a verifier, float32."""
    return 7 * batch * (SHAPES[shape][1] + 1) * vocab * 4 / 2**30


@torch.inference_mode()
def measure(
    shape: str, rules: list[str], lm: SyntheticLM, batch: int, repeats: int, device: torch.device, compiled: bool
) -> list:
    """Rows of the table for one shape and batch size."""
    verifiers: dict[str, Verifier] = {}
    compilers: dict[str, CompiledVerifier] = {}
    for name in rules:
        rule = plugins.get("verifiers", name)
        verifiers[name] = rule()
        if compiled and CompiledVerifier.supports(verifiers[name]):
            compilers[f"{name}, compiled"] = CompiledVerifier(rule())
            verifiers[f"{name}, compiled"] = compilers[f"{name}, compiled"].verifier
    times: dict[str, list[float]] = {name: [] for name in ("softmax", *verifiers)}
    accepted: dict[str, list[float]] = {name: [] for name in verifiers}
    warm_up = 12 if compiled else 2  # merged sequences come in several shapes
    for verifier in verifiers.values():
        for row in range(batch):
            verifier.start(row)
    rng, nodes = CounterRng(0), 0
    for position in range(repeats + warm_up):
        if position == warm_up:
            for compiler in compilers.values():
                compiler.compiling = False
        numbers = rng.for_step(range(batch), [position] * batch, device)
        start = (torch.arange(batch, device=device) * 7 + position) % SyntheticLM.STATES
        draft = lm.draft(shape, start, numbers)
        states = lm.states(draft, start)
        logits, p = lm.target[states], lm.p[states]
        elapsed, _ = seconds(lambda: logits.softmax(-1), device)  # noqa: B023
        results = {"softmax": elapsed}
        for name, verifier in verifiers.items():
            # Cached properties of a draft (such as its ancestor mask) are recomputed for every verifier.
            own = replace(draft)
            # The drafter's first draw has generated the step's random numbers.
            own_numbers = copy.deepcopy(numbers)
            verify = compilers.get(name, verifier.verify)
            results[name], verdict = seconds(lambda: verify(own, p, own_numbers), device)  # noqa: B023
            tau = verdict.length.tolist()
            verifier.observe(tau, draft.count.tolist())
            accepted[name].append(sum(tau) / batch)
        nodes = max(nodes, draft.width)
        if position >= warm_up:
            for name, value in results.items():
                times[name].append(value)
    softmax = statistics.median(times["softmax"])
    rows = []
    for name in verifiers:
        ratios = [own / base for own, base in zip(times[name], times["softmax"], strict=True)]
        rows.append(
            [
                *(shape, lm.p.shape[1], batch, name, nodes, softmax * 1e3),
                *(statistics.median(times[name]) * 1e3, statistics.median(ratios), statistics.mean(accepted[name])),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 152064])
    parser.add_argument("--rules", nargs="+", help="default: all that support sampling")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit-gib", type=float, default=6.0, help="skip combinations that need more memory")
    parser.add_argument("--compile", action="store_true", help="also run compiled verifiers")
    args = parser.parse_args()
    device = torch.device(args.device)
    known = {}
    for name in args.rules or plugins.entries("verifiers"):
        rule = plugins.get("verifiers", name)
        known[name] = rule.traits(rule.Config())
    header = ["draft", "V", "B", "rule", "N", "softmax ms", "rule ms", "ratio", "E[tau]"]
    rows = []
    for vocab in args.vocab:
        lm = SyntheticLM(vocab, device)
        for shape, (drawn, _) in SHAPES.items():
            rules = [
                name
                for name, traits in known.items()
                if traits.accepts_kind(drawn)
                and not traits.temperature_zero_only
                # Verifiers for pairs of siblings do not support this tree.
                and not (traits.pairs_only and drawn is WITHOUT_REPLACEMENT)
            ]
            if shape not in args.shapes or not rules:
                continue
            for batch in args.batch:
                if (need := gibibytes(shape, batch, vocab)) > args.limit_gib:
                    print(f"skipped: {shape}, V = {vocab}, B = {batch} needs about {need:.1f} GiB (--limit-gib)")
                    continue
                rows += measure(shape, rules, lm, batch, args.repeats, device, args.compile)
                print(f"{shape}, V = {vocab}, B = {batch}: done", flush=True)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"\ntorch {torch.__version__}, {place}, {args.repeats} repeats, medians")
    print(tabulate(rows, header, floatfmt=("", "", "", "", "", ".2f", ".2f", ".2f", ".2f")))


if __name__ == "__main__":
    main()
