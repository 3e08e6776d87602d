"""``crossdraft replay --counted``: each cause of a difference is injected into the counters of an engine, and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from scrapes import scrape
from tiny_models import save_model
from transformers import AutoTokenizer

from crossdraft import generate, load_model
from crossdraft.framework.cli import main as cli

FIXTURE = Path(__file__).parents[1] / "fixtures" / "vllm-ngram.json"
RECORDED = json.loads(FIXTURE.read_text(encoding="utf-8"))
FILE = "responses.jsonl"
NGRAM = json.dumps(RECORDED["drafter"])


def responses(path: Path, continuation: bool = True) -> str:
    rows = []
    for i, response in enumerate(RECORDED["responses"]):
        row = {"max_tokens": RECORDED["max_tokens"], "temperature": 0} | response | {"id": str(i)}
        rows.append({key: value for key, value in row.items() if continuation or key != "continuation"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def compared(capsys: Any, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["replay", *argv, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def counters(capsys: Any, source: str, drafter: str, *more: str) -> tuple[float, list[float], float]:
    """Counters that replay computes as vLLM's."""
    data = compared(capsys, source, "--drafter", drafter, "--as", "vllm", *more)
    (row,) = data["rows"]
    return tuple(row["counters"][key] for key in ("drafts", "accepted_per_position", "draft_tokens"))


def test_recorded_counters_agree(tmp_path: Path, capsys: Any) -> None:
    counts = RECORDED["counters"]
    file = scrape(tmp_path / "scrape.txt", counts["drafts"], counts["accepted_per_position"], counts["draft_tokens"])
    source = responses(tmp_path / "responses.jsonl")
    argv = ["replay", source, "--drafter", NGRAM, "--as", "vllm", "--counted", file]
    assert cli.main(argv) == 0
    assert "vllm: counted as replayed\n" in capsys.readouterr().out


def definitions() -> dict[str, tuple[str, str]]:
    """Changes of the definition -> cause and words of its description."""
    return {
        "idle_steps": ("definition of the counter", "steps without a draft are counted"),
        "shortens": ("definition of the counter", "drafts near the maximum length are cut"),
        "accepted": ("end of sequence", "up to the one before the last of a response"),
    }


