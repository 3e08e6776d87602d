"""Distil a small LM drafter from the target.

The student starts as a few of the target's own layers with the target's embedding, final norm and head; the
embedding (tied to the head) stays the target's and is not stored. It learns to match the target's whole law on
text the target wrote: Y. Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
2024. Untrained, such a student accepts next to nothing.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..errors import UsageError
from ..models import LoadedModel, save_sharing_embedding
from .texts import Text, pad

Divergence = Literal["forward-kl", "reverse-kl", "tv"]


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        layers: the target's layers the student starts from, in order.
        divergence: what is minimised between the target's law p and the student's q.
        epochs: passes over the training texts.
        minutes: stop (and let the learning rate fall) by this much training time, 0 = no limit.
        sampled_vocab: tokens that never occur in the texts' responses are represented by this many random ones
            a step, each standing for its share of them; 0 = the full vocabulary. The head is most of the cost.
        batch_tokens: padded tokens per step.
        learning_rate: of AdamW at its peak, warmed up linearly over ``warm_up`` steps, then falling along a
            cosine to 5 % of it.
        save_minutes: how often a checkpoint is written.
    """

    layers: tuple[int, ...]
    divergence: Divergence = "forward-kl"
    epochs: int = 3
    minutes: float = 0
    sampled_vocab: int = 2048
    batch_tokens: int = 2048
    learning_rate: float = 6e-4
    warm_up: int = 30
    weight_decay: float = 0.01
    save_minutes: float = 10
    seed: int = 0


def student_of(target: Any, layers: Sequence[int]) -> Any:
    """A model with ``layers`` of ``target``, sharing its embedding tensor.

    Raises:
        UsageError: a layer the target does not have, or an untied head (the student could not share it).
    """
    config = copy.deepcopy(target.config)
    count = config.num_hidden_layers
    if not layers or any(not 0 <= i < count for i in layers):
        raise UsageError(f"--layers must name layers 0 to {count - 1} of the target, got {list(layers)}")
    if target.get_input_embeddings().weight is not target.get_output_embeddings().weight:
        raise UsageError(
            "the target's head is not tied to its embedding; a student that shares both needs tied weights"
        )
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    student = type(target)(config).to(target.device, torch.float32)
    source = target.state_dict()
    state = {}
    for key in student.state_dict():
        old = re.sub(r"\.(\d+)\.", lambda m: f".{layers[int(m[1])]}.", key, count=1)
        state[key] = source[old]
    student.load_state_dict(state)
    student.set_input_embeddings(target.get_input_embeddings())
    student.tie_weights()
    student.get_input_embeddings().weight.requires_grad_(False)
    return student


class _Distil(torch.autograd.Function):
    """Divergence between two laws over V given final hidden states, without ever holding ``[n, V]`` twice.

    The gradient with respect to the student's hidden states is formed in the forward pass, a slice of rows at
    a time, so that the logits of a slice stay in the processor's cache.
    """

    @staticmethod
    def forward(ctx, student: Tensor, target: Tensor, head: Tensor, bias: Tensor, divergence: str, rows: int):  # type: ignore[override]
        loss = student.new_zeros(())
        overlap = student.new_zeros(())
        gradient = torch.empty_like(student)
        for start in range(0, len(student), rows):
            part = slice(start, start + rows)
            log_p = functional.log_softmax((target[part] @ head.T).float() + bias, -1)
            log_q = functional.log_softmax((student[part] @ head.T).float() + bias, -1)
            p, q = log_p.exp(), log_q.exp()
            overlap += torch.minimum(p, q).sum()
            if divergence == "forward-kl":
                loss += (p * (log_p - log_q)).sum()
                slope = q - p
            elif divergence == "reverse-kl":
                difference = log_q - log_p
                kl = (q * difference).sum(-1, keepdim=True)
                loss += kl.sum()
                slope = q * (difference - kl)
            else:  # TV = 1 - sum min(p, q)
                below = (q < p).float()
                mass = (q * below).sum(-1, keepdim=True)
                loss += (1 - torch.minimum(p, q).sum(-1)).sum()
                slope = -q * (below - mass)
            gradient[part] = (slope.to(head.dtype) @ head).to(gradient.dtype)
        n = max(len(student), 1)
        ctx.save_for_backward(gradient / n)
        ctx.mark_non_differentiable(overlap)
        return loss / n, overlap / n

    @staticmethod
    def backward(ctx, *grads: Any):
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None


