"""``crossdraft train KIND``: write texts with the target, train a drafter on them, export it with a model card."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import plugins

# Trainers import PyTorch, and every kind has to say its options; so nothing is saved by importing this later.
from ..contracts.training_options import Options, flag, numbers, option
from ..errors import ContractError, UsageError
from .trust_args import add_consent, trusted

AnyOptions = TypeVar("AnyOptions", bound=Options)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """What texts there are."""

    texts_limit: int = option(0, "how many texts of each --texts file to take (0: all)", at_least=0)
    invented: float = option(
        0.5,
        "share of questions the target invents itself (default 0.5; 1 without --questions)",
        at_least=0,
        at_most=1,
    )
    tokens: int = option(200_000, "response tokens to write", at_least=0, at_most=10**12)
    temperatures: tuple[float, ...] = option(
        (1.0,), "answers are sampled at these in turn, e.g. 1,0 (default 1)", type=numbers, at_least=0, at_most=100
    )
    max_prompt: int = option(256, "longest prompt used, in tokens", at_least=1, at_most=1_000_000)
    max_response: int = option(192, "longest answer used, in tokens", at_least=1, at_most=1_000_000)
    write_batch: int = option(64, "answers written at once", at_least=1, at_most=4096)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """How it is run, beside the options of the kind."""

    held_out: float = option(0.04, "share of the texts kept for evaluation", above=0, below=1)
    dtype: str = option(
        "auto",
        "of the target (what is trained is float32)",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:0")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """How steps are made, where something is trained and not searched."""

    precision: str = option("no", "autocast of the training steps", choices=("no", "bf16"))
    cache_gib: float = option(4.0, "memory for the target's features, in GiB", at_least=0, at_most=1_000_000)


@dataclass(frozen=True, kw_only=True)
class CardOptions(Options):
    """What the model card states."""

    measure: str = option("builtin", "prompts to measure block efficiency on, or none", metavar="PROMPTS")
    measure_limit: int = option(24, "the first so many of them", at_least=1, at_most=1_000_000)
    measure_tokens: int = option(64, "new tokens each", at_least=1, at_most=1_000_000)


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


def _add_arguments(p: argparse.ArgumentParser, recipe: type[Options]) -> None:
    p.set_defaults(recipe=recipe, broken=None)
    p.add_argument("--target", required=True, help="name, directory or Hub id of the target")
    p.add_argument("--out", required=True, help="directory for texts, checkpoint and result")
    p.add_argument("--force", action="store_true", help="write to a directory that holds other files, too")
    add_consent(p)
    texts = p.add_argument_group("texts")
    texts.add_argument(
        "--texts",
        action="append",
        default=[],
        metavar="FILE",
        help="finished texts to add: JSONL with prompt and response, or question and answer (repeatable)",
    )
    texts.add_argument(
        "--questions",
        action="append",
        default=[],
        metavar="PROMPTS",
        help="prompt set whose first turns the target answers (repeatable)",
    )
    _add_options(texts, TextOptions)
    training = p.add_argument_group("training")
    _add_options(training, recipe)
    _add_options(training, RunOptions)
    if not _searches(recipe):
        _add_options(training, StepOptions)
    _add_options(p.add_argument_group("model card"), CardOptions)


def _add_options(group: Any, options: type[Options]) -> None:
    for name, default, settings in options.options():
        said = f" (default: {default})" if default and "default" not in settings["help"] else ""
        # None: not given. What stands for it is the default of the options' own class.
        group.add_argument(flag(name), default=None, **{**settings, "help": settings["help"] + said})


def _searches(recipe: type[Options]) -> bool:
    from ..contracts.training import SearchConfig

    return issubclass(recipe, SearchConfig)


def main(args: argparse.Namespace) -> int:
    """Train; 130 after Ctrl-C, SIGTERM or SIGHUP, which leave all that is whole."""
    if args.broken:
        raise UsageError(args.broken)
    try:
        return _main(args)
    except KeyboardInterrupt:
        print(
            f"crossdraft: interrupted; what is whole is kept in {args.out}, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130


def _main(args: argparse.Namespace) -> int:
    recipe, texts = _given(args, args.recipe), _given(args, TextOptions)
    run, card = _given(args, RunOptions), _given(args, CardOptions)
    out, files = _path("--out", args.out), [_path("--texts", name) for name in args.texts]
    _check_together(args, texts, card, files)
    trusted(args, [args.target])

    from ..models.device import pick_device, pick_dtype
    from ..models.resolve import resolve
    from ..recipe.prompts import load_prompts
    from ..training.files import check_directory, claim_directory

    reads = [args.target, *([recipe.start_from] if recipe.start_from else [])]
    check_directory(out, reads, files if texts.tokens else (), force=args.force)
    pick_dtype(run.dtype, pick_device(run.device))
    questions = [prompt.turns[0] for name in args.questions for prompt in load_prompts(name)]
    asked = None if card.measure == "none" else load_prompts(card.measure, limit=card.measure_limit)
    if recipe.start_from:
        resolve(recipe.start_from, heads=True)
    with claim_directory(out):
        return _train(args, recipe, texts, run, card, out, files, questions, asked)


def _train(
    args: argparse.Namespace,
    recipe: Any,
    texts: TextOptions,
    run: RunOptions,
    card: CardOptions,
    out: Path,
    files: list[Path],
    questions: list[str],
    asked: Any,
) -> int:
    from ..models.load import load_model
    from ..training import text_files
    from ..training import texts as t
    from ..training.card import measure, write_card
    from ..training.search import Searcher
    from ..training.trainer import Trainer
    from ..training.writer import Writer

    consent = args.target in args.trust_remote_code
    target = load_model(args.target, dtype=run.dtype, device=run.device, trust_remote_code=consent)
    # Before the texts: an option that does not fit should not wait for them.
    if _searches(args.recipe):
        trainer: Any = Searcher(target, recipe, out)
    else:
        steps = _given(args, StepOptions)
        trainer = Trainer(target, recipe, out, precision=steps.precision, cache_gib=steps.cache_gib)
    finished = []
    for file in files:
        finished += text_files.read_finished(file, target, texts.max_prompt, texts.max_response, texts.texts_limit)
    written = []
    if texts.tokens:
        writer = Writer(
            target,
            batch_size=texts.write_batch,
            max_prompt=texts.max_prompt,
            max_response=texts.max_response,
            seed=recipe.seed,
        )
        written = t.write(
            out / "texts.jsonl",
            writer,
            tokens=texts.tokens,
            questions=questions,
            invented=texts.invented if questions else 1.0,
            temperatures=texts.temperatures,
        )
    if len(written or finished) < 2:
        raise UsageError(
            f"{len(written or finished)} texts are too few to train on, and to hold one out; give more --tokens, or "
            "finished --texts"
        )
    # Held out are texts the target wrote, which is what a drafter meets.
    train, held_out = t.split(written or finished, run.held_out)
    train += finished if written else []
    trainer.run(train, held_out)
    trainer.export(held_out)
    measured = None
    if asked is not None:
        measured = measure(
            target,
            trainer.trainee.drafting_with(out),
            asked,
            source=card.measure,
            temperature=texts.temperatures[0],
            tokens=card.measure_tokens,
            seed=recipe.seed,
        )
    write_card(
        out / "README.md",
        trainer,
        train,
        held_out,
        temperatures=texts.temperatures,
        questions=args.questions,
        finished=files,
        measured=measured,
        argv=sys.argv[1:],
    )
    measure_of = trainer.trainee.measured
    print(f"held-out {measure_of} {trainer.best:.3f} per drafted token; {args.kind} written to {out}")
    return 0


def _given(args: argparse.Namespace, kind: type[AnyOptions]) -> AnyOptions:
    given = {name: getattr(args, name) for name, _, _ in kind.options()}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _path(name: str, text: str) -> Path:
    """A path as it was given, with ``~`` in it."""
    try:
        if text.strip():
            return Path(text).expanduser()
    except RuntimeError:  # ~nobody
        pass
    raise UsageError(f"{name} {text!r}: must be a path")


def _check_together(args: argparse.Namespace, texts: TextOptions, card: CardOptions, files: list[Path]) -> None:
    """Raise UsageError for options that do not go together, and for files that are not there."""
    if not texts.tokens and not files:
        raise UsageError("no texts to train on: give --tokens for the target to write, or finished --texts")
    if not texts.tokens and args.questions:
        raise UsageError("--questions: must be left out with --tokens 0, because the target writes no answers then")
    if args.texts_limit is not None and not files:
        raise UsageError(f"--texts-limit {args.texts_limit}: must be left out without --texts")
    if args.invented is not None and not (args.questions and texts.tokens) and args.invented != 1:
        raise UsageError(f"--invented {args.invented:g}: must be left out without --questions that are answered")
    for name in ("measure_limit", "measure_tokens"):
        if getattr(args, name) is not None and card.measure == "none":
            raise UsageError(f"{flag(name)} {getattr(args, name)}: must be left out with --measure none")
    for file in files:
        try:
            there = file.is_file()
        except (OSError, ValueError):  # a name that no file can have
            there = False
        if not there:
            raise UsageError(f"--texts {file}: must be a file; there is none (it is relative to {Path.cwd()})")
