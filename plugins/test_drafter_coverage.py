"""The table of coverage in docs/internals.md: what certificates of all drafters exercise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from crossdraft_combine.drafter import Combine
from crossdraft_drafters import DRAFTERS
from crossdraft_ngram_cache.drafter import NgramCache
from crossdraft_rest.datastore import build
from crossdraft_rest.drafter import Rest
from crossdraft_suffix.drafter import Suffix

from crossdraft.framework import plugins
from crossdraft.framework.certificate.outcomes import certify_drafter, outcome
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import incompatible

PAGE = Path(__file__).parents[1] / "docs" / "internals.md"
TREE = {"model": "toy", "branching": [2, 1]}
LOOKUP, MODEL = {"name": "prompt-lookup", "gamma": 2}, {"name": "draft-model", "model": "toy", "gamma": 2}
#: Options of each drafter that can be enumerated: with its defaults, unless it needs some.
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {},
    "draft-model": {"model": "toy"},
    "draft-model-iid": {"model": "toy"},
    "draft-model-tree": TREE,
    "draft-model-dynamic-tree": {"model": "toy"},
    "token-recycling": {},
    "early-exit": {},
    "layer-skip": {"skip_attention": [0], "skip_mlp": []},
    "lookahead": {},
    "jacobi": {},
    "pass": {"model": "toy"},
    "online": {"model": "toy"},
    "universal": {"model": "toy"},
    "suffix": {},
    "ngram-cache": {},
    "rest": {"shortest": 1},
    "combine": {"drafters": [LOOKUP, MODEL]},
}
CLASSES = {cls.name: cls for cls in (Combine, NgramCache, Rest, Suffix)}


def line(name: str, tmp_path: Path) -> str:
    """The row of a drafter in the table."""
    cls = CLASSES.get(name) or plugins.get("drafters", name)
    options = dict(OPTIONS[name])
    if name == "rest":
        build([[0, 1, 0, 1, 1], [1, 0, 0, 1]], tmp_path / "store")
        options["datastore"] = str(tmp_path / "store")
    config = cls.Config(**options)
    traits = cls.traits(config, Sampling())
    verifiers = [plugins.get("verifiers", each) for each in ("token", "specinfer")]
    verifier = next(
        each for each in verifiers if not incompatible(name, traits, each.name, each.traits(each.Config()), Sampling())
    )
    rows = certify_drafter(cls, config, verifier, verifier.Config())
    certificate = outcome(rows)
    assert certificate is not None and certificate.lossless and certificate.exercised, certificate
    coverage = rows[0].pair_coverage
    unequal = "no q" if rows[0].point_mass else f"{coverage.unequal:,}"
    counts = (f"{coverage.drafted:,}", unequal, f"{coverage.rejected:,}", f"{coverage.bonus:,}", str(coverage.depth))
    return f"| `{name}` | `{verifier.name}` | {' | '.join(counts)} |"


def table() -> dict[str, str]:
    """Rows of the page by drafter."""
    text = PAGE.read_text(encoding="utf-8").partition("| drafter | verifier | steps with a draft |")[2]
    return {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)` \|.*\|$", text.partition("\n\n")[0], re.M)}


def test_every_drafter_is_in_table_or_needs_more_than_table() -> None:
    needing = {"none", "grammar", "medusa", "eagle", "eagle3", "p-eagle", "mtp", "dflash", "dspark", "mlp-speculator"}
    ours = {
        name
        for name in plugins.entries("drafters")
        if plugins.get("drafters", name).__module__.startswith("crossdraft")
    }
    assert list(table()) == list(OPTIONS) and ours | {*DRAFTERS} <= {*OPTIONS} | needing


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_coverage_is_that_of_page(name: str, tmp_path: Path) -> None:
    """Every drafter is exercised above the bound; on a difference, the message is the row to write."""
    row = line(name, tmp_path)
    assert table().get(name) == row, row
