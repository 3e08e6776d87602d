"""``crossdraft compare-texts``: ties and mistakes injected into greedy texts of a tiny model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import argmax_text, save_model

from crossdraft import load_model
from crossdraft.framework.cli import main as cli

PROMPTS = {"a": [5, 6, 7], "b": [9, 8, 9, 10], "c": [20, 21], "d": [30, 31, 32]}
LENGTH, AT = 12, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> tuple[str, Any]:
    path = save_model(tmp_path_factory.mktemp("target"), seed=3)
    return path, load_model(path, dtype="float32", device="cpu").model


def greedy(model: Any, prompt: Sequence[int], start: Sequence[int] = ()) -> list[int]:
    """``LENGTH`` tokens after a prompt, beginning with ``start``."""
    text = argmax_text(model, [*prompt, *start], LENGTH - len(start))
    return text[len(prompt) :]


def write(path: Path, texts: dict[str, list[int]], prompts: dict[str, list[int]] = PROMPTS, **fields: Any) -> Path:
    rows = [{"id": name, "prompt": prompts[name], "tokens": tokens} | fields for name, tokens in texts.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def compare(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["compare-texts", *map(str, arguments)])
    return code, *capsys.readouterr()


def verdicts(capsys: Any, *arguments: Any) -> tuple[int, dict[str, Any]]:
    code, out, err = compare(capsys, *arguments, "--json")
    assert out, err
    return code, {row["id"]: row for row in json.loads(out)["responses"]}


def other_token(model: Any, prefix: Sequence[int], rank: int) -> int:
    return int(model(torch.tensor([list(prefix)])).logits[0, -1].argsort(descending=True)[rank])


def test_equal_texts_pass(tmp_path: Path, target: Any, capsys: Any) -> None:
    path, model = target
    texts = {name: greedy(model, prompt) for name, prompt in PROMPTS.items()}
    sources = write(tmp_path / "a.jsonl", texts), write(tmp_path / "b.jsonl", texts)
    code, out, _ = compare(capsys, *sources, "--target", path, "--dtype", "float32")
    assert code == 0 and out.strip() == "4 responses: 4 equal, 0 differ by ties, 0 not the target's"


def test_mistakes_are_located_and_attributed(tmp_path: Path, target: Any, capsys: Any) -> None:
    """Another token than the argmax, followed by the greedy text of what then stands there."""
    path, model = target
    first = {name: greedy(model, prompt) for name, prompt in PROMPTS.items()}
    second = {name: list(text) for name, text in first.items()}
    for name, side in (("a", second), ("b", first), ("c", first), ("c", second)):
        prompt, text = PROMPTS[name], side[name]
        rank = 2 if side is first else 1
        start = [*text[:AT], other_token(model, [*prompt, *text[:AT]], rank)]
        side[name] = greedy(model, prompt, start)
    sources = write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second)
    code, rows = verdicts(capsys, *sources, "--target", path, "--dtype", "float32")
    assert code == 1
    assert {name: row["verdict"] for name, row in rows.items()} == {"a": "B", "b": "A", "c": "both", "d": "equal"}
    for name in "abc":
        row = rows[name]
        prefix = torch.tensor([[*PROMPTS[name], *first[name][:AT]]])
        logits = model(prefix).logits[0, -1].detach()
        assert row["token"] == AT and row["tokens"] == [first[name][AT], second[name][AT]]
        expected = [float(logits.max() - logits[token]) for token in row["tokens"]]
        assert row["gaps"] == pytest.approx(expected, abs=1e-4)
    assert rows["a"]["beyond"][0] is None and rows["a"]["beyond"][1][0] == AT
    _, out, _ = compare(capsys, *sources, "--target", path, "--dtype", "float32")
    assert "1 equal, 0 differ by ties, 3 not the target's" in out
    assert "not rounding: 2 of A, 2 of B are not the greedy text" in out


@pytest.mark.parametrize("gap, verdict, code", [(0.0, "tie", 0), (5e-4, "tie", 0), (5e-3, "B", 1)])
def test_ties_differ_from_mistakes_by_gap(
    tmp_path: Path, target: Any, capsys: Any, gap: float, verdict: str, code: int
) -> None:
    """A model in which one token has the logit of another, less a gap."""
    prompt = PROMPTS["a"]
    model = load_model(target[0], dtype="float32", device="cpu").model
    text = greedy(model, prompt)
    token, twin = text[AT], next(t for t in range(5, 64) if t not in text)
    state = model(torch.tensor([[*prompt, *text[:AT]]]), output_hidden_states=True).hidden_states[-1][0, -1].detach()
    row = model.lm_head.weight.data[token]
    model.lm_head.weight.data[twin] = row - gap * state / state.dot(state)
    changed = tmp_path / "changed"
    save_model(changed, seed=3)
    model.save_pretrained(changed)
    first = text if gap else [min(t, twin) if t in (token, twin) else t for t in text]
    start = [*first[:AT], twin if first[AT] == token else token]
    sources = (
        write(tmp_path / "a.jsonl", {"a": greedy(model, prompt, first[: AT + 1])}),
        write(tmp_path / "b.jsonl", {"a": greedy(model, prompt, start)}),
    )
    status, rows = verdicts(capsys, *sources, "--target", changed, "--dtype", "float32")
    assert rows["a"]["verdict"] == verdict and status == code, rows
    assert max(rows["a"]["gaps"]) == pytest.approx(gap, abs=1e-5)


def test_mistake_after_tie_and_equal_but_wrong_texts_are_found(tmp_path: Path, target: Any, capsys: Any) -> None:
    path, model = target
    text = greedy(model, PROMPTS["a"])
    wrong = [*text[:AT], other_token(model, [*PROMPTS["a"], *text[:AT]], 3)]
    wrong = greedy(model, PROMPTS["a"], wrong)
    sources = write(tmp_path / "a.jsonl", {"a": wrong}), write(tmp_path / "b.jsonl", {"a": wrong})
    status, rows = verdicts(capsys, *sources, "--target", path, "--dtype", "float32")
    assert status == 1 and rows["a"]["verdict"] == "both" and rows["a"]["token"] is None


def test_bfloat16_texts_differ_by_ties(tmp_path: Path, target: Any, capsys: Any) -> None:
    """Texts of the same weights in another dtype are the target's, in the tolerance of that dtype."""
    path, model = target
    half = load_model(path, dtype="bfloat16", device="cpu").model
    prompts = {str(i): [5 + i, 6 + i, 40 - i] for i in range(20)}
    sources = (
        write(tmp_path / "a.jsonl", {name: greedy(model, prompt) for name, prompt in prompts.items()}, prompts),
        write(tmp_path / "b.jsonl", {name: greedy(half, prompt) for name, prompt in prompts.items()}, prompts),
    )
    status, rows = verdicts(capsys, *sources, "--target", path, "--dtype", "bfloat16")
    assert status == 0 and {row["verdict"] for row in rows.values()} == {"equal", "tie"}
    assert verdicts(capsys, *sources, "--target", path, "--dtype", "float32")[0] == 1


