"""The loop that searches settings of a drafter: trials, each judged by what the drafter would have said of texts.

A trial is the acceptance of one fork of the target along responses that the target wrote, sum_x min(p, q) on average,
and the share of the target's weights that it reads; `Search.worth` makes a number of the two. Nothing is timed, so a
search comes out the same on any machine, up to rounding, and goes on where it was stopped: what a trial proposes
follows from the seed, its number and the trials before, which are in ``trials.json``.

The fork reads its own keys and values of the response so far; when it drafts, those of committed tokens are the
target's. So it is accepted a little more than is reckoned here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..api.build import make_slots
from ..contracts.draft import on_device
from ..contracts.models import TRANSFORMERS, LoadedModel
from ..contracts.sampling import Sampling
from ..contracts.training import SearchConfig, Text
from ..errors import ModelError, NumericalError, UsageError
from ..runs.interrupts import deferred_interrupt
from ..util.extras import need
from ..util.input_files import read_json
from ..util.limits import CONFIG_BYTES
from .files import replace_text


class Searcher:
    """Searches settings; :meth:`run` can be interrupted at any time and called again. Beside `Trainer`.

    Args:
        target: the loaded target.
        recipe: what to search, and how.
        out: directory for the trials and the result.

    Attributes:
        log: per improvement: trials, minutes and response tokens judged so far, ``held_out_acceptance`` and, with
        that as
            its only entry, ``positions``, as `Trainer.log` has them.
        best: the last held-out acceptance.
        settings: the best so far, with their acceptance on the sample, cost, speed-up and draft length.

    Raises:
        UsageError: a target that the search does not fit; optuna is missing.
    """

    precision = "no"

    def __init__(self, target: LoadedModel, recipe: SearchConfig, out: Path):
        if target.backend != TRANSFORMERS:
            raise UsageError(f"{target.name} is run by {target.backend}; crossdraft train needs a transformers model")
        self._optuna = _optuna()
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
        """Search to the end of the recipe, from the trials that there are.

        Raises:
            UsageError: trials of other options or texts, or damaged ones; no settings that draft.
            NumericalError: a law that is not finite.
            KeyboardInterrupt: after SIGINT, SIGTERM or SIGHUP, when the trial in progress is over.
        """
        r, sample, other = self.recipe, _Sample(self.target, train, self.recipe), None
        made_with = self._made_with(train, held_out)
        study = self._optuna.create_study(direction="maximize")
        self._resume(study, made_with)
        first, said = self.trainee.first(), -1.0 if not self.settings else self.settings["speed_up"]
        with (
            deferred_interrupt() as told,
            tqdm(total=r.trials, initial=self.step, unit="trial", desc=r.name, disable=None) as bar,
        ):
            while self.step < r.trials and not (r.minutes and self.seconds > 60 * r.minutes):
                if told.is_set():
                    raise KeyboardInterrupt
                start = time.perf_counter()
                params = first[self.step] if self.step < len(first) else self._proposed(study)
                settings = self.trainee.suggest(self._optuna.trial.FixedTrial(dict(params)))
                found = self._judged(sample, settings)
                self._trials.append({"params": dict(params), **found})
                self._tell(study, self._trials[-1])
                self.step += 1
                self.tokens += sample.tokens
                if found["speed_up"] > said:
                    other = other or _Sample(self.target, held_out, r)
                    said, self.settings = found["speed_up"], settings | found
                    self.best = self._judged(other, settings)["acceptance"]
                self.seconds += time.perf_counter() - start
                if self.settings and self.settings["speed_up"] == found["speed_up"] == said:
                    self._improved()
                facts = {"made_with": made_with, "trials": self._trials, "seconds": self.seconds, "log": self.log}
                replace_text(self.file, json.dumps(facts | {"best": self.settings}, indent=1) + "\n")
                bar.set_postfix(speed_up=f"{said:.3f}", held_out=f"{self.best:.3f}")
                bar.update()
        if not self.settings or self.settings["acceptance"] <= 0:
            raise UsageError(f"none of {self.step} trials drafts anything; ask for more --trials")

    def export(self, held_out: Sequence[Text]) -> None:
        """Write ``settings.json``, which `DraftContext.load_settings` reads, and ``training.json``."""
        self.trainee.drafter["gamma"] = self.settings["gamma"]
        about = {"kind": self.recipe.name, "target": self.trainee.target_name, "target_sha256": self.target.sha256}
        facts = {"kind": self.recipe.name, "recipe": asdict(self.recipe), "seconds": round(self.seconds)}
        facts |= {"steps": self.step, "tokens": self.tokens, "log": self.log}
        replace_text(self.out / "settings.json", json.dumps(about | self.settings, indent=1) + "\n")
        replace_text(self.out / "training.json", json.dumps(facts, indent=1) + "\n")

    # -- pieces -------------------------------------------------------------------------------------------

    def _judged(self, sample: _Sample, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Acceptance, cost, speed-up and draft length of a trial; zeros where there is no such drafter."""
        acceptance, cost = sample.acceptance(self.trainee, settings)
        speed_up, gamma = self.trainee.worth(acceptance, cost) if acceptance else (0.0, 1)
        return {"acceptance": acceptance, "cost": cost, "speed_up": speed_up, "gamma": gamma}

    def _improved(self) -> None:
        spent = {"step": self.step, "minutes": round(self.seconds / 60, 1), "tokens": self.tokens}
        self.log.append({**spent, "held_out_acceptance": self.best, "positions": [self.best]})
        now = self.settings
        tqdm.write(
            f"trial {self.step}, {self.seconds / 60:.1f} min: acceptance {now['acceptance']:.3f}, drafting reads "
            f"{now['cost']:.2f} of the weights, which promises {now['speed_up']:.3f} x with drafts of {now['gamma']}; "
            f"held-out acceptance {self.best:.4f}"
        )

    def _proposed(self, study: Any) -> dict[str, Any]:
        number = int.from_bytes(hashlib.sha256(f"{self.recipe.seed} {self.step}".encode()).digest()[:4])
        study.sampler = self._optuna.samplers.TPESampler(seed=number, n_startup_trials=10)
        trial = study.ask()
        self.trainee.suggest(trial)
        study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # told as a finished one, below
        return trial.params

    def _tell(self, study: Any, one: Mapping[str, Any]) -> None:
        fixed = self._optuna.trial.FixedTrial(dict(one["params"]))
        self.trainee.suggest(fixed)
        study.add_trial(
            self._optuna.trial.create_trial(
                params=dict(one["params"]), distributions=fixed.distributions, value=one["speed_up"]
            )
        )

    def _resume(self, study: Any, made_with: Mapping[str, Any]) -> None:
        if not self.file.exists():
            return
        found = read_json(self.file, CONFIG_BYTES, what="the trials")
        try:
            differ = sorted(key for key in made_with if found["made_with"].get(key) != made_with[key])
            self._trials, self.log, self.settings = list(found["trials"]), list(found["log"]), dict(found["best"])
            self.seconds = float(found["seconds"])
            self.best = self.log[-1]["held_out_acceptance"] if self.log else 0.0
            if not differ:
                for one in self._trials:
                    self._tell(study, one)
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
        options = {key: value for key, value in asdict(self.recipe).items() if key not in free}
        texts = [hashlib.sha256(json.dumps([t.ids for t in some]).encode()).hexdigest() for some in (train, held_out)]
        facts = {"kind": self.recipe.name, **options, "target": self.target.sha256, "texts": texts}
        return json.loads(json.dumps(facts | {"dtype": str(self.target.model.dtype)}))


