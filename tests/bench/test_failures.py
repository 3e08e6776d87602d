"""Failures in a run (a cell, a model, the disk), and interruptions."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from tiny_runs import ONE_GROUP, cells, output

from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.contracts.draft_kind import SINGLE_CHILD
from crossdraft.framework.contracts.verifier import VerifierTraits
from crossdraft.framework.runs.run_directory import RunDirectory
from crossdraft.verifiers.token import Token


class Broken(Token):
    """Fails in the middle of a step, with uncommitted nodes in the target's cache."""

    name = "broken"
    calls = 0

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        type(self).calls += 1
        if self.calls > 25:
            raise RuntimeError("it broke\nin many lines")
        return super().verify(draft, p, rng)


class Interrupting(PromptLookup):
    """Raises KeyboardInterrupt while its third batch is decoded."""

    name = "interrupting"
    steps = 0

    def propose(self, sequences: Any, rng: Any) -> Any:
        type(self).steps += sequences.batch_size == 3
        if self.steps > 9:
            os.kill(os.getpid(), signal.SIGINT)
        return super().propose(sequences, rng)


def test_failing_cell_does_not_disturb_others(bench: Any, tmp_path: Path, install: Any) -> None:
    assert bench(*ONE_GROUP)[0] == 0
    expected = {d.name: output(d) for d in cells(tmp_path)}
    shutil.rmtree(tmp_path / "runs")

    Broken.calls = 0
    install("verifiers", ("broken", Broken))
    code, out, err = bench(*ONE_GROUP[:-1], "verifiers=[broken, token, block]", "drafters.0.gamma=10")
    assert code == 1
    assert "failed: prompt-lookup × broken (temperature 1, batch size 1), draft-model × broken (temperature 1" in out
    assert "RuntimeError: it broke\n" in out and "in many lines" not in out
    assert "2 of 7 cells failed" in err
    assert "failed: prompt-lookup × broken (not certified): RuntimeError: it broke\n" in err  # at once
    failed = [d for d in cells(tmp_path) if (d / "error.txt").is_file()]
    assert {d.name: output(d) for d in cells(tmp_path) if d not in failed} == expected
    for directory in failed:
        text = (directory / "error.txt").read_text(encoding="utf-8")
        assert text.startswith("RuntimeError: it broke\n\nTraceback") and 'raise RuntimeError("it broke' in text

    # A failed cell fails again only if configured.
    calls = Broken.calls
    code, out, err = bench(*ONE_GROUP[:-1], "verifiers=[broken, token, block]", "drafters.0.gamma=10")
    assert code == 1 and Broken.calls == calls and "RuntimeError: it broke" in out
    assert "reusing 7 cells, 2 cells failed before; use --retry-failed to measure again" in err
    settings = [*ONE_GROUP[:-1], "verifiers=[broken, token, block]", "drafters.0.gamma=10"]
    code, _, err = bench(*settings, flags=["--retry-failed", "--fail-fast", "--debug"])
    assert code == 1 and Broken.calls > calls and "Traceback" in err
    assert err.endswith("broken (not certified) failed; the run was stopped (--fail-fast)\n")


class Hungry(Token):
    """Runs out of memory when three rows are verified."""

    name = "hungry"

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        if draft.batch_size == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().verify(draft, p, rng)


def test_only_cell_out_of_memory_fails_and_reports_its_need(bench: Any, install: Any) -> None:
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
    assert "cache 0.00 GB (3 slots of " in out and "(3 × 11 positions); this is less than the " in out


class Lax(Token):
    """Declares itself lossy."""

    name = "lax"
    traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=False))


def test_lossy_verifier_is_marked(bench: Any, install: Any) -> None:
    install("verifiers", ("lax", Lax))
    _, out, _ = bench(*ONE_GROUP[:-1], "verifiers=[token, lax]", "drafters=[prompt-lookup]")
    assert "prompt-lookup  lax (lossy)  " in out
    assert "lossy verifiers change the target's distribution" in out


