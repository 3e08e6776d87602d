"""The page of HTML in headless Chromium."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossdraft_page.html.document import html_page
from html_runs import finished_run

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDEST = 1400


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as started:
        result = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.mark.parametrize("width", [WIDEST, 1000, 390])
def test_forty_cells(browser: Any, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    text = html_page([finished_run(tmp_path)])
    assert len(text.encode()) < 2**20
    file.write_text(text, encoding="utf-8", newline="\n")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark")
    page, requests, bad = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda line: bad.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = "[...document.querySelectorAll('#cells *')].map((e) => e.getBoundingClientRect().right)"
    assert page.evaluate(f"Math.max(...{right})") <= width, "the table is not cut"
    first = page.locator("#cells tbody tr[data-drafter]").first
    shown = [cell.get_attribute("class").split()[0] for cell in first.locator("th, td").all() if cell.is_visible()]
    assert shown[:3] == ["pair", "block_efficiency", "speed_up"] and (len(shown) > 3) == (width == WIDEST)

    rows = page.locator("#cells tbody tr[data-drafter]:visible")
    assert rows.count() == 40
    page.select_option("#filter-verifier", "block")
    page.select_option("#filter-group", "batch size 4")
    assert rows.count() == 4 and page.locator("#cells tbody:visible").count() == 1  # two drafters, two lengths
    page.select_option("#filter-verifier", "")
    page.select_option("#filter-group", "")
    page.locator("#cells thead th.speed_up").click()  # the greatest of each group first
    for group in page.locator("#cells tbody").all():
        values = [float(text) for text in group.locator("td.speed_up .number").all_inner_texts()]
        assert len(values) == 10 and values == sorted(values, reverse=True)

    assert page.locator(".panel svg:visible").count() == 9
    page.select_option(".added select", index=1)
    assert page.locator(".added pre:visible").count() > 3 and page.locator(".added button:visible").count() > 3
    page.select_option("#response-cell", index=3)
    assert page.locator("#response-tokens .token").count() == 128
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    page.click("#theme")
    assert page.evaluate(ground) == dark
    assert (requests, bad) == ([file.as_uri()], [])
    context.close()
