"""Checks before a run: models, tokenizers, vocabularies, context lengths, draft heads.

Every drafter of the recipe is built once per target, with one slot, and discarded; models it loads are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import plugins
from ..api.build import TargetContext, make_slots
from ..errors import ModelError, UsageError
from ..models.chat import encode_text
from ..models.placement import first_device
from ..recipe.prompts import Prompt
from ..recipe.random_tokens import MAX_PROMPTS, warning
from ..recipe.recipe import CellConfig, Recipe
from ..recipe.yaml_errors import KeyPath
from ..runs.interrupts import user_interrupted
from .cells.cell_runner import Models, drafter_of, lengths
from .cells.conversations import Conversation, prepare


def preflight(recipe: Recipe, cells: Sequence[CellConfig], prompts: Sequence[Prompt], models: Models) -> list[str]:
    """Load the models of the cells and build each drafter once. Returns notes about the prompts.

    Other errors than the following are raised again by the cells themselves: an error of a plug-in fails its cells
    only.

    Raises:
        UsageError, ModelError: a model cannot be loaded, or a drafter does not fit its target; with the place in the
            recipe.
    """
    built: set[tuple[str, ...]] = set()
    notes: list[str] = []
    prepared: dict[tuple[str, int], list[Conversation]] = {}
    try:
        if served := [cell for cell in cells if cell.engine is not None]:
            plugins.get("cell_runners", "engine").check_cells(served)
    except UsageError as error:
        raise recipe.places.error(
            ("matrix", "engine") if "engine" in recipe.matrix else ("engine",), str(error)
        ) from None
    for cell in cells:
        try:
            first_device(cell.device)
        except UsageError as error:
            raise recipe.places.error(("device",), str(error)) from None
        try:
            if cell.engine is not None:
                remarks = plugins.get("cell_runners", "engine").remarks(cell)
                notes += [note for r in remarks if (note := f"{cell.engine.title}: {r}") not in notes]
            target = models.target(cell)
            prompts_key = (cell.target, cell.max_new_tokens)
            if prompts_key not in prepared:
                prepared[prompts_key] = prepare(prompts, target, cell.max_new_tokens)
                notes += [note for note in _notes(prompts, target.tokenizer) if note not in notes]
        except (UsageError, ModelError) as error:
            raise recipe.places.error(("target",), str(error), type(error)) from error
        key = (cell.target, cell.dtype, str(cell.max_new_tokens), cell.drafter.name, str(cell.drafter.config))
        if key in built or cell.is_baseline or cell.engine is not None:
            continue
        built.add(key)
        sequence, slot = lengths(prepared[prompts_key], [cell], target.context_length)
        try:
            lm = make_slots(target, 1, slot)
            context = TargetContext.of(target, lm, cell.sampling, slot=slot, sequence=sequence, load=models.drafter)
            drafter, config = drafter_of(cell)
            drafter(config, context)
        except (UsageError, ModelError) as error:
            raise recipe.places.error(_place(recipe, cell), str(error), type(error)) from error
        except BaseException as error:  # reported when the cell runs
            if isinstance(error, KeyboardInterrupt) and user_interrupted():
                raise
    return notes


def _notes(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    if not hasattr(tokenizer, "__len__"):  # tokenizer of another backend: unknown vocabulary size
        return []
    first = [encode_text(tokenizer, prompt.turns[0], special=False) for prompt in prompts[:MAX_PROMPTS]]
    note = warning(first, len(tokenizer))
    return [note] if note else []


def _place(recipe: Recipe, cell: CellConfig) -> KeyPath:
    """Place in the recipe of a cell's drafter, or of its model."""
    named = [i for i, s in enumerate(recipe.drafters) if s.name == cell.drafter.name]
    model = cell.drafter.config.get("model")
    index = next((i for i in named if recipe.drafters[i].config.get("model") == model), named[0])
    return ("drafters", index, "model") if "model" in recipe.drafters[index].config else ("drafters", index)
