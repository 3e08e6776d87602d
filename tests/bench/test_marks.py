"""A lossy verifier that claims to be lossless is rejected by `run` and marked in all reports."""

import csv
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from certificate_verifiers import AcceptAll
from companions import needs_page
from drafters_with_memory import Squared, Successors
from tiny_runs import ONE_GROUP, cells
from torch import Tensor

from crossdraft.drafters.draft_model.draft_model import DraftModelChain
from crossdraft.drafters.retrieval.prompt_lookup import PromptLookup
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import SINGLE_CHILD
from crossdraft.framework.contracts.drafter import StrategyConfig
from crossdraft.framework.contracts.verifier import VerifierTraits
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.report.answer import best_of
from crossdraft.framework.report.tables import terminal
from crossdraft.framework.report.write import write_summary
from crossdraft.framework.runs import certified_registry
from crossdraft.framework.runs.marks import Mark, mark_of, mark_of_verifier
from crossdraft.verifiers.token import Token


class Liar(AcceptAll):
    name = "liar"


class Honest(AcceptAll):
    """The same verifier with correct traits."""

    name = "honest"
    traits = classmethod(lambda cls, config: VerifierTraits(accepts=frozenset({SINGLE_CHILD}), lossless=False))


class Sometimes(Token):
    """A lossless verifier that an option makes lossy."""

    name = "sometimes"

    class Config(StrategyConfig):
        lie: bool = False

    def verify(self, draft: Any, p: Any, rng: Any) -> Any:
        return (AcceptAll.verify if self.config.lie else Token.verify)(self, draft, p, rng)  # type: ignore[arg-type]


class Own(PromptLookup):
    """A drafter of a plug-in."""

    name = "own"


class Full(Successors):
    """Raises once its memory holds twenty tokens."""

    name = "full"

    def reported(self, probs: Tensor, row: int, i: int) -> Tensor:
        if self.seen[row] > 20:
            raise RuntimeError("the table is full")
        return probs


class WrongQ(DraftModelChain):
    """Reports another distribution than its tokens are drawn from."""

    name = "wrong-q"

    def propose(self, sequences: Any, rng: Any) -> Draft:
        draft = super().propose(sequences, rng)
        assert draft.q is not None
        return Draft(**{**vars(draft), "q": draft.q.flip(-1)})


SETTINGS = [*ONE_GROUP[:-1], "verifiers=[token, liar, honest]", "drafters=[{name: prompt-lookup, gamma: 2}]", "limit=3"]


@pytest.fixture
def measured(recipe: str, tmp_path: Path, install: Any) -> Path:
    """Directory of a run with the false claim, from the Python interface, which does not certify."""
    install("verifiers", ("liar", Liar, "accepts anything"), ("honest", Honest))
    result = run(load_recipe(recipe, SETTINGS), tmp_path / "runs", log=None)
    assert not result.failed
    write_summary(result)
    return result.directory


