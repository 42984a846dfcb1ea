"""The report's page in a real browser, opened from a file: it draws, tells, links, and fits."""

from __future__ import annotations

import html
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_sweep import MATRIX, SweepRun, write_sweep

from efficient_lmcache.report.cli_report import write_report

pytestmark = pytest.mark.integration

HOSTILE = "<img src=x onerror=alert(1)> \"'&"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_DRAWN = "document.documentElement.dataset.drawn === 'yes'"
# What Plotly objects to in the figures, once the names of colours are colours.
_OBJECTIONS = """() => Object.entries(JSON.parse(document.getElementById('figures').textContent)).flatMap(
    ([name, figure]) => {
        const plain = JSON.parse(JSON.stringify(figure).replace(/"@[a-z-]+"/g, '"#000"'));
        return (Plotly.validate(plain.data, plain.layout) || []).map((one) => `${name}: ${one.msg}`);
    })"""
_POINT = """(name) => {
    const plot = document.querySelector('#capacity .plot'), box = plot.getBoundingClientRect();
    for (const trace of plot._fullData) {
        const index = (trace.hovertext || []).findIndex((text) => text.startsWith(name));
        if (index < 0) continue;
        const { xaxis, yaxis } = plot._fullLayout;
        const x = xaxis._offset + xaxis.l2p(trace.x[index]), y = yaxis._offset + yaxis.l2p(trace.y[index]);
        return [box.left + x, box.top + y];
    }
}"""


def _give_up(reason: str) -> Any:
    # CI must not pass by skipping.
    return pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _give_up("no playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        _give_up("no chromium on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root, as CI is, has no sandbox; the page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    failed = SweepRun("none", gamma_h=1.7, status="failed", error="</script><script>alert(2)</script>")
    hostile = SweepRun("none", gamma_h=4.0, name=HOSTILE)
    sweep = write_sweep(tmp_path_factory.mktemp("browser") / "sweep", (*MATRIX, hostile, failed))
    write_report([sweep], sweep / "report.html", [])
    return sweep / "report.html"


class Opened:
    """A page that has drawn, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function(_DRAWN, timeout=60_000)

    def point(self, name: str) -> tuple[float, float]:
        """Where the mark of a run, named as in its hover text, is in the viewport: in the first plot of capacity."""
        self.page.locator("#capacity .plot").first.scroll_into_view_if_needed()
        return tuple(self.page.evaluate(_POINT, name))


@pytest.fixture(scope="module")
def desktop(browser, page_file) -> Iterator[Opened]:
    opened = Opened(browser, page_file, viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield opened
    opened.context.close()


def colour(page: Any, selector: str, name: str) -> str:
    return str(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{name}"))


def test_the_page_opens_without_network_and_without_errors(desktop, page_file):
    assert desktop.asked == [page_file.as_uri()]
    assert desktop.said == []


def test_every_plot_is_drawn_with_its_marks(desktop):
    empty = desktop.page.evaluate(
        """() => [...document.querySelectorAll('.plot')]
            .filter((plot) => !plot.querySelector('svg.main-svg .points path, svg.main-svg path.js-line'))
            .map((plot) => plot.id)"""
    )
    assert empty == []
    assert desktop.page.locator(".plot").count() > 15


def test_plotly_accepts_every_figure(desktop):
    assert desktop.page.evaluate(_OBJECTIONS) == []


def test_pointing_at_a_mark_tells_its_run(desktop):
    desktop.page.mouse.move(*desktop.point("<b>a8-none-1.1</b>"))
    label = desktop.page.locator(".hoverlayer .hovertext")
    label.wait_for()
    text = label.text_content()
    for part in ("a8-none-1.1", "A 8", "20 MiB", "makespan", "computed prefill"):
        assert part in text


def test_clicking_a_mark_opens_its_run_directory(desktop, page_file):
    place = desktop.point("<b>a8-none-0.8</b>")
    desktop.page.mouse.move(*place)
    desktop.page.locator(".hoverlayer .hovertext").wait_for()
    with desktop.context.expect_page() as opened:
        desktop.page.mouse.click(*place)
    assert opened.value.url == (page_file.parent / "runs" / "a8-none-0.8").as_uri() + "/"


def test_a_hostile_name_is_text_also_where_it_is_hovered(desktop):
    desktop.page.mouse.move(*desktop.point(f"<b>{html.escape(HOSTILE)}</b>"))
    label = desktop.page.locator(".hoverlayer .hovertext")
    label.wait_for()
    assert "<img src=x onerror=alert(1)>" in label.text_content()
    assert desktop.page.locator("img").count() == 0
    assert desktop.said == []


def test_plots_follow_the_colours_of_the_page(desktop):
    tick = "#capacity .plot .xtick text"
    light = colour(desktop.page, tick, "fill"), colour(desktop.page, "body", "backgroundColor")
    desktop.page.emulate_media(color_scheme="dark")
    desktop.page.wait_for_function(f"getComputedStyle(document.querySelector('{tick}')).fill !== '{light[0]}'")
    dark = colour(desktop.page, tick, "fill"), colour(desktop.page, "body", "backgroundColor")
    desktop.page.emulate_media(color_scheme="light")
    assert _luminance(light[1]) > 0.9 > 0.1 > _luminance(dark[1])
    for text, paper in (light, dark):
        assert _contrast(text, paper) >= 4.5


def _luminance(css: str) -> float:
    """Relative luminance of rgb(...), WCAG 2."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", css)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_phone_shows_it_without_scrolling_sideways(browser, page_file):
    opened = Opened(browser, page_file, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    wide = opened.page.evaluate(
        """() => [...document.querySelectorAll('body, header, section, .plot, .plot svg.main-svg, h1, h2, h3, p, .key')]
            .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)
            .map((element) => element.outerHTML.slice(0, 90))"""
    )
    assert wide == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.said == []
    opened.context.close()


def test_it_prints_in_light_colours_and_then_is_dark_again(browser, page_file):
    opened = Opened(browser, page_file, viewport={"width": 1280, "height": 900}, color_scheme="dark")
    before = colour(opened.page, "#capacity .plot .xtick text", "fill")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed = colour(opened.page, "#capacity .plot .xtick text", "fill")
    assert _contrast(printed, "rgb(255, 255, 255)") >= 4.5
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert colour(opened.page, "#capacity .plot .xtick text", "fill") == before
    assert opened.page.pdf()[:4] == b"%PDF"
    opened.context.close()
