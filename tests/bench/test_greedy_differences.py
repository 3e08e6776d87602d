"""Greedy responses that differ from plain decoding are ties within rounding or faults, by the target's own logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.framework import plugins
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.framework.contracts.draft import Draft, Verdict
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.models import device
from crossdraft.framework.models.chat import encode
from crossdraft.framework.models.load import load_model
from crossdraft.framework.report.answer import best_of
from crossdraft.framework.report.tables import terminal
from crossdraft.framework.report.write import write_summary


class Shifted(plugins.get("verifiers", "token")):
    """Emits the token after the right one."""

    name = "shifted"

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        verdict = super().verify(draft, p, rng)
        return Verdict(verdict.length, (verdict.token + 1) % p.shape[-1])


SETTINGS = ["matrix={batch_size: [2]}", "exclude=[]", "sampling.temperature=0", "verifiers=[greedy, shifted]"]


@pytest.mark.parametrize("explained", [False, True])
def test_differences_are_decided(
    recipe: str, models: dict[str, str], tmp_path: Path, install: Any, monkeypatch: Any, explained: bool
) -> None:
    install("verifiers", ("shifted", Shifted))
    if explained:
        monkeypatch.setitem(device.TIE, "float32", 1e9)
    drafter = f"drafters=[{{name: draft-model, model: {models['narrow']}, gamma: 1}}]"
    outcome = run(load_recipe(recipe, [*SETTINGS, drafter]), tmp_path / "runs", log=None, validate="never")
    assert not outcome.failed, outcome.failed[0].traceback
    write_summary(outcome)
    (directory,) = tmp_path.glob("runs/*")
    finished = read_run(directory)  # what is decided is in the records
    plain, greedy, wrong = finished.summary.results
    assert plain.metrics and greedy.metrics and wrong.metrics
    assert (greedy.metrics.same_as_baseline, greedy.metrics.ties, greedy.metrics.faults) == (1, 0, 0)
    metrics, expected = wrong.metrics, {(r["question_id"], r["turn"]): r for r in plain.responses}
    pairs = [(r, expected[r["question_id"], r["turn"]]) for r in wrong.responses]
    differ = [(r, e) for r, e in pairs if r["tokens"] != e["tokens"]]
    assert len(differ) == 8 and metrics.undecided == 0
    assert (metrics.ties, metrics.faults) == ((8, 0) if explained else (0, 8))

    target = load_model(models["target"], dtype="float32", device="cpu")
    prompts = {prompt.question_id: prompt for prompt in load_recipe(recipe).selected_prompts.load()}
    gaps = []
    for response, other in differ:
        if response["turn"]:
            assert "difference" not in response  # its prompt holds another answer
            continue
        shared = response["difference"]["token"]
        assert response["tokens"][:shared] == other["tokens"][:shared]
        prefix = [*encode(target.tokenizer, prompts[response["question_id"]].turns[:1], []), *other["tokens"][:shared]]
        logits = target.model(torch.tensor([prefix])).logits[0, -1].detach()
        gaps.append(abs(float(logits[response["tokens"][shared]] - logits[other["tokens"][shared]])))
        assert response["difference"]["gap"] == pytest.approx(gaps[-1], abs=1e-4)
    assert len(gaps) == 6 and metrics.largest_gap == pytest.approx(max(gaps), abs=1e-4)

    text = terminal(finished.summary)
    if explained:
        assert "8 of 16 responses equal those of plain decoding, token for token; 8 differ, all at ties" in text
        assert f"within rounding (largest gap {metrics.largest_gap:.2g})" in text
    else:
        assert "FAULT: 8 of 8 responses of draft-model × shifted" in text.partition("\n\n")[2]
        assert [best.pair.split()[-1] for best in best_of(finished.summary.groups)] == ["greedy"]
