"""The catalogue of readings: a server that computes one has the counters of its replay, and it is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.diagnosis.head_misreadings import MISREADINGS, HeadMisreading, misread
from crossdraft_advisor.diagnosis.matching import CONFIGURED, match
from crossdraft_advisor.diagnosis.readings import READINGS, Setup, readings, with_continuations
from crossdraft_advisor.diagnosis.trials import Trial, TrialResult, run_trials
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from feature_heads import LAYERS, make_head, overfit
from replay_fixtures import configured
from safetensors.torch import save_file
from tiny_models import argmax_text, make_tokenizer, save_model

from crossdraft import generate, load_model
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.checkpoint import load_checkpoint

GAMMA, TOKENS, DEFINITION = 3, 16, DEFINITIONS["llama.cpp"]
PROMPTS = [[1, 3, 5 + i, 9, 4] for i in range(6)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Callable[[str], Setup]:
    """``served(name)``: a drafter whose output matters for a target, and responses at temperature 0."""
    root = tmp_path_factory.mktemp("served")
    name = save_model(root / "target", seed=2, layers=4, hidden=32, heads=(4, 2))
    target = Target(name, Sampling(temperature=0), dtype="float32", device="cpu")
    plain = generate(target.loaded, PROMPTS, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    responses = [
        Response(str(i), "", p, r.tokens, maximum=TOKENS) for i, (p, r) in enumerate(zip(PROMPTS, plain, strict=True))
    ]

    def setup(drafter: str) -> Setup:
        path = root / drafter
        if drafter == "draft-model":
            if not path.exists():
                model = load_model(name, dtype="float32", device="cpu").model
                torch.manual_seed(0)
                with torch.no_grad():
                    model.lm_head.weight += 0.1 * torch.randn_like(model.lm_head.weight)
                model.save_pretrained(path)
                make_tokenizer().save_pretrained(path)
            return Setup(configured(drafter, model=str(path), gamma=GAMMA), None, target, responses)
        if not path.exists():
            torch.manual_seed(1)
            head = make_head(drafter, target.loaded.model)
            overfit(drafter, head, target.loaded.model, argmax_text(target.loaded.model, PROMPTS[0], 24), 60)
            head.save(path)
        layers = {"layers": LAYERS} if drafter == "eagle3" else {}
        return Setup(
            configured(drafter, model=str(path), gamma=GAMMA, **layers), load_checkpoint(str(path)), target, responses
        )

    return setup


def written(heads: Checkpoint, path: Path) -> str:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in heads.tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(heads.config), encoding="utf-8")
    return str(path)


def counts_of(setup: Setup, trial: Trial, folder: Path) -> np.ndarray:
    """``[responses, 1 + GAMMA]``: counters of a server that computes as in a trial, for the same texts."""
    cls, config = trial.drafter or setup.drafter
    cls = type(cls.__name__, (cls,), {"emitted": 1})  # the prefill of a server emits a token
    options = config.model_dump(exclude_unset=True) | dict(trial.misconfiguration.options)
    if trial.misconfiguration.change is not None and setup.heads is not None:
        options["model"] = written(trial.misconfiguration.change(setup.heads), folder)
    if trial.target.draft_model_change is not None:
        model = load_model(options["model"], dtype="float32", device="cpu").model
        with torch.no_grad():
            trial.target.draft_model_change(model)
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        options["model"] = str(folder)
    starts = [[*response.prompt, response.tokens[0]] for response in trial.responses]
    more: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "batch_size": 4}
    rows = []
    for result in generate(
        setup.target.loaded, starts, drafter=(cls, cls.Config(**options)), max_new_tokens=TOKENS - 1, **more
    ):
        steps = [step for step in result.steps if step.nodes]
        rows.append([len(steps), *(sum(step.tau >= i for step in steps) for i in range(1, GAMMA + 1))])
    return np.array(rows)


def replayed(setup: Setup, trials: Sequence[Trial]) -> list[TrialResult]:
    return list(run_trials(setup.drafter, trials, GAMMA, DEFINITION))


@pytest.mark.parametrize("drafter", ["draft-model", pytest.param("eagle3", marks=pytest.mark.slow), "eagle"])
def test_server_counts_what_the_replay_of_its_reading_counts(
    drafter: str, served: Callable[[str], Setup], tmp_path: Path
) -> None:
    """Each reading is another computation than its replay, by our decoder; and the answer names it."""
    setup = served(drafter)
    trials = [trial for trial in readings(setup, READINGS) if trial.responses is setup.responses]
    results = replayed(setup, trials)
    changed = set()
    for number, (trial, result) in enumerate(zip(trials, results, strict=True)):
        if result.counts is None:
            continue  # a reading that does not load, as another embedding
        counts, name = counts_of(setup, trial, tmp_path / str(number)), trial.misconfiguration.mistake
        assert counts.tolist() == np.array(result.counts.by_response).round().astype(int).tolist(), name
        source = Acceptance.from_rows([counts.sum(0)], "scrape.txt")
        assert (name or CONFIGURED) in match(results, source).named()
        assert results[0].counts is not None
        if counts.tolist() != np.array(results[0].counts.by_response).round().astype(int).tolist():
            changed.add(name)
    assert len(changed) > len(trials) / 3  # the others cost nothing on these texts
    if drafter != "draft-model":
        assert len(changed & {misreading.mistake for misreading in MISREADINGS}) >= 4


def test_wrapped_heads_draft_as_they_are(served: Callable[[str], Setup]) -> None:
    setup = served("eagle")
    wrapped = misread(setup.drafter, HeadMisreading())
    trial = Trial(Misconfiguration("", ""), setup.target, setup.responses)
    plain, same = replayed(setup, [trial, replace(trial, drafter=wrapped)])
    assert plain.counts is not None and same.counts is not None
    assert np.array_equal(plain.counts.by_response, same.counts.by_response)


def test_readings_of_prompts_are_decided_by_the_texts(served: Callable[[str], Setup]) -> None:
    """The server renders the prompts in another way than they are recorded."""
    setup = served("draft-model")
    trials = list(readings(setup, READINGS))
    of_prompts = [trial for trial in trials if trial.responses is not setup.responses]
    names = [trial.misconfiguration.mistake for trial in of_prompts]
    assert names[:2] == ["prompts begin with two BOS tokens", "prompts begin without a BOS token"]
    for trial in of_prompts[:2]:
        starts = [list(response.prompt) for response in trial.responses]
        texts = generate(setup.target.loaded, starts, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        recorded = [replace(r, tokens=t.tokens) for r, t in zip(setup.responses, texts, strict=True)]
        results = replayed(setup, list(readings(replace(setup, responses=recorded), READINGS)))
        name = trial.misconfiguration.mistake
        (result,) = (item for item in results if item.misconfiguration.mistake == name)
        assert result.counts is not None and result.texts is not None and result.texts.share == 1.0
        source = Acceptance.from_rows([(result.counts.drafts, *result.counts.per_position)], "scrape.txt")
        assert match(results, source).named()[0] == name
        assert results[0].texts is not None and results[0].texts.foreign


def test_tails_are_decoded_behind_the_prompts_of_the_reading(served: Callable[[str], Setup]) -> None:
    """An engine counts drafts past the end of a response, where its own prompts decide what the target emits."""
    setup = replace(served("draft-model"), continued=partial(with_continuations, gamma=GAMMA))
    trials = list(readings(setup, READINGS))
    prompts = {tuple(trial.responses[0].prompt) for trial in trials}
    assert len(prompts) > 2
    for trial in trials:
        for response in trial.responses[:2]:
            before = [*response.prompt, *response.tokens]
            assert list(response.continuation) == argmax_text(setup.target.loaded.model, before, GAMMA)[len(before) :]


def test_template_is_taken_off_and_put_on(served: Callable[[str], Setup]) -> None:
    setup = served("draft-model")
    tokenizer = setup.target.loaded.tokenizer

    def prompts_of(prompt: list[int]) -> dict[str, list[int]]:
        responses = [replace(setup.responses[0], prompt=prompt)]
        trials = list(readings(replace(setup, responses=responses), READINGS))
        return {t.misconfiguration.mistake: list(t.responses[0].prompt) for t in trials if t.responses is not responses}

    text = [{"role": "user", "content": "w7 w8"}]
    inside = tokenizer.apply_chat_template(text, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert prompts_of(inside)["the chat template is missing"] == [7, 8]
    assert prompts_of([7, 8])["prompts are in the chat template"] == inside


def test_temperature_of_drafts_is_a_reading(served: Callable[[str], Setup]) -> None:
    """Above temperature 0, drafts may be greedy, at temperature 1, or sampled although configured as greedy."""
    setup = served("draft-model")

    def options(sampled_at: float, **drafts: Any) -> list[dict[str, Any]]:
        target = Target(setup.target.name, Sampling(temperature=sampled_at), dtype="float32", device="cpu")
        drafter = configured("draft-model", model=setup.drafter[1].model, **drafts)
        trials = readings(replace(setup, drafter=drafter, target=target), READINGS)
        return [dict(t.misconfiguration.options) for t in trials if t.misconfiguration.options]

    assert options(0.0) == []
    assert options(1.0) == [{"temperature": 0}]
    assert options(0.7) == [{"temperature": 0}, {"temperature": 1.0}]
    assert options(0.7, temperature=0) == [{"temperature": None}]
    assert (
        replace(setup, others=("other",))
        and [dict(t.misconfiguration.options) for t in readings(replace(setup, others=("other",)), READINGS)].count(
            {"model": "other"}
        )
        == 1
    )
