"""Charts: what they draw is in the file, and the same figures give the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import rc_context

from megatron_style.paper.measures import Figures, Findings
from megatron_style.paper.results.charts import draw_positions, draw_table, draw_times
from megatron_style.paper.results.curves import Curve
from megatron_style.paper.results.presented import present
from megatron_style.paper.scale import SCALES
from megatron_style.paper.tables import SYSTEMS, table

POSITIONS = tuple(range(1, 21))


def text_of(draw: Callable[[Path], None], tmp_path: Path) -> str:
    """Return the drawing, with its letters as text, after checking that it is drawn alike twice."""
    with rc_context({"svg.fonttype": "none"}):
        for name in ("one.svg", "other.svg"):
            draw(tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "other.svg").read_text()
    return drawn


def times(labels: list[str]) -> list[Curve]:
    steps = range(1, 9)
    return [
        Curve(label, tuple(map(float, steps)), tuple(400 / step + 10 * index for step in steps))
        for index, label in enumerate(labels)
    ]


def test_every_system_is_named_with_its_last_perplexity(tmp_path: Path) -> None:
    drawn = text_of(lambda path: draw_times(times(list(SYSTEMS)), "A title", path), tmp_path)
    for index, label in enumerate(SYSTEMS):
        assert f">{label}  {50 + 10 * index}<" in drawn
    assert ">A title<" in drawn


def test_losses_by_position_are_one_curve_each(tmp_path: Path) -> None:
    def drawn(**losses: float) -> str:
        curves = [Curve(label, POSITIONS, (loss,) * 20) for label, loss in losses.items()]
        return text_of(lambda path: draw_positions(curves, "A title", path), tmp_path)

    both = drawn(cached=5.0, plain=6.0)
    assert ">cached<" in both
    assert ">plain<" in both
    assert drawn(one=5.0, other=6.0) != drawn(one=5.5, other=6.0)


@pytest.mark.parametrize(("number", "scale"), [(2, "paper"), (2, "miniature"), (8, "miniature")])
def test_first_stages_are_a_heat_map_of_the_papers_figures_and_ours(number: int, scale: str, tmp_path: Path) -> None:
    grid = table(number).at(SCALES[scale])
    here: Findings = {
        (row.subject, measure): Figures((70 + index + 0.25,))
        for index, row in enumerate(grid.rows)
        for measure in row.measures
        if row.subject is not None and measure is not None
    }
    drawn = text_of(lambda path: draw_table(present(grid, here), path), tmp_path)
    published = [row.paper[0] for row in grid.rows if row.label.endswith("L=128")]
    assert all(f">{figure:.2f}<" in drawn for figure in published if figure is not None)
    assert all(f">{70 + index}.25<" in drawn for index, row in enumerate(grid.rows[:20]) if " epochs of " in row.label)
    assert ">epochs of the first stage<" in drawn


def test_a_grid_may_have_gaps_and_stages_that_never_match(tmp_path: Path) -> None:
    grid = table(6).at(SCALES["miniature"])
    first, second, *_ = (row for row in grid.rows)
    assert first.subject is not None
    assert second.subject is not None
    here: Findings = {
        (first.subject, first.measures[0]): Figures((float("inf"),)),  # type: ignore[dict-item]
        (second.subject, second.measures[0]): Figures((0.5,)),  # type: ignore[dict-item]
    }
    drawn = text_of(lambda path: draw_table(present(grid, here), path), tmp_path)
    assert ">never<" in drawn
    assert ">-<" in drawn
