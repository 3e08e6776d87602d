"""``crossdraft certify``: rows and tables, exit codes, toys from a file, and mistakes that are one sentence."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from certificate_verifiers import AcceptAll, exact, kind_of
from verifier_traits import traits_of

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.contracts.draft_kind import SAMPLED_SIBLINGS, SINGLE_CHILD
from crossdraft.framework.contracts.verifier import VerifierTraits

TOYS = ("T0", "G1", "G2", "G3", "G4", "D6")
GAMMA = {"T0": 2, "G1": 2, "G2": 3, "G3": 2, "G4": 3, "D6": 6}


def run(capsys: Any, options: str, *more: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``crossdraft certify``."""
    code = cli.main(["certify", *options.split(), *more])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def smallest_toy(tmp_path: Path) -> str:
    """A toy file with T0 alone."""
    built_in = json.loads(files("crossdraft.framework.certificate").joinpath("toys.json").read_text(encoding="utf-8"))
    path = tmp_path / "T0.json"
    path.write_text(json.dumps({"T0": built_in["T0"]}), encoding="utf-8")
    return str(path)


def test_by_default_everything_registered_is_certified(capsys: Any, smallest_toy: str) -> None:
    """Each verifier meets every draft it accepts; test_golden.py does so on all toys."""
    code, out, _ = run(capsys, "--json", "--toy", smallest_toy)
    rows = json.loads(out)
    assert code == 0
    for name in plugins.entries("verifiers"):
        rule = plugins.get("verifiers", name)
        accepted = {label for label, kind in DRAFTS.items() if traits_of(rule).accepts_kind(kind_of(kind, rule))}
        if traits_of(rule).modifies_target:
            accepted.remove("stop-early")  # its draft length is not fixed before drafting
        if traits_of(rule).pairs_only:
            accepted.remove("tree-sequoia")  # the root's two children have not one child each
        assert accepted, f"no draft label exercises the verifier {name!r}"
        assert {row["draft"] for row in rows if row["verifier"] == name} == accepted
    assert all(row["lossless"] for row in rows if traits_of(plugins.get("verifiers", row["verifier"])).lossless)


def test_json_rows(capsys: Any, golden: dict) -> None:
    code, out, err = run(capsys, "--json --verifier block --draft chain --steps 2")
    rows = json.loads(out)
    assert code == 0 and re.fullmatch(r"lossless: 6 pairs certified, TV at most \S+\n", err)
    assert [row["toy"] for row in rows] == list(TOYS)
    for row in rows:
        assert set(row) == {
            "toy",
            "draft",
            "verifier",
            "gamma",
            "steps",
            "tv",
            "expected_tau",
            "lossless",
            "drafted",
        } | {"exercised", "coverage"}
        assert (row["draft"], row["verifier"], row["steps"]) == ("chain", "block", 2)
        assert row["gamma"] == GAMMA[row["toy"]]
        assert row["lossless"] is True and row["drafted"] is True and 0 <= row["tv"] <= TOLERANCE
        if row["toy"] != "D6":
            assert row["expected_tau"] == pytest.approx(
                exact(golden["expected_tau"]["block"]["chain"][row["toy"]][:2]), abs=1e-9
            )


def test_table(capsys: Any, install: Callable) -> None:
    class Lossy(AcceptAll):
        name = "lossy"
        traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=False))

    install("verifiers", (Lossy.name, Lossy))
    code, out, _ = run(capsys, "-v --verifier token --verifier greedy --verifier lossy --draft chain --gamma 1")
    assert code == 0  # a verifier declared lossy cannot fail
    lines = out.splitlines()
    assert " ".join(lines[0].split()) == "toy draft verifier gamma steps TV E[tau] per step lossless"
    assert any("token" in line and line.endswith("yes") for line in lines)
    assert any("greedy (temperature 0)" in line and line.endswith("yes") for line in lines)
    assert any("lossy" in line and line.endswith("declared lossy") for line in lines)


