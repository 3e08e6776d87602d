"""The argument ``constraint`` of `generate` and `stream`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from text_models import ENDLESS, SCHEMA, WIDTH, is_valid, save_text_model
from tiny_models import save_model

pytest.importorskip("llguidance", reason="constraints need the extra constrain")

from crossdraft_combine.drafter import Combine

from crossdraft import (
    Constraint,
    LoadedModel,
    ModelError,
    NumericalError,
    Sampling,
    UsageError,
    generate,
    load_model,
    stream,
)
from crossdraft.framework.contracts.constraint import permitted_next
from crossdraft.framework.models.grammar import compile_constraint

PROMPTS = ["a cat as JSON", "a dog as JSON", 'like {"name": "Bo", "age": 5']
OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "chat": False}


DEEP: Any = "a"
for _ in range(5000):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def names(tmp_path_factory: Any) -> list[str]:
    root: Path = tmp_path_factory.mktemp("models")
    return [save_text_model(root / f"model-{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def target(names: list[str]) -> LoadedModel:
    return load_model(names[0], dtype="float32", device="cpu")


def drafters(names: list[str]) -> list[Any]:
    model = {"model": names[1]}
    return [
        "none",
        "grammar",
        "prompt-lookup",
        {"name": "draft-model", "gamma": 3, **model},
        {"name": "draft-model-iid", "gamma": 2, "K": 2, **model},
        {"name": "draft-model-tree", "branching": [2, 2], **model},
        {"name": "draft-model-tree", "branching": [3, 1], "siblings": "top-k", **model},
        {"name": "draft-model-dynamic-tree", "depth": 3, "top_k": 2, "nodes": 5, **model},
        {"name": "first-layers", "layers": [0], "gamma": 2},
    ]


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[list[int]]:
    """Tokens of plain greedy decoding under the schema."""
    options = {**OPTIONS, "drafter": "none", "constraint": {"json_schema": SCHEMA}, "temperature": 0}
    return [response.tokens for response in generate(target, PROMPTS, **options)]


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("index", range(9))
def test_outputs_match_schema(names: list[str], target: LoadedModel, plain: list[list[int]], index: int) -> None:
    drafter, constraint = drafters(names)[index], {"json_schema": SCHEMA, "mask_drafts": index % 2 == 0}
    responses = generate(target, PROMPTS, drafter=drafter, constraint=constraint, batch_size=2, **OPTIONS)
    assert all(is_valid(response.text or "") and response.finish_reason == "stop" for response in responses)
    greedy = generate(target, PROMPTS, drafter=drafter, constraint=constraint, temperature=0, **OPTIONS)
    assert [response.tokens for response in greedy] == plain


@pytest.mark.parametrize("index", [1, 3, 4, 5])
def test_logprobs_are_those_of_masked_target(names: list[str], target: LoadedModel, index: int) -> None:
    """Scored by the model itself, text by text, with a mask by a new matcher."""
    constraint = {"json_schema": SCHEMA}
    grammar = compile_constraint(Constraint(**constraint), target, WIDTH)
    options = {**OPTIONS, "drafter": drafters(names)[index], "constraint": constraint, "temperature": 0.8, "top_k": 20}
    prompt = target.tokenizer.encode(PROMPTS[0])
    (response,) = generate(target, [prompt], **options)
    matcher, sampling = grammar.matcher(), Sampling(temperature=0.8, top_k=20)
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 :]
    for token, row, logprob in zip(response.tokens, logits, response.logprobs or (), strict=False):
        permitted = torch.from_numpy(permitted_next(matcher, [2]))
        probs = sampling.probs(row.masked_fill(~permitted, -torch.inf))
        assert float(probs[token].log()) == pytest.approx(logprob, abs=1e-3)
        assert token == 2 or matcher.advance(token)


def test_grammar_drafts_are_always_accepted(target: LoadedModel) -> None:
    events: list[Any] = []
    options = {**OPTIONS, "constraint": {"json_schema": SCHEMA}, "on_step": events.append}
    responses = generate(target, PROMPTS, drafter="grammar", batch_size=1, **options)
    assert [event.accepted[0] for event in events] == [int(event.draft.valid.sum()) for event in events]
    assert sum(len(response.tokens) for response in responses) > 1.3 * sum(len(r.steps) for r in responses)


def test_inputs_have_own_constraints(target: LoadedModel) -> None:
    constraints = [{"regex": "[0-9]{3}"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a" start "b" | "ab"'}, None]
    prompts = ["w", "x", "y", "z"]
    options = {**OPTIONS, "max_new_tokens": 30, "seed": 3}
    texts = [r.text or "" for r in generate(target, prompts, constraint=constraints, **options)]
    assert re.fullmatch("[0-9]{3}", texts[0]) and texts[1] in ("yes", "no")
    assert texts[2].startswith("ab") or set(texts[2]) <= {"a", "b"}
    assert texts[3] == generate(target, prompts, **options)[3].text  # unchanged beside constrained rows


def test_stream_yields_outputs_of_generate(target: LoadedModel) -> None:
    options: dict[str, Any] = {**OPTIONS, "constraint": {"json_schema": SCHEMA}, "seed": 4}
    texts = ["", "", ""]
    for chunk in stream(target, PROMPTS, **options):
        texts[chunk.index] += chunk.text or ""
    assert texts == [response.text for response in generate(target, PROMPTS, **options)]


def test_responses_end_only_in_accepting_states(target: LoadedModel) -> None:
    for response in generate(target, ["w"] * 20, constraint={"regex": "(ab){2}"}, **OPTIONS):
        assert response.text == "abab" and response.tokens[-1] == 2


def test_dead_ends_are_reported(tmp_path: Path) -> None:
    target = load_model(save_text_model(tmp_path / "narrow", all_bytes=False), dtype="float32", device="cpu")
    with pytest.raises(UsageError, match="the constraint's regex permits no response: no text matches it that the"):
        generate(target, [[5, 6]], constraint={"regex": "yesz"}, max_new_tokens=8)  # none of its tokens has a z


@pytest.mark.parametrize("index", [0, 1, 5, 7])
def test_failed_constraints_end_their_own_output(names: list[str], target: LoadedModel, index: int) -> None:
    """Drafted tokens reach the failure before the output does."""
    dead_end = {"grammar": 'start: /[ab]/ ("c" | "z" T)\nT: /b/ & /c/'}
    constraints = [dead_end] * 12 + [{"json_schema": ENDLESS}] * 2 + [{"regex": "[0-9]{3}"}] * 2
    options = {**OPTIONS, "drafter": drafters(names)[index], "batch_size": 6}
    with pytest.raises(NumericalError) as caught:
        generate(target, ["w"] * len(constraints), constraint=constraints, **options)
    responses = caught.value.responses
    assert {r.text for r in responses[:12] if r.finish_reason == "stop"} <= {"ac", "bc"}
    errors = [r for r in responses[:12] if r.finish_reason == "error"]
    assert errors and all("a dead end" in (r.error or "") for r in errors)
    assert all("constraint failed: parser error: Too many items" in (r.error or "") for r in responses[12:14])
    assert all(re.fullmatch("[0-9]{3}", r.text or "") for r in responses[14:])


def test_unreadable_tokenizers_are_refused(tmp_path: Path) -> None:
    target = load_model(save_model(tmp_path / "words"), dtype="float32", device="cpu")
    with pytest.raises(ModelError, match="llguidance cannot read the tokenizer of"):
        generate(target, [[5, 6]], constraint={"regex": "a"}, max_new_tokens=4)


@pytest.mark.parametrize(
    "constraint, sentence",
    [
        ("[0-9]", "constraint='[0-9]' is not a constraint; give a mapping such as"),
        ({"regx": "a"}, "constraint.regx: is unknown; did you mean 'regex'?"),
        ({}, "constraint: needs exactly one of json_schema, regex, grammar, choice"),
        ({"regex": "a", "choice": ["b"]}, "constraint: needs exactly one of"),
        ({"choice": []}, "constraint: choice must be a list of texts"),
        ({"json_schema": "{"}, "constraint: json_schema:1: not JSON"),
        ({"json_schema": "[" * 100_000}, "cannot read this JSON: it is nested too deeply"),
        ({"json_schema": {"const": DEEP}}, "constraint: json_schema is nested more than 64 deep"),
        ({"json_schema": {"const": {1}}}, "constraint: json_schema is not JSON: Object of type set"),
        ({"choice": ["a"] * 20_001}, "constraint: choice has 20001 texts; the maximum is 20000"),
        ({"choice": ["a" * 300_000]}, "constraint: choice has 300004 bytes; the maximum is 262144"),
        ({"regex": "a" * 300_000}, "constraint: regex has 300002 bytes; the maximum is 262144"),
        ({"regex": "("}, "the constraint's regex cannot be compiled"),
        ({"grammar": "start: x"}, "the constraint's grammar cannot be compiled"),
        ({"json_schema": {"type": "text"}}, "the constraint's json_schema cannot be compiled"),
        ([{"regex": "a"}], "constraint has 1 values for 3 inputs"),
    ],
)
def test_invalid_constraints_are_refused(target: LoadedModel, constraint: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        generate(target, PROMPTS, constraint=constraint, **OPTIONS)


def test_constraint_excludes_ignore_eos(target: LoadedModel) -> None:
    with pytest.raises(UsageError, match="ignore_eos=True, but a constraint ends with"):
        generate(target, PROMPTS, constraint={"regex": "a"}, ignore_eos=True)


def test_combine_drafts_by_grammar_first(names: list[str], target: LoadedModel) -> None:
    """Steps with implied tokens are drafted by the grammar and accepted in full; the model drafts the others."""
    model = {"name": "draft-model", "model": names[1], "gamma": 3}
    config = Combine.Config(drafters=("grammar", model))
    events: list[Any] = []
    options = {**OPTIONS, "constraint": {"json_schema": SCHEMA}, "batch_size": 1}
    responses = generate(target, PROMPTS, drafter=(Combine, config), on_step=events.append, **options)
    assert all(is_valid(response.text or "") for response in responses)
    baseline = generate(target, PROMPTS, drafter="grammar", **options)
    drafts = [event for event in events if event.draft.width]
    copied = [event for event in drafts if float(event.draft.q.amax(-1).min()) == 1]
    assert 0 < len(copied) < len(drafts)
    assert [event.accepted[0] for event in copied] == [int(event.draft.valid.sum()) for event in copied]
    assert sum(len(r.steps) for r in responses) <= sum(len(r.steps) for r in baseline)
