"""Prompts prepared for a target, and their division into blocks and pieces (see `bench.group_runner`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from random import Random

from ...api.cell_runner import Conversation
from ...contracts.constraint import Grammar
from ...contracts.models import LoadedModel
from ...errors import UsageError
from ...metrics.intervals import LEAST_PIECES
from ...models.chat import encode
from ...models.grammar import compile_constraint
from ...recipe.prompts import Prompt

#: Maximum number of tokens that a chat template adds around a response.
TEMPLATE_SLACK = 16


def prepare_conversations(prompts: Sequence[Prompt], target: LoadedModel, max_new_tokens: int) -> list[Conversation]:
    """Compute the length of every turn. Raises UsageError for a prompt that is empty or exceeds the context."""
    conversations = []
    for prompt in prompts:
        prompt_lens = []
        for turn in range(len(prompt.turns)):
            tokens = encode(target.tokenizer, prompt.turns[: turn + 1], [""] * turn)
            max_len = len(tokens) + turn * (max_new_tokens + TEMPLATE_SLACK)
            title = f"prompt {prompt.question_id!r}" + (f", turn {turn + 1}" if len(prompt.turns) > 1 else "")
            if not tokens:
                raise UsageError(f"{title} has no tokens; a prompt needs at least one")
            if target.context_length is not None and max_len >= target.context_length:
                length = f"{max_len} tokens" if turn == 0 else f"up to {max_len} tokens with the answers before it"
                raise UsageError(
                    f"{title} has {length}, but the context length of {target.name} is {target.context_length}; "
                    "shorten or remove the prompt, or use a target with a longer context"
                )
            prompt_lens.append(max_len)
        conversations.append(Conversation(prompt, tuple(prompt_lens)))
    return conversations


def compile_constraints(
    conversations: Sequence[Conversation], target: LoadedModel, vocab_size: int
) -> list[Conversation]:
    """Compile the constraints of prompts, equal ones once, for logits with ``vocab_size`` entries.

    Raises UsageError for a constraint that cannot be compiled, with its prompt.
    """
    grammars: dict[str, Grammar] = {}
    results = []
    for conversation in conversations:
        if (constraint := conversation.prompt.constraint) is not None:
            try:
                grammar = grammars.get(constraint.key) or compile_constraint(constraint, target, vocab_size)
            except UsageError as error:
                raise UsageError(f"prompt {conversation.prompt.question_id!r}: {error}") from None
            grammars[constraint.key] = grammar
            conversation = replace(conversation, grammar=grammar)
        results.append(conversation)
    return results


def blocks_of(prompts: Sequence[Prompt], batch_sizes: Iterable[int], random: Random) -> list[list[int]]:
    """Return the positions of the prompts of each block: a piece of the largest batch size, subdivided by smaller ones.

    The first block is the shortest in turns, so that the first table is early.
    """
    position = {id(prompt): i for i, prompt in enumerate(prompts)}
    pieces = list(cut_pieces([Conversation(prompt, ()) for prompt in prompts], max(batch_sizes), random))
    turns = [sum(len(conversation.prompt.turns) for conversation in piece) for piece in pieces]
    pieces.insert(0, pieces.pop(turns.index(min(turns))))
    return [[position[id(conversation.prompt)] for conversation in piece] for piece in pieces]


def cut_pieces(
    conversations: Sequence[Conversation], batch_size: int, random: Random, min_pieces: int = LEAST_PIECES
) -> Sequence[Sequence[Conversation]]:
    """Divide conversations into pieces of nearly equal size, of one category each if every category is large enough.

    A piece has at least 2B - 1 prompts for batch size B, so that at least B of them finish before slots run empty. If
    that gives fewer than ``min_pieces`` pieces, it has at least B; fewer prompts than that form a single piece. The
    order is random, but any first n pieces contain the categories in proportion.
    """
    categories: dict[str, list[Conversation]] = {}
    for conversation in random.sample(list(conversations), len(conversations)):
        categories.setdefault(conversation.prompt.category, []).append(conversation)
    full_size = 2 * batch_size - 1
    if min(map(len, categories.values())) < min_pieces * full_size:
        pieces = max(len(conversations) // full_size, min(min_pieces, len(conversations) // batch_size), 1)
        mixed = [c for members in categories.values() for c in members]
        result = [mixed[i::pieces] for i in range(pieces)]  # all categories in each piece
    else:
        result = []
        for members in categories.values():
            pieces = len(members) // full_size
            edges = [i * len(members) // pieces for i in range(pieces + 1)]
            result += [members[a:b] for a, b in pairwise(edges)]
    return _balanced(result, random)


def _balanced(pieces: Sequence[Sequence[Conversation]], random: Random) -> list[Sequence[Conversation]]:
    """Shuffle pieces so that any first n of them contain the categories in proportion, up to one piece.

    Stratified: each of the n pieces of a category gets a random position in its own n-th part of the order.
    """
    by_category: dict[str, list[Sequence[Conversation]]] = {}
    for piece in random.sample(list(pieces), len(pieces)):
        names = {conversation.prompt.category for conversation in piece}
        by_category.setdefault(names.pop() if len(names) == 1 else "", []).append(piece)
    ranked = [
        ((k + random.random()) / len(members), piece)
        for members in by_category.values()
        for k, piece in enumerate(members)
    ]
    return [piece for _, piece in sorted(ranked, key=itemgetter(0))]
