"""DistillSpec's training options compared: one student per option, replayed along the same responses.

    python benchmarks/distillspec.py [--target smollm2-135m-instruct] [--start-from smollm2-draft-model] [--out DIR]

Each row is `crossdraft train draft-model` with other options: sequence-level (`nll`), or token-level with each
divergence, on the target's texts, on the student's own (`--on-policy 1`) or on half of each. The target generates the
texts once. Then `crossdraft replay` replays every student along responses of the target to held-out prompts;
differences are paired by response, with 95 % intervals over prompts. Completed students are kept in --out, and the
same command resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from crossdraft_advisor.replay.aggregate import difference
from crossdraft_advisor.replay.baseline_responses import baseline_responses
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.replay import replay
from crossdraft_advisor.replay.responses import Reader
from tabulate import tabulate

from crossdraft import Sampling
from crossdraft.framework.cli.main import main as crossdraft
from crossdraft.runs import estimate_text

#: Divergence, and the share of texts that are the student's own.
METHODS = {
    "forward-kl": ("forward-kl", 0),
    "nll": ("nll", 0),
    "reverse-kl": ("reverse-kl", 0),
    "jsd": ("jsd", 0),
    "tv": ("tv", 0),
    "forward-kl, on-policy": ("forward-kl", 1),
    "reverse-kl, on-policy": ("reverse-kl", 1),
    "jsd, on-policy": ("jsd", 1),
    "tv, on-policy": ("tv", 1),
    "jsd, mixed": ("jsd", 0.5),
}
#: Options that all students share, by their defaults here.
SHARED = {"tokens": 100_000, "max_response": 128, "write_batch": 64, "batch_tokens": 2048, "sampled_vocab": 2048}
SHARED |= {"epochs": 2, "learning_rate": 2e-4}


def train(args: argparse.Namespace, name: str, texts: Path) -> Path:
    """Train a student by one method, on the given texts; return its directory."""
    out = args.out / name.replace(", ", "-")
    if (out / "training.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for file in ("texts.jsonl", "texts.json"):
        if (texts / file).exists() and not (out / file).exists():
            shutil.copyfile(texts / file, out / file)
    divergence, on_policy = METHODS[name]
    options = {"target": args.target, "out": out, "measure": "none", "warm_up": 3, "divergence": divergence}
    options |= {"on_policy": on_policy} if on_policy else {}
    options |= {option: getattr(args, option) for option in SHARED}
    options |= {"start_from": args.start_from} if args.start_from else {}
    options |= {"questions": args.questions, "invented": 0} if args.questions else {}
    words = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", str(value))]
    argv = ["train", "draft-model", *words]
    if code := crossdraft(argv):
        sys.exit(code)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument(
        "--start-from", default="smollm2-draft-model", help="empty: initialize from the target's layers"
    )
    parser.add_argument("--methods", default=";".join(METHODS), help="methods to train, separated by semicolons")
    parser.add_argument(
        "--questions", default="", help="prompts for the training texts (default: the target invents questions)"
    )
    for option, value in SHARED.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--prompts", default="builtin", help="prompts whose responses are replayed")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--verifier", default="token")
    parser.add_argument("--out", type=Path, default=Path("runs/distillspec"))
    args = parser.parse_args()
    names = [name.strip() for name in args.methods.split(";")]
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"--methods: unknown method {unknown[0]!r}; choose from {'; '.join(METHODS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    outs: list[Path] = []
    for name in names:
        outs.append(train(args, name, outs[0] if outs else args.out / "none"))
    facts = [json.loads((out / "training.json").read_text(encoding="utf-8")) for out in outs]
    models = [*map(str, outs), *([args.start_from] if args.start_from else [])]
    drafters = [json.dumps({"name": "draft-model", "model": model}) for model in models]
    sampling = Sampling(temperature=args.temperature)
    candidates = candidates_of(drafters, [args.verifier], [args.gamma], sampling=sampling, target=args.target)
    responses = baseline_responses(args.target, args.prompts, sampling, limit=args.limit, maximum=args.max_new_tokens)
    result = replay(Reader(target=args.target, sampling=sampling, processed=True).read([str(responses)]), candidates)
    tallies = [candidate.tallies[args.verifier, 1] for candidate in result.candidates]
    rows = []
    for i, name in enumerate([*names, args.start_from][: len(tallies)]):
        others = [tallies[0]] if i else [], [tallies[-1]] if args.start_from and i < len(facts) else []
        less = [
            "".join(
                estimate_text(difference(tallies[i], args.gamma, other, args.gamma), "+", digits=3) for other in some
            )
            for some in others
        ]
        held_out = f"{facts[i]['log'][-1]['held_out_acceptance']:.3f}" if i < len(facts) else ""
        minutes = f"{facts[i]['seconds'] / 60:.1f}" if i < len(facts) else ""
        own = estimate_text(tallies[i].row(args.gamma).block_efficiency, digits=3)
        rows.append((name, held_out, own, *less, minutes))
    heads = ["method", "held-out", f"BE, gamma {args.gamma}, {args.verifier}", f"less {names[0]}", "less the start"]
    print(tabulate(rows, [*heads, "minutes"], tablefmt="github", disable_numparse=True))
    print(f"\n{result.responses} responses of {result.tokens} tokens; temperature {args.temperature:g}")


if __name__ == "__main__":
    main()
