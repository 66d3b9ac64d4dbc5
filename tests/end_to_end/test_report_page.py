"""The report page in a real browser: everything is drawn, nothing is requested from the network, no width scrolls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_style.report import main
from tests.support.browser import Tab, find_browser, open_tab
from tests.support.tiny import run_here
from tests.support.written_runs import BASELINE, LONG, SHORTFORMER, write_run

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium or chrome"),
]

# Of every chart that is shown: its size, its lines and bars and the smallest of them, room beside its words.
DRAWN = """[...document.querySelectorAll('figure svg')].filter(svg => svg.checkVisibility()).map(svg => {
  const box = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll('path.line, path.bar')].map(path => path.getBBox());
  const words = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
  return [svg.querySelector('title').textContent, box.width, box.height, shapes.length,
          Math.min(...shapes.map(shape => shape.width + shape.height)),
          Math.min(...words.map(word => Math.min(word.left, innerWidth - word.right)))]})"""
CURVES = ["Loss, nats per token", "Perplexity", "Learning rate", "Gradient norm"]
OTHERS = ["Held-out loss, nats per token", "Speed, tokens per second", "Speed, FLOP/s", "Peak memory of the first rank"]

# Every label of a chart that is shown, the number of places along its curves, and the labels that have one inside.
ON_CURVES = """(() => {
  const found = {labels: 0, places: 0, covered: []};
  for (const svg of [...document.querySelectorAll('figure svg')].filter(svg => svg.checkVisibility())) {
    const places = [...svg.querySelectorAll('path.line')].flatMap(path => {
      const box = path.closest('svg').querySelector('clipPath rect').getBBox(), toScreen = path.getScreenCTM();
      return Array.from({length: 401}, (_, n) => path.getPointAtLength(path.getTotalLength() * n / 400))
        .filter(at => at.y >= box.y && at.y <= box.y + box.height).map(at => at.matrixTransform(toScreen))});
    const labels = [...svg.querySelectorAll('text')].map(label => [label.textContent, label.getBoundingClientRect()]);
    found.labels += labels.length; found.places += places.length;
    found.covered.push(...labels.filter(([, box]) => places.some(at =>
      at.x > box.left && at.x < box.right && at.y > box.top && at.y < box.bottom)).map(([name]) => name));
  }
  return found})()"""
FIELD = """(box => [box.left, box.top, box.width, box.height])(
  document.querySelector('.by-tokens .readouts').getBoundingClientRect())"""
SHOWN = """[...document.querySelectorAll('.said')].filter(said => said.checkVisibility()).map(said => {
  const box = said.getBoundingClientRect();
  return {text: said.innerText, left: box.left, right: box.right}})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    written = {"short<former": SHORTFORMER, "baseline": BASELINE, "a-name-that-is-much-longer-than-others": LONG}
    runs = [write_run(folder / name, run) for name, run in written.items()]
    assert run_here(main, *runs, "--output", folder / "three.html").code == 0
    assert run_here(main, runs[0], "--output", folder / "one.html").code == 0
    return folder / "three.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert BROWSER is not None
    with open_tab(BROWSER, tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", ["one.html", "three.html"])
def test_everything_is_drawn_and_the_page_does_not_scroll_sideways(
    tab: Tab, page: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    tab.look(page.with_name(name), width=width, dark=dark)
    assert tab.ask("innerWidth") == width
    assert tab.ask("document.documentElement.scrollWidth") <= width
    for along in ("time", "flops", "tokens"):
        tab.ask(f"document.querySelector('label[for=along-{along}]').click()")
        charts = tab.ask(DRAWN)
        assert [chart[0] for chart in charts] == CURVES + OTHERS
        for title, wide, high, shapes, smallest, room in charts:
            assert wide > 250, title
            assert high > 100, title
            assert shapes >= 1, title
            assert smallest > 1, title
            assert room > 0, f"{title}: a label is cut off"
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert tab.complaints == []
    assert {address.split(":")[0] for address in tab.addresses} == {"file"}


def test_dark_is_dark_and_its_lines_are_light(tab: Tab, page: Path) -> None:
    brightness = []
    for dark in (False, True):
        tab.look(page, width=1280, dark=dark)
        for what, style in (("document.body", "backgroundColor"), ("document.querySelector('.line')", "stroke")):
            colour = tab.ask(f"getComputedStyle({what}).{style}")
            brightness.append(sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))))
    light_ground, light_line, dark_ground, dark_line = brightness
    assert dark_ground < light_line < dark_line < light_ground


def test_wide_tables_scroll_in_their_own_boxes(tab: Tab, page: Path) -> None:
    tab.look(page, width=375)
    boxes = tab.ask("[...document.querySelectorAll('.box')].map(box => [box.clientWidth, box.scrollWidth])")
    assert any(inside > box for box, inside in boxes)
    assert all(box <= 375 for box, _ in boxes)
    names = tab.ask("[...document.querySelectorAll('tbody th')].map(name => name.getBoundingClientRect().width)")
    assert max(names) < 375 / 2  # they stay when the rest scrolls, and must leave room for it


@pytest.mark.parametrize("name", ["one.html", "three.html"])
def test_a_usual_window_cuts_no_column(tab: Tab, page: Path, name: str) -> None:
    tab.look(page.with_name(name), width=1280)
    boxes = tab.ask(
        "[...document.querySelectorAll('.box')].map(box => [box.ariaLabel, box.scrollWidth - box.clientWidth])"
    )
    assert len(boxes) >= 2
    assert [about for about, excess in boxes if excess > 0] == []


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", ["one.html", "three.html"])
def test_no_label_lies_on_a_curve(tab: Tab, page: Path, name: str, width: int) -> None:
    tab.look(page.with_name(name), width=width)
    found = tab.ask(ON_CURVES)
    assert found["labels"] > 20
    assert found["places"] > 1000
    assert found["covered"] == []


def test_the_value_under_the_pointer_is_shown(tab: Tab, page: Path) -> None:
    for width in (375, 1280):
        tab.look(page, width=width, height=3000)
        left, top, wide, high = tab.ask(FIELD)
        for share in (0.02, 0.45, 0.55, 0.98):
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + share * wide, y=top + high / 2)
            (said,) = tab.ask(SHOWN)
            assert "short<former, training: " in said["text"]
            assert 0 <= said["left"] < said["right"] <= width
            assert tab.ask("document.documentElement.scrollWidth") <= width
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert tab.ask(SHOWN) == []


def test_the_values_are_reached_by_keyboard_one_chart_per_stop(tab: Tab, page: Path) -> None:
    tab.look(page.with_name("one.html"), width=1280, height=3000)
    stops = []
    while not stops or stops[-1] != "read-perplexity-by-tokens":
        tab.press("Tab", 9)
        stops.append(tab.ask("document.activeElement.name || document.activeElement.tagName"))
        assert len(stops) < 10
    assert stops[-2] == "read-loss-by-tokens"
    first = tab.ask(SHOWN)[0]["text"]
    tab.press("ArrowRight", 39)
    (second,) = tab.ask(SHOWN)
    assert first != second["text"]
    assert "short<former, training: " in second["text"]


@pytest.mark.slow
def test_the_page_prints_on_light_paper(tab: Tab, page: Path, tmp_path: Path) -> None:
    tab.look(page, width=1280, dark=True)
    tab.paper(tmp_path / "page.pdf")
    assert 2 <= (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") <= 5
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.ask("getComputedStyle(document.querySelector('fieldset')).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")
