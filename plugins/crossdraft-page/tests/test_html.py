"""The page of HTML: what stands in it, read with the standard library's parser, and that nothing in it can act."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
from companions import needs_command
from crossdraft_page.charts import pairs
from crossdraft_page.charts.charts import KINDS
from crossdraft_page.html import cell_table
from crossdraft_page.html.cell_table import COLUMNS, table_of
from crossdraft_page.html.document import html_page
from crossdraft_page.html.responses import _tokenizer, origins, token_texts
from html_runs import SMALL, finished_run, on_disk

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.metrics.cell_metrics import StepRecord
from crossdraft.framework.metrics.columns import QUANTITIES
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.report import answer as answers
from crossdraft.framework.report import batch_sizes, caveats
from crossdraft.framework.runs import labels
from crossdraft.framework.runs.marks import Mark

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
        self.rows = [[" ".join(entry.split()) for entry in row] for row in self.rows]
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        elif tag in ("h2", "h3"):
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
        if within and within[-1] in ("h2", "h3"):
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


def answer(text: str) -> str:
    """The text of the section that a reader sees first."""
    section = text[text.index('<section id="answer"') :]
    return " ".join(re.sub("<[^>]*>", "", section[: section.index("</section>")]).split())


def test_answer_stands_first(text: str, tmp_path: Path) -> None:
    results = finished_run(tmp_path, SMALL, tokens=40).summary.results
    best = max(results[1:], key=lambda r: r.metrics.speed_up.value)  # type: ignore[union-attr]
    assert best.metrics is not None and (e := best.metrics.speed_up) is not None and e.low is not None and e.low > 1
    words = answer(text)
    assert words.startswith(
        f"prompt-lookup × {best.config.verifier.name} ✓ lossless, certified {e.value:.2f} × the speed"
    )
    assert f"of plain decoding, 95 % interval {e.low:.2f} to {e.high:.2f}: faster than plain decoding." in words
    assert "Conditions: temperature 1, batch size 1; target org/name, cpu (a processor), float32, 6 prompts;" in words
    assert words.endswith("the best of 2 certified cells.")
    assert text.index('id="answer"') < text.index('id="cells"') < text.index('id="charts-title"')


def test_only_pair_that_was_shown_to_be_faster_is_called_so(tmp_path: Path) -> None:
    run = finished_run(tmp_path, SMALL, tokens=12)
    token, block = (result.metrics for result in run.summary.results[1:])
    assert token is not None and block is not None
    token.speed_up, block.speed_up = Estimate(1.3, 1.2, 1.4), Estimate(1.6, 0.9, 2.8)
    assert answer(html_page([run])).startswith("prompt-lookup × token ✓ lossless, certified 1.30 × the speed")
    token.speed_up = Estimate(0.8, 0.7, 0.9)
    words = answer(html_page([run]))
    assert words.startswith(
        "No certified pair was shown to be faster than plain decoding The best one: prompt-lookup × block"
    )
    assert "0.90 to 2.80: no difference from plain decoding was shown." in words
    for metrics in (token, block):
        metrics.speed_up, metrics.withheld = None, "too few"
    words = answer(html_page([run]))
    assert words.startswith("No speed-up to report: every speed-up is withheld (too few)")
    assert "Greatest block efficiency: prompt-lookup × block, BE 2.29 [" in words
    assert "(1 of 1 other intervals overlap)" in words and "× plain decoding by the clock. A quieter machine" in words


@pytest.mark.parametrize("kind", ["lossy", "unexercised", "uncertified", "failed"])
def test_no_other_pair_makes_headline(tmp_path: Path, kind: Any, monkeypatch: Any) -> None:
    """A faster pair with a mark is not the headline; its mark stands beside its name in table and certificates."""
    run = finished_run(tmp_path, SMALL, tokens=12)
    block = run.summary.results[2]
    assert block.metrics is not None
    block.metrics.speed_up = Estimate(9.0, 8.0, 10.0)
    mark = Mark(kind, 0.5 if kind == "failed" else None)
    for module in (answers, batch_sizes, caveats, cell_table, labels, pairs):
        monkeypatch.setattr(module, "mark_of", lambda cell: mark if cell is block else Mark("certified"))
    text = html_page([run])
    assert "block" not in answer(text) and "× token" in answer(text)
    page = Page(text)
    badges = {"lossy": "≈ lossy", "unexercised": "? not exercised", "uncertified": "? not certified"}
    badge = badges.get(kind, "✗ FAILED (TV 0.5)")
    assert f"prompt-lookup × block {badge}" in [row[0] for row in page.rows]
    assert f"block {badge}" in [row[0] for row in page.rows] and f"block{mark.suffix}" in page.text
    run.summary.results.pop(1)  # the certified one
    assert answer(html_page([run])).startswith("No pair here is certified lossless")


def test_table_holds_every_cell(page: Page, tmp_path: Path) -> None:
    run = finished_run(tmp_path, SMALL, tokens=40)
    header, token, block = page.rows[:3]
    # One group, at one batch size: settings stand in the heading, and no column repeats them.
    assert header[0] == "pair" and [h.rstrip("0123456789.") for h in header[1:3]] == ["block efficiency", "speed-up"]
    assert header[3:] == ["tok/s", "rows/tok", "Pr(τ ≥ 1)", "draft %"]
    assert "temperature 1 · batch size 1 · target org/name · plain decoding 46.1 tok/s" in page.text
    for row, result in zip((token, block), run.summary.results[1:], strict=True):
        assert row[0] == f"prompt-lookup × {result.config.verifier.name} ✓ lossless"
        metrics = result.metrics
        assert metrics is not None and metrics.block_efficiency is not None and metrics.speed_up is not None
        for at, estimate in ((1, metrics.block_efficiency), (2, metrics.speed_up)):
            assert row[at] == f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
        assert row[3] == f"{metrics.tokens_per_second:.1f}"
    headers = [a for tag, a in page.elements if tag == "th" and a.get("title")]
    assert len(headers) == len(header)  # each has its meaning
    # A column is sorted by its number, not by its text.
    orders = [float(str(a["data-order"])) for tag, a in page.elements if tag == "td" and "data-order" in a]
    assert run.summary.results[1].metrics.speed_up.value in orders  # type: ignore[union-attr]
    words = (
        "BE = mean acceptance length (vLLM) = accept length (SGLang) = tau of the EAGLE papers, bonus token included."
    )
    assert words in page.text


def test_settings_that_vary_are_headings_of_groups(tmp_path: Path) -> None:
    run = finished_run(tmp_path, tokens=12)
    page = Page(html_page([run]))
    sizes = [a["data-group"] for tag, a in page.elements if tag == "tbody" and "data-group" in a]
    assert sizes == [f"batch size {b}" for b in (1, 4, 16, 32)]
    assert [row[0].split(" plain")[0] for row in page.rows if len(row) == 1] == sizes
    assert "temperature 1 · target org/name" in page.text and "tok/s/user" in page.rows[0]
    hidden = [header for tag, a in page.elements if tag == "th" and (header := a.get("class"))]
    narrow = [name for name in hidden if name and "more" not in name.split()][:3]
    assert narrow == ["pair", "block_efficiency", "speed_up"]  # what a phone shows


def test_intervals_are_drawn_on_scale_of_header(tmp_path: Path) -> None:
    table = table_of([("run", finished_run(tmp_path, tokens=40))])
    for key, scale in table.scales.items():
        estimates = [row.values[key].estimate for row in table.rows]
        assert all(scale.low <= e.value <= scale.high for e in estimates if e)
        assert 2 <= len(scale.labels) <= 5 and scale.percent(scale.low) == 0 and scale.percent(99.0) == 100
        for label, at in scale.labels:
            assert scale.percent(float(label)) == at and f"{at}% 0 / 1px" in scale.grid
    assert "1" in dict(table.scales["speed_up"].labels)


def test_charts_are_in_page(page: Page, text: str) -> None:
    """Charts of the kinds that the run has data for, and a reason for each of the others."""
    assert "Acceptance by position in the draft" in page.headings
    assert "Block efficiency by category of prompts" in page.headings
    assert "Speed-up by draft length and batch size" not in page.headings
    needed = "it requires a pair that was measured with several gammas at several batch sizes"
    assert f"Speed-up by draft length and batch size: {needed}" in page.text
    charts = re.findall("<figure aria-label=.*?</figure>", text, re.DOTALL)
    assert len(charts) == len([kind for kind in KINDS if kind not in ("throughput", "pareto", "draft_length")])
    for chart in charts:
        minidom.parseString(chart)
        assert "<title>" in chart and "tip:" not in chart and "metadata" not in chart
    names = [str(a["id"]) for tag, a in page.elements if tag in ("path", "clippath") and "id" in a]
    assert len(names) == len(set(names)) > 20
    assert re.search(r"<title>prompt-lookup × block: \d\.\d\d \[\d\.\d\d, \d\.\d\d\]</title>", text)
    assert re.search(r"<title>draft: \d+ %</title>", text)


def test_certificates_and_manifest(page: Page) -> None:
    rows = {row[0]: row[1:3] for row in page.rows[-2:]}
    assert rows["token ✓ lossless"] == ["lossless", "lossless, certified (other code than is installed here)"]
    assert "crossdraft run small.yaml" in page.text and "ab" * 32 in page.text and "torch 2.13.0" in page.text


def test_responses_are_those_of_records(page: Page, tmp_path: Path) -> None:
    responses = page.data("responses")
    run = finished_run(tmp_path, SMALL, tokens=40)
    assert (responses["shown"], responses["total"], len(responses["cells"])) == (6, 6, 2)
    assert not responses["texts"] and "the target's tokenizer was not on the machine" in page.text
    for shown, result in zip(responses["cells"], run.summary.results[1:], strict=True):
        for response, record in zip(shown["responses"], result.responses, strict=True):
            assert response["tokens"] == record["tokens"] and len(response["origins"]) == len(record["tokens"])
            assert response["text"] == record["text"] and response["steps"] > 0
        prompt = [r for r in result.records if r.prompt == 0]
        first = shown["responses"][0]
        assert first["origins"].count("a") == sum(r.tau for r in prompt)
        assert sum(first["rejected"].values()) == sum(r.nodes - r.tau for r in prompt)


def test_response_without_steps_keeps_those_of_others(page: Page, tmp_path: Path) -> None:
    """The prefill of an engine emits the first token, which may end the response."""
    run = finished_run(tmp_path, SMALL, tokens=40)
    for result in run.summary.results:
        result.records = [record for record in result.records if record.prompt != 1]
    cells = zip(page.data("responses")["cells"], Page(html_page([run])).data("responses")["cells"], strict=True)
    for all_steps, some_steps in cells:
        expected = [response["steps"] for response in all_steps["responses"]]
        expected[1] = 0
        assert [response["steps"] for response in some_steps["responses"]] == expected


def test_tokens_are_shown_as_text_if_tokenizer_is_here(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "▁small": 1, "▁words": 2, "<eos>": 3}, unk_token="[UNK]"))
    words.decoder = decoders.Metaspace()  # type: ignore[assignment]
    words.add_special_tokens(["<eos>"])
    target = tmp_path / "target"
    target.mkdir()
    words.save(str(target / "tokenizer.json"))
    run = finished_run(tmp_path, SMALL | {"target": str(target)}, tokens=12)
    for result in run.summary.results:
        for record in result.responses:
            record |= {"tokens": [1] + [2] * 10 + [3], "text": "small" + " words" * 10}
    page = Page(html_page([run]))
    response = page.data("responses")["cells"][0]["responses"][0]
    assert response["tokens"] == ["small", *[" words"] * 10, "<eos>"] and response["texts"] and not response["text"]
    assert "by their ids" not in page.text
    # Not those of another tokenizer, whose text is another one; nor anything but a tokenizer.
    assert token_texts(_tokenizer(str(target)), [1, 2], "other words") is None
    (target / "tokenizer.json").write_text("{")
    assert _tokenizer(str(target)) is None and token_texts(None, [1], "small") is None


def test_origins() -> None:
    def steps(*inputs: tuple[int, int, int]) -> list[StepRecord]:
        return [StepRecord(0, "q", "", 0, i, tau, out, nodes, nodes, 9) for i, (tau, out, nodes) in enumerate(inputs)]

    # Three of three: a bonus. One of three: a correction for the second, the third went with it. Nothing drafted.
    assert origins(steps((3, 4, 3), (1, 2, 3), (0, 1, 0)), True, 3) == ("aaab" + "ac" + "p", {5: 2})
    # At depth two of a tree of six nodes a node is a leaf; at depth one that depends on the tree.
    assert origins(steps((2, 3, 6), (1, 2, 6)), False, 2) == ("aab" + "ao", {2: 4, 4: 5})
    # The end of a sequence inside the draft: no token of the target's own.
    assert origins(steps((2, 2, 3)), True, 3) == ("aa", {2: 1})


def test_no_request_is_made_and_no_other_script_may_run(page: Page) -> None:
    allowed = {"icon": "data:,"}
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
        if "href" in attributes:
            assert attributes["href"] == allowed[str(attributes["rel"])]
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "unsafe-eval" not in policy
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    kinds = [a.get("type") for tag, a in page.elements if tag == "script"]
    code = [script for script, kind in zip(page.scripts, kinds, strict=True) if kind is None]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code]
    assert directives["script-src"].split() == [f"'sha256-{digest}'" for digest in digests] and len(code) == 1


def test_user_names_are_escaped(tmp_path: Path) -> None:
    hostile = SMALL | {"drafters": [{"name": "prompt-lookup", "label": EVIL, "gamma": 3}], "question": EVIL}
    run = finished_run(tmp_path, hostile, tokens=12)
    for result in run.summary.results:
        result.responses[0] |= {"text": EVIL, "question_id": EVIL, "category": EVIL}
        result.provenance["verifier"] = {"distribution": EVIL, "version": EVIL, "sha256": EVIL}
        assert result.metrics is not None
        result.metrics.by_category = {EVIL: result.metrics.by_category["maths"], **result.metrics.by_category}
    run.environment["versions"] = {"torch": EVIL}
    run.remarks.append(f"- note: {EVIL}")
    html = html_page([run])
    assert "alert(1)</script>" not in html and "<img src=x" not in html and "onerror=alert(2)>" not in html
    actual = Page(html)
    assert not any("onerror" in a for _, a in actual.elements) and len(actual.scripts) == 2
    assert (
        actual.rows[1][0].startswith(f"{EVIL} × token")
        and actual.data("responses")["cells"][0]["responses"][0]["text"] == EVIL
    )


def test_columns_have_descriptions_of_summary() -> None:
    meanings = {quantity.meaning for quantity in QUANTITIES}
    own = [column.key for column in COLUMNS if column.meaning not in meanings]
    assert own == ["pair", "per_user", "first"]  # columns that are missing or different in the CSV


def test_command_writes_page(tmp_path: Path, capsys: Any) -> None:
    run = on_disk(finished_run(tmp_path / "small-abc", SMALL, tokens=12))
    out = tmp_path / "out.html"
    command = ["report", str(run), "--format", "html", "--out", str(out)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    rows = Page(out.read_text(encoding="utf-8")).rows[1:3]
    assert [row[0] for row in rows] == [f"prompt-lookup × {name} ✓ lossless" for name in ("token", "block")]


@needs_command("advise")
def test_settings_of_engines(tmp_path: Path, install: Any) -> None:
    """The page offers the settings that the engines' own formats write, or the reason why not."""
    from crossdraft_advisor import Engine, Settings

    def export(self: Any, schedule: Any) -> Any:
        return Settings("<b>--k</b>", (f"{1 // (self.name == 'theirs')} remark",))

    parts = {"read_from": "Theirs 1.0", "methods": {"prompt-lookup": "ngram"}, "export": export}
    install("engines", *((name, type(name, (Engine,), parts | {"name": name})) for name in ("theirs", "faulty")))
    file = tmp_path / "page.html"
    run = on_disk(finished_run(tmp_path / "run", SMALL, tokens=12))
    assert cli.main(["report", str(run), "--format", "html", "--out", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    section = text[text.index('<section class="added">') :].partition("</section>")[0]
    assert re.findall("<h3>(.*)</h3>", section) == [f"prompt-lookup × {r}, temperature 1" for r in ("token", "block")]
    first, second = section.split("<h3>")[1:]
    offered = dict(re.findall("<h4>(.*)</h4>\n(.*(?:\n(?!<h4>).*)*)", first))
    assert list(offered) == list(plugins.entries("engines"))
    assert "&quot;num_speculative_tokens&quot;: 3" in offered["vllm"] and "block" not in offered["vllm"]
    assert "option names of vLLM" in offered["vllm"] and "block" in second
    assert all("<pre>" in text or f"not in {name}: " in text for name, text in offered.items())
    assert "&lt;b&gt;--k&lt;/b&gt;" in offered["theirs"]
    assert "raised ZeroDivisionError" in offered["faulty"]
