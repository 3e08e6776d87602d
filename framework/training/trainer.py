"""The one loop that trains every kind of drafter: steps, checkpoints, a held-out estimate, a log.

A run that is interrupted at any moment goes on from its last checkpoint when it is started again: the order of texts,
the sampled tokens and the learning rate follow from the number of the step, and the target's features do not depend
on how texts are batched, so that on a CPU the result is the same to the bit (if the run is limited by epochs, not by
minutes).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..contracts.errors import NumericalError, UsageError
from ..contracts.models import LoadedModel
from ..contracts.training import Text, TrainingConfig
from .features import Features, check_head


class Trainer:
    """Trains a student on texts; :meth:`run` can be interrupted at any time and called again.

    Args:
        target: the loaded target, which is frozen.
        recipe: what to train, and how.
        out: directory for checkpoint and result.
        precision: ``no`` (float32) or ``bf16`` (autocast), as `accelerate` names them.
        cache_gib: see :class:`Features`.

    Attributes:
        log: per evaluation: step, minutes and response tokens trained on so far, ``held_out_acceptance`` (mean sum of
            min(p, q) of the first drafted token) and ``positions`` (the same of each position of a draft).
        best: the last held-out acceptance.

    Raises:
        UsageError: options that do not fit the target, `accelerate` missing, or started in several processes.
    """

    def __init__(
        self, target: LoadedModel, recipe: TrainingConfig, out: Path, *, precision: str = "no", cache_gib: float = 4.0
    ):
        self.target, self.out = target, out
        self.device = target.model.device
        self.recipe = recipe.fitted(target)
        self.accelerator = _accelerator(self.device, precision)
        check_head(target)
        for parameter in target.model.parameters():
            parameter.requires_grad_(False)
        self.trainee = self.recipe.trainee(target)
        if self.recipe.start_from:
            self.trainee.start_from(self.recipe.start_from)
        self.features = Features(target, self.trainee.hidden_layers, cache_gib)
        self.step, self.seconds, self.tokens, self.best = 0, 0.0, 0, 0.0
        self.log: list[dict[str, Any]] = []
        self._digest = ""

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def run(self, train: Sequence[Text], held_out: Sequence[Text]) -> None:
        """Train to the end of the recipe, from the checkpoint if there is one.

        SIGINT and SIGTERM end the run after the step in progress, with a checkpoint.

        Raises:
            UsageError: a checkpoint of other options or other texts, or one that is damaged.
            NumericalError: the loss is not finite.
            KeyboardInterrupt: after such a signal.
        """
        self._digest = _digest(train)
        self.trainee.prepare(train)
        self.trained = list(self.trainee.trained.values())
        r = self.recipe
        self.optimizer: Any = self.accelerator.prepare_optimizer(
            torch.optim.AdamW(self.trained, lr=r.learning_rate, betas=(0.9, 0.95), weight_decay=r.weight_decay)
        )
        self._resume()
        batches = [b for epoch in range(r.epochs) for b in self._batches(train, epoch)]
        saved = time.perf_counter()
        if not self.log:
            self._evaluate(held_out)
        with _until_told() as told, tqdm(total=len(batches), initial=self.step, unit="step", desc=r.name) as bar:
            while self.step < len(batches) and (progress := self._progress(len(batches))) < 1:
                start = time.perf_counter()
                loss, first = self._train(batches[self.step], train, progress)
                self.step += 1
                self.seconds += time.perf_counter() - start
                bar.set_postfix(loss=f"{loss:.3f}", min_pq=f"{first:.3f}", held_out=f"{self.best:.3f}")
                bar.update()
                if told.is_set():
                    self._save()
                    raise KeyboardInterrupt
                if time.perf_counter() - saved > 60 * r.save_minutes:
                    self._evaluate(held_out)
                    self._save()
                    saved = time.perf_counter()
        if self.log[-1]["step"] < self.step:
            self._evaluate(held_out)
            self._save()

    def export(self, held_out: Sequence[Text]) -> None:
        """Write the student in its layout, and ``training.json``; the card is written by `card.write_card`."""
        self.trainee.student.eval()
        with torch.no_grad():
            self.trainee.export(self.out, self.features.batches(held_out, -1))
        facts = {"kind": self.recipe.name, "recipe": asdict(self.recipe), "seconds": round(self.seconds)}
        facts |= {"steps": self.step, "tokens": self.tokens, "log": self.log}
        (self.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

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

    def _train(self, numbers: Sequence[int], texts: Sequence[Text], progress: float) -> tuple[float, float]:
        r = self.recipe
        fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = r.learning_rate * min(1.0, (self.step + 1) / max(r.warm_up, 1)) * fall
        self.trainee.student.train()
        batch = self.features.batch([texts[i] for i in numbers], numbers)
        with self.accelerator.autocast():
            loss, first = self.trainee.loss(batch, self.step)
        if not loss.isfinite():
            raise NumericalError(
                f"the loss is not finite at step {self.step}; lower --learning-rate or use --precision no, with "
                "another --out"
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.tokens += int(batch.predicts.sum())
        return float(loss.detach()), float(first.detach())

    @torch.no_grad()
    def _evaluate(self, texts: Sequence[Text]) -> None:
        """Mean sum_x min(p, q) at temperature 1 over held-out response tokens, by position of the draft."""
        self.trainee.student.eval()
        sums: list[float] = []
        counts: list[int] = []
        for batch in self.features.batches(texts, -1):
            with self.accelerator.autocast():
                found = self.trainee.acceptance(batch)
            sums = [a + float(f.sum()) for a, f in zip(sums or [0.0] * len(found), found, strict=True)]
            counts = [a + len(f) for a, f in zip(counts or [0] * len(found), found, strict=True)]
        means = [round(a / max(n, 1), 4) for a, n in zip(sums, counts, strict=True)]
        self.best = means[0]
        spent = {"step": self.step, "minutes": round(self.seconds / 60, 1), "tokens": self.tokens}
        self.log.append({**spent, "held_out_acceptance": self.best, "positions": means})
        tqdm.write(
            f"step {self.step}, {self.seconds / 60:.1f} min, {self.tokens} tokens: held-out acceptance "
            + " ".join(f"{mean:.4f}" for mean in means)
        )

    def _save(self) -> None:
        state = {
            "student": {name: weight.detach() for name, weight in self.trainee.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "log": self.log,
            "recipe": self._recipe_json(),
            "texts": self._digest,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        part = self.checkpoint.with_suffix(".part")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # a machine that goes down must not leave a new name on old nothing
        part.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError):
            raise UsageError(f"{self.checkpoint} is damaged; delete it to start over") from None
        made, mine = json.loads(state["recipe"]), json.loads(self._recipe_json())
        free = {"save_minutes"}  # changes nothing in the result
        if differ := sorted(key for key in mine.keys() - free if key in made and made[key] != mine[key]):
            raise UsageError(
                f"{self.checkpoint} was made with other options ({', '.join(differ)}); use them again, or another --out"
            )
        if state.get("texts", self._digest) != self._digest:
            raise UsageError(f"{self.checkpoint} was made with other texts; use them again, or another --out")
        weights = self.trainee.trained
        if weights.keys() != state["student"].keys():
            raise UsageError(f"{self.checkpoint} holds another kind of drafter; use another --out")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state["student"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.log = [{"positions": [entry["held_out_acceptance"]], **entry} for entry in state["log"]]
        self.best = self.log[-1]["held_out_acceptance"]

    def _recipe_json(self) -> str:
        return json.dumps({"kind": self.recipe.name, **asdict(self.recipe)})


def _accelerator(device: torch.device, precision: str) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UsageError(
            "crossdraft train needs the package accelerate; install it with: pip install 'crossdraft[train]'"
        ) from None
    found = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, device_placement=False)
    if found.num_processes > 1:
        raise UsageError("crossdraft train runs in one process; start it without accelerate launch or torchrun")
    return found


def _digest(texts: Sequence[Text]) -> str:
    """Which texts, in which order."""
    found = hashlib.sha256()
    for text in texts:
        found.update(json.dumps([text.prompt, text.response]).encode())
    return found.hexdigest()


@contextmanager
def _until_told() -> Iterator[threading.Event]:
    """Set when the process is asked to stop: half a step must not end up in a checkpoint."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield told
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda *_: told.set()) for kind in kinds]
    try:
        yield told
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