def test_shorter_text_is_not_equal(tmp_path: Path, target: Any, capsys: Any) -> None:
    path, model = target
    text = greedy(model, PROMPTS["a"])
    sources = write(tmp_path / "a.jsonl", {"a": text}), write(tmp_path / "b.jsonl", {"a": text[:-4]})
    for first, second in (sources, sources[::-1]):
        code, rows = verdicts(capsys, first, second, "--target", path)
        assert code == 3 and (rows["a"]["verdict"], rows["a"]["token"]) == ("length", LENGTH - 4)
    _, out, _ = compare(capsys, *sources, "--target", path)
    assert (
        "one text ends there" in out and "0 equal, 0 differ by ties, 0 not the target's, 1 equal until one ends" in out
    )


def test_other_prompts_are_not_compared(tmp_path: Path, target: Any, capsys: Any) -> None:
    path, model = target
    texts = {name: greedy(model, prompt) for name, prompt in PROMPTS.items()}
    other = PROMPTS | {"a": [1, *PROMPTS["a"]]}
    sources = write(tmp_path / "a.jsonl", texts), write(tmp_path / "b.jsonl", texts, other)
    code, out, _ = compare(capsys, *sources, "--target", path, "--dtype", "float32")
    assert code == 3 and "1 not compared: other prompts" in out
    renamed = write(tmp_path / "c.jsonl", {"a": texts["a"]}, other)
    code, _, err = compare(capsys, sources[0], renamed, "--target", path)
    assert code == 2 and "has 3 tokens in" in err and "chat templates" in err


def test_errors(tmp_path: Path, target: Any, capsys: Any) -> None:
    path, model = target
    text = greedy(model, PROMPTS["a"])
    good = write(tmp_path / "a.jsonl", {"a": text})
    sampled = write(tmp_path / "sampled.jsonl", {"a": text}, temperature=0.7)
    unnamed = write(tmp_path / "b.jsonl", {"b": text})
    wide = write(tmp_path / "wide.jsonl", {"a": [500]})
    long = write(tmp_path / "long.jsonl", {"a": text * 20})
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    for source, message in (
        (sampled, "sampled at temperature 0.7"),
        (unnamed, "has the id of one of"),
        (wide, "token 500 is outside of the target's vocabulary"),
        (long, "but the target's context length is"),
        (tmp_path / "empty.jsonl", "no responses"),
    ):
        code, _, err = compare(capsys, good, source, "--target", path)
        assert code == 2 and message in err, err
