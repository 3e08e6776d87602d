"""What can be known before a run is refused before it: models, tokenizers, vocabularies, contexts, heads.

Every drafter of the recipe is built once for every target it is to draft for, with one slot, and thrown away; the
models that it loaded are kept for the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..api.build import TargetContext, make_slots
from ..errors import ModelError, UsageError
from ..models.chat import encode_text
from ..recipe.prompts import Prompt
from ..recipe.random_tokens import MOST, warning
from ..recipe.recipe import CellConfig, Recipe
from ..recipe.yaml_errors import KeyPath
from ..runs.interrupts import asked
from .cell_runner import Conversation, Models, drafter_of, lengths, prepare


def preflight(recipe: Recipe, cells: Sequence[CellConfig], prompts: Sequence[Prompt], models: Models) -> list[str]:
    """Build what the cells need, once. Returns what readers of the numbers should know of the prompts.

    Anything else than a refusal is left to the cell: a plug-in's mistake costs its own cells.

    Raises:
        UsageError, ModelError: a model that cannot be had, or a drafter that does not fit its target; with the place in
            the recipe.
    """
    tried: set[tuple[str, ...]] = set()
    notes: list[str] = []
    prepared: dict[tuple[str, int], list[Conversation]] = {}
    for cell in cells:
        try:
            target = models.target(cell)
            wanted = (cell.target, cell.max_new_tokens)
            if wanted not in prepared:
                prepared[wanted] = prepare(prompts, target, cell.max_new_tokens)
                notes += [note for note in _notes(prompts, target.tokenizer) if note not in notes]
        except (UsageError, ModelError) as error:
            raise recipe.places.error(("target",), str(error), type(error)) from error
        key = (cell.target, cell.dtype, str(cell.max_new_tokens), cell.drafter.name, str(cell.drafter.config))
        if key in tried or cell.is_baseline:
            continue
        tried.add(key)
        sequence, slot = lengths(prepared[wanted], [cell], target.context_length)
        try:
            lm = make_slots(target, 1, slot)
            context = TargetContext.of(target, lm, cell.sampling, slot=slot, sequence=sequence, load=models.drafter)
            drafter, config = drafter_of(cell)
            drafter(config, context)
        except (UsageError, ModelError) as error:
            raise recipe.places.error(_place(recipe, cell), str(error), type(error)) from error
        except BaseException as error:  # told with the cell, when it is its turn
            if isinstance(error, KeyboardInterrupt) and asked():
                raise
    return notes


def _notes(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    if not hasattr(tokenizer, "__len__"):  # of another backend: how many tokens there are is not known
        return []
    first = [encode_text(tokenizer, prompt.turns[0], special=False) for prompt in prompts[:MOST]]
    found = warning(first, len(tokenizer))
    return [found] if found else []


def _place(recipe: Recipe, cell: CellConfig) -> KeyPath:
    """Where the recipe names the drafter of a cell, and its model."""
    index = next((i for i, s in enumerate(recipe.drafters) if s.name == cell.drafter.name), 0)
    return ("drafters", index, "model") if "model" in recipe.drafters[index].config else ("drafters", index)
