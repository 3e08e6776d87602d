"""Advice from recorded or newly decoded responses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.advise.replayed import replayed_acceptances
from crossdraft_advisor.commands.advise import Advise
from crossdraft_advisor.replay import baseline_responses

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.sampling import Sampling


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def advised(capsys: Any, *arguments: Any) -> tuple[dict[str, Any], str]:
    assert cli.main(["advise", *map(str, arguments), "--json"]) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def test_from_prompts_to_decision(
    models: dict[str, str], write_prompts: Any, tmp_path: Path, capsys: Any, cache: Path, monkeypatch: Any
) -> None:
    prompts = write_prompts(tmp_path / "mine.jsonl", n=4)
    same = json.dumps({"name": "draft-model", "model": models["same"]})
    options = ["--target", models["target"], "--prompts", prompts, "--drafter", "prompt-lookup", "--drafter", same]
    options += ["--on", "h100", "--batch-size", "1,4", "--responses", 4, "--max-new-tokens", 24]
    result, output = advised(capsys, *options)
    assert "decoding 4 responses of at most 24 tokens (96 in total)" in output and "estimated time:" in output
    (kept,) = (cache / "responses").iterdir()
    assert len(kept.read_text(encoding="utf-8").splitlines()) == 4
    one, four = result["advice"]
    assert (one["batch_size"], four["batch_size"]) == (1, 4) and one["group"] == "temperature 1"
    warnings = " ".join(result["remarks"]["warnings"])
    assert "tokens are few" in warnings
    # The second call uses the cached responses.
    monkeypatch.setattr(baseline_responses, "_decode", None)
    repeat, output = advised(capsys, *options)
    assert repeat == result and "cached responses" in output


def test_cached_responses_are_those_of_the_prompts_and_the_template(
    models: dict[str, str], write_prompts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    target = shutil.copytree(models["target"], tmp_path / "target")
    monkeypatch.setattr(baseline_responses, "_decode", lambda name, texts, *rest: [{} for _ in texts])

    def categories() -> tuple[Path, set[str]]:
        path = baseline_responses.baseline_responses(str(target), str(prompts), Sampling(), limit=3, maximum=2)
        return path, {json.loads(line)["category"] for line in path.read_text(encoding="utf-8").splitlines()}

    prompts = Path(write_prompts(tmp_path / "mine.jsonl", n=3))
    first = categories()
    assert first[1] == {"a", "b", "c"} and categories() == first
    prompts.write_text(prompts.read_text(encoding="utf-8").replace('"b"', '"d"'), encoding="utf-8")
    second = categories()
    assert second[1] == {"a", "c", "d"}
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert categories()[0] not in (first[0], second[0])


def test_damaged_and_outdated_responses_are_decoded_again(
    models: dict[str, str], write_prompts: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    decoded: list[int] = []

    def decode(name: str, texts: list[str], *rest: Any) -> list[dict[str, Any]]:
        decoded.append(len(texts))
        return [{"tokens": [5, 6, i]} for i in range(len(texts))]

    monkeypatch.setattr(baseline_responses, "_decode", decode)
    prompts = write_prompts(tmp_path / "mine.jsonl", n=3)

    def responses() -> Path:
        return baseline_responses.baseline_responses(models["target"], str(prompts), Sampling(), limit=3, maximum=2)

    path = responses()
    whole = path.read_bytes()
    assert responses() == path and len(decoded) == 1
    lines = whole.splitlines(keepends=True)
    for count, data in enumerate((b"", whole[:-1], b"".join(lines[:-1]), whole.replace(b"6, 1", b"6, 2")), 2):
        path.write_bytes(data)
        assert responses() == path and path.read_bytes() == whole and len(decoded) == count
        assert f"{path} are damaged; decoding them again" in capsys.readouterr().err
    for name in ("crossdraft", "torch", "transformers"):
        monkeypatch.setattr(baseline_responses, "release", lambda other, name=name: "9.9" if other == name else "1")
        assert responses() != path
    assert len(decoded) == 8


def test_acceptance_by_draft_length(models: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """Acceptance at each gamma equals that of `crossdraft replay`."""
    from crossdraft_advisor.advise.caveats import Remarks

    path = tmp_path / "responses.jsonl"
    rows = [
        {"id": i, "prompt": [5, 6, 7, 5, 6], "tokens": [7, 5, 6, 7, 8, 9, 5, 6] * 4, "finish_reason": "length"}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    remarks = Remarks()
    command = Advise(replay=(str(path),), drafter=("prompt-lookup",), temperature=0)
    result = replayed_acceptances(command, remarks)
    assert any("all responses are truncated" in line for line in remarks.warnings)
    assert cli.main(["replay", str(path), "--drafter", "prompt-lookup", "--temperature", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [item.gamma for item in result] == [row["gamma"] for row in rows] == list(range(1, 17))
    for item, row in zip(result, rows, strict=True):
        assert item.block_efficiency().value == pytest.approx(row["block_efficiency"]["value"])
        assert item.marginal == pytest.approx(row["acceptance_marginal"])
        assert (item.drafter, item.verifier, item.temperature, len(item.rows)) == ("prompt-lookup", "greedy", 0, 5)


def test_export_is_priced_with_the_engines_own_drafts(tmp_path: Path, capsys: Any) -> None:
    """The earliest match, which vLLM copies, is followed by more tokens in this periodic text than the latest."""
    path = tmp_path / "responses.jsonl"
    prompt = [5, 6, 7, *[5, 6, 8] * 6]
    rows = [{"id": i, "prompt": prompt, "tokens": [5, 6, 8] * 12, "finish_reason": "length"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--replay", path, "--temperature", "0", "--on", "h100", "--target", tmp_path / "target.json"]
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "target.json").write_text(json.dumps(config), encoding="utf-8")
    speed_ups = {}
    for match in ("", ", match: first", ", match: latest"):
        drafter = f"{{name: prompt-lookup, max_ngram: 2, min_ngram: 2{match}}}"
        report, _ = advised(capsys, *options, "--drafter", drafter, "--batch-size", "1", "--export", "vllm")
        speed_ups[match] = report["advice"][0]["best"]["speed_up"]["value"]
        assert any("earliest match" in remark for remark in report["remarks"]["settings"]) == ("latest" in match)
    assert speed_ups[""] == speed_ups[", match: first"] > speed_ups[", match: latest"]

    # What the engine lacks is left out before anything is replayed; the flags have the length of the schedule.
    lacking = ["--drafter", "jacobi"]
    report, err = advised(capsys, *options, "--drafter", drafter, *lacking, "--batch-size", "1", "--export", "vllm")
    assert "replaying 1 drafter, 1 pair, gamma 1" in err
    assert any("jacobi × greedy is left out: vllm: it has no" in line for line in report["remarks"]["warnings"])
    assert f'"num_speculative_tokens": {report["schedule"][0]["gamma"]}' in report["settings"]
    assert cli.main(["advise", *map(str, options), *lacking, "--export", "vllm"]) == 2
    err = capsys.readouterr().err
    assert "no pair can be exported: jacobi" in err and "replaying" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "advise requires one source of acceptance"),
        (["--replay", "x"], "--drafter is missing"),
        (["--prompts", "x", "--drafter", "prompt-lookup"], "--prompts requires --target"),
        (["--replay", "x", "--prompts", "y"], "advise requires one source"),
        (
            ["log", "--drafter", "eagle", "--drafter", "medusa"],
            "several drafters or verifiers, and options of drafters, require",
        ),
        (["log", "--drafter", "{name: eagle}"], "options of drafters, require --replay"),
        (["log", "--responses", "3"], "--responses requires --prompts"),
        (["log", "--replay", "x"], "advise requires one source"),
    ],
)
def test_incompatible_options(capsys: Any, options: list[str], message: str) -> None:
    assert cli.main(["advise", *options]) == 2
    assert message in capsys.readouterr().err


def test_config_of_the_target_is_enough_for_token_ids(models: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """Drafters without a model need the cost of the target only."""
    row = {"prompt": [5, 6, 7, 5, 6], "tokens": [7, 5, 6, 7, 5, 2], "finish_reason": "stop"}
    (tmp_path / "responses.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    (tmp_path / "config.json").write_bytes((Path(models["target"]) / "config.json").read_bytes())
    options = ["--replay", tmp_path / "responses.jsonl", "--target", tmp_path / "config.json", "--on", "h100"]
    result, _ = advised(capsys, *options, "--temperature", 0, "--drafter", "prompt-lookup", "--batch-size", 1)
    assert result["advice"][0]["best"]["drafter"] == "prompt-lookup"
