"""A tiny target with a chat template, and drafters of each kind that are made for it; used by `diagnose_matching`.

Heads are trained for a minute; a draft model is the target with noise in its weights. Each drafter has an earlier
checkpoint: fewer steps of training, or more noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from crossdraft_drafters.heads.mlp_speculator import Speculator
from crossdraft_drafters.heads.mtp import MtpHead
from safetensors.torch import save_file
from tiny_heads import HIDDEN, LAYERS, SHAPE, TOKENS, VOCABULARY, prompts, roll_out, save_head, save_target, train_head
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from crossdraft import generate
from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.drafters.heads.medusa.weights import MedusaHeads, save_heads

#: A system prompt of its own, and a beginning of the answer.
TEMPLATE = (
    "{{ bos_token }} w2 {% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set rest = messages[1:] %}{% else %}w7 w8{% set rest = messages %}{% endif %} w3 "
    "{% for message in rest %}{{ message['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)
#: Standard deviation of the noise in a draft model's weights, in units of theirs: now, and in the earlier checkpoint.
NOISE = (0.08, 0.14)
#: Heads of Medusa, stages of an MLP speculator.
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


def training_texts(target: Any, count: int = 1024) -> Tensor:
    """Sampled texts of the target, without its template."""
    starts = prompts(count, 0)
    options = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "seed": 0}
    responses = generate(target, starts, batch_size=128, **options)
    return torch.tensor([[*start, *response.tokens] for start, response in zip(starts, responses, strict=True)])


#: ``make(target, texts, steps, early)``: functions that write the earlier checkpoint, then the last one.
Writer = Callable[[Path], Any]


def _eagle3(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    for head in train_head(target, ids.tolist(), steps, early):
        yield lambda path, head=head: save_head(head, path)


def _eagle(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    torch.manual_seed(1)
    tables = (target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    head = EagleHead(make_config(**SHAPE, rope_parameters=rope), *(table.detach() for table in tables))
    for part in roll_out(head, target, (-1,), ids, steps, early):
        yield part.save


def _mtp(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    torch.manual_seed(1)
    head = MtpHead(target.model)
    head.embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(False)
    for part in roll_out(head, target, (-1,), ids, steps, early):
        yield part.save


def _medusa(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    torch.manual_seed(1)
    heads = MedusaHeads(HIDDEN, AHEAD, vocab_size=VOCABULARY)
    for weight in heads.parameters():
        if len(weight) == VOCABULARY:
            torch.nn.init.normal_(weight, std=HIDDEN**-0.5)

    def loss(states: Tensor, rows: Tensor) -> Tensor:
        return torch.stack(
            [
                functional.cross_entropy(head(states[:, : -i - 2]).flatten(0, 1), rows[:, i + 2 :].flatten())
                for i, head in enumerate(heads)
            ]
        ).sum()

    for _ in _trained(heads, target, ids, loss, steps, early):
        yield lambda path: save_heads(path, heads, {})


def _mlp(target: Any, ids: Tensor, steps: int, early: int) -> Iterator[Writer]:
    torch.manual_seed(1)
    speculator = Speculator(AHEAD, VOCABULARY, HIDDEN, HIDDEN)

    def loss(states: Tensor, rows: Tensor) -> Tensor:
        n, total = rows.shape[1] - AHEAD - 1, torch.zeros(())
        state = speculator.first(states[:, :n]).flatten(0, 1)
        for i in range(AHEAD):
            state, logits = speculator(i, state, rows[:, 1 + i : 1 + i + n].flatten())
            total = total + functional.cross_entropy(logits, rows[:, 2 + i : 2 + i + n].flatten())
        return total

    def write(path: Path) -> None:
        path.mkdir()
        tensors = {f"speculator.{name}": t.detach().clone() for name, t in speculator.state_dict().items()}
        save_file(tensors, path / "model.safetensors")
        sizes = {"emb_dim": HIDDEN, "inner_dim": HIDDEN, "vocab_size": VOCABULARY}
        config = {"model_type": "mlp_speculator", "n_predict": AHEAD, "tie_weights": False, "scale_input": False}
        (path / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")

    for _ in _trained(speculator, target, ids, loss, steps, early):
        yield write


def _trained(module: Any, target: Any, ids: Tensor, loss: Any, steps: int, early: int) -> Iterator[None]:
    """Train heads that read the target's last state only."""
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states[-1]
    optimiser = torch.optim.AdamW(module.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for number in range(steps):
        rows = torch.randint(len(ids), (32,))
        optimiser.zero_grad()
        loss(states[rows], ids[rows]).backward()
        optimiser.step()
        schedule.step()
        if number + 1 in (early, steps):
            yield


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
        Kind("eagle", _eagle),
        Kind("mtp", _mtp),
        Kind("medusa", _medusa),
        Kind("mlp-speculator", _mlp),
    )
}
