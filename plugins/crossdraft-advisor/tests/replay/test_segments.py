"""Segments of responses: the tokens of each, steps that are counted in one segment only, the same in a run."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.commands.replay.output import as_json, records, tables
from crossdraft_advisor.replay.aggregate import PromptGroups, Tally
from crossdraft_advisor.replay.replay import Candidate, ReplayResult
from crossdraft_advisor.replay.step_chain import StepAcceptance, expected_steps, heuristic
from replay_fixtures import RECIPE, random_acceptance
from text_models import THINKING, make_text_tokenizer, save_text_model

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.drafter import Drafter
from crossdraft.framework.errors import UsageError
from crossdraft.framework.models import segments
from crossdraft.framework.models.chat import encode_messages, encode_text
from crossdraft.framework.models.segments import Segments
from crossdraft.framework.models.tokenizer import TokenizerOf, decode_tokens, load_tokenizer

CODE = "Run\n```python\nprint(1)\n```\nnow."
CALL = '<tool_call>{"name": "x"}</tool_call>'


def tokenizer_of(chat: str = THINKING) -> TokenizerOf:
    tokenizer = make_text_tokenizer()
    tokenizer.chat_template = chat
    return TokenizerOf("the-target", tokenizer, (2,))


def spans(requests: list[str], prompt: str, response: str) -> list[tuple[str, str]]:
    """The text of each run of tokens of one segment."""
    target = tokenizer_of()
    tokens = target.tokenizer.encode(response)
    names = Segments.parse(requests, target).of(target.tokenizer.encode(prompt), tokens)
    result: list[tuple[str, str]] = []
    for name, text in zip(names, decode_tokens(target.tokenizer, tokens), strict=True):
        if result and result[-1][0] == name:
            text = result.pop()[1] + text
        result.append((name, text))
    return result


@pytest.mark.parametrize(
    ("requests", "prompt", "response", "expected"),
    [
        (["think"], "hi", "<think>so</think>yes", [("think", "<think>so</think>"), ("answer", "yes")]),
        (["think"], "hi <think>\n", "so</think>yes", [("think", "so</think>"), ("answer", "yes")]),
        (["think"], "hi <think>\n", "so it never", [("think", "so it never")]),
        (["think"], "hi <think></think>\n", "yes", [("answer", "yes")]),
        (["code"], "hi", CODE, [("answer", "Run\n"), ("code", CODE[4:-5]), ("answer", "\nnow.")]),
        (["code"], "hi", CODE[:20], [("answer", "Run\n"), ("code", CODE[4:20])]),
        (["code"], "hi", "a\n```x``` is\nb\n", [("answer", "a\n```x``` is\nb\n")]),
        (["code"], "hi", f"````\n{CODE}\n````\na", [("code", f"````\n{CODE}\n````"), ("answer", "\na")]),
        (["code"], "hi", "~~~ py\n```\n~~~\na", [("code", "~~~ py\n```\n~~~"), ("answer", "\na")]),
        (["tool"], "hi", f"a{CALL}b", [("answer", "a"), ("tool", CALL), ("answer", "b")]),
        (["think", "code"], "hi<think>", f"{CODE}</think>ok", [("think", f"{CODE}</think>"), ("answer", "ok")]),
        (
            ["code", "think"],
            "hi<think>",
            f"{CODE}</think>ok",
            [("think", "Run\n"), ("code", CODE[4:-5]), ("think", "\nnow.</think>"), ("answer", "ok")],
        ),
        ([r"sum=^Answer: .*?$"], "hi", "1é2\nAnswer: 3", [("answer", "1é2\n"), ("sum", "Answer: 3")]),
        (["accent=é"], "hi", "1é2", [("answer", "1"), ("accent", "é"), ("answer", "2")]),
    ],
)
def test_tokens_are_those_of_their_text(
    requests: list[str], prompt: str, response: str, expected: list[tuple[str, str]]
) -> None:
    assert spans(requests, prompt, response) == expected


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (["thnk"], "did you mean 'think'"),
        (["x=("], "is not a valid regular expression"),
        (["x=" + "(" * 900 + ")" * 900], "it is nested too deeply"),
        (["x=" + "(" * 3000 + ")" * 3000], "it has 6000 characters; the maximum is 2000"),
        (["x=a{99999999999}"], "repeat count too big"),
        (["code", "code=a"], "the name 'code' is taken"),
        (["answer=a"], "the name 'answer' is taken"),
    ],
)
def test_invalid_segments_are_refused(requests: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Segments.parse(requests, tokenizer_of())


def test_expression_that_takes_too_long_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "SECONDS", 0.1)
    slow = Segments.parse(["x=(a|aa)+[bc]"], tokenizer_of())
    monkeypatch.setattr(segments, "decode_tokens", lambda tokenizer, tokens: ["a" * 60])
    with pytest.raises(UsageError, match=r"--segment x: .* takes more than"):
        slow.of([], [1])


def test_model_without_markers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the chat template of the-target .* --segment 'think=REGEX'"):
        Segments.parse(["think"], tokenizer_of("{{ messages }}"))


def test_steps_of_all_segments_are_those_of_the_response() -> None:
    """Any partition of the tokens; the tokens of a segment are those that its steps emit."""
    draw = np.random.default_rng(1)
    for seed in range(20):
        t = int(draw.integers(1, 12))
        item = random_acceptance(seed, t, 3, None if seed % 3 else t + seed % 4)
        labels = draw.integers(0, 3, t)
        masks = [labels == part for part in range(3)]
        for steps_of in (lambda rows: expected_steps(rows, [1, 3]), lambda rows: heuristic(rows, 3, 2)):
            whole = steps_of([item])
            parts = [steps_of([StepAcceptance(item.survival, item.lengths, item.limit, starts=mask)]) for mask in masks]
            for key in ("tokens", "steps", "drafted", "taken", "counted", "emitted", "accepted"):
                total = sum(getattr(part, key) for part in parts)
                assert total == pytest.approx(getattr(whole, key)), key


@pytest.mark.parametrize(("rate", "tokens"), [(0.5, 1), (0.25, 0)])
def test_segments_without_idle_steps_are_listed(rate: float, tokens: int) -> None:
    """Every step drafts, and fewer than half a step may start in the segment."""
    result = ReplayResult([], PromptGroups(), segment_tokens=Counter(code=1, answer=3))
    survival = np.array([[1 - rate, 0.0], [rate, 0.0], [rate, 0.0], [0.0, 0.0]])
    labels = np.array(["answer", "code", "answer", "answer"])
    item = StepAcceptance(survival, np.full(4, 2), None)
    candidate = Candidate("d", (Drafter, None), {"token": (1,)}, (2,), iter)  # type: ignore[arg-type]
    candidate.tally(result, "token", 1).add(expected_steps([item], [2]), [result.groups.number("all", "a")])
    tally = candidate.by_segment["token", 1] = Tally(result.segments, [2])
    for name in ("answer", "code"):
        part = expected_steps([replace(item, starts=labels == name)], [2])
        tally.add(part, [result.segments.number(name, "a")])
    result.candidates.append(candidate)
    (row,) = json.loads(json.dumps(as_json(result, None, {})))["rows"]
    code = row["by_segment"]["code"]
    emitted = rate * (1 + rate)
    assert (code["tokens"], code["steps"]) == (tokens, rate) and set(row["by_segment"]) == {"code", "answer"}
    assert code["drafted_per_token"] == pytest.approx(2 * rate / emitted)
    assert code["target_rows_per_token"] == pytest.approx(3 * rate / emitted)
    assert list(records(result))[2]["segment"] == "code"
    assert "  code  " in tables(result, None, {})


#: Thinking repeats itself, so that prompt lookup drafts it; the answer does not.
REPEATED, RANDOM = "abcdabcdabcdabcdabcdabcd", "zyxwvutsrqponmlk"


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    return save_text_model(tmp_path_factory.mktemp("target"), chat=THINKING)


def write(path: Path, sizes: list[int]) -> Path:
    rows = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": "Why?"}],
            "response": f"{REPEATED[: size * 4]}</think>{RANDOM[:size]}",
            "finish_reason": "length",
            "temperature": 0,
        }
        for i, size in enumerate(sizes)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def walked(target: str, source: Path) -> dict[str, tuple[int, int]]:
    """Steps, and the tokens that they emit, by the segment of their first token."""
    loaded = load_tokenizer(target)
    counts = {"think": (0, 0), "answer": (0, 0)}
    for line in source.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        prompt = encode_messages(loaded.tokenizer, fields["messages"])
        text = [*prompt, *encode_text(loaded.tokenizer, fields["response"], special=False)]
        names = Segments.parse(["think"], loaded).of(prompt, text[len(prompt) :])
        at = len(prompt)
        while at < len(text):
            draft = copied(text[:at])[: len(text) - at - 1]
            tau = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
            steps, emitted = counts[names[at - len(prompt)]]
            counts[names[at - len(prompt)]] = steps + 1, emitted + tau + 1
            at += tau + 1
    return counts


def copied(text: list[int]) -> list[int]:
    """Three tokens after the latest earlier occurrence of the last three tokens, or two."""
    for n in (3, 2):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == text[-n:]:
                return text[at : at + 3]
    return []


def test_acceptance_by_segment_is_that_of_a_walk(tmp_path: Path, target: str, capsys: Any) -> None:
    """Steps counted one by one: prompt lookup accepts in the repeated text only."""
    source = write(tmp_path / "responses.jsonl", sizes := [3, 4, 5, 6])
    drafter = ["--drafter", "{name: prompt-lookup, gamma: 3, min_ngram: 2, max_ngram: 3}"]
    argv = ["replay", str(source), *drafter, "--target", target, "--segment", "think"]
    assert cli.main([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["rows"]
    think, answer = (row["by_segment"][name] for name in ("think", "answer"))
    assert data["segments"]["answer"] == sum(sizes) and sum(data["segments"].values()) == data["tokens"]
    assert answer["acceptance_marginal"] == [0, 0, 0] and answer["block_efficiency"]["value"] == 1
    for name, (steps, emitted) in walked(target, source).items():
        assert (row["by_segment"][name]["steps"], row["by_segment"][name]["tokens"]) == (steps, emitted)
    assert think["acceptance_marginal"][0] > 0.3
    assert think["tokens"] + answer["tokens"] == data["tokens"]
    assert think["steps"] + answer["steps"] == pytest.approx(row["steps"])
    assert cli.main(argv) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "  think  " in line]
    assert f"{think['block_efficiency']['value']:.2f} [" in line and "+" in line
    assert cli.main([*argv, "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    by_name = {line["segment"]: float(line["block_efficiency"]) for line in lines}
    assert by_name["think"] == think["block_efficiency"]["value"] and by_name[""] == row["block_efficiency"]["value"]


def test_run_has_the_segments_of_its_replay(models: Any, write_prompts: Any, tmp_path: Path, capsys: Any) -> None:
    """Point masses: the steps of the run are those that replay derives from its responses."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", n=6)
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(target=models["target"], prompts=prompts, gamma=2), encoding="utf-8"
    )
    assert cli.main(["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    run = next((tmp_path / "runs").iterdir())
    (cell,) = run.glob("cells/prompt-lookup*")
    segment = ["--segment", r"odd=w\d?[13579]\b"]
    drafter = ["--drafter", "{name: prompt-lookup, gamma: 2}", "--verifier", "block"]
    capsys.readouterr()
    assert cli.main(["replay", str(cell), *drafter, *segment, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert cli.main(["report", str(run), "--rows", "drafter", *segment, "--format", "csv"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    for name in ("odd", "answer"):
        estimate, column = row["by_segment"][name]["block_efficiency"], f"block, block efficiency {name}"
        assert float(line[column]) == pytest.approx(estimate["value"])
        if estimate["low"] is not None:
            assert float(line[f"{column}_low"]) == pytest.approx(estimate["low"])
    assert (
        cli.main(
            [
                "report",
                str(run),
                "--rows",
                "drafter",
                *segment,
                "--value",
                "tokens_odd,acceptance_1_odd",
                "--format",
                "csv",
            ]
        )
        == 0
    )
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    marginal = row["by_segment"]["odd"]["acceptance_marginal"][0]
    assert float(line["block, acceptance 1 odd"]) == pytest.approx(marginal)
    html = tmp_path / "report.html"
    assert cli.main(["report", str(run), *segment, "--format", "html", "--out", str(html)]) == 0
    capsys.readouterr()
    assert cli.main(["report", str(run), *segment]) == 0
    text = capsys.readouterr().out
    expected = row["by_segment"]["odd"]["block_efficiency"]["value"]
    assert "by segment of the responses" in text and "| odd       | " in text and f"{expected:.2f}" in text
    assert "Block efficiency by segment of responses" in html.read_text(encoding="utf-8")
