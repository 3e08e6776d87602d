"""Results and records of the default command."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificate_verifiers import AcceptAll, WrongLater
from wrong_verifiers import accepts_from

from crossdraft.framework import plugins
from crossdraft.framework.certificate import effort
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.rows import PairTooLarge, certify_row
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft_kind import CHAIN, IID, WITHOUT_REPLACEMENT
from crossdraft.framework.contracts.drafter import DraftTraits, StrategyConfig
from crossdraft.framework.runs import certified_registry, code_digest
from crossdraft.framework.runs.marks import Mark, mark_of_verifier


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def one_toy(toys: dict[str, Toy], monkeypatch: Any) -> None:
    """A default table that takes a moment."""
    monkeypatch.setattr("crossdraft.framework.certificate.toys.built_in_toys", lambda: [toys["T0"]])
    monkeypatch.setattr("crossdraft.framework.certificate.toys.toys_of_two_vocabularies", list)


MATCH = """
import torch
from crossdraft import SINGLE_CHILD, Verdict, Verifier, VerifierTraits


class Match(Verifier):
    name = "match"

    @classmethod
    def traits(cls, config):
        return VerifierTraits(accepts=frozenset({SINGLE_CHILD}))

    def verify(self, draft, p, rng):
        n = draft.width
        drawn = torch.stack([rng.draw(p[:, i], index=i) for i in range(n + 1)], 1)
        tau = ((drawn[:, :n] == draft.tokens) & draft.valid).long().cumprod(1).sum(1)
        return Verdict(tau, drawn.gather(1, tau[:, None]).squeeze(1))
