"""``crossdraft train KIND``: write texts with the target, train a drafter on them, export it with a model card."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import plugins
from ..contracts.errors import ContractError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, entry in sorted(plugins.entries("trainers").items()):
        p = kinds.add_parser(name, help=entry.summary)
        try:
            recipe = plugins.get("trainers", name)
        except ContractError as error:  # of a plug-in: the other kinds work
            p.set_defaults(broken=str(error))
        else:
            _add_arguments(p, recipe)


def _add_arguments(p: argparse.ArgumentParser, recipe: type) -> None:
    p.set_defaults(recipe=recipe, broken=None)
    p.add_argument("--target", required=True, help="name, directory or Hub id of the target")
    p.add_argument("--out", required=True, type=Path, help="directory for texts, checkpoint and result")
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
    for name, default, settings in recipe.options():  # type: ignore[attr-defined]
        said = f" (default: {default})" if default and "default" not in settings["help"] else ""
        flag = f"--{name.replace('_', '-')}"
        training.add_argument(flag, default=default, **{**settings, "help": settings["help"] + said})
    training.add_argument("--held-out", type=float, default=0.04, help="share of the texts kept for evaluation")
    training.add_argument("--dtype", default="auto", help="of the target (what is trained is float32)")
    training.add_argument("--device", default="auto")
    training.add_argument("--precision", choices=["no", "bf16"], default="no", help="autocast of the training steps")
    training.add_argument(
        "--cache-gib", type=float, default=4.0, help="memory for the target's features, in GiB (default 4)"
    )
    card = p.add_argument_group("model card")
    card.add_argument(
        "--measure", default="builtin", metavar="PROMPTS", help="prompts to measure block efficiency on, or none"
    )
    card.add_argument("--measure-limit", type=int, default=24, help="the first so many of them (default 24)")
    card.add_argument("--measure-tokens", type=int, default=64, help="new tokens each (default 64)")


def main(args: argparse.Namespace) -> int:
    if args.broken:
        raise UsageError(args.broken)
    from ..models.load import load_model
    from ..runs.prompts import load_prompts
    from ..training import texts as t
    from ..training.card import measure, write_card
    from ..training.trainer import Trainer

    recipe = args.recipe(**{name: getattr(args, name) for name, _, _ in args.recipe.options()})
    questions = [prompt.turns[0] for name in args.questions for prompt in load_prompts(name)]
    asked = None if args.measure == "none" else load_prompts(args.measure, limit=args.measure_limit)
    target = load_model(args.target, dtype=args.dtype, device=args.device)
    # Before the texts: an option that does not fit should not wait for them.
    trainer = Trainer(target, recipe, args.out, precision=args.precision, cache_gib=args.cache_gib)
    args.out.mkdir(parents=True, exist_ok=True)
    written = []
    if args.tokens:
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
    if len(written or finished) < 2:
        raise UsageError("no texts to train on: give --tokens for the target to write, or finished --texts")
    # Held out are texts the target wrote, which is what a drafter meets.
    train, held_out = t.split(written or finished, args.held_out)
    train += finished if written else []
    trainer.run(train, held_out)
    trainer.export(held_out)
    measured = None
    if asked is not None:
        measured = measure(
            target,
            {**trainer.trainee.drafter, "model": str(args.out)},
            asked,
            source=args.measure,
            temperature=args.temperatures[0],
            tokens=args.measure_tokens,
            seed=args.seed,
        )
    write_card(
        args.out / "README.md",
        trainer,
        train,
        held_out,
        temperatures=args.temperatures,
        questions=args.questions,
        finished=args.texts,
        measured=measured,
        argv=sys.argv[1:],
    )
    print(f"held-out acceptance {trainer.best:.3f} per drafted token; {args.kind} written to {args.out}")
    return 0


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
