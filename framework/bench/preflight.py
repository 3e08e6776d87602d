"""Checks before a run: models, tokenizers, vocabularies, context lengths, draft heads.

The first group is not checked here, but when it is opened: its drafters are built once. Every other drafter of another
target is built with one slot and discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import plugins
from ..api.build import TargetContext, configured, make_slots
from ..api.cell_runner import Conversation
from ..errors import ModelError, UsageError
from ..models.chat import encode_text
from ..models.placement import first_device
from ..recipe.prompts import Prompt
from ..recipe.random_tokens import MAX_PROMPTS, warning
from ..recipe.recipe import CellConfig, Recipe
from ..recipe.yaml_errors import KeyPath
from ..runs.interrupts import propagate_interrupt
from .cells.cell_runner import Models, lengths
from .cells.conversations import prepare_conversations


def preflight(
    recipe: Recipe, groups: Sequence[Sequence[CellConfig]], prompts: Sequence[Prompt], models: Models
) -> list[str]:
    """Check devices and engines of all groups, and load what groups after the first need. Returns notes for readers.

    Other errors than the following are raised again by the cells themselves: an error of a plug-in fails its cells
    only.

    Raises:
        UsageError, ModelError: a model cannot be loaded, or a drafter does not fit its target; with the place in the
            recipe.
    """
    cells = [cell for group in groups for cell in group]
    for cell in cells:
        with recipe.places.at(("device",)):
            first_device(cell.device)
    served = [cell for cell in cells if cell.engine is not None]
    notes = _check_engines(recipe, served) if served else []
    if len(groups) < 2:
        return notes
    built = {_drafter_key(cell) for cell in groups[0]}
    prepared: dict[str, list[Conversation]] = {}
    for cell in cells:
        if _drafter_key(cell) in built:
            continue
        built.add(_drafter_key(cell))
        with recipe.places.at(("target",)):
            target, key = models.target(cell), _target_key(cell)
            if key not in prepared:
                prepared[key] = prepare_conversations(prompts, target, cell.max_new_tokens)
                notes += notes_on(prompts, target.tokenizer)
        if cell.is_baseline or cell.engine is not None:
            continue
        sequence, slot = lengths(prepared[key], [cell], target.context_length)
        try:
            with recipe.places.at(recipe_place(recipe, cell)):
                lm = make_slots(target, 1, slot)
                load = {"slot": slot, "sequence": sequence, "load": models.drafter}
                drafter, config = configured("drafters", cell.drafter)
                drafter(config, TargetContext.of(target, lm, cell.sampling, **load))
        except (UsageError, ModelError):
            raise
        except BaseException as error:  # reported when the cell runs
            propagate_interrupt(error)
    return notes


def _check_engines(recipe: Recipe, cells: Sequence[CellConfig]) -> list[str]:
    """Check cells that an engine decodes; return remarks on what it does differently."""
    runner = plugins.of_companion("runner of engines")
    with recipe.places.at(("matrix", "engine") if "engine" in recipe.matrix else ("engine",)):
        runner.check_cells(cells)
    with recipe.places.at(("target",)):
        return [f"{cell.engine.title}: {text}" for cell in cells if cell.engine for text in runner.remarks(cell)]


def notes_on(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    """Notes for readers about the prompts."""
    if not hasattr(tokenizer, "__len__"):  # tokenizer of another backend: unknown vocabulary size
        return []
    first = [encode_text(tokenizer, prompt.turns[0], special=False) for prompt in prompts[:MAX_PROMPTS]]
    note = warning(first, len(tokenizer))
    return [note] if note else []


def recipe_place(recipe: Recipe, cell: CellConfig) -> KeyPath:
    """Place in the recipe of a cell's drafter, or of its model; of the baseline that of the target."""
    if cell.is_baseline:
        return ("target",)
    named = [i for i, s in enumerate(recipe.drafters) if s.name == cell.drafter.name]
    model = cell.drafter.config.get("model")
    index = next((i for i in named if recipe.drafters[i].config.get("model") == model), named[0])
    return ("drafters", index, "model") if "model" in recipe.drafters[index].config else ("drafters", index)


def _target_key(cell: CellConfig) -> str:
    return str((cell.target, cell.dtype, cell.attn_implementation, cell.max_new_tokens, cell.engine))


def _drafter_key(cell: CellConfig) -> str:
    return f"{_target_key(cell)} {cell.drafter.identity}"
