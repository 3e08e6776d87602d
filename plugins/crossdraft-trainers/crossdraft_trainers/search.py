"""Search of drafter settings by trials, each evaluated on texts written by the target.

A trial computes the acceptance of one fork of the target along responses, the mean of sum_x min(p, q), and its share of
the target's weights; `Search.worth` combines the two. Nothing is timed, so a search is reproducible on any machine, up
to rounding, and can be resumed: a proposal follows from the seed, its number and the earlier trials in ``trials.json``.

In a trial the fork uses its own keys and values of the response; in decoding, committed tokens have the target's. So
the actual acceptance is slightly higher.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import Tensor
from tqdm import tqdm

from crossdraft import LoadedModel, ModelError, NumericalError, Sampling, UsageError, on_device
from crossdraft.commands import CONFIG_BYTES, read_json
from crossdraft.models import TRANSFORMERS, make_slots

from .contract import SearchConfig, Text
from .files import replace_text
from .heartbeat import doing
from .interrupts import deferred_interrupt

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Searcher:
    """Search of settings, the counterpart of `Trainer`; :meth:`run` can be interrupted at any time and resumed.

    Args:
        target: the loaded target.
        recipe: search space and options.
        out: directory of the trials and the result.

    Attributes:
        log: per improvement: trials, minutes and response tokens evaluated so far, ``held_out_acceptance``, and
            ``positions`` with that as its only entry, as in `Trainer.log`.
        best: last held-out acceptance.
        settings: the best so far, with their acceptance on the sample, cost, speed-up and draft length.

    Raises:
        UsageError: the target is not supported.
    """

    precision = "no"

    def __init__(self, target: LoadedModel, recipe: SearchConfig, out: Path):
        if target.backend != TRANSFORMERS:
            raise UsageError(
                f"{target.name} uses backend {target.backend}; crossdraft train needs a transformers model"
            )
        self.target, self.recipe, self.out, self.device = target, recipe, out, target.model.device
        self.trainee = recipe.search(target)
        self.step, self.seconds, self.tokens, self.best = 0, 0.0, 0, 0.0
        self.log: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self._trials: list[dict[str, Any]] = []

    @property
    def file(self) -> Path:
        return self.out / "trials.json"

    def run(self, train: Sequence[Text], held_out: Sequence[Text]) -> None:
        """Run the search, resuming from existing trials.

        Raises:
            UsageError: the trials are damaged or of other options or texts; or no settings draft anything.
            NumericalError: a distribution is not finite.
            KeyboardInterrupt: after SIGINT, SIGTERM or SIGHUP, at the end of the current trial.
        """
        r, sample, held_out_sample = self.recipe, _Sample(self.target, train, self.recipe), None
        made_with = self._made_with(train, held_out)
        study = optuna.create_study(direction="maximize")
        self._resume(study, made_with)
        initial, best_speed_up = self.trainee.first(), -1.0 if not self.settings else self.settings["speed_up"]
        doing(lambda: f"searching: trial {self.step} of {r.trials}")
        with (
            deferred_interrupt() as stop_requested,
            tqdm(total=r.trials, initial=self.step, unit="trial", desc=r.name, disable=None) as bar,
        ):
            while self.step < r.trials and not (r.minutes and self.seconds > 60 * r.minutes):
                if stop_requested.is_set():
                    raise KeyboardInterrupt
                start = time.perf_counter()
                params = initial[self.step] if self.step < len(initial) else self._propose(study)
                settings = self.trainee.suggest(optuna.trial.FixedTrial(dict(params)))
                result = self._evaluate(sample, settings)
                self._trials.append({"params": dict(params), **result})
                self._add_trial(study, self._trials[-1])
                self.step += 1
                self.tokens += sample.tokens
                if result["speed_up"] > best_speed_up:
                    held_out_sample = held_out_sample or _Sample(self.target, held_out, r)
                    best_speed_up, self.settings = result["speed_up"], settings | result
                    self.best = self._evaluate(held_out_sample, settings)["acceptance"]
                self.seconds += time.perf_counter() - start
                if self.settings and self.settings["speed_up"] == result["speed_up"] == best_speed_up:
                    self._log_improvement()
                facts = {"made_with": made_with, "trials": self._trials, "seconds": self.seconds, "log": self.log}
                replace_text(self.file, json.dumps(facts | {"best": self.settings}, indent=1) + "\n")
                bar.set_postfix(speed_up=f"{best_speed_up:.3f}", held_out=f"{self.best:.3f}")
                bar.update()
        if not self.settings or self.settings["acceptance"] <= 0:
            raise UsageError(f"none of {self.step} trials drafts anything; increase --trials")

    def export(self, held_out: Sequence[Text]) -> None:
        """Write ``settings.json``, which `DraftContext.load_settings` reads, and ``training.json``."""
        self.trainee.drafter["gamma"] = self.settings["gamma"]
        about = {"kind": self.recipe.name, "target": self.trainee.target_name, "target_sha256": self.target.sha256}
        facts = {"kind": self.recipe.name, "recipe": self.recipe.model_dump(), "seconds": round(self.seconds)}
        facts |= {"steps": self.step, "tokens": self.tokens, "log": self.log}
        replace_text(self.out / "settings.json", json.dumps(about | self.settings, indent=1) + "\n")
        replace_text(self.out / "training.json", json.dumps(facts, indent=1) + "\n")

    # -- pieces -------------------------------------------------------------------------------------------

    def _evaluate(self, sample: _Sample, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Acceptance, cost, speed-up and draft length of a trial; zeros if the settings are not a valid drafter."""
        acceptance, cost = sample.acceptance(self.trainee, settings)
        speed_up, gamma = self.trainee.worth(acceptance, cost) if acceptance else (0.0, 1)
        return {"acceptance": acceptance, "cost": cost, "speed_up": speed_up, "gamma": gamma}

    def _log_improvement(self) -> None:
        spent = {"step": self.step, "minutes": round(self.seconds / 60, 1), "tokens": self.tokens}
        self.log.append({**spent, "held_out_acceptance": self.best, "positions": [self.best]})
        settings = self.settings
        tqdm.write(
            f"trial {self.step}, {self.seconds / 60:.1f} min: acceptance {settings['acceptance']:.3f}, drafting reads "
            f"{settings['cost']:.2f} of the weights, predicted speed-up {settings['speed_up']:.3f} x with gamma "
            f"{settings['gamma']}; held-out acceptance {self.best:.4f}"
        )

    def _propose(self, study: Any) -> dict[str, Any]:
        number = int.from_bytes(hashlib.sha256(f"{self.recipe.seed} {self.step}".encode()).digest()[:4])
        study.sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=10)
        trial = study.ask()
        self.trainee.suggest(trial)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # added as a finished trial later
        return trial.params

    def _add_trial(self, study: Any, trial: Mapping[str, Any]) -> None:
        fixed = optuna.trial.FixedTrial(dict(trial["params"]))
        self.trainee.suggest(fixed)
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(trial["params"]), distributions=fixed.distributions, value=trial["speed_up"]
            )
        )

    def _resume(self, study: Any, made_with: Mapping[str, Any]) -> None:
        if not self.file.exists():
            return
        result = read_json(self.file, CONFIG_BYTES, subject="the trials")
        try:
            differ = sorted(key for key in made_with if result["made_with"].get(key) != made_with[key])
            self._trials, self.log, self.settings = list(result["trials"]), list(result["log"]), dict(result["best"])
            self.seconds = float(result["seconds"])
            self.best = self.log[-1]["held_out_acceptance"] if self.log else 0.0
            if not differ:
                for trial in self._trials:
                    self._add_trial(study, trial)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise UsageError(f"{self.file} is damaged; delete it to start over, or use another --out") from None
        if differ:
            raise UsageError(
                f"{self.file} was made with other options or texts ({', '.join(differ)}); use them again, or another "
                "--out"
            )
        self.step = len(self._trials)
        self.tokens = self.log[-1]["tokens"] if self.log else 0

    def _made_with(self, train: Sequence[Text], held_out: Sequence[Text]) -> dict[str, Any]:
        free = {"trials", "minutes"}
        options = {key: value for key, value in self.recipe.model_dump().items() if key not in free}
        texts = [hashlib.sha256(json.dumps([t.ids for t in part]).encode()).hexdigest() for part in (train, held_out)]
        facts = {"kind": self.recipe.name, **options, "target": self.target.sha256, "texts": texts}
        return json.loads(json.dumps(facts | {"dtype": str(self.target.model.dtype)}))


