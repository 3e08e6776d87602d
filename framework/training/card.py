"""The model card of a trained drafter, and the block efficiency that it states."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.generate import generate
from ..contracts.models import LoadedModel
from ..contracts.training import Text, public
from ..models.chat import encode
from ..models.digests import weights_sha256
from ..models.resolve import resolve
from ..recipe.prompts import Prompt
from .files import replace_text
from .search import Searcher
from .trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """Block efficiency by category, measured by decoding.

    Attributes:
        by_category: category -> (tokens emitted per target call after prefill, prompts).
        how: what was decoded and with what, for people.
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
    """Decode the first turn of ``prompts`` with a drafter, ``tokens`` each, 8 at a time."""
    inputs = [encode(target.tokenizer, prompt.turns[:1]) for prompt in prompts]
    responses = generate(target, inputs, drafter=drafter, max_new_tokens=tokens, temperature=temperature, seed=seed)
    found: dict[str, tuple[float, int]] = {}
    for category in sorted({prompt.category for prompt in prompts}):
        mine = [r for r, prompt in zip(responses, prompts, strict=True) if prompt.category == category]
        emitted = sum(r.emitted for response in mine for r in response.steps)
        found[category] = (emitted / max(sum(len(response.steps) for response in mine), 1), len(mine))
    rule = "greedy" if temperature == 0 else "block"
    named = {key: value["name"] if isinstance(value, Mapping) else value for key, value in drafter.items()}
    options = "".join(f", {key} {value}" for key, value in named.items() if key not in ("name", "model", "checkpoint"))
    how = (
        f"drafter {drafter['name']}{options} with its defaults, {rule} verification, temperature {temperature:g}, "
        f"{tokens} new tokens for the first turn of each of the first {len(prompts)} prompts of `{Path(source).name}`, "
        f"seed {seed}"
    )
    return Measured(found, how)


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
        temperatures: that the target answered at.
        questions, finished: where questions and finished texts come from.
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
    places = len(log[-1]["positions"])
    by_place = "" if places == 1 else ", by its place in the draft"
    others = f" {len(train) - written} finished texts come from {_names(finished)}." if finished else ""
    given = f", the others come from {_names(questions)}" if questions else ""
    start = []
    if begun := trainer.recipe.start_from:
        digest = weights_sha256(resolve(begun, heads=True).path)
        start = [f"Starts from the weights of `{trainee.start_name}`, sha256 `{digest}`; what follows came after them"]
    facts = [
        f"Target weights: sha256 `{trainer.target.sha256}` ({source})",
        *start,
        f"Data: {len(train)} conversations, {distinct} distinct response tokens. {written} answers were written by the "
        f"target at temperature {', '.join(f'{x:g}' for x in temperatures)}; it invented {invented} of their questions "
        f"itself (Magpie){given}.{others}",
        f"Objective: {objective}",
        f"Training: {trainer.step} steps, {trainer.seconds / 60:.1f} minutes, {trainer.tokens} response tokens seen, "
        f"device {trainer.device}, precision {trainer.precision}",
        f"{trainee.measured.capitalize()} of a drafted token on {len(held_out)} held-out conversations "
        f"({trainee.measured_by}{by_place}): {', '.join(f'**{a:.3f}**' for a in log[-1]['positions'])}",
    ]
    parts = [f"# {title}", _wrapped(about), "\n".join(_wrapped(fact, "- ") for fact in facts)]
    if measured is not None:
        rows = [[name, f"{be:.2f}", count] for name, (be, count) in measured.by_category.items()]
        parts.append(_wrapped(f"Block efficiency (tokens emitted per target call after prefill): {measured.how}."))
        parts.append(_table(["category", "BE", "prompts"], rows))
    header = [f"held-out {trainee.measured}"] if places == 1 else [f"token {i + 1}" for i in range(places)]
    rows = [[e["step"], e["minutes"], e["tokens"], *(f"{a:.3f}" for a in e["positions"])] for e in log]
    parts.append(_table(["step", "minutes", "tokens seen", *header], rows))
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


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _names(files: Sequence[Any]) -> str:
    return ", ".join(Path(f).name for f in files)