def test_records_that_cannot_be_written(bench: Any, monkeypatch: Any) -> None:
    def full(self: Any, result: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDirectory, "save", full)
    code, out, err = bench(*ONE_GROUP[:-1], "verifiers=[token]", "drafters=[prompt-lookup]")
    assert code == 1 and "\n\ntemperature 1, batch size 1\n" in out  # the table, all the same
    assert err.endswith("cells/: No space left on device\n") or "No space left on device" in err


def test_nan_is_one_sentence(bench: Any, models: dict[str, str]) -> None:
    code, out, _ = bench(*ONE_GROUP, f"target={models['nan']}", "drafters=[prompt-lookup]")
    assert code == 1
    assert "NaN or infinite logits for warm-up prompt at position" in out
    assert "speed-up" not in out


def test_nan_in_drafting_model(bench: Any, models: dict[str, str]) -> None:
    code, out, _ = bench(*ONE_GROUP, f"drafters.1.model={models['nan']}")
    assert code == 1 and "drafter 'draft-model' produced NaN or infinite logits for warm-up prompt at" in out
    assert "prompt-lookup  block" in out  # the others finished


def test_models_that_do_not_fit(bench: Any, models: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    """Rejected before anything is measured, with the line in the recipe."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what lies beside a checkout is unknown
    first = f"drafters.0={{name: draft-model, model: {models['same']}}}"
    code, out, err = bench(*ONE_GROUP, first, f"drafters.1.model={models['other']}")
    assert (code, out) == (1, "") and f"--set drafters.1.model={models['other']}: '{models['other']}'" in err
    assert f"cannot draft for '{models['target']}': the tokenizers differ: 'w5' has id 5" in err
    _, _, err = bench(*ONE_GROUP, f"drafters.1.model={models['short']}")
    assert f"'{models['short']}' has a context of 16 tokens, but sequences reach " in err
    code, _, err = bench(*ONE_GROUP, "device=gpu")
    assert code == 2 and "error: --set device=gpu: unknown device 'gpu'; use auto, cpu, cuda or cuda:0" in err
    code, _, err = bench(*ONE_GROUP, "target=../", "drafters=[prompt-lookup]")
    assert code == 1 and "error: --set target=../: .. is not a model directory: config.json is missing" in err


def test_prompt_longer_than_context(bench: Any, tmp_path: Path, models: dict[str, str], write_prompts: Any) -> None:
    write_prompts(tmp_path / "prompts.jsonl", n=2, length=120)
    code, _, err = bench(*ONE_GROUP)
    assert code == 2
    assert f"prompt 'q0', turn 1 has 122 tokens, but the context length of {models['target']} is 96; shorten" in err


def test_wrong_requests(bench: Any, tmp_path: Path) -> None:
    code, out, err = bench("max_new_token=1")
    assert (code, out) == (2, "")
    sentence = "--set max_new_token=1: unknown key 'max_new_token'; did you mean 'max_new_tokens'?"
    assert err == f"crossdraft: error: {sentence}\n"
    (tmp_path / "prompts.jsonl").write_text('{"turns": 1}\n', encoding="utf-8")
    code, _, err = bench()
    sentence = f"{tmp_path}/prompts.jsonl:1: 'turns' must be a list of texts and must not be empty"
    assert code == 2 and err == f"crossdraft: error: {sentence}\n"
    (tmp_path / "prompts.jsonl").unlink()
    assert "recipe.yaml:4: prompt file" in bench()[2]
    (tmp_path / "runs").write_text("", encoding="utf-8")
    assert "cannot be created" in bench("prompts=builtin")[2]


def test_interruption_keeps_finished_groups(bench: Any, tmp_path: Path, install: Any) -> None:
    Interrupting.steps = -2  # of the warm-up
    install("drafters", ("interrupting", Interrupting))
    settings = ["matrix={batch_size: [1, 3]}", *ONE_GROUP[1:], "drafters=[interrupting]"]
    code, out, _ = bench(*settings)
    assert code == 130
    assert "batch size 1\n" in out and "interrupted: " in out
    assert len(cells(tmp_path)) == 3 and not list(tmp_path.glob("runs/*/cells/.*"))
    Interrupting.steps = -1000
    code, out, err = bench(*settings)
    assert code == 0 and "reusing 3 cells" in err and "batch size 3\n" in out
