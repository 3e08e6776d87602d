"""Acceptance rate of the first, second, ... sibling sampled from a draft model: Sequoia's acceptance vector.

    python benchmarks/sibling_acceptance.py [--target smollm2-135m-instruct] [--model smollm2-draft-model]
        [--siblings 8] [--temperature 1] [--verifier specinfer] [--limit 12] [--max-new-tokens 32]

Every step drafts ``--siblings`` children of the last committed token and no deeper nodes. Prints acceptance rates with
intervals over prompts, a line for a recipe (``acceptance``, made monotone by averaging), and the expected number of
tokens per step of Sequoia's trees.
"""

from __future__ import annotations

import numpy as np
from pair_options import pair_options
from scipy.optimize import isotonic_regression
from tabulate import tabulate

from crossdraft import StepEvent, generate, load_model, load_prompts
from crossdraft.drafters.autoregressive.sequoia import best_tree
from crossdraft.runs import estimate


def main() -> None:
    parser = pair_options(__doc__)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--verifier", help="default: specinfer, or greedy at temperature 0")
    parser.add_argument("--depth", type=int, default=8, help="maximum depth of the printed trees")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    args = parser.parse_args()
    prompts = [prompt.turns[0] for prompt in load_prompts(args.prompts)[: args.limit]]
    counts = np.zeros((len(prompts), 1 + args.siblings))  # steps, and steps in which each sibling was accepted

    def note(event: StepEvent) -> None:
        if not event.draft.width:
            return
        present = event.draft.valid.any(1).tolist()
        ranks = [0] * len(present) if event.verdict.path is None else event.verdict.path[:, 0].tolist()
        for prompt, drafted, tau, rank in zip(event.prompts, present, event.accepted, ranks, strict=True):
            if prompt is not None and drafted:
                counts[prompt, 0] += 1
                counts[prompt, 1 + rank] += tau > 0

    drafter = {"name": "draft-model-tree", "model": args.model, "branching": [args.siblings]}
    verifier = args.verifier or ("specinfer" if args.temperature else "greedy")
    names = ("max_new_tokens", "temperature", "batch_size")
    options = {name: getattr(args, name) for name in names} | {"drafter": drafter, "verifier": verifier}
    generate(load_model(args.target, device=args.device, dtype=args.dtype), prompts, on_step=note, **options)
    results = [
        estimate(lambda sums: sums[..., 1] / sums[..., 0], counts[:, [0, k]], log=False, minimum=0.0, maximum=1.0)
        for k in range(1, args.siblings + 1)
    ]
    rows = [[rank, item.value, item.low, item.high] for rank, item in enumerate(results, 1)]
    print(f"{counts[:, 0].sum():.0f} steps over {len(prompts)} prompts")
    print(tabulate(rows, headers=["sibling", "accepted", "from", "to"], floatfmt=".4f"))
    falling = isotonic_regression([item.value for item in results], increasing=False).x
    acceptance = tuple(round(float(share), 4) for share in falling)
    print(f"acceptance: {list(acceptance)}")
    trees = []
    for nodes in args.nodes:
        paths, accepted = best_tree(acceptance, nodes, args.depth)
        trees.append([nodes, max(map(len, paths)), sum(len(path) == 1 for path in paths), 1 + accepted])
    headers = ["nodes", "levels", "children of the root", "expected tokens a step"]
    print(tabulate(trees, headers=headers, floatfmt=".3f"))


if __name__ == "__main__":
    main()