class _Sample:
    """A sample of texts in slots of the target, with the target's distributions along them."""

    def __init__(self, target: LoadedModel, texts: Sequence[Text], recipe: SearchConfig):
        chosen: list[Text] = []
        for text in texts:
            if sum(len(trial.response) for trial in chosen) < recipe.sample:
                chosen.append(text)
        self._chosen, self._sampling = chosen, Sampling(temperature=recipe.temperature)
        self.tokens = sum(len(text.response) for text in chosen)
        longest = max(len(text.response) for text in chosen)
        slot_len = max(len(text.prompt) for text in chosen) + longest + 1
        self._lm: Any = make_slots(target, len(chosen), slot_len)
        # Inputs are shifted by one token: the prompt's last comes first.
        inputs = [[text.prompt[-1], *text.response[:-1]] for text in chosen]
        self._inputs = on_device([tokens + [0] * (longest - len(tokens)) for tokens in inputs], self._lm.device)
        with torch.inference_mode():
            for row, text in enumerate(chosen):
                self._lm.start(row, text.prompt)
            self._p = self._probs(self._lm)
        self._read = _weights_read(self._lm.model)

    def _probs(self, lm: Any) -> list[Tensor]:
        """Probabilities ``[response tokens, V]`` of each text."""
        logits, _ = lm.forward(self._inputs)
        self._lm.commit([0] * len(self._chosen))
        return [
            self._sampling.probs(rows[: len(text.response)]) for rows, text in zip(logits, self._chosen, strict=True)
        ]

    @torch.inference_mode()
    def acceptance(self, search: Any, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Mean sum_x min(p, q) per response token, and the share of the target's weights that is read.

        Acceptance is 0 if the settings are not a valid drafter.
        """
        try:
            fork = search.fork(self._lm, settings)
        except ModelError as error:
            raise UsageError(f"{search.target_name} cannot be searched: {error}") from error
        if fork is None:
            return 0.0, 1.0
        fork_probs = self._probs(fork)
        total = sum(float(torch.minimum(p, q).sum()) for p, q in zip(self._p, fork_probs, strict=True))
        if not total < float("inf"):
            raise NumericalError("a distribution is not finite; try --dtype float32")
        return round(total / self.tokens, 6), round(_weights_read(fork.model) / self._read, 6)


def _weights_read(model: Any) -> int:
    """Number of weights read by a pass over few tokens: all but an untied input embedding."""
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        weights.pop(id(embedding), None)
    return sum(weights.values())
