"""Training loop of all kinds of drafters: steps, checkpoints, held-out evaluation, log.

An interrupted run resumes from its last checkpoint with the same result: the order of texts, random numbers, learning
rate and evaluation steps follow from the step, and target features do not depend on batching. On a CPU with the same
number of threads, weights and log are bit-identical. Runs with a time limit depend on the clock.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from crossdraft import LoadedModel, NumericalError, UsageError
from crossdraft.models import TRANSFORMERS, resolve, weights_sha256

from .checkpoints import Checkpoint, check_weights, load, load_optimizer
from .contract import Text, TrainingConfig
from .features import Features, check_head
from .files import replace_text, staged
from .heartbeat import doing
from .interrupts import deferred_interrupt

#: Evaluations during training, besides the one before the first step.
EVALUATIONS = 10


class Trainer:
    """Trainer of a student on texts; :meth:`run` can be interrupted at any time and resumed.

    Args:
        target: the loaded target, which is frozen.
        recipe: the kind of drafter and its training options.
        out: directory of checkpoint and result.
        precision: ``no`` (float32) or ``bf16`` (autocast), as in `accelerate`.
        cache_gib: see :class:`Features`.

    Attributes:
        log: per evaluation: step, minutes and response tokens trained on so far, ``held_out_acceptance`` (mean sum of
            min(p, q) of the first drafted token) and ``positions`` (the same for each position of a draft).
        best: last held-out acceptance.
        later: evaluations after the one whose weights are kept, with ``patience``; they are not in ``log``.

    Raises:
        UsageError: options not supported by the target, or several processes.
    """

    def __init__(
        self, target: LoadedModel, recipe: TrainingConfig, out: Path, *, precision: str = "no", cache_gib: float = 4.0
    ):
        if target.backend != TRANSFORMERS:
            raise UsageError(
                f"{target.name} uses backend {target.backend}; crossdraft train needs a transformers model"
            )
        self.target, self.out = target, out
        self.device = target.model.device
        self.recipe = recipe.with_target_defaults(target)
        self.accelerator = _accelerator(self.device, precision)
        check_head(target)
        for parameter in target.model.parameters():
            parameter.requires_grad_(False)
        with _seeded(self.recipe.seed, "start", self.device):
            self.trainee = self.recipe.trainee(target)
            if self.recipe.start_from:
                self.trainee.start_from(self.recipe.start_from)
        self.features = Features(target, self.trainee.hidden_layers, cache_gib)
        self.step, self.seconds, self.tokens, self.best = 0, 0.0, 0, 0.0
        self.log: list[Any] = []
        self.later: list[Any] = []
        self._tenth = -1  # progress at the last evaluation
        self._made_with: dict[str, Any] = {}

    @property
    def precision(self) -> str:
        return self.accelerator.mixed_precision

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def best_checkpoint(self) -> Path:
        """With ``patience``, the state of the evaluation with the highest held-out block efficiency."""
        return self.out / "best.pt"

    @property
    def best_evaluation(self) -> int:
        """Index in `log` of the first evaluation with the highest block efficiency of a chain that is held out."""
        efficiencies = [sum(accumulate(entry["positions"], mul)) for entry in self.log]
        return efficiencies.index(max(efficiencies))

    def run(self, train: Sequence[Text], held_out: Sequence[Text]) -> None:
        """Train to the end, resuming from a checkpoint if it exists.

        SIGINT, SIGTERM and SIGHUP end the run after the current step, with a checkpoint; a second signal at once.

        Raises:
            UsageError: the checkpoint is damaged or of other options or texts.
            NumericalError: the loss is not finite.
            CrossdraftError: a checkpoint cannot be written; the earlier one is kept.
            KeyboardInterrupt: after such a signal.
        """
        if not train or not held_out:
            raise UsageError(f"training needs training and held-out texts, not {len(train)} and {len(held_out)}")
        self._made_with = self._identity(train, held_out)
        with _seeded(self.recipe.seed, "prepare", self.device):
            self.trainee.prepare(train)
        self.trained = list(self.trainee.trained.values())
        r = self.recipe
        self.optimizer: Any = self.accelerator.prepare_optimizer(
            torch.optim.AdamW(self.trained, lr=r.learning_rate, betas=(0.9, 0.95), weight_decay=r.weight_decay)
        )
        batches = [b for epoch in range(r.epochs) for b in self._batches(train, epoch)]
        self._load(self.checkpoint, len(batches))
        saved = time.perf_counter()
        doing(lambda: f"training: step {self.step} of {len(batches)}, held-out {self.trainee.measured} {self.best:.4f}")
        with (
            deferred_interrupt() as stop_requested,
            tqdm(total=len(batches), initial=self.step, unit="step", desc=r.name, disable=None) as bar,
        ):
            while True:
                progress = self._progress(len(batches))
                # Evaluations depend on the step only, not on checkpoints or interruptions.
                if int(EVALUATIONS * progress) > self._tenth:
                    self._evaluate(held_out)
                    self._tenth = int(EVALUATIONS * progress)
                    if r.patience and self.best_evaluation == len(self.log) - 1:
                        self._save(self.best_checkpoint)
                    self._save()
                    saved = time.perf_counter()
                if stop_requested.is_set():
                    self._save()
                    raise KeyboardInterrupt
                if progress >= 1 or 0 < r.patience < len(self.log) - self.best_evaluation:
                    break
                start = time.perf_counter()
                with _seeded(r.seed, self.step, self.device):
                    loss, first = self._train(batches[self.step], train, progress)
                self.step += 1
                self.seconds += time.perf_counter() - start
                bar.set_postfix(loss=f"{loss:.3f}", min_pq=f"{first:.3f}", held_out=f"{self.best:.3f}")
                bar.update()
                if time.perf_counter() - saved > 60 * r.save_minutes:
                    self._save()
                    saved = time.perf_counter()

        if r.patience:
            evaluations = self.log
            self._load(self.best_checkpoint, len(batches))
            self.later = evaluations[len(self.log) :]

    def export(self, held_out: Sequence[Text]) -> None:
        """Write the student in its layout, and ``training.json``; `card.write_card` writes the card.

        Raises:
            CrossdraftError: the disk is full; earlier files are kept.
        """
        self.trainee.student.eval()
        facts = {"kind": self.recipe.name, "recipe": self.recipe.model_dump(), "seconds": round(self.seconds)}
        facts |= {"steps": self.step, "tokens": self.tokens, "log": self.log}
        facts |= {"later": self.later} if self.later else {}
        facts |= {"target": self.target.name, "target_sha256": self.target.sha256}
        with staged(self.out) as directory:
            with torch.no_grad(), _seeded(self.recipe.seed, "export", self.device):
                self.trainee.export(directory, self.features.batches(held_out, -1))
            replace_text(directory / "training.json", json.dumps(facts, indent=1, default=str) + "\n")

    # -- pieces -------------------------------------------------------------------------------------------

    def _batches(self, texts: Sequence[Text], epoch: int) -> list[list[int]]:
        """Shuffled batches of texts of similar length, at most ``batch_tokens`` padded tokens each."""
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
        return min(max(self.step / steps, spent), 1.0)

    def _train(self, numbers: Sequence[int], texts: Sequence[Text], progress: float) -> tuple[float, float]:
        r = self.recipe
        fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = r.learning_rate * min(1.0, (self.step + 1) / max(r.warm_up, 1)) * fall
        self.trainee.student.train()
        batch_texts = [texts[i] for i in numbers]
        rewritten = self.trainee.rewritten(batch_texts, self.step)
        fresh = (old is not new for old, new in zip(batch_texts, rewritten, strict=True))
        batch = self.features.batch(rewritten, [None if new else i for new, i in zip(fresh, numbers, strict=True)])
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
        """Log the mean sum_x min(p, q) at temperature 1 over held-out response tokens, by position of the draft."""
        self.trainee.student.eval()
        sums: list[float] = []
        counts: list[int] = []
        for batch in self.features.batches(texts, -1):
            with self.accelerator.autocast(), _seeded(self.recipe.seed, "evaluate", self.device):
                acceptance = self.trainee.acceptance(batch)
            sums = [a + float(f.sum()) for a, f in zip(sums or [0.0] * len(acceptance), acceptance, strict=True)]
            counts = [a + len(f) for a, f in zip(counts or [0] * len(acceptance), acceptance, strict=True)]
        means = [round(a / max(n, 1), 4) for a, n in zip(sums, counts, strict=True)]
        if not all(map(math.isfinite, means)):
            raise NumericalError(
                f"the student's probabilities are not finite after {self.step} steps; lower --learning-rate or use "
                "--precision no, with another --out"
            )
        self.best = means[0]
        spent = {"step": self.step, "minutes": round(self.seconds / 60, 1), "tokens": self.tokens}
        self.log.append({**spent, "held_out_acceptance": self.best, "positions": means})
        tqdm.write(
            f"step {self.step}, {self.seconds / 60:.1f} min, {self.tokens} tokens: held-out {self.trainee.measured} "
            + " ".join(f"{mean:.4f}" for mean in means)
        )

    def _state(self) -> dict[str, Tensor]:
        """Trained weights and persistent buffers of the student."""
        student = self.trainee.student
        weights = dict(student.named_parameters(remove_duplicate=False))
        stored = student.state_dict(keep_vars=True)
        buffers = {name: t for name, t in stored.items() if name not in weights and isinstance(t, Tensor)}
        return {name: tensor.detach() for name, tensor in (buffers | self.trainee.trained).items()}

    def _save(self, path: Path | None = None) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        Checkpoint(
            student=self._state(),
            optimizer=self.optimizer.state_dict(),
            step=self.step,
            seconds=self.seconds,
            tokens=self.tokens,
            tenth=self._tenth,
            log=self.log,
            made_with=self._made_with,
        ).save(path or self.checkpoint)

    def _load(self, path: Path, steps: int) -> None:
        """Continue from a checkpoint, if it exists."""
        if not path.exists():
            return
        loaded = load(path, self.device, self._made_with, {"save_minutes"})
        own_state = self._state()
        check_weights(path, loaded.student, own_state)
        if loaded.step > steps:
            raise UsageError(f"{path} has {loaded.step} steps, more than {steps}; use another --out")
        with torch.no_grad():
            for name, tensor in own_state.items():
                tensor.copy_(loaded.student[name])
        load_optimizer(path, self.optimizer, loaded.optimizer, self.trained)
        self.step, self.seconds, self.tokens, self.log = loaded.step, loaded.seconds, loaded.tokens, loaded.log
        self._tenth, self.best = loaded.tenth, loaded.log[-1]["held_out_acceptance"]

    def _identity(self, train: Sequence[Text], held_out: Sequence[Text]) -> dict[str, Any]:
        """Options and digests that determine the result."""
        start_from = self.recipe.start_from
        identity = {
            "kind": self.recipe.name,
            **self.recipe.model_dump(),
            "start_from_sha256": weights_sha256(resolve(start_from, heads=True).path) if start_from else "",
            **self.trainee.made_with(),
            "target": self.target.sha256,
            "dtype": str(self.target.model.dtype),
            "precision": self.accelerator.mixed_precision,
            "texts": _digest(train),
            "held_out": _digest(held_out),
        }
        return json.loads(json.dumps(identity, default=str))


def _accelerator(device: torch.device, precision: str) -> Any:
    try:
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision, device_placement=False)
    except ValueError as error:
        raise UsageError(f"--precision {precision}: accelerate is already configured differently: {error}") from None
    if accelerator.num_processes > 1:
        raise UsageError("crossdraft train supports one process only; start it without accelerate launch or torchrun")
    return accelerator


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.prompt, text.response]).encode())
    return digest.hexdigest()


@contextmanager
def _seeded(seed: int, key: int | str, device: torch.device) -> Iterator[None]:
    """Seed PyTorch, NumPy and Python by the seed and ``subject``; restores their states on exit."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:4])
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