"""


def loaded(file: Path, code: str) -> Any:
    """The class Match of a file that is written now."""
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code_digest._digest.cache_clear()  # as in a new process
    return module.Match


@pytest.fixture
def match(tmp_path: Path) -> Iterator[Any]:
    name = f"rule_of_{tmp_path.name}"
    yield loaded(tmp_path / f"{name}.py", MATCH)
    del sys.modules[name]


# -- depth ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the whole table; which of its drafts are deep enough is tested below
def test_rules_that_accept_anything_deep_down_are_refused_by_default(
    capsys: Any, install: Callable, cache: Path
) -> None:
    rule: Any = accepts_from(4)
    install("verifiers", (rule.name, rule))
    assert cli.main(["certify", "--verifier", rule.name, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    for toy in ("T0", "G1", "G2", "G3", "G4", "D6"):
        assert {row["lossless"] for row in rows if row["toy"] == toy} == {toy != "D6"}  # no other one is so deep
    assert mark_of_verifier(rule, rule.Config()).kind == "failed"


@pytest.mark.parametrize("depth", [5, 6])
@pytest.mark.parametrize("label", ["chain", "point-mass", "stop-early"])
def test_every_kind_of_chain_is_deep_enough(toys: dict[str, Toy], label: str, depth: int) -> None:
    row = certify_row(toys["D6"], label, DRAFTS[label], accepts_from(depth))
    assert row.lengths == (6,) and row.tv is not None and row.tv > 1e-3 and row.failed


@pytest.mark.parametrize("label", ["tree-greedy-2-1", "tree-top-2-1"])
def test_so_are_rules_for_trees(toys: dict[str, Toy], label: str) -> None:
    right, wrong = plugins.get("verifiers", "specinfer"), accepts_from(6, "specinfer")
    good, bad = (certify_row(toys["D6"], label, DRAFTS[label], rule) for rule in (right, wrong))
    assert good.lengths == bad.lengths == (6,)
    assert good.lossless and not good.failed
    assert bad.tv is not None and bad.tv > 1e-4 and bad.failed and bad.verdict == "NO"


def test_mistake_in_second_step_is_seen_by_default(toys: dict[str, Toy]) -> None:
    row = certify_row(toys["T0"], "chain", DRAFTS["chain"], WrongLater)
    assert row.failed and len(row.lengths) == 2
    once = certify_row(toys["T0"], "chain", DRAFTS["chain"], WrongLater, steps=1)
    assert not once.failed and not once.proves


def test_deep_first_steps_and_shorter_later_ones(toys: dict[str, Toy]) -> None:
    row = certify_row(toys["D6"], "chain", DRAFTS["chain"], plugins.get("verifiers", "greedy-block"))
    assert row.lengths == (6, 3) and row.gamma == [6, 3] and row.proves
    assert row.as_json()["gamma"] == [6, 3] and row.as_json()["steps"] == 2


# -- effort --------------------------------------------------------------------------------------------------


def traits(**more: Any) -> DraftTraits:
    return DraftTraits(**{"kind": CHAIN, "point_mass": False, "nodes": 6} | more)


@pytest.mark.parametrize(
    "draft_traits, depth, nodes",
    [
        (traits(), 2, 2),
        (traits(), 9, 6),
        (traits(), 0, 0),
        (traits(point_mass=True), 4, 0),
        (traits(kind=None, nodes=0), 4, 0),
        (traits(kind=IID, nodes=12, levels=6), 2, 4),
        (traits(kind=WITHOUT_REPLACEMENT, nodes=12, levels=3, branching=(2, 2, 1)), 2, 6),
        (traits(kind=WITHOUT_REPLACEMENT, nodes=99, levels=2, branching=(9, 10)), 2, 3 + 9),  # there are 3 tokens
        (traits(kind=WITHOUT_REPLACEMENT, nodes=12, levels=3), 2, 12),  # of unknown shape
    ],
)
def test_drawn_nodes(draft_traits: DraftTraits, depth: int, nodes: int) -> None:
    assert effort.drawn_nodes(draft_traits, 3, depth) == nodes


def test_paths_are_upper_bound(toys: dict[str, Toy]) -> None:
    from crossdraft.framework.certificate.certify import certify
    from crossdraft.framework.contracts.sampling import Sampling

    for label, rule in (("chain", "token"), ("iid-2", "spectr"), ("tree-wor-2-1", "multipath-block")):
        for toy in ("T0", "G3", "D6"):
            drafter, config = DRAFTS[label].config(2)
            bits = effort.paths(drafter.traits(config, Sampling()), toys[toy].vocab_size, 2)
            certificate = certify(toys[toy], DRAFTS[label].build, plugins.get("verifiers", rule), gamma=2)
            assert 1 < certificate.paths <= 2**bits


def test_lengths_of_steps() -> None:
    chain = lambda n: 2 * n + 1.0  # noqa: E731 - two tokens
    assert effort.draft_length(chain, 6, 2**20) == 6
    assert effort.draft_length(chain, 6, 2**7) == 3
    assert effort.draft_length(chain, 6, 1) is None
    assert effort.draft_lengths(chain, 6, 2, 2**20) == [6, 3]
    assert effort.draft_lengths(chain, 6, 3, 2**15) == [2, 2, 2]
    assert effort.draft_lengths(chain, 6, 3, 2**9) == [1, 1, 1]
    assert effort.draft_lengths(chain, 6, 3, 2**8) is None
    assert effort.draft_lengths(chain, 0, 3, 2**3) == [0, 0, 0]


def test_numbers_as_people_read_them() -> None:
    assert effort.number_text(1_234_567) == "1,234,567"
    assert effort.number_text(10**30) == "about 10^30" and effort.number_text(10**4000) == "about 10^4,000"
    assert effort.power(25) == "33,554,432" and effort.power(1e9) == "about 10^301,029,996"


def test_enumeration_aborts(toys: dict[str, Toy], monkeypatch: Any) -> None:
    """Strategies with more decisions than their traits imply."""
    from crossdraft.framework.certificate import certify

    monkeypatch.setattr(certify, "MOST_PATHS", 20.0)
    row = certify_row(toys["G2"], "chain", DRAFTS["chain"], plugins.get("verifiers", "token"))
    assert row.error is not None and "limited to 20 decision paths" in row.error
    with pytest.raises(PairTooLarge, match="toy G2, chain: there may be 8,589,934,592 decision paths"):
        certify_row(toys["G2"], "chain", DRAFTS["chain"], plugins.get("verifiers", "token"), gamma=16)


# -- what is written down ------------------------------------------------------------------------------------


def test_whole_table_is_noted_and_parts_are_not(
    capsys: Any, install: Callable, match: Any, cache: Path, one_toy: None
) -> None:
    install("verifiers", (match.name, match))
    assert mark_of_verifier(match, match.Config()) == Mark("uncertified")
    for part in (["--draft", "chain"], ["--gamma", "1"]):
        assert cli.main(["certify", "--verifier", "match", *part]) == 0
        assert mark_of_verifier(match, match.Config()) == Mark("uncertified")
    assert cli.main(["certify", "--verifier", "match"]) == 0
    assert mark_of_verifier(match, match.Config()) == Mark("certified")
    (entry,) = json.loads((cache / certified_registry.FILE).read_text(encoding="utf-8"))["certificates"]
    assert entry["name"] == "match" and len(entry["sha256"]) == 64 and entry["crossdraft"] and entry["lossless"]
    capsys.readouterr()


def test_failure_is_noted_whatever_part_it_is_of(
    capsys: Any, install: Callable, match: Any, cache: Path, one_toy: None
) -> None:
    wrong = loaded(Path(sys.modules[match.__module__].__file__ or ""), MATCH.replace("draw(p", "draw(p.flip(-1)"))
    install("verifiers", (wrong.name, wrong))
    assert cli.main(["certify", "--verifier", "match", "--draft", "chain"]) == 1
    mark = mark_of_verifier(wrong, wrong.Config())
    assert mark.kind == "failed" and mark.tv and mark.tv > 0.1 and mark.place == "on toy 'T0' with draft 'chain'"
    assert f"(TV up to {mark.tv:.2g} on toy 'T0' with draft 'chain'): " in capsys.readouterr().out.splitlines()[-1]
    mended = loaded(Path(sys.modules[match.__module__].__file__ or ""), MATCH)
    assert mark_of_verifier(mended, mended.Config()) == Mark("uncertified")


PASSED = certified_registry.CertificateRecord(1e-16)
FAILED = certified_registry.CertificateRecord(0.5, False, "on toy 'T0'")


def test_other_code_has_to_be_certified_again(match: Any, cache: Path) -> None:
    options = match.Config()
    certified_registry.remember([(match, options, FAILED)])
    assert certified_registry.certificate(match, options) == FAILED
    changed = loaded(Path(sys.modules[match.__module__].__file__ or ""), MATCH.replace("cumprod", "cumprod  ") + "\n")
    assert certified_registry.certificate(changed, options) is None
    certified_registry.remember([(changed, options, PASSED)])
    assert certified_registry.certificate(changed, options) == PASSED
    # That of the older code stays, for what was measured with it.
    assert len(json.loads((cache / certified_registry.FILE).read_text(encoding="utf-8"))["certificates"]) == 2
    certified_registry.remember([(changed, options, FAILED)])
    assert certified_registry.certificate(changed, options) == FAILED


def test_newest_certificates_are_kept(of_known_source: Any, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(certified_registry, "_MAX_ENTRIES", 2)
    for name in "abc":
        monkeypatch.setattr(of_known_source, "name", name)
        certified_registry.remember([(of_known_source, StrategyConfig(), PASSED)])
    entries = json.loads((cache / certified_registry.FILE).read_text(encoding="utf-8"))["certificates"]
    assert [entry["name"] for entry in entries] == ["b", "c"]


def test_another_crossdraft_certifies_again(of_known_source: Any, monkeypatch: Any) -> None:
    certified_registry.remember([(of_known_source, StrategyConfig(), PASSED)])
    now = certified_registry.release("crossdraft")
    monkeypatch.setattr(certified_registry, "release", lambda name: "99")
    assert certified_registry.certificate(of_known_source, StrategyConfig()) is None
    assert certified_registry.certificate(of_known_source, StrategyConfig(), crossdraft=now) == PASSED


def test_crossdrafts_own_rules_are_certified_unless_certificate_failed() -> None:
    token = plugins.get("verifiers", "token")
    assert mark_of_verifier(token, token.Config()) == Mark("certified")
    certified_registry.remember([(token, token.Config(), FAILED)])
    assert mark_of_verifier(token, token.Config()) == Mark("failed", 0.5, "on toy 'T0'")
    assert str(mark_of_verifier(token, token.Config())) == "FAILED (TV 0.5)"


def test_class_without_file_is_never_certified(cache: Path) -> None:
    verifier = type("Made", (AcceptAll,), {"name": "made", "__module__": "__nowhere__"})
    certified_registry.remember([(verifier, verifier.Config(), PASSED)])
    assert mark_of_verifier(verifier, verifier.Config()) == Mark("uncertified") and not cache.exists()


@pytest.fixture
def of_known_source(monkeypatch: Any) -> Any:
    """A rule whose code need not be looked for."""
    source = {"distribution": "rules", "version": "1", "sha256": "0" * 64}
    monkeypatch.setattr(certified_registry, "source_of", lambda rule: source)
    return type("Known", (AcceptAll,), {"name": "known", "__module__": "rules"})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"certificates": 5}',
        b'{"certificates": [1, null, {"name": "match"}]}',
        b"[" * 9999,
    ],
)
def test_damaged_records_are_ignored(of_known_source: Any, cache: Path, content: bytes) -> None:
    cache.mkdir()
    (cache / certified_registry.FILE).write_bytes(content)
    assert certified_registry.certificate(of_known_source, StrategyConfig()) is None
    certified_registry.remember([(of_known_source, StrategyConfig(), PASSED)])
    assert certified_registry.certificate(of_known_source, StrategyConfig()) == PASSED
    assert [file.name for file in cache.iterdir()] == [certified_registry.FILE]


@pytest.mark.parametrize("change", [{"tv": None}, {"tv": float("nan")}, {"lossless": "yes"}, {"sha256": 5}, {"new": 1}])
def test_damaged_entries_are_left_out(of_known_source: Any, cache: Path, change: dict) -> None:
    certified_registry.remember([(of_known_source, StrategyConfig(), PASSED)])
    (entry,) = json.loads((cache / certified_registry.FILE).read_text(encoding="utf-8"))["certificates"]
    (cache / certified_registry.FILE).write_text(json.dumps({"certificates": [entry | change]}), encoding="utf-8")
    assert certified_registry.certificate(of_known_source, StrategyConfig()) is None


def test_cache_that_cannot_be_written_loses_no_table(
    capsys: Any, install: Callable, match: Any, tmp_path: Path, monkeypatch: Any, one_toy: None
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSDRAFT_CACHE", os.fspath(tmp_path / "file"))
    install("verifiers", (match.name, match))
    assert cli.main(["certify", "--verifier", "match"]) == 0
    out, err = capsys.readouterr()
    assert "match" in out and "cannot be stored" in err