def test_broken_promise_is_exit_code_1(capsys: Any, install: Callable) -> None:
    install("verifiers", (AcceptAll.name, AcceptAll))
    code, out, err = run(capsys, "-v --verifier accept-all --draft chain")
    assert code == 1
    assert out.splitlines()[2].endswith("NO")
    code, out, err = run(capsys, "--verifier accept-all")
    assert code == 1 and len(out.splitlines()) < 12 and err.count("\n") == 1
    verdict = out.splitlines()[-1]
    assert re.fullmatch(
        r"FAILED: verifier 'accept-all' changes the target's distribution "
        r"\(TV up to [\d.]+ on toy '\w+' with draft '[\w-]+'\): drafted tokens are accepted "
        "with probability 1: every token is accepted",
        verdict,
    )
    code, out, _ = run(capsys, "--verifier accept-all --draft chain --json")
    assert code == 1
    assert not any(row["lossless"] for row in json.loads(out))


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_crash_is_one_failed_row(capsys: Any, install: Callable, kind: str) -> None:
    class Crashing(AcceptAll):
        name = "crashing"

        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            if kind == "raises":
                raise RuntimeError("boom")
            return Verdict(draft.count, rng.draw(p[:, 0] * float("nan")))

    install("verifiers", (Crashing.name, Crashing))
    options = "--verifier crashing --verifier token --draft chain"
    sentence = "RuntimeError: boom" if kind == "raises" else "NaN or infinite probabilities"
    code, out, _ = run(capsys, options)
    assert code == 3
    verdict = out.splitlines()[-1]
    assert verdict.startswith("ERROR: verifier 'crashing' on toy 'T0' with draft 'chain': ") and sentence in verdict
    assert verdict.endswith("; 5 more pairs raised errors")
    assert any("token" in line and line.endswith("yes") for line in out.splitlines())  # the others still ran
    code, out, _ = run(capsys, options, "--json")
    assert code == 3
    failed = [row for row in json.loads(out) if row["verifier"] == "crashing"]
    assert len(failed) == len(TOYS)
    for row in failed:
        assert (row["tv"], row["expected_tau"], row["lossless"]) == (None, [], False)
        assert sentence in row["error"]


@pytest.mark.parametrize("form", ["", "--json"], ids=["table", "json"])
def test_pairs_that_cannot_run_are_skipped_with_sentence(capsys: Any, install: Callable, form: str) -> None:
    class TreesOnly(AcceptAll):
        name = "trees-only"
        traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SAMPLED_SIBLINGS})))

    install("verifiers", (TreesOnly.name, TreesOnly))
    code, out, err = run(capsys, f"--verifier token --verifier trees-only --draft chain {form}")
    assert code == 0
    assert "trees-only" not in out
    assert "skipped pairs of draft and verifier: 1 incompatible (--verbose lists them)" in err
    code, _, err = run(capsys, f"-v --verifier token --verifier trees-only --draft chain {form}")
    assert err.count("makes 'chain' drafts, but verifier 'trees-only' accepts only: without_replacement") == 1
    code, out, err = run(capsys, f"--verifier trees-only --draft chain {form}")
    assert code == 2 and not out
    assert "accepts only: without_replacement" in err and "all pairs were skipped" in err


def test_verifier_that_cannot_be_loaded_does_not_stop_others(capsys: Any, install: Callable) -> None:
    install("verifiers", ("not-a-class", SimpleNamespace(name="not-a-class")))
    code, out, err = run(capsys, "--json --draft point-mass --gamma 1")
    assert code == 1  # it was to be certified, and was not
    assert {"token", "block"} <= {row["verifier"] for row in json.loads(out)}
    assert "not-a-class" in err
    code, _, err = run(capsys, "--verifier not-a-class")
    assert code == 1 and "unusable" in err


def test_toy_file_round_trip(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "toys.json"
    model = {
        "V": 2,
        "gamma": 1,
        "target_start": ["1/3", "2/3"],
        "target_rows": [[0.25, 0.75], ["1", 0]],
        "draft_start": [0.5, 0.5],
        "draft_rows": [["1/2", "1/2"], ["1/5", "4/5"]],
    }
    path.write_text(json.dumps({"mine": {"model": model, "golden": "ignored"}}), encoding="utf-8")
    code, out, _ = run(capsys, "--json --verifier token --draft chain --draft chain", "--toy", str(path))
    assert code == 0
    (row,) = json.loads(out)
    assert (row["toy"], row["gamma"]) == ("mine", 1)
    assert row["expected_tau"] == pytest.approx([1 / 3 + 1 / 2], abs=1e-12)  # sum over x of min(p, q)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--verifier blok", "did you mean 'block'?"),
        ("--draft chian", "did you mean 'chain'?"),
        ("--toy no-such-file.json", "cannot read toy file no-such-file.json"),
        ("--gamma 24", "lower the draft length with --gamma (now 24)"),
        ("--steps 9", "lower --steps (now 9)"),
        ("--gamma 1" + "0" * 30, "2 to the power of about 10^30 outputs"),
        ("--steps 1000000000", "about 10^903,089,987 outputs"),
        (
            "--gamma 9 --draft iid-2 --verifier specinfer",
            "T0, iid-2: there may be 268,435,456 decision paths",
        ),
        ("--drafter draft-model --draft chain", "--draft chain has no effect with --drafter; remove it"),
        ("--drafter-option gamma=2", "--drafter-option gamma=2 has no effect without --drafter"),
    ],
)
def test_usage_errors(capsys: Any, options: str, sentence: str) -> None:
    code, out, err = run(capsys, options)
    assert code == 2 and not out
    assert sentence in err and err.count("\n") == 1
