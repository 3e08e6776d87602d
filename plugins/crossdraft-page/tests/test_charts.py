"""Charts of synthetic cells: positions of points and intervals, layout, and reproducible files."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from cell_results import SERIES, cell, outcome
from crossdraft_page.charts.charts import KINDS, chart, draw
from crossdraft_page.charts.draft_lengths import break_even_line
from crossdraft_page.charts.pairs import front, rows_per_step
from crossdraft_page.charts.series import break_even
from crossdraft_page.charts.style import COLOURS, PLAIN, WIDTHS, label, marks, panels, style, wrapped
from html_runs import RECIPE, finished_run, on_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from crossdraft.framework.cli import main as cli
from crossdraft.framework.metrics.cell_metrics import acceptance
from crossdraft.framework.report.write import write_summary
from crossdraft.framework.runs.records import CellResult

#: Two drafters with three rules at three batch sizes.
SOME = RECIPE | {"name": "some", "matrix": {"gamma": [3], "batch_size": [1, 4, 16]}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> Sequence[CellResult]:
    return finished_run(tmp_path_factory.mktemp("some"), SOME, tokens=40).summary.results


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with style():
        yield


def figure(kind: str, results: Sequence[CellResult], width: str = "page") -> Any:
    drawn = KINDS[kind].draw(results, width)
    assert drawn is not None and drawn[1] == 0
    return drawn[0]


def estimates(panel: Any) -> list[tuple[float, float, float, float]]:
    """Position, value and interval bounds of every vertical estimate in a panel, by position."""
    results = []
    for container in panel.containers:
        xs, ys = container.lines[0].get_data()
        for x, y, bar in zip(xs, ys, container.lines[2][0].get_segments(), strict=True):
            results.append((float(x), float(y), float(bar[0][1]), float(bar[1][1])))
    return sorted(results)


def lines(panel: Any, colour: str) -> list[tuple[list[float], list[float]]]:
    """Lines of a colour with several points."""
    results = [line for line in panel.lines if line.get_color() == colour and len(line.get_xdata()) > 1]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in results]


# -- what is shown ------------------------------------------------------------------------------------------------


def test_block_efficiency_by_pair(results: Sequence[CellResult]) -> None:
    (panel,) = figure("block_efficiency", results).axes
    assert panel.get_title() == "temperature 1, batch size 1"
    assert [text.get_text() for text in panel.get_yticklabels()] == ["prompt-lookup", "draft-model", "draft-model-iid"]
    pairs = [r for r in results if not r.config.is_baseline and r.config.batch_size == 1]
    assert len(panel.containers) == len(pairs) == 5
    shown = {}
    for container in panel.containers:
        ((x,), _), (bar,) = container.lines[0].get_data(), container.lines[2][0].get_segments()
        shown[float(x)] = (float(bar[0][0]), float(bar[1][0]))
    for result in pairs:
        assert result.metrics is not None and result.metrics.block_efficiency is not None
        actual = result.metrics.block_efficiency
        assert shown[actual.value] == (pytest.approx(actual.low), pytest.approx(actual.high))


def test_pairs_are_not_connected(results: Sequence[CellResult]) -> None:
    for kind in ("block_efficiency", "target_rows"):
        for panel in figure(kind, results).axes:
            assert all(len(container.lines[0].get_xdata()) == 1 for container in panel.containers)
            joined = [line.get_color() for line in panel.lines if len(line.get_xdata()) > 1]
            assert {str(colour) for colour in joined} <= {"0.55", "0.75", "0.92"}  # rules of the panel, no pair's


def test_block_efficiency_against_target_rows(results: Sequence[CellResult]) -> None:
    panels = figure("target_rows", results).axes
    assert [panel.get_title() for panel in panels] == ["batch size 1", "batch size 4", "batch size 16"]
    for panel, b in zip(panels, (1, 4, 16), strict=True):
        cells = [r for r in results if r.config.batch_size == b and not r.config.is_baseline]
        expected = []
        for r in cells:
            assert r.metrics is not None and r.metrics.block_efficiency is not None
            e = r.metrics.block_efficiency
            expected.append((rows_per_step(r), e.value, e.low, e.high))
        drawn, widest = estimates(panel), max(x for x, *_ in expected)
        assert sorted(item[1:] for item in drawn) == [
            tuple(map(pytest.approx, item[1:])) for item in sorted(expected, key=lambda e: e[1:])
        ]
        xs = sorted(x for x, *_ in drawn)
        assert all(b - a > 0.02 * widest for a, b in pairwise(xs)), "marks of equal rows stand side by side"
        assert all(min(abs(x - y) for y, *_ in expected) < 0.1 * widest for x in xs)
    # A chain of three nodes and the root: at most four rows a sequence; two sequences: seven.
    by_key = {r.config.drafter.name: rows_per_step(r) for r in results if r.config.batch_size == 16}
    assert by_key["none"] == 16 and 48 < by_key["draft-model"] <= 64 and 80 < by_key["draft-model-iid"] <= 112


def test_series_over_batch_sizes(tmp_path: Path) -> None:
    measured = outcome(tmp_path, SERIES).results
    chain, iid = figure("throughput", measured).axes
    assert (chain.get_title(), iid.get_title()) == ("draft-model", "draft-model-iid")
    assert lines(chain, PLAIN["color"]) == [([1, 4, 16], [pytest.approx(10 * b) for b in SERIES])]
    token, block = (lines(chain, COLOURS[i]) for i in (0, 1))
    assert token == [([1, 4, 16], [pytest.approx(rate) for rate in (15, 48, 160)])]
    assert block == [([1, 4, 16], [pytest.approx(rate) for rate in (16, 52, 128)])]
    assert [text.get_text() for text in chain.texts] == [f"B ≈ {break_even({4: 1.3, 16: 0.8}):.1f}", "break-even"]
    panels = figure("speed_up", measured).axes
    assert [[round(y, 2) for _, y in sorted(zip(*line, strict=True))] for line in lines(panels[1], COLOURS[2])] == [
        [2.0, 1.1, 0.7]
    ]
    legend = [text.get_text() for text in panels[0].figure.legends[0].get_texts()]
    assert legend == ["token", "block", "spectr", "specinfer"]


def test_speed_up_at_one_batch_size_is_list(results: Sequence[CellResult]) -> None:
    (panel,) = figure("speed_up", [r for r in results if r.config.batch_size == 4]).axes
    assert panel.get_title() == "temperature 1, batch size 4" and len(panel.containers) == 5


def test_acceptance_by_position(results: Sequence[CellResult]) -> None:
    panels = {panel.get_title(): panel for panel in figure("acceptance", results).axes}
    assert list(panels) == ["prompt-lookup", "draft-model", "draft-model-iid"]
    for drafter, panel in panels.items():
        cells = [r for r in results if r.config.drafter.name == drafter and r.config.batch_size == 1]
        for container, result in zip(panel.containers, cells, strict=True):
            assert result.metrics is not None
            assert list(container.lines[0].get_ydata()) == pytest.approx(result.metrics.acceptance)
        actual = acceptance(cells[0].records, 3, 3)
        assert all(0 <= e.low < e.value < e.high <= 1 for e in actual if e.low is not None and e.high is not None)
        assert all(e.low is not None for e in actual)


def test_front_of_throughput(tmp_path: Path) -> None:
    """The certified points that no other one beats in both rates."""
    measured = outcome(tmp_path, SERIES).results
    chain, _ = figure("pareto", measured).axes
    token, block = (lines(chain, COLOURS[i]) for i in (0, 1))
    assert token == [([pytest.approx(x) for x in (15, 12, 10)], [pytest.approx(y) for y in (15, 48, 160)])]
    (steps,) = [line for line in chain.lines if line.get_drawstyle() == "steps-pre"]
    corners = list(zip(*steps.get_data(), strict=True))
    assert corners == sorted(corners, key=lambda corner: -corner[0]) == sorted(corners, key=lambda corner: corner[1])
    assert block and not any(x > a and y > b for x, y in corners for a, b in corners)


def test_speed_ups_by_draft_length(tmp_path: Path) -> None:
    measured = finished_run(tmp_path, RECIPE, tokens=12).summary.results
    panels = {panel.get_title(): panel for panel in figure("draft_length", measured).axes if panel.axison}
    assert "draft-model × block" in panels
    panel = panels["draft-model × block"]
    shown = {text.get_position(): float(text.get_text()) for text in panel.texts}
    assert len(shown) == 8
    for result in measured:
        config = result.config
        if (config.drafter.name, config.verifier.name) == ("draft-model", "block"):
            place = [1, 4, 16, 32].index(config.batch_size), [2, 4].index(config.drafter.config["gamma"])
            assert result.metrics is not None and result.metrics.speed_up is not None
            assert shown[place] == round(result.metrics.speed_up.value, 2)
    assert break_even_line({(2, 1): 1.2, (2, 4): 0.9, (4, 1): 0.8, (4, 4): 0.7}, [2, 4], [1, 4]) == [
        ((0.5, -0.5), (0.5, 0.5)),
        ((-0.5, 0.5), (0.5, 0.5)),
    ]


def test_shares_of_time(results: Sequence[CellResult]) -> None:
    for panel in figure("time", results).axes[:3]:
        bars = [bar for container in panel.containers for bar in container]
        assert len(bars) == 4 * 6 and sum(bar.get_width() for bar in bars) == pytest.approx(600)


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [
        ({1: 2.0, 4: 0.5}, 2.0),  # halfway, in logarithms
        ({4: 0.5, 1: 2.0}, 2.0),
        ({1: 4.0, 4: 1.0, 16: 0.25}, 4.0),
        ({1: 2.0, 4: 0.5, 16: 2.0, 64: 0.5}, 32.0),  # the last time
        ({1: 2.0, 4: 0.5, 16: 1.0}, None),  # it pays again
        ({1: 2.0, 4: 1.0}, None),
        ({1: 0.9, 4: 0.5}, None),
    ],
)
def test_break_even(speed_ups: dict[int, float], expected: float | None) -> None:
    assert break_even(speed_ups) == (expected if expected is None else pytest.approx(expected))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
@settings(max_examples=50, deadline=None)
def test_front(points: list[tuple[int, int]]) -> None:
    """All points lie on or below the front, whose corners are points."""
    result = front([(float(x), float(y)) for x, y in points])
    assert set(result) <= set(points) and result == sorted(result)
    for x, y in points:
        assert max(b for a, b in result if a <= x) >= y


# -- how it looks -------------------------------------------------------------------------------------------------


def test_marks_are_distinct() -> None:
    names = [f"v{i}" for i in range(20)]
    result = marks(names)
    assert len({(m.colour, m.marker, m.hollow, m.dash) for m in result.values()}) == 20
    assert len({(m.marker, m.hollow) for m in result.values()}) == 20, "without colours, too"


@pytest.mark.parametrize("width", ["column", pytest.param("page", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_chart_text_is_visible(results: Sequence[CellResult], kind: str, width: str, tmp_path: Path) -> None:
    if kind == "draft_length":
        results = finished_run(tmp_path, RECIPE, tokens=12).summary.results
    drawn = figure(kind, results, width)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer, whole = canvas.get_renderer(), drawn.bbox
    legends = [item.get_window_extent(renderer) for item in drawn.legends]
    outside = [drawn._supxlabel.get_window_extent(renderer)]
    outside += [drawn._supylabel.get_window_extent(renderer)] if drawn._supylabel else []
    panels = [panel.get_tightbbox(renderer) for panel in drawn.axes if panel.axison]
    for box in (*legends, *outside, *panels):
        assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1 and box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1
    boxes = [*legends, *outside, *panels]
    for i, item in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = (
                item.x1 <= other.x0 + 2 or other.x1 <= item.x0 + 2 or item.y1 <= other.y0 + 2 or other.y1 <= item.y0 + 2
            )
            assert apart, "two parts of the figure lie on each other"
    assert drawn.get_figwidth() <= WIDTHS[width]


def test_names_are_not_tex(tmp_path: Path) -> None:
    measured = outcome(tmp_path, {1: {"token": 1.0, "block": 1.2}}).results
    for result in measured:
        drafter = result.config.drafter.model_copy(update={"label": "$\\frac{$ a\u202eb _^%&"})
        result.config = result.config.model_copy(update={"drafter": drafter})
    drawn = figure("block_efficiency", measured)
    FigureCanvasAgg(drawn).draw()
    (label,) = drawn.axes[0].get_yticklabels()
    assert label.get_text() == "$\\frac{$ a\\u202eb _^%&"


def test_omitted_panels_are_noted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("crossdraft_page.charts.charts.encoded", lambda figure, form: b"chart")
    measured = outcome(tmp_path, {1: {"token": 1.0, "block": 1.0}})
    measured.results = [cell(1, rule, 1.5, temperature=t / 20) for t in range(1, 15) for rule in ("token", "block")]
    drawn = KINDS["target_rows"].draw(measured.results, "page")
    assert drawn is not None and len(drawn[0].axes) == 12 and drawn[1] == 2
    assert "target_rows.png" in draw(measured)
    assert "target_rows.png omits 2 panels; crossdraft report --format png --where draws them" in measured.notes


# -- files ----------------------------------------------------------------------------------------------------------


def test_charts_of_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("crossdraft_page.charts.charts.encoded", lambda figure, form: b"chart")
    assert draw(outcome(tmp_path, {1: {"token": 1.0}})) == []
    assert draw(outcome(tmp_path, {1: {}})) == []
    assert draw(outcome(tmp_path, {1: {"token": 1.0, "block": 1.0}})) == ["block_efficiency.png", "target_rows.png"]
    names = [f"{kind}.png" for kind in ("block_efficiency", "target_rows", "speed_up", "throughput")]
    assert draw(outcome(tmp_path, {1: {"token": 1.0}, 2: {"token": 1.0}})) == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("font", ["", "no font"])
def test_run_draws_charts_after_its_tables(tmp_path: Path, monkeypatch: Any, font: str) -> None:
    """Charts are shown in ``summary.md``; an error costs no table."""

    def encode(figure: Any, form: str) -> bytes:
        if font:
            raise RuntimeError(font)
        return b"chart"

    monkeypatch.setattr("crossdraft_page.charts.charts.encoded", encode)
    summary = write_summary(outcome(tmp_path, {1: {"token": 1.0, "block": 1.0}}))
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| draft-model" in text and (tmp_path / "summary.csv").is_file()
    assert ("![target rows](target_rows.png)" in text, "note: no charts: RuntimeError: no font" in text) == (
        not font,
        bool(font),
    )
    assert summary.charts == ([] if font else ["block_efficiency.png", "target_rows.png"])


@pytest.mark.slow
def test_files_are_valid_and_reproducible(results: Sequence[CellResult], tmp_path: Path) -> None:
    cells = [r for r in results if r.config.batch_size == 1]
    written: list[dict[str, bytes]] = []
    for size, forms in ((8, ("svg", "pdf")), (20, ("svg", "pdf", "png"))):
        matplotlib.rcParams["font.size"] = size  # the user's own settings do not matter
        written.append({f".{form}": chart(cells, KINDS["acceptance"], "column", form)[0] for form in forms})
    svg, pdf, png = written[1].values()
    assert written[0] == {".svg": svg, ".pdf": pdf}
    assert png.startswith(b"\x89PNG")
    assert (
        b"<svg" in svg
        and b"<text" not in svg
        and b"http"
        not in svg.replace(b"http://www.w3.org", b"")
        .replace(b"http://purl.org", b"")
        .replace(b"http://creativecommons.org", b"")
        .replace(b"https://matplotlib.org", b"")
    )
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf


def test_command(tmp_path: Path, capsys: Any) -> None:
    run = on_disk(finished_run(tmp_path / "some-abc", SOME, tokens=12))
    out = tmp_path / "figures"
    command = ["report", str(run), "--format", "png", "--kind", "target_rows,acceptance"]
    assert cli.main([*command, "--out", str(out), "--where", "batch_size=1,4", "--where", "drafter=draft-model"]) == 0
    files = [out / f"some-{kind}.png" for kind in ("target_rows", "acceptance")]
    assert capsys.readouterr().out == "".join(f"wrote {file}\n" for file in files)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert cli.main(["report", str(run), "--format", "svg", "--kind", "acceptance"]) == 0
    assert (run / "acceptance.svg").is_file()

    def refused(*arguments: str) -> str:
        assert cli.main(["report", str(run), "--format", "png", *arguments]) == 2
        return capsys.readouterr().err.removeprefix("crossdraft: error: ").strip()

    assert refused("--kind", "throughput", "--where", "batch_size=1") == (
        "throughput cannot be drawn for run some: it requires cells at several batch sizes"
    )
    # The charts after one that cannot be drawn are drawn.
    kinds, folder = "throughput,acceptance,speed_up", tmp_path / "others"
    output = refused("--kind", kinds, "--where", "batch_size=1", "--out", str(folder), "--format", "png")
    assert "throughput cannot be drawn" in output and "acceptance cannot" not in output
    assert (folder / "some-acceptance.png").is_file()
    assert refused("--where", "batch_size=2") == "no cell has batch_size '2'; known values: 1, 4, 16"
    assert "there is no key of a cell named 'bach_size'; did you mean 'batch_size'?" in refused(
        "--where", "bach_size=1"
    )
    assert refused("--where", "gamma").startswith("--where 'gamma' is not KEY=VALUE")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert refused("--out", str(tmp_path / "file")).endswith(
        "file is not a directory; give an existing or a new directory"
    )
    assert refused("--format", "jpg").startswith("there is no report named 'jpg'")
    assert "there is no kind of chart named 'pie'" in refused("--kind", "pie")


def test_cut_intervals_are_marked() -> None:
    """An arrow for each end of a bar that the axis does not show, at the border and in the bar's colour."""
    whole, (panel,) = panels(1, "page")
    panel.errorbar([1, 2], [1.0, 2.0], yerr=[[0.5, 0.1], [9.0, 0.1]], color="#0072b2")
    panel.set_ylim(0.8, 3.0)
    label(whole, [panel], ["a title"], "x", "y")
    arrows = {(line.get_marker(), *line.get_xydata()[0]) for line in panel.lines if line.get_marker() in "^v<>"}
    assert arrows == {("v", 1.0, 0.8), ("^", 1.0, 3.0)} and panel.get_ylim() == (0.8, 3.0)


def test_long_titles_are_wrapped() -> None:
    assert wrapped(["a name of several words", "temperature 0"], 16) == "a name of\nseveral words,\ntemperature 0"
    assert wrapped(["short", "temperature 0"], 30) == "short, temperature 0"
