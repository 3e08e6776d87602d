"""``crossdraft replay`` along checkpoints: a target that is perturbed more and more, and one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model

from crossdraft import generate, load_model
from crossdraft.framework.cli import main as cli

PROMPTS = [[5 + i, 6 + i % 3, 7 + i % 5] for i in range(16)]
NOISE = (0.0, 0.002, 0.05, 1.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> list[tuple[str, str]]:
    """Targets that are the draft model, with noise of growing size; each with its own responses."""
    root = tmp_path_factory.mktemp("checkpoints")
    results = []
    for number, size in enumerate(NOISE):
        path = root / f"ckpt-{100 * number}"
        save_model(path, seed=3)
        loaded = load_model(str(path), dtype="float32", device="cpu").model
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in loaded.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += size * parameter.std(correction=0) * noise
        loaded.save_pretrained(path)
        results.append((str(path), str(write(root / f"{number}.jsonl", str(path), seed=number))))
    return results


def write(file: Path, target: str, seed: int) -> Path:
    model = load_model(target, dtype="float32", device="cpu")
    responses = generate(model, PROMPTS, max_new_tokens=24, temperature=1.0, seed=seed, batch_size=16)
    rows = [
        {"id": str(i), "prompt": prompt, "tokens": response.tokens, "finish_reason": response.finish_reason}
        for i, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True))
    ]
    file.write_text("".join(json.dumps(row | {"temperature": 1.0}) + "\n" for row in rows), encoding="utf-8")
    return file


def replayed(capsys: Any, sources: list[tuple[str, str]], drafter: str, *more: str) -> str:
    argv = [source for _, source in sources] + [word for target, _ in sources for word in ("--target", target)]
    argv += ["--drafter", f"{{name: draft-model, model: {drafter}}}", "--gamma", "3", "--verifier", "token"]
    capsys.readouterr()
    code = cli.main(["replay", *argv, "--dtype", "float32", "--device", "cpu", *more])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_perturbed_target_makes_the_drafter_stale(checkpoints: list[tuple[str, str]], capsys: Any) -> None:
    drafter = checkpoints[0][0]
    (pair,) = json.loads(replayed(capsys, checkpoints, drafter, "--json"))["pairs"]
    rows = pair["checkpoints"]
    lengths = [row["block_efficiency"]["value"] for row in rows]
    assert 3.9 < lengths[0] <= 4  # the first checkpoint is the draft model; an end of sequence has no bonus token
    assert lengths == sorted(lengths, reverse=True), lengths
    assert [row["verdict"] for row in rows] == ["", "ok", "stale", "stale"]
    assert pair["refresh_at"] == checkpoints[2][0] and all(row["paired"] for row in rows[1:])
    assert rows[2]["change"]["value"] == pytest.approx(lengths[2] / lengths[0] - 1)
    text = replayed(capsys, checkpoints, drafter, "--drop", "0.5")
    assert f"draft-model × token: refresh the drafter at {checkpoints[3][0]}" in text
    assert "draft-model: has weights of its own" in text


def test_drafter_without_weights_is_not_refreshed(tmp_path: Path, capsys: Any) -> None:
    """Texts that repeat themselves, and texts that do not."""
    sources = []
    for name, period in (("first", 2), ("second", 9)):
        rows = [
            {"id": str(i), "prompt": [5, 6, 5], "tokens": [9 + (i + t) % period for t in range(12)], "temperature": 0}
            for i in range(12)
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sources.append(("policy-" + name, str(tmp_path / name)))
    argv = [source for _, source in sources] + [word for target, _ in sources for word in ("--target", target)]
    argv = ["replay", *argv, "--drafter", "prompt-lookup", "--gamma", "3"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "the texts of policy-second are drafted worse, and the drafter has no weights to refresh" in out
    assert cli.main([*argv, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert (pair["stale_at"], pair["refresh_at"]) == ("policy-second", None)


def test_unchanged_target_keeps_the_drafter(checkpoints: list[tuple[str, str]], tmp_path: Path, capsys: Any) -> None:
    """Other samples of the same target, and a draft model that is not the target."""
    target, drafter = checkpoints[0][0], checkpoints[2][0]
    sources = []
    for number in range(3):
        link = tmp_path / f"same-{number}"
        link.symlink_to(target)
        sources.append((str(link), str(write(tmp_path / f"{number}.jsonl", target, seed=10 + number))))
    text = replayed(capsys, sources, drafter, "--drop", "0.3")
    assert "draft-model × token: keep the drafter: a loss of 30.0 % is excluded" in text
    text = replayed(capsys, sources[:2], drafter, "--drop", "0.001")
    assert "a loss of 0.1 % is neither shown nor excluded" in text


def test_all_assumptions_are_listed(checkpoints: list[tuple[str, str]], tmp_path: Path, capsys: Any) -> None:
    """Two assumptions about the same number of responses of one source."""
    row = {"prompt": [5], "tokens": [7, 8, 9], "logprobs": [-1.0] * 4, "finish_reason": "stop", "temperature": 1.0}
    (source := tmp_path / "responses.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    argv = [str(source)] * 2 + [word for target, _ in checkpoints[:2] for word in ("--target", target)]
    assert cli.main(["replay", *argv, "--drafter", "prompt-lookup", "--gamma", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{source}, 1 response: with finish_reason stop" in out
    assert f"{source}, 1 response: with log-probabilities at temperature 1" in out


@pytest.mark.parametrize(
    ("remove", "more", "message"),
    [
        (1, [], "--target is given 4 times for 3 sources"),
        (0, ["--as", "vllm"], "--as cannot be combined with several targets"),
    ],
)
def test_unclear_requests_are_refused(
    checkpoints: list[tuple[str, str]], capsys: Any, remove: int, more: list[str], message: str
) -> None:
    argv = [source for _, source in checkpoints[remove:]]
    argv += [word for target, _ in checkpoints for word in ("--target", target)]
    assert cli.main(["replay", *argv, "--drafter", "prompt-lookup", *more]) == 2
    assert message in capsys.readouterr().err
