"""The page of HTML: what stands in it, read with the standard library's parser, and that nothing in it can act."""

import base64
import hashlib
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from html_runs import SMALL, finished_run, on_disk

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.cell_metrics import StepRecord
from crossdraft.framework.report import load_run
from crossdraft.framework.report.html.document import html_page
from crossdraft.framework.report.html.responses import fates

pytest.importorskip("bokeh", reason="the extra html is not installed")
pytest.importorskip("itables", reason="the extra html is not installed")

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """Elements as (tag, attributes), texts by the id of the innermost element that has one."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.text = ""
        self._within: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        elif tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        within = self._within
        if within and within[-1] == "script":
            self.scripts[-1] += data
            return
        if within and within[-1] == "style":
            return
        self.text += data
        if {"td", "th"} & set(within):
            self.rows[-1][-1] += data
        if within and within[-1] == "h2":
            self.headings[-1] += data

    def data(self, name: str) -> Any:
        kinds = [a for tag, a in self.elements if tag == "script"]
        (at,) = [i for i, attributes in enumerate(kinds) if attributes.get("id") == f"data-{name}"]
        return json.loads(self.scripts[at])


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> str:
    return html_page([finished_run(tmp_path_factory.mktemp("small"), SMALL, tokens=40)])


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_table_holds_every_cell(page: Page, tmp_path: Path) -> None:
    run = finished_run(tmp_path, SMALL, tokens=40)
    plain, token, block = page.rows[1:4]
    assert page.rows[0][:3] == ["drafter", "verifier", "B"]
    assert plain[:6] == ["none", "", "1", "", "", "temperature 1"]
    for row, result in zip((token, block), run.summary.results[1:], strict=True):
        assert row[:2] == ["prompt-lookup", result.config.verifier.name]
        metrics = result.metrics
        assert metrics is not None and metrics.block_efficiency is not None and metrics.speed_up is not None
        for at, estimate in ((3, metrics.block_efficiency), (4, metrics.speed_up)):
            assert row[at] == f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
        assert row[6] == f"{metrics.tokens_per_second:.1f}"
    headers = [a for tag, a in page.elements if tag == "th" and a.get("title")]
    assert len(headers) == len(page.rows[0])  # each says what it means
    # What a column is sorted by is the number, not its text.
    orders = [float(str(a["data-order"])) for tag, a in page.elements if tag == "td" and "data-order" in a]
    assert run.summary.results[1].metrics.speed_up.value in orders  # type: ignore[union-attr]


def test_panels_without_data_say_why(page: Page) -> None:
    assert "Acceptance by position" in page.headings and "Block efficiency by category of prompts" in page.headings
    assert "Draft length and batch size" not in page.headings
    assert "Draft length and batch size: it needs a pair that was measured with several gammas" in page.text
    plots = page.data("plots")
    assert {key.partition("-")[0] for key in plots} == {"acceptance", "rows", "category", "time"}
    named = [a for tag, a in page.elements if a.get("role") == "img"]
    assert len(named) == 4 and all(a["aria-label"] for a in named)


def test_certificates_and_manifest(page: Page) -> None:
    said = {row[0]: row[1:3] for row in page.rows[-2:]}
    assert said["token"] == ["lossless", "lossless, certified (other code than is installed here)"]
    assert "crossdraft run small.yaml" in page.text and "ab" * 32 in page.text and "torch 2.13.0" in page.text


def test_responses_are_those_of_the_records(page: Page, tmp_path: Path) -> None:
    responses = page.data("responses")
    run = finished_run(tmp_path, SMALL, tokens=40)
    assert (responses["shown"], responses["total"], len(responses["cells"])) == (6, 6, 2)
    for shown, result in zip(responses["cells"], run.summary.results[1:], strict=True):
        for response, said in zip(shown["responses"], result.responses, strict=True):
            assert response["tokens"] == said["tokens"] and len(response["fates"]) == len(said["tokens"])
        prompt = [r for r in result.records if r.prompt == 0]
        first = shown["responses"][0]
        assert first["fates"].count("a") == sum(r.tau for r in prompt)
        assert sum(first["rejected"].values()) == sum(r.nodes - r.tau for r in prompt)


def test_fates() -> None:
    def steps(*given: tuple[int, int, int]) -> list[StepRecord]:
        return [StepRecord(0, "q", "", 0, i, tau, out, nodes, nodes, 9) for i, (tau, out, nodes) in enumerate(given)]

    # Three of three: a bonus. One of three: a correction for the second, the third went with it. Nothing drafted.
    assert fates(steps((3, 4, 3), (1, 2, 3), (0, 1, 0)), True, 3) == ("aaab" + "ac" + "p", {5: 2})
    # Two deep in a tree of six nodes is a leaf; less deep, only the tree would tell.
    assert fates(steps((2, 3, 6), (1, 2, 6)), False, 2) == ("aab" + "ao", {2: 4, 4: 5})
    # The end of a sequence inside the draft: no token of the target's own.
    assert fates(steps((2, 2, 3)), True, 3) == ("aa", {2: 1})


def test_nothing_is_asked_for_and_no_other_script_may_run(page: Page) -> None:
    allowed = {"icon": "data:,"}
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "img", "base", "form")
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
        if "href" in attributes:
            assert attributes["href"] == allowed[str(attributes["rel"])]
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "unsafe-eval" not in policy
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    kinds = [a.get("type") for tag, a in page.elements if tag == "script"]
    code = [script for script, kind in zip(page.scripts, kinds, strict=True) if kind in (None, "text/plain")]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code]
    assert directives["script-src"].split() == [f"'sha256-{digest}'" for digest in digests] and len(code) == 3
    assert kinds.count("text/plain") == 1  # the plot library: run when the first plot comes into sight


def test_what_people_called_things_is_inert(tmp_path: Path) -> None:
    hostile = SMALL | {"drafters": [{"name": "prompt-lookup", "label": EVIL, "gamma": 3}], "question": EVIL}
    run = finished_run(tmp_path, hostile, tokens=12)
    for result in run.summary.results:
        result.responses[0] |= {"text": EVIL, "question_id": EVIL, "category": EVIL}
        result.provenance["verifier"] = {"distribution": EVIL, "version": EVIL, "sha256": EVIL}
        assert result.metrics is not None
        result.metrics.by_category = {EVIL: result.metrics.by_category["maths"], **result.metrics.by_category}
    run.environment["versions"] = {"torch": EVIL}
    run.remarks.append(f"- note: {EVIL}")
    made = html_page([run])
    assert "alert(1)</script>" not in made and "<img" not in made and "onerror=alert(2)>" not in made
    found = Page(made)
    assert not any("onerror" in a for _, a in found.elements) and len(found.scripts) == 6
    assert EVIL in found.rows[2][0] and found.data("responses")["cells"][0]["responses"][0]["text"] == EVIL


def test_all_missing_libraries_are_named_at_once(monkeypatch: Any, tmp_path: Path) -> None:
    run = finished_run(tmp_path, SMALL, tokens=12)
    for absent, named in ((("itables",), "package itables"), (("bokeh", "itables"), "packages bokeh and itables")):
        for name in absent:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf"an HTML report needs the {named}; .* 'crossdraft\[html\]'"):
            html_page([run])


def test_the_command_writes_the_page(tmp_path: Path, capsys: Any) -> None:
    run = on_disk(finished_run(tmp_path / "small-abc", SMALL, tokens=12))
    out = tmp_path / "out.html"
    command = ["report", str(run), "--html", str(out)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert [row[1] for row in Page(out.read_text(encoding="utf-8")).rows[1:4]] == ["", "token", "block"]
    assert cli.main([*command, "--out", str(out)]) == 2
    assert "both name" in capsys.readouterr().err


def test_settings_of_engines(tmp_path: Path) -> None:
    """What `crossdraft report --html` offers to copy is what the engines' own formats write, or says why not."""
    file = tmp_path / "page.html"
    run = on_disk(finished_run(tmp_path / "run", SMALL, tokens=12))
    assert cli.main(["report", str(run), "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    data = text.partition('<script type="application/json" id="data-settings">')[2].partition("</script>")[0]
    pairs = json.loads(data)
    assert [pair["title"] for pair in pairs] == [f"prompt-lookup × {r}, temperature 1" for r in ("token", "block")]
    told = [{one["name"]: one for one in pair["engines"]} for pair in pairs]
    assert '"num_speculative_tokens": 3' in told[0]["vllm"]["text"] and "block" not in told[0]["vllm"]["text"]
    assert "vLLM" in " ".join(told[0]["vllm"]["remarks"])
    assert all(one["text"] or one["remarks"][0].startswith(f"not in {one['name']}: ") for one in told[0].values())
    assert "select" in text and 'id="settings-copy"' in text


def test_a_note_that_follows_from_the_cells_stands_once(tmp_path: Path, monkeypatch: Any) -> None:
    """What the run's own summary says of them is left to whoever reads the cells again; its other notes are kept."""
    path = on_disk(finished_run(tmp_path, SMALL))
    monkeypatch.setattr(load_run, "remarks_of", lambda summary: [["note: this machine was busy"], []])
    with (path / "summary.md").open("a", encoding="utf-8") as file:
        file.write("\n- note: this machine was busy\n- note: no charts: no matplotlib\n")
    assert load_run.read_run(path).remarks == ["- note: no charts: no matplotlib"]
