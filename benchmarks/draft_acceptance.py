"""Accepted tokens of several verifiers on the same drafts of a pair of models: E[tau] of each draft shape.

    python benchmarks/draft_acceptance.py [--target smollm2-135m-instruct] [--model smollm2-draft-model]
        [--temperature 1] [--limit 16] [--max-new-tokens 32] [--coins 4] [--seconds 600]

Every draft has twelve nodes at most. Each shape decodes the prompts with its last verifier, so all verifiers see
contexts that the target wrote; at every step with a full draft each verifier decides ``--coins`` times on the draft at
hand. Verifiers of one shape are compared on the same drafts, shapes on the same prompts. Intervals are
over prompts. ``--seconds``: stop before the next group of prompts.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pair_options import pair_options
from tabulate import tabulate

from crossdraft import CounterRng, StepEvent, generate, load_model, load_prompts
from crossdraft.framework import plugins
from crossdraft.runs import estimate, estimate_text

TREE, DELAYED = [3, 1, 1, 1], [1, 1, 1, 3, 1, 1]
SEQUENCES, SIBLINGS = "specinfer spectr traversal", "specinfer traversal greedy-draft-optimal univer"
IID, TREES = {"name": "draft-model-iid", "K": 3}, {"name": "draft-model-tree"}
#: Shapes of twelve nodes: drafter without its model, number of levels, and verifiers.
SHAPES: dict[str, tuple[dict[str, Any], int, str]] = {
    "three sequences of four": (IID | {"gamma": 4}, 4, SEQUENCES),
    "three sequences after three tokens": (IID | {"gamma": 6, "delay": 3}, 6, SEQUENCES),
    f"tree {TREE}": (TREES | {"branching": TREE}, 4, "specinfer traversal"),
    f"tree {DELAYED}": (TREES | {"branching": DELAYED}, 6, "specinfer traversal"),
    f"greedy siblings {TREE}": (TREES | {"branching": TREE, "siblings": "greedy"}, 4, SIBLINGS),
    f"greedy siblings {DELAYED}": (TREES | {"branching": DELAYED, "siblings": "greedy"}, 6, SIBLINGS),
}


def mean(sums: np.ndarray) -> np.ndarray:
    """Accepted tokens a step, of totals ``[.., 2]``: steps and accepted tokens."""
    return sums[..., 1] / sums[..., 0]


def difference(sums: np.ndarray) -> np.ndarray:
    """Difference of two means, of totals ``[.., 4]``."""
    return mean(sums[..., :2]) - mean(sums[..., 2:])


def main() -> None:
    parser = pair_options(__doc__, dtype="float32")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--coins", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    end, target = time.monotonic() + args.seconds, load_model(args.target, device=args.device, dtype=args.dtype)
    prompts = [prompt.turns[0] for prompt in load_prompts(args.prompts)[: args.limit]]
    options = {name: getattr(args, name) for name in ("temperature", "max_new_tokens", "batch_size")}
    sums = {shape: np.zeros((len(prompts), 1 + len(rules.split()))) for shape, (_, _, rules) in SHAPES.items()}
    emitted, first = np.zeros(len(prompts), int), 0  # tokens of each prompt; the first prompt of the group

    def note(event: StepEvent, shape: str) -> None:
        rules, levels = SHAPES[shape][2].split(), SHAPES[shape][1]
        accepted = np.zeros((len(event.prompts), len(rules)))
        slots = [first + (prompt or 0) for prompt in event.prompts]
        for coin in range(args.coins if event.draft.width else 0):
            for column, name in enumerate(rules):
                numbers = CounterRng(1 + coin).for_step(slots, emitted[slots].tolist(), event.draft.tokens.device)
                own = replace(event.draft)
                verdict = plugins.get("verifiers", name)().verify(own, event.scores.p, numbers)
                accepted[:, column] += verdict.length.numpy(force=True)
        for row, (prompt, tokens) in enumerate(zip(event.prompts, event.emitted, strict=True)):
            if prompt is not None:
                if args.max_new_tokens - emitted[first + prompt] > levels:
                    sums[shape][first + prompt] += [1, *accepted[row] / args.coins]
                emitted[first + prompt] += len(tokens)

    for first in range(0, len(prompts), args.batch_size):
        if time.monotonic() > end:
            break
        for shape, (drafter, _, rules) in SHAPES.items():
            emitted[:] = 0
            pair = {"drafter": drafter | {"model": args.model}, "verifier": rules.split()[-1]}
            step = partial(note, shape=shape)
            generate(target, prompts[first : first + args.batch_size], on_step=step, **pair, **options)
        print(f"{sum(item[:, 0].sum() for item in sums.values()):.0f} steps", flush=True)
    rows = []
    base = sums[next(iter(SHAPES))][:, [0, 3]]
    for shape, (_, _, rules) in SHAPES.items():
        traversal = 1 + rules.split().index("traversal")
        for column, name in enumerate(rules.split(), 1):
            columns = [sums[shape][:, [0, column]], sums[shape][:, [0, traversal]], base]
            items = [estimate(mean, columns[0], log=False, minimum=0.0)]
            items += [estimate(difference, np.concatenate([columns[0], other], 1), log=False) for other in columns[1:]]
            rows.append([shape, name, *(estimate_text(item, digits=3) for item in items)])
    used = int((base[:, 0] > 0).sum())
    print(f"{used} prompts, {', '.join(f'{item[:, 0].sum():.0f}' for item in sums.values())} steps")
    headers = ["draft", "verifier", "E[τ]", "less `traversal`", "less `traversal` of the first draft"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
