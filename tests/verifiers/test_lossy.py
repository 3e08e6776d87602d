"""The lossy rules: their thresholds, and that they never hide what they are."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lossy_reference import CHAINS, LOSSY, TOYS, TREE_RULES, Recording, rule, shipped_rng
from pydantic import ValidationError

from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import StepRecord, measure
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.recipe.recipe import CellConfig, Recipe
from crossdraft.framework.report.tables import summary_markdown, terminal
from crossdraft.framework.runs.records import CellResult

# -- typical acceptance: the threshold ------------------------------------------------------------------


@pytest.mark.parametrize(
    "probs, entropy, threshold",
    [
        ([1 / 2, 1 / 3, 1 / 6], 1.011404264707, 0.09),
        ([0.2, 0.6, 0.2], 0.950270539233, 0.09),
        ([1 / 4] * 4, 1.386294361120, 0.075),
        ([0.97, 0.01, 0.01, 0.01], 0.167700536840, 0.09),
        ([0.0, 1.0, 0.0], 0.0, 0.09),
    ],
)
def test_typical_threshold(probs: list[float], entropy: float, threshold: float) -> None:
    p = torch.tensor(probs, dtype=torch.float64)
    assert rule("typical").threshold(p).item() == pytest.approx(threshold, abs=1e-12)
    # With epsilon out of the way the threshold shows the entropy, in nats.
    assert rule("typical", epsilon=1).threshold(p).item() == pytest.approx(0.3 * math.exp(-entropy), abs=1e-12)
    v = len(probs)
    draft = Draft.chain(torch.arange(v)[:, None], torch.ones(v, dtype=torch.long))
    verdict = rule("typical").verify(draft, p.expand(v, 2, v), shipped_rng(0, range(v)))
    assert verdict.length.tolist() == [int(x > threshold) for x in probs]


def test_threshold_itself_does_not_pass() -> None:
    p = torch.tensor([[[0.0625, 0.9375]] * 2], dtype=torch.float64)
    for epsilon, tau in ((0.0625, 0), (0.0624, 1)):
        draft = Draft.chain(torch.tensor([[0]]), torch.tensor([1]))
        verdict = rule("typical", epsilon=epsilon, delta=0.9).verify(draft, p, shipped_rng(0, [0]))
        assert verdict.length.tolist() == [tau]


def test_next_token_is_drawn_among_typical_ones() -> None:
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    rng = Recording()
    rule("typical", epsilon=0.2, delta=0.9).verify(Draft.empty(1), p[None], rng)
    assert rng.weights[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_flat_distribution_has_typical_tokens(dtype: torch.dtype) -> None:
    """Delta exp(-H) is all but 1 / V here, and rounding may put every token below it."""
    for v in range(1, 200):
        p = torch.full((1, 1, v), 1 / v, dtype=dtype)
        rng = Recording()
        rule("typical", epsilon=1, delta=1 - 1e-12).verify(Draft.empty(1), p, rng)
        assert rng.weights.isfinite().all() and (rng.weights > 0).all()


# -- top-k and rollback ---------------------------------------------------------------------------------


def lengths(name: str, probs: list[float], **options: Any) -> list[int]:
    """Tau of every one-token draft."""
    v, p = len(probs), torch.tensor(probs, dtype=torch.float64)
    draft = Draft.chain(torch.arange(v)[:, None], torch.ones(v, dtype=torch.long))
    return rule(name, **options).verify(draft, p.expand(v, 2, v), shipped_rng(0, range(v))).length.tolist()


def test_top_k_by_hand() -> None:
    probs = [0.1, 0.4, 0.1, 0.2, 0.15, 0.05]  # ln 2 = 0.69, ln 4 = 1.39 behind
    assert lengths("top-k", probs) == [0, 1, 0, 1, 1, 0]
    assert lengths("top-k", probs, tolerance=0.69) == [0, 1, 0, 0, 0, 0]
    assert lengths("top-k", probs, tolerance=0.70) == [0, 1, 0, 1, 0, 0]
    assert lengths("top-k", probs, k=4, tolerance=2) == [1, 1, 0, 1, 1, 0]  # of equals the lowest id is in
    assert lengths("top-k", probs, k=2, tolerance=2) == [0, 1, 0, 1, 0, 0]
    assert lengths("top-k", probs, k=99, tolerance=1e9) == [1] * 6
    assert lengths("top-k", [0.0, 1.0, 0.0], tolerance=1e9) == [0, 1, 0]  # never a token of probability 0


def test_rollback_by_hand() -> None:
    probs = [0.5, 0.25, 0.2, 0.05, 0.0]  # surprises 0.69, 1.39, 1.61, 3.0, inf
    assert lengths("bild", probs) == [1, 1, 1, 1, 0]
    assert lengths("bild", probs, rollback=1.4) == [1, 1, 0, 0, 0]
    assert lengths("bild", probs, rollback=0) == [1, 0, 0, 0, 0]  # what would be replaced by itself stays
    assert lengths("bild", [0.0, 1.0]) == [0, 1]


def test_rollback_drops_later_tokens() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.5, 0.499, 0.001], [0.1, 0.2, 0.7], [0.1, 0.8, 0.1]]])
    for x, tau, token in ([1, 0, 2], 3, 1), ([1, 2, 2], 1, 0), ([2, 1, 0], 3, 1):
        verdict = rule("bild").verify(Draft.chain(torch.tensor([x]), torch.tensor([3])), p, Recording())
        assert (verdict.length.item(), verdict.token.item()) == (tau, token)


@pytest.mark.parametrize(
    "name, options",
    [
        ("lenient", {"lenience": 0}),
        ("lenient", {"lenience": 1.1}),
        ("typical", {"epsilon": 0}),
        ("typical", {"delta": 1}),
        ("top-k", {"k": 0}),
        ("top-k", {"tolerance": -1}),
        ("bild", {"rollback": math.inf}),
        ("bild", {"fallback": 0.6}),
    ],
)
def test_impossible_settings(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rule(name, **options)


# -- never without saying so ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSY)
def test_command_reports_declared_lossy(capsys: Any, name: str) -> None:
    labels = [part for label in (*CHAINS, "iid-2", "tree-top-2-1") for part in ("--draft", label)]
    assert cli.main(["certify", "-v", "--verifier", name, *labels, "--gamma", "1"]) == 0
    *lines, _, verdict = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == (len(TOYS) + 1) * (4 if name in TREE_RULES else 2)
    for line in lines:
        assert line.endswith("declared lossy")
    assert verdict == f"lossy: nothing to certify; {len(lines)} pairs declared lossy"


def test_json_does_not_call_them_lossless(capsys: Any) -> None:
    verifiers = [part for name in LOSSY for part in ("--verifier", name)]
    assert cli.main(["certify", *verifiers, "--draft", "chain", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(LOSSY) * (len(TOYS) + 1)  # one for deep drafts
    assert not any(row["lossless"] for row in rows)


def test_tables_mark_them(tmp_path: Path) -> None:
    """In the table and wherever two verifiers are compared; a label does not hide it."""

    def result(drafter: str, verifier: Any, tau: int = 1) -> CellResult:
        config = CellConfig.model_validate({"target": "toy", "drafter": drafter, "verifier": verifier})
        records = [StepRecord(0, "q", "", 0, i, tau, tau + 1, 2, 2, 9) for i in range(3)]
        seconds = {"draft": 0.0, "target": 1.0, "verify": 0.0, "rest": 0.0, "prefill": 0.0}
        return CellResult(config, measure(records, [Piece(3 * tau + 3, seconds)]), records=records)

    strict = result("prompt-lookup", "token")
    lossy = [result("prompt-lookup", {"name": name, "label": f"my {name}"}, 2) for name in LOSSY]
    recipe = Recipe.model_validate({"target": "toy", "drafters": ["prompt-lookup"], "verifiers": ["token"]})
    for report in (terminal, summary_markdown):
        text = report(Summary(recipe, tmp_path, [result("none", "token"), strict, *lossy]))
        assert "token (lossy)" not in text
        for name in LOSSY:
            assert text.count(f"my {name}") == text.count(f"my {name} (lossy)") > 0
            assert report is terminal or f"BE of my {name} (lossy) − token, on the same prompts" in text
        assert "lossy verifiers change the target's distribution" in text
        assert "lossy" not in report(Summary(recipe, tmp_path, [result("none", "token"), strict]))