class _Sample:
    """Some texts in slots of the target, and what it says along them."""

    def __init__(self, target: LoadedModel, texts: Sequence[Text], recipe: SearchConfig):
        chosen: list[Text] = []
        for text in texts:
            if sum(len(one.response) for one in chosen) < recipe.sample:
                chosen.append(text)
        self._chosen, self._sampling = chosen, Sampling(temperature=recipe.temperature)
        self.tokens = sum(len(text.response) for text in chosen)
        longest = max(len(text.response) for text in chosen)
        room = max(len(text.prompt) for text in chosen) + longest + 1
        self._lm: Any = make_slots(target, len(chosen), room)
        # What is fed is one token behind what is said: the prompt's last comes first.
        fed = [[text.prompt[-1], *text.response[:-1]] for text in chosen]
        self._fed = on_device([tokens + [0] * (longest - len(tokens)) for tokens in fed], self._lm.device)
        with torch.inference_mode():
            for row, text in enumerate(chosen):
                self._lm.start(row, text.prompt)
            self._p = self._laws(self._lm)
        self._read = _read(self._lm.model)

    def _laws(self, lm: Any) -> list[Tensor]:
        """Of each text, ``[response tokens, V]``."""
        logits, _ = lm.forward(self._fed)
        self._lm.commit([0] * len(self._chosen))
        return [
            self._sampling.probs(rows[: len(text.response)]) for rows, text in zip(logits, self._chosen, strict=True)
        ]

    @torch.inference_mode()
    def acceptance(self, search: Any, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Mean sum_x min(p, q) of a response token, and the share of the target's weights that is read; 0 where the
        settings are no drafter's."""
        try:
            fork = search.fork(self._lm, settings)
        except ModelError as error:
            raise UsageError(f"{search.target_name} cannot be searched: {error}") from error
        if fork is None:
            return 0.0, 1.0
        laws = self._laws(fork)
        total = sum(float(torch.minimum(p, q).sum()) for p, q in zip(self._p, laws, strict=True))
        if not total < float("inf"):
            raise NumericalError("a law is not finite; try --dtype float32")
        return round(total / self.tokens, 6), round(_read(fork.model) / self._read, 6)


def _read(model: Any) -> int:
    """Weights that a pass over few tokens reads: all but an embedding that is not the head as well."""
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        weights.pop(id(embedding), None)
    return sum(weights.values())


def _optuna() -> Any:
    need("a search", "search", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
