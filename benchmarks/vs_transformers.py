"""crossdraft against transformers' own `generate`, in one process, interleaved, on the same model and prompts.

    python benchmarks/vs_transformers.py [--model smollm2-135m-instruct] [--drafter smollm2-draft-model]

Pairs (same gamma, temperature, dtype and threads on both sides):

    plain        generate()                                 drafter none
    prompt       generate(prompt_lookup_num_tokens=gamma)   drafter prompt-lookup, the same n-gram rule
    assistant    generate(assistant_model=...)              drafter draft-model, verifier token
    assistant+   generate(assistant_model=...)              drafter draft-model, verifier block

For each prompt both sides of every pair run one after the other, in rotating order; the ratio of a prompt is ours /
theirs in tokens per second, prefill included on both sides. Prints the ratio of totals, the median over prompts and
the interquartile range. `batch` rows show the effect of B slots; transformers' assisted generation supports only one
sequence at a time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from tqdm import tqdm

from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.stopwatch import Stopwatch
from crossdraft.framework.models.load import load_model
from crossdraft.framework.recipe.prompts import load_prompts

Ids = list[int]


class Ours:
    """A drafter x verifier cell with reused buffers."""

    def __init__(self, target, small, drafter: str, config: dict, verifier: str, args, batch: int, prompts: list[Ids]):
        self.decoder = pair_decoder(
            target,
            {"name": drafter, **config},
            verifier,
            max(map(len, prompts)) + args.max_new_tokens,
            sampling=Sampling(temperature=args.temperature),
            batch_size=batch,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            load=lambda name, target: small,
            stopwatch=Stopwatch(target.model.device, enabled=False),
        )

    def __call__(self, prompts: list[Ids]) -> int:
        return sum(len(r.tokens) for r in self.decoder.run(prompts))


class Theirs:
    """transformers' generate, prompt by prompt."""

    def __init__(self, target, args, **options):
        self.target, self.args, self.options = target, args, options

    def __call__(self, prompts: list[Ids]) -> int:
        count = 0
        for prompt in prompts:
            torch.manual_seed(self.args.seed)
            ids = torch.tensor([prompt], device=self.target.model.device)
            out = self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.args.max_new_tokens,
                eos_token_id=list(self.target.eos_token_ids),
                pad_token_id=self.target.eos_token_ids[0],
                do_sample=self.args.temperature > 0,
                **({"temperature": self.args.temperature, "top_k": 0, "top_p": 1.0} if self.args.temperature else {}),
                **self.options,
            )
            count += out.shape[1] - len(prompt)
        return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-draft-model", help="model of the draft-model drafter")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8, help="number of slots of the batch rows; 0: without them")
    parser.add_argument("--pairs", nargs="+", help="run only these pairs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target = load_model(args.model, dtype=args.dtype, device=args.device)
    small = load_model(args.drafter, share_with=target)
    # Separate copies for transformers: crossdraft replaces the linear layers of a model on a CPU.
    plain_target, plain_small = copy.deepcopy(target), copy.deepcopy(small)
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": p.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for p in load_prompts(args.prompts)[: args.limit]
    ]
    # transformers reads the draft length from the assistant's own generation config
    plain_small.model.generation_config.update(
        num_assistant_tokens=args.gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    verifier = "token" if args.temperature else "greedy"
    lookup = {"gamma": args.gamma, "max_ngram": 2, "match": "first"}
    lm = {"model": args.drafter, "gamma": args.gamma}

    def ours(drafter: str, config: dict, rule: str = verifier, batch: int = 1) -> Ours:
        return Ours(target, small, drafter, config, rule, args, batch, prompts)

    assisted = Theirs(plain_target, args, assistant_model=plain_small.model)
    pairs: dict[str, tuple[Callable[[list[Ids]], int], Callable[[list[Ids]], int]]] = {
        "plain": (ours("none", {}), Theirs(plain_target, args)),
        "prompt": (
            ours("prompt-lookup", lookup),
            Theirs(plain_target, args, prompt_lookup_num_tokens=args.gamma, max_matching_ngram_size=2),
        ),
        "assistant": (ours("draft-model", lm), assisted),
    }
    if args.temperature:
        pairs["assistant+"] = (ours("draft-model", lm, "block"), assisted)
    pairs = {name: sides for name, sides in pairs.items() if name in (args.pairs or pairs)}
    rates = {(name, side): [] for name in pairs for side in (0, 1)}
    totals = {key: [0, 0.0] for key in rates}
    for sides in pairs.values():  # warm up
        for run in sides:
            run(prompts[:1])
    order = list(rates)
    for i, prompt in enumerate(tqdm(prompts, desc="prompts", disable=None)):
        turn = i % len(order)
        for name, side in order[turn:] + order[:turn]:
            start = time.perf_counter()
            count = pairs[name][side]([prompt])
            seconds = time.perf_counter() - start
            rates[name, side].append(count / seconds)
            totals[name, side][0] += count
            totals[name, side][1] += seconds
    rows = []
    for name in pairs:
        ratios = [a / b for a, b in zip(rates[name, 0], rates[name, 1], strict=True)]
        own, other = (totals[name, side][0] / totals[name, side][1] for side in (0, 1))
        quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows.append([name, 1, other, own, own / other, quarter[1], f"{quarter[0]:.2f}-{quarter[2]:.2f}"])
    if args.batch:
        best = {name: totals[name, 1][0] / totals[name, 1][1] for name in pairs}
        for name, drafter, config in (
            ("plain", "none", {}),
            ("prompt", "prompt-lookup", lookup),
            ("assistant", "draft-model", lm),
        ):
            if name not in pairs:
                continue
            cell = ours(drafter, config, batch=args.batch)
            cell(prompts[:1])
            start = time.perf_counter()
            rate = cell(prompts) / (time.perf_counter() - start)
            rows.append([name, args.batch, best[name], rate, rate / best[name], None, None])
    print(
        f"{target.name} ({str(target.model.dtype)[6:]}, {target.model.device}, {torch.get_num_threads()} threads), "
        f"temperature {args.temperature:g}, gamma {args.gamma}, {len(prompts)} prompts x {args.max_new_tokens} tokens"
    )
    head = [
        "pair",
        "B",
        "transformers tok/s",
        "crossdraft tok/s",
        "ratio of totals",
        "median ratio",
        "middle half",
    ]
    print(tabulate(rows, head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
