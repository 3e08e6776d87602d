"""Forty mistakes in the code of the core and the companions, each of which the tests named beside it must find.

``pytest -n0 -m slow tests/test_seeded_mistakes.py -k NAME`` copies the repository, makes the mistake in the copy and
runs these tests there. Run it before and after a change to the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ADVISOR, DRAFTERS = "plugins/crossdraft-advisor", "plugins/crossdraft-drafters"
PACKAGES = "plugins/test_packages.py"


class Mistake(NamedTuple):
    """``before``, which occurs once in ``file``, replaced by ``after``; ``tests``: files that find it."""

    file: str
    before: str
    after: str
    tests: str


GOLDEN, MUTANTS = "tests/verifiers/test_golden.py", "tests/verifiers/test_merged_sequences.py"
MISTAKES = {
    "token-accepts-less": Mistake(
        "verifiers/token.py", "ratios(draft, p).clamp_(max=1)", "ratios(draft, p).mul_(0.95).clamp_(max=1)", GOLDEN
    ),
    "residual-is-the-target": Mistake(
        "verifiers/_chain.py", "minus = (tau < draft.count)", "minus = (tau < 0)", GOLDEN
    ),
    "block-residual-unscaled": Mistake(
        "verifiers/block.py", "(tau < draft.count) / scale", "(tau < draft.count) / scale**0", GOLDEN
    ),
    "joint-above-one": Mistake(
        "verifiers/_chain.py", "cummax(1).values.clamp_(min=1)", "cummax(1).values.clamp_(min=0.9)", GOLDEN
    ),
    "rejected-child-keeps-its-mass": Mistake(
        "verifiers/specinfer.py", "residual(target, q)[0], target)", "target, target)", GOLDEN
    ),
    "merged-sequences-not-renormalised": Mistake(
        "verifiers/_tree.py", "torch.where(mass > 0, q / mass, q)", "torch.where(mass > 0, q, q)", f"{GOLDEN} {MUTANTS}"
    ),
    "match-forced-where-active": Mistake(
        "verifiers/sample_match.py", "force_token(target, token, ~active)", "force_token(target, token, active)", GOLDEN
    ),
    "greedy-counts-behind-a-miss": Mistake(
        "verifiers/greedy.py",
        "matches.long().cumprod(1).sum(1)",
        "matches.long().sum(1)",
        "tests/engine/test_decoder.py",
    ),
    "typical-without-epsilon": Mistake(
        "verifiers/typical.py", ".clamp(max=self.config.epsilon)", "", "tests/verifiers/test_lossy_by_hand.py"
    ),
    "lookup-swaps-first-and-latest": Mistake(
        "drafters/retrieval/prompt_lookup.py",
        "self.continuations[gram] = (first, end)",
        "self.continuations[gram] = (end, first)",
        "tests/drafters/test_prompt_lookup.py",
    ),
    "confidence-drops-the-last": Mistake(
        "drafters/autoregressive/policies.py",
        'threshold, stop == "after"',
        'threshold, stop == "before"',
        "tests/drafters/test_confidence.py",
    ),
    "heuristic-shrinks-twice": Mistake(
        "drafters/autoregressive/policies.py",
        "MORE, FEWER = 2, 1",
        "MORE, FEWER = 2, 2",
        "tests/drafters/test_heuristic.py",
    ),
    "nan-of-nodes-is-ignored": Mistake(
        "framework/engine/step.py",
        "return finite[:, 0] & (valid <= finite[:, 1:]).all(1)",
        "return finite[:, 0]",
        "tests/engine/test_decoding_errors.py",
    ),
    "philox-key": Mistake("framework/contracts/rng.py", "0xBB67AE85", "0xBB67AE84", "tests/contracts/test_rng.py"),
    "draw-beyond-the-vocabulary": Mistake(
        "framework/contracts/rng.py",
        "inside.masked_fill_(beyond[block], 0.0)",
        "inside.masked_fill_(beyond[block], 1.0)",
        "tests/contracts/test_rng.py",
    ),
    "window-one-too-wide": Mistake(
        "framework/lm/attention_masks.py",
        "queries - keys < self.window",
        "queries - keys <= self.window",
        "tests/lm/test_kv_cache.py tests/engine/test_decoder.py",
    ),
    "chunks-slide": Mistake(
        "framework/lm/attention_masks.py",
        "queries // self.chunk == keys // self.chunk",
        "queries - keys < self.chunk",
        "tests/lm",
    ),
    "tree-positions-of-keys": Mistake(
        "framework/lm/attention_masks.py",
        "depth.gather(1, (node - 1).clamp_(0, total - 1))",
        "(node - 1).clamp_(0, total - 1)",
        "tests/lm tests/engine/test_decoder.py",
    ),
    "intervals-too-narrow": Mistake(
        "framework/metrics/intervals.py", "FREEDOM = 0.6", "FREEDOM = 2.0", "tests/metrics/test_intervals.py"
    ),
    "acceptance-counts-the-bonus": Mistake(
        "framework/metrics/cell_metrics.py",
        "row[1 : record.tau + 1] += 1",
        "row[1 : record.tau + 2] += 1",
        "tests/metrics/test_cell_metrics.py",
    ),
    "shorter-drafts-not-eased": Mistake(
        f"{ADVISOR}/crossdraft_advisor/shorter_drafts.py",
        "_EASE = 0.4",
        "_EASE = -0.4",
        f"{ADVISOR}/tests/test_shorter_drafts.py",
    ),
    "pays-up-to-the-least": Mistake(
        "framework/report/batch_sizes.py", "last == max(measured", "last == min(measured", "tests/report"
    ),
    "latex-bracket": Mistake(
        "framework/util/table.py",
        'if line.lstrip().startswith("[")',
        'if line.startswith("[[")',
        "tests/util/test_table.py",
    ),
    "dead-end-goes-on": Mistake(
        "framework/engine/constraints.py",
        "if following.any():",
        "if following is not None:",
        "tests/api/test_constraint.py",
    ),
    "stop-string-across-tokens": Mistake(
        "framework/api/detokenizer.py",
        "max(map(len, self._stop), default=1) + 1)",
        "0)",
        "tests/api/test_detokenizer.py",
    ),
    "unequal-q-not-required": Mistake(
        "framework/certificate/certify.py",
        "self.share < UNEQUAL_SHARE",
        "self.share < 0",
        "tests/certificate",
    ),
    "merged-tree-keeps-orphans": Mistake(
        "plugins/crossdraft-combine/crossdraft_combine/merging.py",
        "if token < 0 or (parent >= 0 and merged_parent < 0):",
        "if token < 0:",
        PACKAGES,
    ),
    "recycling-too-deep": Mistake(
        f"{DRAFTERS}/crossdraft_drafters/token_recycling.py",
        "(limit > level)",
        "(limit >= level)",
        f"{DRAFTERS}/tests/test_token_recycling.py {DRAFTERS}/tests/test_contract.py",
    ),
    "suffix-forgets-the-path": Mistake(
        "plugins/crossdraft-suffix/crossdraft_suffix/speculation.py",
        "probability * len(group) / len(rows)",
        "len(group) / len(rows)",
        PACKAGES,
    ),
    "rest-counts-ended-texts": Mistake(
        "plugins/crossdraft-rest/crossdraft_rest/trie.py", "* (column[starts] != END)", "", PACKAGES
    ),
    "gradient-with-the-wrong-sign": Mistake(
        "plugins/crossdraft-trainers/crossdraft_trainers/losses.py",
        "slope = q - p",
        "slope = p - q",
        "plugins/crossdraft-trainers/tests/test_training_heads.py plugins/crossdraft-trainers/tests/test_training.py",
    ),
    "other-sites-may-ask": Mistake(
        "plugins/crossdraft-server/crossdraft_server/access.py",
        "_netloc(origin) != host.lower()",
        "not _netloc(origin)",
        "plugins/crossdraft-server/tests/test_access.py",
    ),
    "acceptance-by-depth-from-zero": Mistake(
        "plugins/crossdraft-cluster/crossdraft_cluster/numbers.py",
        "enumerate(value, 1)",
        "enumerate(value)",
        "plugins/crossdraft-cluster/tests/test_numbers.py",
    ),
    "prefill-counts-as-a-step": Mistake(
        f"{ADVISOR}/crossdraft_advisor/engines/step_counts.py",
        "tokens - PREFILL_TOKENS * responses - accepted",
        "tokens - accepted",
        f"{ADVISOR}/tests/engines",
    ),
    "block-without-the-minimum": Mistake(
        f"{ADVISOR}/crossdraft_advisor/replay/acceptance_formulas.py",
        "np.exp(np.minimum.accumulate(np.minimum(np.cumsum(log_r, -1), 0.0), -1))",
        "np.exp(np.minimum(np.cumsum(log_r, -1), 0.0))",
        f"{ADVISOR}/tests/replay",
    ),
    "vllm-counts-no-tokens-past-the-end": Mistake(
        f"{ADVISOR}/crossdraft_advisor/engines/counter_definitions.py",
        'accepted="all",\n            length="Mean acceptance length"',
        'accepted="before_last",\n            length="Mean acceptance length"',
        f"{ADVISOR}/tests/replay/test_counter_definitions.py",
    ),
    "bonus-behind-the-last-token": Mistake(
        f"{ADVISOR}/crossdraft_advisor/replay/step_chain.py",
        "bonus = i <= (size[:, None] - 1 - t)[..., None]",
        "bonus = i <= (size[:, None] - t)[..., None]",
        f"{ADVISOR}/tests/replay",
    ),
    "every-expert-is-read": Mistake(
        f"{ADVISOR}/crossdraft_advisor/roofline/roofline.py",
        "1 - (1 - self.active / self.experts) ** tokens",
        "1 - (1 - self.active / self.experts) ** (tokens + 1)",
        f"{ADVISOR}/tests/roofline",
    ),
    "duplicate-series-is-read": Mistake(
        f"{ADVISOR}/crossdraft_advisor/engines/prometheus.py",
        "if key in of_name:",
        "if not of_name:",
        f"{ADVISOR}/tests/engines",
    ),
    "simulated-step-without-overhead": Mistake(
        f"{ADVISOR}/crossdraft_advisor/simulate/policies.py",
        "return seconds + drafting + self.overhead",
        "return seconds + drafting",
        f"{ADVISOR}/tests/simulate",
    ),
}


def test_every_mistake_can_be_made() -> None:
    assert len(MISTAKES) == 40
    for name, mistake in MISTAKES.items():
        text = (ROOT / mistake.file).read_text(encoding="utf-8")
        assert text.count(mistake.before) == 1, f"{name}: {mistake.file} has {mistake.before!r} other than once"
        assert all((ROOT / file).exists() for file in mistake.tests.split()), name


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, under the name of the package."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    root = tmp_path_factory.mktemp("copy") / "crossdraft"
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, root / file)
    return root


@pytest.mark.slow
@pytest.mark.companions
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found(name: str, copy: Path) -> None:
    mistake = MISTAKES[name]
    text = (copy / mistake.file).read_text(encoding="utf-8")
    marks = "not slow and not gpu and not simulated and not network and not engine"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", marks]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        (copy / mistake.file).write_text(text.replace(mistake.before, mistake.after), encoding="utf-8")
        done = subprocess.run(
            [*command, *mistake.tests.split()], cwd=copy, env=environment, capture_output=True, text=True
        )
    finally:
        (copy / mistake.file).write_text(text, encoding="utf-8")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]  # 2: tests could not be collected
