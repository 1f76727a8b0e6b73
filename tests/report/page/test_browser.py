"""The page of ``explain`` in a real browser, headless: nothing is loaded, nothing overflows, drawings can be read."""

from __future__ import annotations

import shutil

import pytest

import mla_compile
from mla_compile.report.explained import explained
from mla_compile.report.facts import facts_of
from mla_compile.report.page.write import write_page
from tests.support.explaining import Long
from tests.support.toy import decode_inputs

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"), pytest.mark.thorough]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory, explained_tiny):
    """An absorbed model with everything a page can have, and a refusal with a large drawing."""
    folder = tmp_path_factory.mktemp("pages")
    write_page(explained_tiny, folder / "absorbed.html", "absorbed")
    report = mla_compile.explain(Long(), *decode_inputs(cached=300))
    write_page(explained(facts_of(report.sites, report.messages, "Long"), "fp32", 4), folder / "refused.html", "A" * 90)
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.mark.singly
@pytest.mark.parametrize("name", ["absorbed", "refused"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_a_desk_in_light_and_dark(browser, pages, name, scheme):
    """Text is far from its ground: contrast of at least 7 (WCAG AAA), by luminance."""
    view = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    said, asked = [], []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    address = (pages / f"{name}.html").as_uri()
    view.goto("about:blank")
    blank = view.screenshot()
    view.goto(address)
    shown = view.screenshot()
    assert len(shown) > 5 * len(blank)
    style = "getComputedStyle(document.body)"
    ground, ink = (luminance(view.evaluate(f"{style}.{what}")) for what in ("backgroundColor", "color"))
    assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 7
    assert ground > 0.8 if scheme == "light" else ground < 0.05
    view.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for width in (390, 1280, 320):
        view.set_viewport_size({"width": width, "height": 800})
        across = view.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert across[0] <= across[1], f"{width} px: the page is {across[0]} px wide"
    assert (said, asked) == ([], [address])
    view.close()


def test_charts_and_drawings_can_be_seen(browser, pages):
    view = browser.new_page(viewport={"width": 390, "height": 800})
    view.goto((pages / "absorbed.html").as_uri())
    bars = view.evaluate("[...document.querySelectorAll('.bar rect')].map(r => r.getBoundingClientRect().width)")
    values = view.evaluate("[...document.querySelectorAll('.bar')].map(b => Number(b.dataset.value))")
    assert len(bars) == 3
    assert sorted(range(3), key=bars.__getitem__) == sorted(range(3), key=values.__getitem__)
    assert view.evaluate("document.querySelectorAll('.line circle').length") == 18
    # Every mark lies within its chart, and every label within its box: the fonts are not ours.
    assert view.evaluate(
        """[...document.querySelectorAll('svg.chart circle, svg.chart text')].filter(c => {
            const inner = c.getBoundingClientRect(), outer = c.closest('svg').getBoundingClientRect();
            return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
        }).map(c => c.textContent)"""
    ) == []  # fmt: skip
    assert view.evaluate(
        """[...document.querySelectorAll('svg.nodes .node')].filter(g => {
            const box = g.querySelector('path').getBBox().width;
            return [...g.querySelectorAll('text')].some(t => t.getComputedTextLength() > box - 4);
        }).map(g => g.textContent)"""
    ) == []  # fmt: skip
    # What is wider than a phone scrolls in its own box.
    assert view.evaluate("[...document.querySelectorAll('.graph .scroll')].some(s => s.scrollWidth > s.clientWidth)")
    view.close()


def luminance(colour: str) -> float:
    """Of ``rgb(r, g, b)``, relative, as WCAG 2 defines it."""
    red, green, blue = (int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