def distil(
    student: Tensor, target: Tensor, head: Tensor, bias: Tensor, divergence: Divergence, rows: int = 128
) -> tuple[Tensor, Tensor]:
    """Mean divergence and mean sum_x min(p, q) over ``[n, H]`` final hidden states, a head ``[R, H]`` and bias ``[R]``.

    The bias is the logarithm of how many tokens a row of the head stands for: 0 for a full head.
    """
    return _Distil.apply(student, target, head, bias, divergence, rows)  # type: ignore[return-value]


class Trainer:
    """Trains a student on texts; :meth:`run` can be interrupted at any time and called again.

    Args:
        target: the loaded target, frozen.
        out: directory for checkpoint and result.
    """

    def __init__(self, target: LoadedModel, recipe: Recipe, out: Path):
        self.target, self.recipe, self.out = target, recipe, out
        self.device = target.model.device
        self.student = student_of(target.model, recipe.layers)
        for parameter in target.model.parameters():
            parameter.requires_grad_(False)
        self.trained = [p for p in self.student.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.step, self.seconds, self.tokens, self.best = 0, 0.0, 0, 0.0
        self.log: list[dict[str, float]] = []
        self._hidden: dict[int, Tensor] = {}  # final hidden states of the target, by text; held-out ones below 0
        self._common = torch.empty(0, dtype=torch.long)  # tokens that occur in the responses

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def run(self, train: Sequence[Text], held_out: Sequence[Text]) -> None:
        """Train to the end of the recipe, from the checkpoint if there is one."""
        self._resume()
        occurring = sorted({token for text in train for token in text.response})
        self._common = torch.tensor(occurring, device=self.device)
        batches = [b for epoch in range(self.recipe.epochs) for b in self._batches(train, epoch)]
        saved = time.perf_counter()
        if not self.log:
            self._evaluate(held_out)
        with tqdm(total=len(batches), initial=self.step, unit="step", desc="distil") as bar:
            while self.step < len(batches) and (progress := self._progress(len(batches))) < 1:
                start = time.perf_counter()
                loss, overlap = self._train(batches[self.step], train, progress)
                self.step += 1
                self.seconds += time.perf_counter() - start
                bar.set_postfix(loss=f"{loss:.3f}", min_pq=f"{overlap:.3f}")
                bar.update()
                if time.perf_counter() - saved > 60 * self.recipe.save_minutes:
                    self._evaluate(held_out)
                    self._save()
                    saved = time.perf_counter()
        self._evaluate(held_out)
        self._save()

    def export(self, card: str) -> None:
        """Write the student to ``out``: config, bfloat16 weights without the embedding, model card."""
        student = copy.deepcopy(self.student).to(torch.bfloat16)
        student.set_input_embeddings(copy.deepcopy(self.target.model.get_input_embeddings()).to(torch.bfloat16))
        student.tie_weights()
        save_sharing_embedding(student, self.out, embedding_of=self.target.name)
        (self.out / "README.md").write_text(card, encoding="utf-8")
        (self.out / "training.json").write_text(
            json.dumps(
                {
                    "recipe": asdict(self.recipe),
                    "seconds": round(self.seconds),
                    "tokens": self.tokens,
                    "log": self.log,
                },
                indent=1,
            )
            + "\n"
        )

    # -- pieces -------------------------------------------------------------------------------------------

    def _batches(self, texts: Sequence[Text], epoch: int) -> list[list[int]]:
        """Texts of like length together, at most ``batch_tokens`` padded tokens each, in a shuffled order."""
        rng = random.Random(self.recipe.seed * 1009 + epoch)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids) + rng.uniform(-16, 16))
        batches: list[list[int]] = [[]]
        for i in order:
            if (len(batches[-1]) + 1) * len(texts[i].ids) > self.recipe.batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(i)
        rng.shuffle(batches)
        return batches

    def _progress(self, steps: int) -> float:
        spent = self.seconds / (60 * self.recipe.minutes) if self.recipe.minutes else 0.0
        return max(self.step / steps, spent)

    def _train(self, batch: Sequence[int], texts: Sequence[Text], progress: float) -> tuple[float, float]:
        r = self.recipe
        fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = r.learning_rate * min(1.0, (self.step + 1) / r.warm_up) * fall
        loss, overlap, count = self._loss([texts[i] for i in batch], batch, *self._sampled_head())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.tokens += count
        return float(loss.detach()), float(overlap.detach())

    @property
    def _head(self) -> Tensor:
        head: Any = self.target.model.get_output_embeddings()
        return head.weight

    def _sampled_head(self) -> tuple[Tensor, Tensor]:
        """Rows of the head for this step, and the logarithm of how many tokens each stands for."""
        head = self._head
        wanted, vocab = self.recipe.sampled_vocab, len(head)
        rest = torch.ones(vocab, dtype=torch.bool, device=self.device)
        rest[self._common] = False
        others = rest.nonzero().squeeze(1)
        if not 0 < wanted < len(others):
            return head, head.new_zeros(vocab, dtype=torch.float32)
        random_order = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        chosen = others[torch.randperm(len(others), generator=random_order)[:wanted].to(self.device)]
        share = math.log(len(others) / wanted)
        bias = torch.cat([torch.zeros(len(self._common)), torch.full((wanted,), share)]).to(self.device)
        return head[torch.cat([self._common, chosen])], bias

    def _loss(
        self, texts: Sequence[Text], keys: Sequence[int], head: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        ids, mask, predicts = pad(texts, self.device)
        target = self._target_states(keys, ids, mask, predicts)
        states = self.student.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
            predicts
        ]
        loss, overlap = distil(states.to(head.dtype), target.to(head.dtype), head, bias, self.recipe.divergence)
        return loss, overlap, len(target)

    @torch.no_grad()
    def _target_states(self, keys: Sequence[int], ids: Tensor, mask: Tensor, predicts: Tensor) -> Tensor:
        """``[n, H]`` final hidden states of the target, computed once per text and kept in bfloat16."""
        if not all(k in self._hidden for k in keys):
            states = self.target.model.get_decoder()(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state
            for i, k in enumerate(keys):
                self._hidden[k] = states[i][predicts[i]].to("cpu", torch.bfloat16)
        return torch.cat([self._hidden[k] for k in keys]).to(self.device)

    @torch.no_grad()
    def _evaluate(self, texts: Sequence[Text]) -> None:
        """Mean sum_x min(p, q) at temperature 1 over held-out response tokens: the acceptance of one drafted token."""
        head = self._head
        bias = head.new_zeros(len(head), dtype=torch.float32)
        overlap = count = 0.0
        for start in range(0, len(texts), 8):
            part = texts[start : start + 8]
            _, value, n = self._loss(part, range(-1 - start, -1 - start - len(part), -1), head, bias)
            overlap, count = overlap + float(value) * n, count + n
        self.best = overlap / max(count, 1)
        self.log.append(
            {
                "step": self.step,
                "minutes": round(self.seconds / 60, 1),
                "tokens": self.tokens,
                "held_out_acceptance": round(self.best, 4),
            }
        )
        tqdm.write(
            f"step {self.step}, {self.seconds / 60:.1f} min, {self.tokens} tokens: held-out acceptance {self.best:.4f}"
        )

    def _save(self) -> None:
        trained = {k: v for k, v in self.student.state_dict().items() if "embed" not in k and "lm_head" not in k}
        state = {
            "student": trained,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "log": self.log,
            "recipe": json.dumps(asdict(self.recipe)),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["recipe"] != json.dumps(asdict(self.recipe)):
            raise UsageError(f"{self.checkpoint} was made with other options; use them again, or another --out")
        self.student.load_state_dict(state["student"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.log = state["log"]
