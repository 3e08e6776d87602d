"""A tiny target with a chat template, and drafters of each kind that are made for it; used by `diagnose_matching`.

Heads are trained for a minute; a draft model is the target with noise in its weights. Each drafter has an earlier
checkpoint: fewer steps of training, or more noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from crossdraft_trainers.medusa_files import save_heads
from tiny_heads import HIDDEN, LAYERS, VOCABULARY, minimise, prompts, save_head, save_target, train_head
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from crossdraft.drafters.heads.medusa.weights import MedusaHeads

#: A system prompt of its own, and a beginning of the answer.
TEMPLATE = (
    "{{ bos_token }} w2 {% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set rest = messages[1:] %}{% else %}w7 w8{% set rest = messages %}{% endif %} w3 "
    "{% for message in rest %}{{ message['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)
#: Standard deviation of the noise in a draft model's weights, in units of theirs: now, and in the earlier checkpoint.
NOISE = (0.08, 0.14)
#: Heads of Medusa.
AHEAD = 5


def save_chat_target(path: Path) -> str:
    """The target of `tiny_heads`, with `TEMPLATE`."""
    save_target(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


def chat_prompts(count: int, seed: int) -> list[list[int]]:
    """`prompts` in the template."""
    return [[0, 2, 7, 8, 3, *prompt, 4, 5] for prompt in prompts(count, seed)]


#: ``make(target, texts, steps, early)``: functions that write the earlier checkpoint, then the last one.
Writer = Callable[[Path], Any]


def _eagle3(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    for head in train_head(target, ids.tolist(), steps, early):
        yield lambda path, head=head: save_head(head, path)


def _medusa(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    torch.manual_seed(1)
    heads = MedusaHeads(HIDDEN, AHEAD, vocab_size=VOCABULARY)
    for weight in heads.parameters():
        if len(weight) == VOCABULARY:
            torch.nn.init.normal_(weight, std=HIDDEN**-0.5)

    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states[-1]

    def loss(rows: Tensor) -> Tensor:
        return torch.stack(
            [
                functional.cross_entropy(head(states[rows, : -i - 2]).flatten(0, 1), ids[rows, i + 2 :].flatten())
                for i, head in enumerate(heads)
            ]
        ).sum()

    for _ in minimise(loss, heads, len(ids), steps, early):
        yield lambda path: save_heads(path, heads, {})


def _draft_model(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    for noise in reversed(NOISE):
        model, generator = deepcopy(target.model), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)

        def write(path: Path, model: Any = model) -> None:
            model.save_pretrained(path)
            target.tokenizer.save_pretrained(path)

        yield write


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: how it is made, and its options beside ``model`` and ``gamma``.

    ``prompts``: those of its servers, in the template or without. ``steps``: of the training.
    """

    name: str
    make: Callable[[Any, Tensor, int, int], Iterator[Writer]]
    options: dict[str, Any] = field(default_factory=dict)
    prompts: Callable[[int, int], list[list[int]]] = prompts
    steps: int = 500


KINDS = {
    kind.name: kind
    for kind in (
        Kind("eagle3", _eagle3, {"layers": LAYERS}, steps=900),
        Kind("draft-model", _draft_model, prompts=chat_prompts),
        Kind("medusa", _medusa),
    )
}
