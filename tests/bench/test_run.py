"""Whole runs on tiny models, through the command line: tables, records, reuse, failures, interruption."""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pyarrow import parquet

from crossdraft.drafters.prompt_lookup import PromptLookup
from crossdraft.framework import cli, plugins
from crossdraft.framework.bench import run as run_module
from crossdraft.framework.bench.cell import Cell, Conversation
from crossdraft.framework.bench.cost import batch_rounds
from crossdraft.framework.bench.prompts import Prompt
from crossdraft.framework.bench.recipe import load_recipe
from crossdraft.framework.bench.records import FORMAT, RunDirectory
from crossdraft.framework.bench.run import chunked, run
from crossdraft.framework.decoding import fused, loop
from crossdraft.framework.decoding.lm import FittedLM, TransformersLM
from crossdraft.framework.hookspecs import hookimpl
from crossdraft.framework.models import load_model
from crossdraft.framework.verifier import VerifierTraits
from crossdraft.verifiers.token import Token

RECIPE = """\
# does it run?
question: does it run?
target: {target}
prompts: {prompts}
dtype: float32
device: cpu
max_new_tokens: 10
drafters:
  - prompt-lookup
  - {{name: small-lm, model: {same}, gamma: 3}}
verifiers: [greedy, token, block]
matrix:
  temperature: [0, 1.0]
  batch_size: [1, 3]
exclude:
  - {{verifier: [token, block], temperature: 0}}
"""
ONE_GROUP = ["matrix={}", "sampling.temperature=1", "exclude=[]", "verifiers=[token, block]"]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: Any) -> None:
    """No cost curve that somebody measured on this machine, and no charts, which take seconds to draw."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "draw", lambda outcome: [])


@pytest.fixture
def recipe(tmp_path: Path, models: dict[str, str], recipe_file: Any, write_prompts: Any) -> str:
    return recipe_file(RECIPE.format(prompts=write_prompts(tmp_path / "prompts.jsonl"), **models))


@pytest.fixture
def bench(recipe: str, tmp_path: Path, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """``bench(*settings, flags=[...])`` runs the recipe: exit code, standard output, standard error."""

    def go(*settings: str, flags: Any = ()) -> tuple[int, str, str]:
        arguments = [part for setting in settings for part in ("--set", setting)]
        code = cli.main(["run", recipe, "--out", str(tmp_path / "runs"), *arguments, *flags])
        return code, *capsys.readouterr()

    return go


def cells(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("runs/*/cells/*"))


def said(directory: Path) -> dict[tuple[Any, int], list[int]]:
    lines = (directory / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    return {(r["question_id"], r["turn"]): r["tokens"] for r in map(json.loads, lines)}


def test_a_run_and_its_records(bench: Any, tmp_path: Path) -> None:
    code, out, err = bench()
    assert code == 0
    assert err.splitlines()[0] == "recipe: 16 cells in 4 groups, 6 prompts each"
    assert "group 2 of 4 (temperature 1, batch size 1): running 5 cells" in err
    assert "temperature 1, batch size 3\n" in out and "speed-up [95 %]" in out and "records: " in out
    assert max(map(len, out.split("skipped: ")[0].splitlines())) <= 130
    assert "at temperature 0, 32 of 32 responses equal those of plain decoding, token for token" in out
    assert "small-lm: BE of block − token, on the same prompts: " in out

    (directory,) = tmp_path.glob("runs/*")
    assert {p.name for p in directory.iterdir()} == {
        "recipe.json",
        "cost_curves.json",
        "environment.json",
        "cells",
        "summary.csv",
        "summary.md",
    }
    found = cells(tmp_path)
    assert len(found) == 16
    assert all(
        {p.name for p in d.iterdir()} == {"config.json", "rounds.parquet", "responses.jsonl", "metrics.json"}
        for d in found
    )
    environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    assert len(environment["models"]) == 2 and environment["prompts"]["count"] == 6
    assert [condition["dtype"] for condition in environment["conditions"]] == ["float32"]
    assert environment["conditions"][0]["threads"] == torch.get_num_threads()

    with (directory / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and {row["error"] for row in rows} == {""}
    for row in rows:
        table = parquet.read_table(directory / "cells" / row["cell"] / "rounds.parquet")
        emitted, rounds = sum(table["emitted"].to_pylist()), table.num_rows
        assert float(row["block_efficiency"]) == pytest.approx(emitted / rounds)
        assert int(row["tokens"]) == emitted == sum(len(t) for t in said(directory / "cells" / row["cell"]).values())
        assert int(row["sequences"]) == 8  # two of the six prompts have a second turn
        assert int(row["peak_memory"]) > 10**7
        assert set(table["cell"].to_pylist()) == {row["cell"]}
        if row["drafter"] == "small-lm":
            assert int(row["drafter_passes"]) > 0 and float(row["block_efficiency"]) > 2
        if row["drafter"] == "none":
            assert float(row["speed_up"]) == 1.0
    assert "| small-lm" in (directory / "summary.md").read_text(encoding="utf-8")


def test_what_is_said_depends_on_neither_batch_size_nor_limit(bench: Any, tmp_path: Path) -> None:
    assert bench("drafters.0={name: prompt-lookup, gamma: 2}")[0] == 0
    by_cell: dict[str, list[dict[Any, list[int]]]] = {}
    for directory in cells(tmp_path):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["config"]
        config.pop("batch_size")
        by_cell.setdefault(json.dumps(config), []).append(said(directory))
    assert len(by_cell) == 8
    assert all(one == three for one, three in by_cell.values())
    shutil.rmtree(tmp_path / "runs")
    settings = [
        "drafters.0={name: prompt-lookup, gamma: 2}",
        "prompts.categories=[a, c]",
        "matrix.batch_size=[2]",
    ]
    assert bench(*settings, flags=["--limit", "3"])[0] == 0
    for directory in cells(tmp_path):
        some = said(directory)
        assert len(some) == 5  # q0 and q3 have two turns, q2 one
        assert any(some.items() <= answers.items() for pair in by_cell.values() for answers in pair)


def test_a_rerun_reuses_whole_groups(bench: Any, tmp_path: Path, models: dict[str, str], write_prompts: Any) -> None:
    settings = ["matrix={batch_size: [1, 2]}", *ONE_GROUP[1:], "drafters=[prompt-lookup]", "max_new_tokens=5"]
    assert "running" in bench(*settings)[2]
    first = {d.name: (d / "metrics.json").read_bytes() for d in cells(tmp_path)}
    code, out, err = bench(*settings)
    assert code == 0 and err.count("reusing 3 cells") == 2 and "running" not in err
    assert "BE of block − token" in out
    assert {d.name: (d / "metrics.json").read_bytes() for d in cells(tmp_path)} == first

    gone = cells(tmp_path)[0]
    shutil.rmtree(gone)
    err = bench(*settings)[2]
    assert "running 3 cells" in err and "reusing 3 cells" in err  # its group is measured together again
    changed = [d.name for d in cells(tmp_path) if (d / "metrics.json").read_bytes() != first[d.name]]
    assert len(changed) == 3 and gone.name in changed

    earlier = cells(tmp_path)[0] / "config.json"
    written = earlier.read_text(encoding="utf-8").replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}')
    earlier.write_text(written, encoding="utf-8")
    assert bench(*settings)[2].count("running 3 cells") == 1
    (cells(tmp_path)[0] / "metrics.json").write_text("{", encoding="utf-8")  # damaged
    assert bench(*settings)[2].count("running 3 cells") == 1
    assert bench(*settings, flags=["--fresh"])[2].count("running 3 cells") == 2
    write_prompts(tmp_path / "prompts.jsonl", length=6)  # the same file name, other prompts
    assert bench(*settings)[2].count("running 3 cells") == 2


def test_a_changed_model_is_measured_again(bench: Any, tmp_path: Path, models: dict[str, str]) -> None:
    shutil.copytree(models["same"], tmp_path / "draft")
    settings = [*ONE_GROUP, f"drafters=[{{name: small-lm, model: {tmp_path / 'draft'}}}]"]
    bench(*settings)
    assert "reusing 3 cells" in bench(*settings)[2]
    shutil.copytree(models["narrow"], tmp_path / "draft", dirs_exist_ok=True)
    assert "running 3 cells" in bench(*settings)[2]


def test_changed_heads_are_measured_again(bench: Any, tmp_path: Path) -> None:
    def write(seed: int) -> str:
        torch.manual_seed(seed)
        weights = {f"{i}.0.linear.weight": torch.randn(16, 16) for i in range(2)}
        weights |= {f"{i}.0.linear.bias": torch.randn(16) for i in range(2)}
        (tmp_path / "heads").mkdir(exist_ok=True)
        torch.save(weights, tmp_path / "heads" / "medusa_lm_head.pt")
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 16}
        (tmp_path / "heads" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return hashlib.sha256((tmp_path / "heads" / "medusa_lm_head.pt").read_bytes()).hexdigest()

    digest = write(0)
    settings = [*ONE_GROUP, f"drafters=[{{name: medusa, model: {tmp_path / 'heads'}}}]"]
    code, _, err = bench(*settings)
    assert code == 0, err
    provenance = [json.loads((d / "config.json").read_text(encoding="utf-8"))["provenance"] for d in cells(tmp_path)]
    assert {p["models"][name]["sha256"] for p in provenance for name in p["models"] if "heads" in name} == {digest}
    assert "reusing 3 cells" in bench(*settings)[2]
    assert write(1) != digest
    assert "running 3 cells" in bench(*settings)[2]


def test_quiet(bench: Any) -> None:
    code, out, err = bench(*ONE_GROUP, flags=["--quiet"])
    assert (code, err) == (0, "") and out.startswith("temperature 1, batch size 1")


# -- failures ------------------------------------------------------------------------------------------------


class Broken(Token):
    """Fails in the middle of a round, when the target has grown nodes that nobody keeps."""

    name = "broken"
    calls = 0

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        type(self).calls += 1
        if self.calls > 25:
            raise RuntimeError("it broke\nin many lines")
        return super().verify(draft, p, rng)


class Interrupting(PromptLookup):
    """Somebody presses Ctrl-C while its third batch is decoded."""

    name = "interrupting"
    rounds = 0

    def propose(self, sequences: Any, rng: Any) -> Any:
        type(self).rounds += sequences.batch_size == 3
        if self.rounds > 9:
            raise KeyboardInterrupt
        return super().propose(sequences, rng)


def test_a_failing_cell_does_not_disturb_the_others(bench: Any, tmp_path: Path, install: Any) -> None:
    assert bench(*ONE_GROUP)[0] == 0
    expected = {d.name: said(d) for d in cells(tmp_path)}
    shutil.rmtree(tmp_path / "runs")

    Broken.calls = 0
    install("verifiers", ("broken", Broken))
    code, out, err = bench(*ONE_GROUP[:-1], "verifiers=[broken, token, block]", "drafters.0.gamma=10")
    assert code == 1
    assert "failed: prompt-lookup × broken (temperature 1, batch size 1), small-lm × broken (temperature 1" in out
    assert "RuntimeError: it broke\n" in out and "in many lines" not in out
    assert "2 of 7 cells failed" in err
    assert {d.name: said(d) for d in cells(tmp_path)} == expected


class Hungry(Token):
    """Asks for more memory than there is, when three rows are verified."""

    name = "hungry"

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        if draft.batch_size == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().verify(draft, p, rng)


def test_a_cell_without_memory_fails_alone_and_says_what_it_needed(bench: Any, install: Any) -> None:
    install("verifiers", ("hungry", Hungry))
    settings = [
        "matrix={batch_size: [1, 3]}",
        *ONE_GROUP[1:-1],
        "verifiers=[hungry, token]",
        "drafters=[prompt-lookup]",
    ]
    code, out, err = bench(*settings)
    assert code == 1 and "1 of 6 cells failed" in err
    assert (
        "failed: prompt-lookup × hungry (temperature 1, batch size 3): out of memory at batch size 3: weights " in out
    )
    assert "cache 0.00 GB (3 slots of " in out and "(3 × 11 positions) are less than the " in out


class Lax(Token):
    """Says of itself that it changes the distribution."""

    name = "lax"
    traits = VerifierTraits(drawn=frozenset({"chain"}), lossless=False)


def test_a_lossy_verifier_is_marked(bench: Any, install: Any) -> None:
    install("verifiers", ("lax", Lax))
    _, out, _ = bench(*ONE_GROUP[:-1], "verifiers=[token, lax]", "drafters=[prompt-lookup]")
    assert "prompt-lookup  lax (lossy)  " in out
    assert "lossy verifiers change what the target says" in out


def test_records_that_cannot_be_written(bench: Any, monkeypatch: Any) -> None:
    def full(self: Any, result: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "save", full)
    code, out, _ = bench(*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]")
    assert code == 1 and "its records cannot be written: [Errno 28] No space left on device" in out


def test_nan_is_one_sentence(bench: Any, models: dict[str, str]) -> None:
    code, out, _ = bench(*ONE_GROUP, f"target={models['nan']}", "drafters=[prompt-lookup]")
    assert code == 1
    assert "NaN or infinite logits for prompt 'q0' at position" in out
    assert "speed-up" not in out


def test_nan_in_a_drafting_model(bench: Any, models: dict[str, str]) -> None:
    code, out, _ = bench(*ONE_GROUP, f"drafters.1.model={models['nan']}")
    assert code == 1 and "produced NaN logits" in out
    assert "prompt-lookup  block" in out  # the others finished


def test_models_that_do_not_fit(bench: Any, models: dict[str, str]) -> None:
    _, out, _ = bench(*ONE_GROUP, f"drafters.1.model={models['other']}")
    assert f"{models['other']} cannot draft for {models['target']}: the tokenizers differ: 'w5' has id 5" in out
    _, out, _ = bench(*ONE_GROUP, f"drafters.1.model={models['short']}")
    assert f"{models['short']} has a context of 16 tokens, but this recipe's sequences reach" in out
    code, out, _ = bench(*ONE_GROUP, "target=../", "drafters=[prompt-lookup]")
    assert code == 1 and "and 0 more" not in out and "no config.json" in out


def test_a_prompt_longer_than_the_context(
    bench: Any, tmp_path: Path, models: dict[str, str], write_prompts: Any
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", n=2, length=120)
    code, out, _ = bench(*ONE_GROUP)
    assert code == 1
    assert f"prompt 'q0', turn 1 has 122 tokens, but {models['target']} has a context of 96; shorten" in out


def test_wrong_requests(bench: Any, tmp_path: Path) -> None:
    code, out, err = bench("max_new_token=1")
    assert (code, out) == (2, "")
    sentence = "--set max_new_token=1: unknown key 'max_new_token'; did you mean 'max_new_tokens'?"
    assert err == f"crossdraft: error: {sentence}\n"
    (tmp_path / "prompts.jsonl").write_text('{"turns": 1}\n', encoding="utf-8")
    code, _, err = bench()
    sentence = f"{tmp_path}/prompts.jsonl:1: 'turns' must be a list of texts, and none of them empty"
    assert code == 2 and err == f"crossdraft: error: {sentence}\n"
    (tmp_path / "prompts.jsonl").unlink()
    assert "recipe.yaml:4: there is no prompt file" in bench()[2]
    (tmp_path / "runs").write_text("", encoding="utf-8")
    assert "cannot write to" in bench("prompts=builtin")[2]


def test_an_interruption_keeps_finished_groups(bench: Any, tmp_path: Path, install: Any) -> None:
    Interrupting.rounds = 0
    install("drafters", ("interrupting", Interrupting))
    settings = ["matrix={batch_size: [1, 3]}", *ONE_GROUP[1:], "drafters=[interrupting]"]
    code, out, _ = bench(*settings)
    assert code == 130
    assert "batch size 1\n" in out and "batch size 3\n" not in out and "interrupted: " in out
    assert len(cells(tmp_path)) == 3 and not list(tmp_path.glob("runs/*/cells/.*"))
    Interrupting.rounds = -1000
    code, out, err = bench(*settings)
    assert code == 0 and "reusing 3 cells" in err and "batch size 3\n" in out


# -- pieces --------------------------------------------------------------------------------------------------


def test_plug_ins_are_told(recipe: str, tmp_path: Path) -> None:
    told: list[Any] = []

    def crossdraft_run_started(run: Any) -> None:
        told.append(run["cells"])

    def crossdraft_cell_finished(run: Any, cell: Any) -> None:
        told.append((cell["config"]["drafter"]["name"], cell["metrics"]["rounds"] > 0))

    hooks = {f.__name__: hookimpl(f) for f in (crossdraft_run_started, crossdraft_cell_finished)}
    plugin = SimpleNamespace(**hooks)
    plugins.manager().register(plugin, "listener")
    try:
        settings = [*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]"]
        outcome = run(load_recipe(recipe, settings), tmp_path / "runs", say=None)
    finally:
        plugins.manager().unregister(plugin)
    assert told == [2, ("none", True), ("prompt-lookup", True)]
    assert outcome.exit_code == 0 and len(outcome.results) == 2


def test_a_batch_that_cannot_be_filled_is_noted(bench: Any) -> None:
    _, out, _ = bench(*ONE_GROUP, "batch_size=9")
    assert "note: batch size 9 with only 6 prompts: some slots stay empty, tok/s are those of fewer rows" in out


def test_the_tail_is_kept_apart(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Every look at the clock takes a second, of which a round books five."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    settings = ["matrix={batch_size: [1, 3, 9]}", *ONE_GROUP[1:], "drafters=[{name: prompt-lookup, gamma: 2}]"]
    outcome = run(load_recipe(recipe, settings), tmp_path / "runs", say=None)
    for result in outcome.results:
        assert result.metrics is not None
        b = result.config.batch_size
        lengths = [response["prompt_tokens"] for response in result.responses]
        rounds = batch_rounds(result.records, lengths, result.chunks, b)
        tail = [r for r in rounds if r.occupied < b] if b < 9 else []  # nine slots are never full: all counts
        assert (len(tail) > 0) == (b == 3)
        assert sum(c.tail_emitted for c in result.chunks) == sum(r.emitted for r in tail)
        assert result.metrics.tail_seconds == 5 * len(tail)
        assert result.metrics.decode_seconds == 5 * (len(rounds) - len(tail))
        assert result.metrics.tokens == sum(r.emitted for r in rounds)
        counted = result.metrics.tokens - sum(r.emitted for r in tail)
        assert result.metrics.tokens_per_second == counted / result.metrics.decode_seconds


def test_a_compiled_verifier_says_the_same(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    compiled: list[Any] = []

    def compile_(step: Any, inputs: Any) -> Any:
        compiled.append(step)
        assert not on_the_clock
        return lambda tensors: step(*tensors)

    on_the_clock: list[Cell] = []
    measured = Cell.run

    def run_(self: Cell, chunk: Any) -> None:
        on_the_clock.append(self)
        measured(self, chunk)
        on_the_clock.clear()

    monkeypatch.setattr(fused, "compile_step", compile_)
    monkeypatch.setattr(Cell, "run", run_)
    one = ["sampling.temperature=1", "exclude=[]", "drafters.0={name: prompt-lookup, gamma: 2}"]
    code, out, _ = bench("matrix={compile_verifier: [false, true]}", *one, "verifiers=[token, greedy-block]")
    assert code == 0 and "batch size 1, compile verifier True\n" in out
    assert compiled
    configs = {d: json.loads((d / "config.json").read_text(encoding="utf-8"))["config"] for d in cells(tmp_path)}
    pairs: dict[str, list[dict[Any, list[int]]]] = {}
    for directory, config in configs.items():
        config.pop("compile_verifier")
        pairs.setdefault(json.dumps(config), []).append(said(directory))
    assert len(pairs) == 5 and all(a == b for a, b in pairs.values())


def test_a_verifier_that_is_not_compiled_is_no_other_cell(recipe: str) -> None:
    plain, asked = (load_recipe(recipe, [f"compile_verifier={value}"]).cells()[0] for value in ("false", "true"))
    assert plain.hash != asked.hash
    assert "compile_verifier" not in plain._unlabelled(), "runs from before there was this key would be other cells"


def test_charts_without_matplotlib(bench: Any, monkeypatch: Any) -> None:
    def missing(outcome: Any) -> list[str]:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(run_module, "draw", missing)
    code, out, _ = bench(*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]")
    assert code == 0 and "note: charts need matplotlib: pip install 'crossdraft[plots]'" in out


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_a_drafting_model_of_another_width(bench: Any, models: dict[str, str], name: str) -> None:
    code, out, _ = bench("matrix.batch_size=[2]", f"drafters.1.model={models[name]}")
    assert code == 0 and "16 of 16 responses equal" in out


def test_logits_are_fitted(models: dict[str, str]) -> None:
    own = load_model(models["narrow"], dtype="float32", device="cpu").model
    for width in (64, 80, 60):
        lm = FittedLM(TransformersLM(own, 1, 16), width)
        lm.begin(0, [5, 70, 6])
        logits, _ = lm.grow(torch.tensor([[71, 7]]))
        assert logits.shape == (1, 2, width)
        assert logits[..., 64:].eq(-torch.inf).all() and logits[..., :60].isfinite().all()
        lm.keep([1])
        assert (lm.lengths, lm.passes) == ([3], 1)


@pytest.mark.parametrize(
    "n, batch, sizes",
    [
        (6, 1, [1] * 6),
        (6, 4, [6]),
        (8, 4, [4, 4]),
        (48, 4, [8] * 6),
        (48, 8, [16] * 3),  # two batches each
        (48, 16, [16] * 3),  # one, for three pieces to resample
        (40, 16, [20] * 2),
        (2, 8, [2]),
        (13, 2, [3, 3, 3, 4]),
    ],
)
def test_chunks_fill_the_batch(n: int, batch: int, sizes: list[int]) -> None:
    pieces = chunked(conversations("a" * n), batch)
    assert [len(piece) for piece in pieces] == sizes
    assert [c.prompt.index for piece in pieces for c in piece] == list(range(n))


@pytest.mark.parametrize(
    "categories, batch, pieces",
    [
        ("ab" * 3, 1, ["a", "a", "a", "b", "b", "b"]),
        ("ab" * 7, 1, ["a"] * 5 + ["aa"] + ["b"] * 5 + ["bb"]),  # at most CHUNKS of each
        ("aaabb", 1, ["a", "a", "a", "b", "b"]),  # b is too small for an interval
        ("ab" * 9, 2, ["aaa"] * 3 + ["bbb"] * 3),
        ("ab" * 8, 2, ["aba", "bab", "aba", "bab", "abab"]),
    ],
)
def test_chunks_of_one_category(categories: str, batch: int, pieces: list[str]) -> None:
    found = chunked(conversations(categories), batch)
    assert ["".join(c.prompt.category for c in piece) for piece in found] == pieces
    assert sorted(c.prompt.index for piece in found for c in piece) == list(range(len(categories)))


def conversations(categories: str) -> list[Conversation]:
    return [Conversation(Prompt(i, category, ("hi",), index=i), (9,)) for i, category in enumerate(categories)]
