"""Model card of a trained drafter, with its measured block efficiency."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossdraft import LoadedModel, Prompt, Table, generate
from crossdraft.models import encode, resolve, weights_sha256

from .contract import Text, public
from .files import replace_text

if TYPE_CHECKING:
    from .search import Searcher
    from .trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """Block efficiency by category, measured by decoding.

    Attributes:
        by_category: category -> (tokens emitted per target call after prefill, prompts).
        how: description of the measurement.
    """

    by_category: dict[str, tuple[float, int]]
    how: str


def measure(
    target: LoadedModel,
    drafter: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    source: str,
    temperature: float,
    tokens: int,
    seed: int,
) -> Measured:
    """Measure block efficiency on the first turn of ``prompts``, ``tokens`` new tokens each, 8 at a time."""
    inputs = [encode(target.tokenizer, prompt.turns[:1]) for prompt in prompts]
    responses = generate(target, inputs, drafter=drafter, max_new_tokens=tokens, temperature=temperature, seed=seed)
    by_category: dict[str, tuple[float, int]] = {}
    for category in sorted({prompt.category for prompt in prompts}):
        selected = [r for r, prompt in zip(responses, prompts, strict=True) if prompt.category == category]
        emitted = sum(r.emitted for response in selected for r in response.steps)
        by_category[category] = (emitted / max(sum(len(response.steps) for response in selected), 1), len(selected))
    verifier = "greedy" if temperature == 0 else "block"
    values = {key: value["name"] if isinstance(value, Mapping) else value for key, value in drafter.items()}
    options = "".join(f", {key} {value}" for key, value in values.items() if key not in ("name", "model", "checkpoint"))
    how = (
        f"drafter {drafter['name']}{options} with its defaults, {verifier} verification, temperature {temperature:g}, "
        f"{tokens} new tokens for the first turn of each of the first {len(prompts)} prompts of `{Path(source).name}`, "
        f"seed {seed}"
    )
    return Measured(by_category, how)


def write_card(
    path: Path,
    trainer: Trainer | Searcher,
    train: Sequence[Text],
    held_out: Sequence[Text],
    *,
    temperatures: Sequence[float],
    questions: Sequence[str],
    finished: Sequence[Path],
    measured: Measured | None,
    argv: Sequence[str],
) -> None:
    """Write the model card.

    Args:
        temperatures: of the target's answers.
        questions, finished: source files of questions and finished texts.
        argv: the command line after ``crossdraft``.
    """
    written = sum(text.source != "finished" for text in train)
    invented = sum(text.source == "invented" for text in train)
    distinct = sum(len(text.response) for text in train)
    trainee, log = trainer.trainee, trainer.log
    source = trainer.target.source
    if source.startswith("directory "):
        source = f"directory {trainee.target_name}"
    title, about, objective = trainee.describe()
    positions = len(log[-1]["positions"])
    by_position = "" if positions == 1 else ", by its place in the draft"
    others = f" {len(train) - written} finished texts come from {_names(finished)}." if finished else ""
    other_sources = f", the others come from {_names(questions)}" if questions else ""
    start = []
    if start_from := trainer.recipe.start_from:
        digest = weights_sha256(resolve(start_from, heads=True).path)
        start = [
            f"Initial weights: `{trainee.start_name}`, sha256 `{digest}`; the numbers below are from this training"
        ]
    facts = [
        f"Target weights: sha256 `{trainer.target.sha256}` ({source})",
        *start,
        f"Data: {len(train)} conversations, {distinct} distinct response tokens. {written} answers were sampled from "
        f"the target at temperature {', '.join(f'{x:g}' for x in temperatures)}; {invented} of their questions were "
        f"also sampled from it (Magpie){other_sources}.{others}",
        f"Objective: {objective}",
        f"Training: {trainer.step} steps, {trainer.seconds / 60:.1f} minutes, {trainer.tokens} response tokens seen, "
        f"device {trainer.device}, precision {trainer.precision}",
        f"{trainee.measured.capitalize()} of a drafted token on {len(held_out)} held-out conversations "
        f"({trainee.measured_by}{by_position}): {', '.join(f'**{a:.3f}**' for a in log[-1]['positions'])}",
    ]
    parts = [f"# {title}", _wrapped(about), "\n".join(_wrapped(fact, "- ") for fact in facts)]
    if measured is not None:
        rows = [[name, be, count] for name, (be, count) in measured.by_category.items()]
        parts.append(_wrapped(f"Block efficiency (tokens emitted per target call after prefill): {measured.how}."))
        parts.append(Table(["category", "BE", "prompts"], rows).markdown())
    header = [f"held-out {trainee.measured}"] if positions == 1 else [f"token {i + 1}" for i in range(positions)]
    rows = [[e["step"], e["minutes"], e["tokens"], *(f"{a:.3f}" for a in e["positions"])] for e in log]
    parts.append(Table(["step", "minutes", "tokens seen", *header], rows, digits=1).markdown())
    parts.append(f"Made with: `crossdraft {shlex.join(map(public, argv))}`")
    replace_text(path, "\n\n".join(parts) + "\n")


def _wrapped(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        text,
        110,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _names(files: Sequence[Any]) -> str:
    return ", ".join(Path(f).name for f in files)
