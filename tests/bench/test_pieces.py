"""Hooks, tails, compiled verifiers, models of other widths, and division into pieces."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.framework import plugins
from crossdraft.framework.api.cell_runner import Conversation
from crossdraft.framework.bench.cells.cell_runner import Cell
from crossdraft.framework.bench.cells.conversations import cut_pieces
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.cost.finished_cells import batch_steps
from crossdraft.framework.engine import compiled_verifier, decoder, stopwatch
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.lm.vocab_adapter import FittedLM
from crossdraft.framework.models.load import load_model
from crossdraft.framework.recipe.prompts import Prompt


def test_plugins_receive_events(recipe: str, tmp_path: Path) -> None:
    events: list[Any] = []

    def crossdraft_run_started(run: Any) -> None:
        events.append(run["cells"])

    def crossdraft_cell_finished(run: Any, cell: Any) -> None:
        events.append((cell["config"]["drafter"]["name"], cell["metrics"]["steps"] > 0))

    hooks = {f.__name__: hookimpl(f) for f in (crossdraft_run_started, crossdraft_cell_finished)}
    plugin = SimpleNamespace(**hooks)
    plugins.manager().register(plugin, "listener")
    try:
        settings = [*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]"]
        outcome = run(load_recipe(recipe, settings), tmp_path / "runs", log=None)
    finally:
        plugins.manager().unregister(plugin)
    assert events == [2, ("none", True), ("prompt-lookup", True)]
    assert outcome.exit_code == 0 and len(outcome.results) == 2


def test_batch_that_cannot_be_filled_is_noted(bench: Any) -> None:
    _, out, _ = bench(*ONE_GROUP, "batch_size=9")
    assert "note: batch size 9 with only 6 prompts: some slots stay empty; tok/s are those of a smaller batch" in out


def test_tail_is_kept_apart(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Each reading of the clock takes a second; a step reads it seven times."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(decoder, "FIRST", 0)  # a validated step looks once more
    monkeypatch.setattr(decoder, "EVERY", 10**9)
    settings = ["matrix={batch_size: [1, 3, 9]}", *ONE_GROUP[1:], "drafters=[{name: prompt-lookup, gamma: 2}]"]
    outcome = run(load_recipe(recipe, settings), tmp_path / "runs", log=None)
    for result in outcome.results:
        assert result.metrics is not None
        b = result.config.batch_size
        lengths = [response["prompt_tokens"] for response in result.responses]
        steps_run = batch_steps(result.records, lengths, result.pieces, b)
        tail = [r for r in steps_run if r.occupied < b] if b < 9 else []  # nine slots are never full: all counts
        assert (len(tail) > 0) == (b == 3)
        assert sum(c.tail_emitted for c in result.pieces) == sum(r.emitted for r in tail)
        # Work after `on_step` is counted with the next step; the first step has no predecessor.
        steps = [row for piece in result.pieces for rows in piece.steps.values() for row in rows]
        assert len(steps) == len(steps_run) - len(tail) and {6e6, 7e6} >= {sum(row[:4]) for row in steps}
        begins = [row[5:] for row in steps if len(row) > 5]  # the tokens of its prompts, a second for each
        fed = sum(response["prompt_tokens"] for response in result.responses)
        assert sum(tokens for tokens, _ in begins) == fed or tail
        assert sum(seconds for _, seconds in begins) == 1e6 * result.metrics.sequences or tail
        prefills = result.metrics.sequences  # a second of drafter prefill each
        total = result.metrics.decode_seconds + result.metrics.tail_seconds
        assert 6 * len(steps_run) <= total - prefills <= 7 * len(steps_run)
        assert result.metrics.tokens == sum(r.emitted for r in steps_run)
        counted = result.metrics.tokens - sum(r.emitted for r in tail)
        assert result.metrics.tokens_per_second_wall == counted / result.metrics.decode_seconds


@pytest.mark.slow
def test_compiled_verifier_gives_same_output(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    compiled: list[Any] = []

    def compile_(step: Any, inputs: Any) -> Any:
        compiled.append(step)
        assert not on_the_clock
        return lambda tensors: step(*tensors)

    on_the_clock: list[Cell] = []
    measured = Cell.run

    def run_(self: Cell, piece: Any) -> Any:
        on_the_clock.append(self)
        result = measured(self, piece)
        on_the_clock.clear()
        return result

    monkeypatch.setattr(compiled_verifier, "compile_function", compile_)
    monkeypatch.setattr(Cell, "run", run_)
    one = ["sampling.temperature=1", "exclude=[]", "drafters.0={name: prompt-lookup, gamma: 2}"]
    code, out, _ = bench("matrix={compile_verifier: [false, true]}", *one, "verifiers=[token, greedy-block]")
    assert code == 0 and "batch size 1, compile verifier True\n" in out
    assert compiled
    configs = {d: json.loads((d / "config.json").read_text(encoding="utf-8"))["config"] for d in cells(tmp_path)}
    pairs: dict[str, list[dict[Any, list[int]]]] = {}
    for directory, config in configs.items():
        config.pop("compile_verifier")
        pairs.setdefault(json.dumps(config), []).append(output(directory))
    assert len(pairs) == 5 and all(a == b for a, b in pairs.values())


@pytest.mark.parametrize("key, usual, other", [("compile_verifier", "false", "true"), ("prefill_tokens", "1024", "0")])
def test_default_of_new_key_keeps_cell_hash(recipe: str, key: str, usual: str, other: str) -> None:
    plain, changed = (expand(load_recipe(recipe, [f"{key}={value}"])).cells[0] for value in (usual, other))
    assert plain.hash != changed.hash
    assert key not in plain._unlabelled(), "runs from before there was this key would be other cells"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_drafting_model_of_another_width(bench: Any, models: dict[str, str], name: str) -> None:
    code, out, _ = bench("matrix.batch_size=[2]", f"drafters.1.model={models[name]}")
    assert code == 0 and "16 of 16 responses equal" in out


def test_logits_are_fitted(models: dict[str, str]) -> None:
    own = load_model(models["narrow"], dtype="float32", device="cpu").model
    for width in (64, 80, 60):
        lm = FittedLM(TransformersLM(own, 1, 16), width)
        lm.start(0, [5, 70, 6])
        logits, _ = lm.forward(torch.tensor([[71, 7]]))
        assert logits.shape == (1, 2, width)
        assert logits[..., 64:].eq(-torch.inf).all() and logits[..., :60].isfinite().all()
        lm.commit([1])
        assert (lm.lengths, lm.passes) == ([3], 1)


@pytest.mark.parametrize(
    "n, batch, sizes",
    [
        (6, 1, [1] * 6),
        (6, 4, [6]),
        (8, 4, [4, 4]),
        (48, 1, [1] * 48),
        (48, 4, [8] * 6),
        (48, 8, [16] * 3),  # two batches each
        (48, 16, [16] * 3),  # one, for three pieces to resample
        (40, 16, [20] * 2),
        (2, 8, [2]),
        (13, 2, [3, 3, 3, 4]),
    ],
)
def test_pieces_fill_batch(n: int, batch: int, sizes: list[int]) -> None:
    pieces = cut_pieces(conversations("a" * n), batch, Random(0))
    assert sorted(len(piece) for piece in pieces) == sizes
    order = [c.prompt.index for piece in pieces for c in piece]
    assert sorted(order) == list(range(n)) and (order != sorted(order) or n < 3)
    assert cut_pieces(conversations("a" * n), batch, Random(0)) == pieces  # the same after an interruption


@pytest.mark.parametrize(
    "categories, batch, pieces",
    [
        ("ab" * 3, 1, ["a", "a", "a", "b", "b", "b"]),
        ("ab" * 7, 1, ["a"] * 7 + ["b"] * 7),
        ("aaabb", 1, ["a", "a", "a", "b", "b"]),  # b is too small for an interval
        ("ab" * 9, 2, ["aaa"] * 3 + ["bbb"] * 3),
        ("ab" * 8, 2, ["aab", "aab", "abb", "abb", "aabb"]),  # some of each
    ],
)
def test_pieces_of_one_category(categories: str, batch: int, pieces: list[str]) -> None:
    result = cut_pieces(conversations(categories), batch, Random(0))
    shown = ["".join(sorted(c.prompt.category for c in piece)) for piece in result]
    assert sorted(shown) == sorted(pieces)
    assert sorted(c.prompt.index for piece in result for c in piece) == list(range(len(categories)))


def conversations(categories: str) -> list[Conversation]:
    return [Conversation(Prompt(i, category, ("hi",), index=i), (9,)) for i, category in enumerate(categories)]
