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
from typing import Any

import yaml
from crossdraft_advisor.replay.aggregate import difference
from crossdraft_advisor.replay.candidates import candidates_of
from crossdraft_advisor.replay.replay import replay
from crossdraft_advisor.replay.responses import Reader
from tabulate import tabulate

from crossdraft import Estimate, Sampling, generate, load_model, load_prompts
from crossdraft.framework.cli.main import main as crossdraft
from crossdraft.models import encode

METHODS = {
    "forward-kl": ["--divergence", "forward-kl"],
    "nll": ["--divergence", "nll"],
    "reverse-kl": ["--divergence", "reverse-kl"],
    "jsd": ["--divergence", "jsd"],
    "tv": ["--divergence", "tv"],
    "forward-kl, on-policy": ["--divergence", "forward-kl", "--on-policy", "1"],
    "reverse-kl, on-policy": ["--divergence", "reverse-kl", "--on-policy", "1"],
    "jsd, on-policy": ["--divergence", "jsd", "--on-policy", "1"],
    "tv, on-policy": ["--divergence", "tv", "--on-policy", "1"],
    "jsd, mixed": ["--divergence", "jsd", "--on-policy", "0.5"],
}


def train(args: argparse.Namespace, name: str, texts: Path) -> Path:
    """Train a student by one method, on the given texts; return its directory."""
    out = args.out / name.replace(", ", "-")
    if (out / "training.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for file in ("texts.jsonl", "texts.json"):
        if (texts / file).exists() and not (out / file).exists():
            shutil.copyfile(texts / file, out / file)
    argv = ["train", "draft-model", "--target", args.target, "--out", str(out), "--measure", "none", *METHODS[name]]
    argv += ["--tokens", str(args.tokens), "--epochs", str(args.epochs), "--learning-rate", str(args.learning_rate)]
    argv += [
        "--write-batch",
        str(args.write_batch),
        "--max-response",
        str(args.max_response),
        "--batch-tokens",
        str(args.batch_tokens),
        "--warm-up",
        "3",
    ]
    argv += ["--sampled-vocab", str(args.sampled_vocab)]
    argv += ["--start-from", args.start_from] if args.start_from else []
    argv += ["--questions", args.questions, "--invented", "0"] if args.questions else []
    if code := crossdraft(argv):
        sys.exit(code)
    return out


def respond(args: argparse.Namespace) -> Path:
    """Recorded responses of the target."""
    path = args.out / "responses.jsonl"
    if path.exists():
        return path
    target = load_model(args.target)
    prompts = load_prompts(args.prompts, limit=args.limit)
    inputs = [encode(target.tokenizer, prompt.turns[:1]) for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 1}
    responses = generate(target, inputs, drafter="none", **options)
    lines = [
        {
            "id": str(i),
            "category": prompt.category,
            "prompt": list(ids),
            "tokens": item.tokens,
            "finish_reason": item.finish_reason,
        }
        for i, (prompt, ids, item) in enumerate(zip(prompts, inputs, responses, strict=True))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def text(one: Estimate | None, sign: str = "") -> str:
    if one is None:
        return "-"
    return f"{one.value:{sign}.3f}" + ("" if one.low is None else f" [{one.low:{sign}.3f}, {one.high:{sign}.3f}]")


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
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--max-response", type=int, default=128)
    parser.add_argument("--write-batch", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--sampled-vocab", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
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
    drafters = [
        yaml.safe_dump({"name": "draft-model", "model": m}, default_flow_style=True, width=10_000) for m in models
    ]
    sampling = Sampling(temperature=args.temperature)
    candidates = candidates_of(
        [drafter.strip() for drafter in drafters],
        [args.verifier],
        [args.gamma],
        sampling=sampling,
        target=args.target,
    )
    result = replay(Reader(target=args.target, sampling=sampling).read([str(respond(args))]), candidates)
    tallies = [candidate.tallies[args.verifier, 1] for candidate in result.candidates]
    rows = []
    for i, name in enumerate([*names, args.start_from][: len(tallies)]):
        less = [difference(tallies[i], args.gamma, other, args.gamma) for other in (tallies[0], tallies[-1])]
        held_out = f"{facts[i]['log'][-1]['held_out_acceptance']:.3f}" if i < len(facts) else ""
        minutes = f"{facts[i]['seconds'] / 60:.1f}" if i < len(facts) else ""
        rows.append(
            (
                name,
                held_out,
                text(tallies[i].row(args.gamma).block_efficiency),
                text(less[0], "+") if i else "",
                text(less[1], "+") if args.start_from and i < len(facts) else "",
                minutes,
            )
        )
    heads = ["method", "held-out", f"BE, gamma {args.gamma}, {args.verifier}", f"less {names[0]}", "less the start"]
    print(tabulate(rows, [*heads, "minutes"], tablefmt="github", disable_numparse=True))
    print(f"\n{result.responses} responses of {result.tokens} tokens; temperature {args.temperature:g}")


if __name__ == "__main__":
    main()