@pytest.fixture(params=["own", "crossdraft_mine"])
def package(request: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[ModuleType]:
    """A module of drafters that are not of this project, also one that is named like a companion."""
    if request.param == "own":
        yield sys.modules[__name__]
        return
    imports = ["from __future__ import annotations", "from drafters_with_memory import Successors"]
    code = [*imports, f"from {PromptLookup.__module__} import PromptLookup", *map(inspect.getsource, (Own, Full))]
    (tmp_path / "crossdraft_mine.py").write_text("\n".join(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(request.param)
    del sys.modules[request.param]


def output(capsys: Any, *argv: str) -> str:
    assert cli.main(list(argv)) == 0
    return capsys.readouterr().out


def test_run_refuses_liar_before_its_first_cell(bench: Any, install: Any, tmp_path: Path, monkeypatch: Any) -> None:
    install("verifiers", ("liar", Liar), ("honest", Honest))
    for _ in range(2):
        code, out, err = bench(*SETTINGS)
        assert code == 1 and not out and not cells(tmp_path)
        assert re.search(
            r"error: verifier 'liar' is declared lossless, but changes the target distribution \(TV [\d.]+ on toy "
            r"'\w+' with draft '[\w-]+'\); fix it, or declare lossless=False in its traits",
            err,
        )
        # The failure was kept: the second run enumerates nothing.
        monkeypatch.setattr("crossdraft.framework.certificate.outcomes.certify_quickly", None)
    code, out, _ = bench(*SETTINGS, "verifiers=[token, honest]")
    assert code == 0 and "honest (lossy)" in out


def test_verifier_is_certified_once_with_its_options(bench: Any, install: Any) -> None:
    install("verifiers", ("sometimes", Sometimes))
    settings = [*SETTINGS, "limit=1"]
    _, out, err = bench(*settings, "verifiers=[token, sometimes]")
    assert re.search(r"certified lossless on the smallest toy models, in \d+\.\d s: (token, )?sometimes\n", err)
    assert "not certified" not in out and mark_of_verifier(Sometimes, Sometimes.Config()) == Mark("certified")
    assert "certified lossless" not in bench(*settings, "verifiers=[token, sometimes]")[2]
    code, _, err = bench(*settings, "verifiers=[{name: sometimes, lie: true}]")
    assert code == 1 and "verifier 'sometimes' is declared lossless" in err
    assert mark_of_verifier(Sometimes, Sometimes.Config(lie=True)).kind == "failed"
    assert mark_of_verifier(Sometimes, Sometimes.Config()).kind == "certified"


def test_code_without_file_runs_and_is_not_certified(bench: Any, install: Any) -> None:
    verifier = type("Made", (Token,), {"name": "made", "__module__": "__nowhere__"})
    install("verifiers", ("made", verifier))
    _, out, _ = bench(*SETTINGS, "limit=1", "verifiers=[made]")
    assert "prompt-lookup  made (not certified)  " in out
    assert "not certified: run crossdraft certify --verifier made" in out
    liar = type("MadeLiar", (AcceptAll,), {"name": "made-liar", "__module__": "__nowhere__"})
    install("verifiers", ("made-liar", liar))
    assert bench(*SETTINGS, "limit=1", "verifiers=[made-liar]")[0] == 1


def test_drafter_without_certificate_is_named(recipe: str, tmp_path: Path, install: Any, package: Any) -> None:
    """The Python interface does not certify: beside a built-in verifier, too, the pair is not called lossless."""
    own = package.Own
    install("drafters", ("own", own))
    settings = [*SETTINGS, "verifiers=[token]", "drafters=[{name: own, gamma: 2}]"]
    summary = write_summary(run(load_recipe(recipe, settings), tmp_path, log=None))
    assert mark_of(summary.results[-1]) == Mark("uncertified")
    assert "not certified: run crossdraft certify --drafter own" in terminal(summary)
    certified_registry.remember([(own, own.Config(gamma=2), certified_registry.CertificateRecord(0.0))])
    assert mark_of(summary.results[-1]) == Mark("certified")


def test_drafter_with_wrong_q_is_rejected(bench: Any, install: Any, models: Any) -> None:
    install("drafters", ("wrong-q", WrongQ))
    drafter = f"drafters=[{{name: wrong-q, model: {models['same']}, gamma: 2}}]"
    for _ in range(2):
        code, out, err = bench(*SETTINGS, "verifiers=[token]", drafter)
        assert (code, out) == (1, "") and "its q is not the distribution that its tokens are drawn from" in err
        assert "error: drafter 'wrong-q' changes the target distribution under a certified verifier (TV 0." in err
    # Its verifier is unaffected.
    assert mark_of_verifier(Token, Token.Config()) == Mark("certified")


def test_drafter_that_cannot_be_enumerated_is_marked(bench: Any, install: Any, package: Any) -> None:
    install("drafters", ("full", package.Full))
    code, out, _ = bench(*SETTINGS, "limit=1", "verifiers=[token]", "drafters=[{name: full, gamma: 2}]")
    assert code == 0 and "token (not exercised)" in out
    assert "(drafter 'full': RuntimeError: the table is full" in out


@pytest.fixture
def with_wrong_memory(bench: Any, recipe: str, install: Any, tmp_path: Path) -> Path:
    """Directory of a run of a drafter that is wrong once its memory has filled, which `run` refuses."""
    install("drafters", (Squared.name, Squared))
    settings = [*SETTINGS, "verifiers=[token]", "drafters=[{name: successors, gamma: 2}]"]
    result = run(load_recipe(recipe, settings), tmp_path / "uncertified", log=None)
    assert not result.failed
    write_summary(result)
    code, out, err = bench(*settings)
    assert (code, out) == (
        1,
        "",
    ) and "drafter 'successors': q is not the distribution that tokens are drawn from" in err
    return result.directory


def test_wrong_memory_is_marked(with_wrong_memory: Path, capsys: Any) -> None:
    listed = output(capsys, "list", "drafters", "successors")
    assert "certificate: FAILED (TV 1) drafter 'successors': q is not the distribution" in listed
    report = output(capsys, "report", str(with_wrong_memory))
    assert (
        re.search(r"successors +\| token \(FAILED, TV 1\)", report)
        and best_of(read_run(with_wrong_memory).summary.groups) == []
    )


@pytest.mark.with_companions
@needs_page
def test_page_of_wrong_memory(with_wrong_memory: Path) -> None:
    from crossdraft_page.html.document import html_page

    page = html_page([read_run(with_wrong_memory)])
    assert "✗ FAILED (TV 1)" in page
    assert "successors" not in page[page.index('id="answer"') :].partition("</section>")[0]


def test_marks_before_and_after_certificate(measured: Path, capsys: Any) -> None:
    """A cell measured uncertified keeps that mark until certification of the same code fails."""
    for mark, suffix in (("not certified", "not certified"), (r"FAILED \(TV [\d.]+\)", r"FAILED, TV [\d.]+")):
        listed = output(capsys, "list", "verifiers")
        assert re.search(rf"^liar +{mark} +accepts anything", listed, re.M)
        assert re.search(r"^token +lossless, certified ", listed, re.M) and re.search(r"^typical +lossy ", listed, re.M)
        assert re.search(rf"\n{mark}.*; verifies drafts: chain", output(capsys, "list", "verifiers", "liar"))
        facts = json.loads(output(capsys, "list", "verifiers", "liar", "--json"))
        assert facts["lossless"] is True and re.fullmatch(mark, facts["mark"])

        page = output(capsys, "report", str(measured))
        assert re.search(rf"\| liar \({suffix}\) +\|", page)
        assert re.search(rf"BE liar \({suffix}\)", page.partition("Verifiers compared")[2])
        assert "liar " not in re.sub(rf"liar \({suffix}\)", "", page).replace("--verifier liar", "")
        for form in ("markdown", "latex", "csv"):
            assert re.search(
                rf"liar \({suffix}\)", output(capsys, "report", str(measured), "--rows", "drafter", "--format", form)
            )
        assert re.search(
            rf"liar \({suffix}\)",
            output(capsys, "report", str(measured), "--rows", "drafter", "--where", "verifier=liar"),
        )

        if mark == "not certified":
            assert cli.main(["certify", "--verifier", "liar", "--draft", "chain"]) == 1
            capsys.readouterr()
    with (measured / "summary.csv").open(encoding="utf-8") as file:
        marks = {row["verifier"]: row["certificate"] for row in csv.DictReader(file)}
    assert marks["liar"] == "not certified" and marks["honest"] == "lossy"


@pytest.mark.with_companions
def test_headline_needs_certified_pair(measured: Path) -> None:
    finished = read_run(measured)
    results = [r for r in finished.summary.results if not r.config.is_baseline and r.metrics]
    efficiency = {r.config.verifier.name: r.metrics.block_efficiency for r in results if r.metrics}
    assert efficiency["liar"] and efficiency["token"] and efficiency["liar"].value > efficiency["token"].value
    assert [best.pair.split()[-1] for best in best_of(finished.summary.groups)] == ["token"]
    of_run = pytest.importorskip("crossdraft_advisor.advise.candidates").of_run
    from crossdraft_advisor.advise.engine_settings import engine_settings

    pairs = re.findall("^### ([^,\n]*)", engine_settings([finished]) or "", re.MULTILINE)
    assert set(pairs) == {"prompt-lookup × token"}
    result, notes = of_run(finished.summary.results, "run", finished.summary.curves)
    assert {item.acceptance.verifier for item in result} <= {"token"}
    assert "run: liar is omitted: not certified; run crossdraft certify --verifier liar" in notes
    assert "run: honest is omitted: lossy" in notes


@pytest.mark.with_companions
@needs_page
def test_html_page(measured: Path) -> None:
    from crossdraft_page.html.document import html_page

    finished = read_run(measured)
    liar = next(r for r in finished.summary.results if r.config.verifier.name == "liar")
    certified_registry.remember(
        [(Liar, Liar.Config(), certified_registry.CertificateRecord(0.5, False, "on toy 'T0' with draft 'chain'"))]
    )
    page = html_page([finished])
    assert mark_of(liar) == Mark("failed", 0.5, "on toy 'T0' with draft 'chain'")
    assert page.count("liar (FAILED, TV 0.5)") > 1  # remarks, responses
    assert page.count('liar <span class="badge failed">✗ FAILED (TV 0.5)</span>') == 2  # table, certificates
    assert "<td>FAILED (TV 0.5) on toy &#39;T0&#39; with draft &#39;chain&#39;</td>" in page
    answer = page[page.index('id="answer"') : page.index("</section>")]
    assert "token" in answer and "liar" not in answer and "honest" not in answer
    rows = re.findall(r"<tr data-drafter.*?</tr>", page, re.S)
    for name, strong in (("token", True), ("liar", False), ("honest", False)):
        assert [("number strong" in row) for row in rows if f'data-verifier="{name}"' in row] == [strong]


@pytest.mark.with_companions
@needs_page
def test_legends_of_charts(measured: Path) -> None:
    from crossdraft_page.charts.charts import KINDS
    from crossdraft_page.charts.style import style

    results = read_run(measured).summary.results
    for result in results:  # on a busy machine speed-ups are withheld
        if result.metrics is not None and not result.config.is_baseline:
            result.metrics.speed_up, result.metrics.withheld = Estimate(1.5, 1.4, 1.6), ""
    for kind in ("block_efficiency", "target_rows", "speed_up", "acceptance"):
        with style():
            drawn = KINDS[kind].draw(results, "page")
        assert drawn is not None
        words = {text.get_text() for item in drawn[0].legends for text in item.get_texts()}
        assert {"token", "liar (not certified)", "honest (lossy)"} <= words


def test_compare_reports_differing_marks(measured: Path, recipe: str, tmp_path: Path, capsys: Any) -> None:
    other = run(load_recipe(recipe, [*SETTINGS, "seed=1"]), tmp_path / "runs", log=None)
    write_summary(other)
    text = output(capsys, "compare", str(measured), str(other.directory))
    assert "liar (not certified)" in text and "honest (lossy)" in text and "token (" not in text
    for file in other.directory.glob("cells/*_liar_*/config.json"):
        head = json.loads(file.read_text(encoding="utf-8"))
        head["provenance"]["verifier"]["sha256"] = "0" * 64  # other code
        head["provenance"]["mark"] = {"kind": "failed", "tv": 0.25, "where": ""}
        file.write_text(json.dumps(head), encoding="utf-8")
    text = output(capsys, "compare", str(measured), str(other.directory))
    assert "not certified / FAILED (TV 0.25)" in text


@pytest.mark.parametrize(
    "record, mark",
    [
        ({"kind": "certified", "tv": None, "where": ""}, Mark("certified")),
        ({"kind": "lossy"}, Mark("lossy")),
        ({"kind": "failed", "tv": 0.5, "where": "there"}, Mark("failed", 0.5, "there")),
        ({"kind": "failed", "tv": None}, None),
        ({"kind": "failed", "tv": float("nan")}, None),
        ({"kind": "failed", "tv": True}, None),
        ({"kind": ["certified"]}, None),
        ({"kind": "best"}, None),
        ("certified", None),
        (None, None),
    ],
)
def test_marks_of_records(record: Any, mark: Mark | None) -> None:
    assert Mark.from_json(record) == mark
    if mark is not None:
        assert Mark.from_json(json.loads(json.dumps(mark.to_json()))) == mark


def test_results_keep_their_mark_when_code_changes(measured: Path) -> None:
    results = {r.config.verifier.name: r for r in read_run(measured).summary.results if not r.config.is_baseline}
    assert results["token"].provenance["mark"]["kind"] == "certified"
    assert results["honest"].provenance["mark"]["kind"] == "lossy"
    certified_registry.remember([(Liar, Liar.Config(), certified_registry.CertificateRecord(0.5, False))])
    assert mark_of(results["liar"]).kind == "failed"
    results["liar"].provenance["verifier"]["sha256"] = "0" * 64
    assert mark_of(results["liar"]) == Mark("uncertified")
    results["liar"].provenance["mark"] = {"kind": "certified"}
    assert mark_of(results["liar"]) == Mark("certified")
    results["liar"].provenance["mark"] = "damaged"
    assert mark_of(results["liar"]) == Mark("uncertified")
