"""The page of HTML in a real browser: headless Chromium, where there is one."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from html_runs import finished_run

from crossdraft.framework.report.html.document import html_page

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def test_forty_cells(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    text = html_page([finished_run(tmp_path)])
    assert len(text.encode()) < 3 * 2**20
    file.write_text(text, encoding="utf-8", newline="\n")
    for width in (1280, 390):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark")
        page, asked, bad = context.new_page(), [], []
        page.on("request", lambda request, to=asked: to.append(request.url))
        page.on("console", lambda said, to=bad: to.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error, to=bad: to.append(str(error)))
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("window.Bokeh === undefined")  # the table does not wait for the plot library
        shown = "#cells tbody tr"
        assert page.locator(shown).count() == 44

        page.select_option("#filter-verifier", "block")
        page.select_option("#filter-batch_size", "4")
        assert page.locator(shown).count() == 4  # two drafters, two lengths
        page.select_option("#filter-verifier", "")
        page.select_option("#filter-batch_size", "")
        header = page.locator("#cells thead th", has_text="speed-up")
        header.click()
        header.click()  # the greatest first
        cells = page.locator("#cells tbody td[data-order] .estimate").all_inner_texts()
        speed_ups = [float(text.split()[0]) for text in cells[1::2]]
        assert len(speed_ups) == 40 and speed_ups == sorted(speed_ups, reverse=True)

        for panel in ("pareto", "heat", "acceptance", "rows", "category", "time"):
            page.locator(f"#panel-{panel}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#plot-{panel} > *", state="attached")
        assert page.evaluate("typeof Bokeh.embed.embed_item") == "function"
        page.select_option("select[data-plot=time]", index=1)
        page.select_option("#response-cell", index=3)
        assert page.locator("#response-tokens .token").count() == 128
        assert page.evaluate("document.documentElement.className") == "dark"
        page.click("#theme")
        assert page.evaluate("document.documentElement.className") == ""
        page.wait_for_timeout(500)
        assert (asked, bad) == ([file.as_uri()], [])
        context.close()
