"""``crossdraft train small-lm``: write texts with the target, distil a student, export it with a model card."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    p = kinds.add_parser("small-lm", help="distil a small LM from a few of the target's own layers")
    p.add_argument("--target", required=True, help="name, directory or Hub id of the target")
    p.add_argument("--out", required=True, type=Path, help="directory for texts, checkpoint and result")
    p.add_argument(
        "--layers",
        type=_integers,
        help="target layers the student starts from, e.g. 0,1,29 (default: first two, last)",
    )
    texts = p.add_argument_group("texts")
    texts.add_argument(
        "--texts",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="finished texts to add: JSONL with prompt and response, or question and answer (repeatable)",
    )
    texts.add_argument("--texts-limit", type=int, default=0, help="how many texts of each such file to take (0: all)")
    texts.add_argument(
        "--questions",
        action="append",
        default=[],
        metavar="PROMPTS",
        help="prompt set whose first turns the target answers (repeatable)",
    )
    texts.add_argument(
        "--invented",
        type=float,
        default=0.5,
        help="share of questions the target invents itself (default 0.5; 1 without --questions)",
    )
    texts.add_argument("--tokens", type=int, default=200_000, help="response tokens to write (default 200000)")
    texts.add_argument(
        "--temperatures",
        type=_floats,
        default=[1.0],
        help="answers are sampled at these in turn, e.g. 1,0 (default 1)",
    )
    texts.add_argument("--max-prompt", type=int, default=256, help="longest prompt used, in tokens")
    texts.add_argument("--max-response", type=int, default=192, help="longest answer written, in tokens")
    texts.add_argument("--write-batch", type=int, default=64, help="answers written at once")
    training = p.add_argument_group("training")
    training.add_argument("--divergence", choices=["forward-kl", "reverse-kl", "tv"], default="forward-kl")
    training.add_argument("--epochs", type=int, default=3)
    training.add_argument("--minutes", type=float, default=0, help="training time after which to stop (0: all epochs)")
    training.add_argument(
        "--sampled-vocab",
        type=int,
        default=2048,
        help="random tokens a step that stand for all that do not occur in the texts (0: full vocabulary)",
    )
    training.add_argument("--batch-tokens", type=int, default=2048)
    training.add_argument("--learning-rate", type=float, default=6e-4)
    training.add_argument("--held-out", type=float, default=0.04, help="share of the texts kept for evaluation")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--dtype", default="auto", help="of the target (the student trains in float32)")
    training.add_argument("--device", default="auto")


def main(args: argparse.Namespace) -> int:
    from ..bench.prompts import load_prompts
    from ..errors import UsageError
    from ..models import load_model
    from . import texts as t
    from .small_lm import Recipe, Trainer

    target = load_model(args.target, dtype=args.dtype, device=args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    layers = tuple(args.layers) if args.layers else (0, 1, target.model.config.num_hidden_layers - 1)
    recipe = Recipe(
        layers=layers,
        divergence=args.divergence,
        epochs=args.epochs,
        minutes=args.minutes,
        sampled_vocab=args.sampled_vocab,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    trainer = Trainer(target, recipe, args.out)  # before the texts: a bad --layers should not wait for them
    written = []
    if args.tokens:
        questions = [prompt.turns[0] for name in args.questions for prompt in load_prompts(name)]
        writer = t.Writer(
            target,
            batch_size=args.write_batch,
            max_prompt=args.max_prompt,
            max_response=args.max_response,
            seed=args.seed,
        )
        written = t.write(
            args.out / "texts.jsonl",
            writer,
            tokens=args.tokens,
            questions=questions,
            invented=args.invented if questions else 1.0,
            temperatures=args.temperatures,
        )
    finished = []
    for file in args.texts:
        found = t.read_finished(file, target, args.max_prompt, args.max_response)
        finished += found[: args.texts_limit or None]
    if not written and not finished:
        raise UsageError("no texts to train on: give --tokens for the target to write, or finished --texts")
    # Held out are texts the target wrote, which is what a drafter meets.
    train, held_out = t.split(written or finished, args.held_out)
    train += finished if written else []
    trainer.run(train, held_out)
    trainer.export(_card(args, trainer, train, held_out))
    print(f"held-out acceptance {trainer.best:.3f} per drafted token; student written to {args.out}")
    return 0


def _card(args: argparse.Namespace, trainer: Any, train: list[Any], held_out: list[Any]) -> str:
    invented = sum(text.source == "invented" for text in train)
    written = sum(text.source != "finished" for text in train)

    def names(files: list[Any]) -> str:
        return ", ".join(Path(f).name for f in files) or "nowhere"

    distinct = sum(len(text.response) for text in train)
    log = "\n".join(
        f"| {e['step']} | {e['minutes']} | {e['tokens']} | {e['held_out_acceptance']:.3f} |" for e in trainer.log
    )
    size = sum(p.numel() for p in trainer.trained)
    return f"""# A small LM drafter for {trainer.target.name}

A causal LM of {len(trainer.recipe.layers)} layers ({size / 1e6:.1f} M trained parameters) that drafts for
`{trainer.target.name}`. It starts from the target's layers {", ".join(map(str, trainer.recipe.layers))} and shares the
target's embedding and head, which are not stored here.

- Target weights: sha256 `{trainer.target.sha256}` ({trainer.target.source})
- Data: {len(train)} conversations, {distinct} distinct response tokens. {written} answers were written by the
  target at temperature {", ".join(f"{x:g}" for x in args.temperatures)}; it invented {invented} of their questions
  itself (Magpie), the others come from {names(args.questions)}. {len(train) - written} finished texts come from
  {names(args.texts)}.
- Objective: {trainer.recipe.divergence} on response tokens (DistillSpec), over the tokens that occur in the texts and
  {trainer.recipe.sampled_vocab} random ones a step standing for the rest (0: the full vocabulary)
- Time spent training: {trainer.seconds / 60:.0f} minutes, {trainer.tokens} tokens seen, device {trainer.device}
- Acceptance of a drafted token on {len(held_out)} held-out conversations (mean sum of min(p, q), temperature 1):
  **{trainer.best:.3f}**

| step | minutes | tokens seen | held-out acceptance |
|---|---|---|---|
{log}

Made with: `crossdraft {shlex.join(_public(sys.argv[1:]))}`
"""


def _public(argv: list[str]) -> list[str]:
    """The command line with paths cut to their last part: a card names files, not the machine they were on."""
    return [Path(a).name if "/" in a and Path(a).is_absolute() else a for a in argv]


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