@pytest.mark.parametrize("key", definitions())
def test_another_definition_is_named(key: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The engine counts otherwise than this version of it is known to do."""
    source = responses(tmp_path / "responses.jsonl")
    own = DEFINITIONS["vllm"]
    value = "before_last" if key == "accepted" else True
    with monkeypatch.context() as patched:
        patched.setitem(DEFINITIONS, "vllm", replace(own, **{key: value}))
        numbers = counters(capsys, source, NGRAM)
    file = scrape(tmp_path / "scrape.txt", *numbers)
    (check,) = compared(capsys, source, "--drafter", NGRAM, "--as", "vllm", "--counted", file)["engines"]
    name, text = definitions()[key]
    assert not check["agrees"] and check["cause"]["name"] == name and text in check["cause"]["text"]


def test_drafted_tokens_are_compared(tmp_path: Path, capsys: Any) -> None:
    """The same drafts and acceptance, but longer drafts: neither a definition nor the end of responses explains it."""
    counts = RECORDED["counters"]
    source = responses(tmp_path / "responses.jsonl")
    file = scrape(tmp_path / "scrape.txt", counts["drafts"], counts["accepted_per_position"], 4 * counts["drafts"])
    argv = [source, "--drafter", NGRAM, "--as", "vllm", "--counted", file]
    (check,) = compared(capsys, *argv)["engines"]
    assert not check["agrees"] and check["cause"]["name"] == "draft length"
    assert "drafts have 4.00 tokens instead of 3.96" in check["cause"]["text"]
    # A drafter without weights has none that can be missing.
    file = scrape(tmp_path / "scrape.txt", counts["drafts"], [1, 0, 0, 0], counts["draft_tokens"])
    (check,) = compared(capsys, *argv)["engines"]
    assert not check["agrees"] and check["cause"] is None


def test_tokens_past_the_end_are_named(tmp_path: Path, capsys: Any) -> None:
    """The responses do not record their continuation, whose tokens the engine accepted."""
    counts = RECORDED["counters"]
    file = scrape(tmp_path / "scrape.txt", counts["drafts"], counts["accepted_per_position"], counts["draft_tokens"])
    source = responses(tmp_path / "responses.jsonl", continuation=False)
    (check,) = compared(capsys, source, "--drafter", NGRAM, "--as", "vllm", "--counted", file)["engines"]
    assert not check["agrees"] and check["cause"]["name"] == "end of sequence"
    assert "record the 'continuation'" in check["cause"]["text"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: Any) -> dict[str, str]:
    """A target with its sampled responses, a draft model that is nearly the target, and one of other weights."""
    root = tmp_path_factory.mktemp("sampled")
    target = save_model(root / "target", seed=3)
    model = load_model(target, dtype="float32", device="cpu")
    for name, seed, scale in (("near", 3, 0.7), ("other", 8, 8.0)):
        draft = load_model(save_model(root / name, seed=seed), dtype="float32", device="cpu").model
        draft.lm_head.weight.data *= scale
        draft.save_pretrained(root / name)
    prompts = [[5 + i, 6, 7] for i in range(24)]
    texts = generate(model, prompts, max_new_tokens=32, temperature=1.0, seed=1, batch_size=24)
    rows = [
        {"id": str(i), "prompt": p, "tokens": r.tokens, "finish_reason": "length", "temperature": 1.0}
        for i, (p, r) in enumerate(zip(prompts, texts, strict=True))
    ]
    (root / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"target": target} | {name: str(root / name) for name in ("near", "other")} | {"source": str(root / FILE)}


@pytest.mark.parametrize("engine_drafter", [{"model": "near"}, {"model": "near", "temperature": 0}, {"model": "other"}])
def test_other_drafts_of_engine_are_left_to_diagnosis(
    engine_drafter: dict[str, Any], sampled: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    """The counters are those of greedy drafts, or of a draft model without its weights."""
    pair = ["--target", sampled["target"], "--dtype", "float32", "--device", "cpu", "--verifier", "token"]
    common = {"name": "draft-model", "gamma": 2}
    drafter = json.dumps(common | engine_drafter | {"model": sampled[engine_drafter["model"]]})
    file = scrape(tmp_path / "scrape.txt", *counters(capsys, sampled["source"], drafter, *pair))
    ours = json.dumps(common | {"model": sampled["near"]})
    assert cli.main(["replay", sampled["source"], "--drafter", ours, "--as", "vllm", "--counted", file, *pair]) == 0
    out = capsys.readouterr().out
    if engine_drafter == {"model": "near"}:
        assert "vllm: counted as replayed" in out
    else:
        assert "not by its way of counting; find how it drafts: crossdraft diagnose" in out
        assert f"--counters {file} --as vllm" in out


def test_dtype_of_engine_is_checked_before_its_drafts(sampled: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """The engine computed in float32; the replay, in bfloat16, gives other counts."""
    rows = [json.loads(line) for line in Path(sampled["source"]).read_text(encoding="utf-8").splitlines()]
    model = load_model(sampled["target"], dtype="float32", device="cpu")
    prompts = [row["prompt"] for row in rows]
    texts = generate(model, prompts, max_new_tokens=64, temperature=0.0, ignore_eos=True, batch_size=24)
    rows = [row | {"tokens": text.tokens, "temperature": 0} for row, text in zip(rows, texts, strict=True)]
    source = tmp_path / "greedy.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    drafter = json.dumps({"name": "draft-model", "gamma": 2, "model": sampled["near"]})
    pair = ["--target", sampled["target"], "--device", "cpu"]
    file = scrape(tmp_path / "a.txt", *counters(capsys, str(source), drafter, *pair, "--dtype", "float32"))
    argv = [str(source), "--drafter", drafter, "--as", "vllm", "--counted", file, *pair, "--dtype", "bfloat16"]
    (check,) = compared(capsys, *argv)["engines"]
    assert not check["agrees"] and check["cause"]["name"] == "dtype"
    assert "the engine computes in it; add --dtype float32" in check["cause"]["text"]


WORDS = [f"w{i}" for i in range(5, 11)]


def served(path: Path, target: str, prefix: str, reported: bool) -> tuple[str, str]:
    """Responses to messages in the template of an engine, and the same with the token ids of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows, plain = [], []
    for i in range(8):
        content = " ".join(WORDS[i % 3 :] + WORDS[:3])
        prompt = tokenizer.encode(f"{prefix}user {content} assistant", add_special_tokens=False)
        tokens = tokenizer.encode(" ".join(WORDS[::-1] + WORDS * 2), add_special_tokens=False)
        choice = {"index": 0, "finish_reason": "length", "token_ids": tokens}
        body: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        request = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        if reported:
            choice["prompt_token_ids"] = prompt
        rows.append({"custom_id": str(i), "request": request, "response": body})
        plain.append({"id": str(i), "prompt": prompt, "tokens": tokens, "finish_reason": "length", "temperature": 0})
    for file, lines in ((path, rows), (path.with_suffix(".plain"), plain)):
        file.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    return str(path), str(path.with_suffix(".plain"))


def test_another_chat_template_is_named(tmp_path: Path, capsys: Any) -> None:
    """An engine whose template begins with words that its answers repeat."""
    target = save_model(tmp_path / "target")
    drafter = "{name: prompt-lookup, gamma: 3}"
    prefix = " ".join(WORDS[::-1]) + " "
    source, plain = served(tmp_path / "a.jsonl", target, prefix, reported=False)
    file = scrape(tmp_path / "a.txt", *counters(capsys, plain, drafter))
    argv = ["--drafter", drafter, "--target", target]
    (check,) = compared(capsys, source, *argv, "--as", "vllm", "--counted", file)["engines"]
    assert not check["agrees"] and check["cause"]["name"] == "chat template"
    assert check["cause"]["text"].startswith("8 prompts differ")

    ids, _ = served(tmp_path / "b.jsonl", target, prefix, reported=True)
    usual, plain = served(tmp_path / "c.jsonl", target, "", reported=True)
    other = scrape(tmp_path / "c.txt", *counters(capsys, plain, drafter))
    both = ["--as", "vllm", "--as", "vllm", "--counted", other, "--counted", file]
    data = compared(capsys, usual, ids, *argv, *both)
    assert [check["agrees"] for check in data["engines"]] == [True, True]
    (cause,) = data["difference"]["causes"]
    assert cause["name"] == "chat template" and cause["text"].startswith("8 of 8 prompts")
    assert data["difference"]["paired"] and data["difference"]["change"]["value"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--as", "vllm", "--as", "sglang"], "got 1 sources, 2 --as, 0 --counted"),
        (["--as", "vllm", "--counted", "SCRAPE", "--drafter", "suffix"], "--counted is for one pair"),
        (["--as", "vllm", "--counted", "SCRAPE", "--gamma", "3"], "counted drafts of 4 tokens; set --gamma 4"),
    ],
)
def test_unclear_comparisons_are_refused(more: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    file = scrape(tmp_path / "scrape.txt", 10, [5, 4, 3, 2])
    source = responses(tmp_path / "responses.jsonl")
    argv = ["replay", source, "--drafter", "prompt-lookup", *(file if word == "SCRAPE" else word for word in more)]
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err
