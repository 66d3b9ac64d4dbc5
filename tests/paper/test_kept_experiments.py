"""The trial runs and experiments that docs/results.md tells of: the page's list has what the records have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_style.base.events import ValidEvent, read_events

KEPT = Path(__file__).parents[2] / "docs" / "results" / "experiments"


def listed(kind: str) -> dict[str, list[str]]:
    """Return the cells of the lines whose first cell links to a record of this kind."""
    page = (KEPT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"^\| \[([^\]]+)\]\({kind}/[^)]+\) \| (.+) \|$", page, flags=re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found}


def test_every_run_is_listed_with_its_last_validation() -> None:
    runs = {path.parent.name: path for path in KEPT.glob("runs/*/metrics.jsonl")}
    assert runs
    assert listed("runs").keys() == runs.keys()
    for name, cells in listed("runs").items():
        *_, last = (event for event in read_events(runs[name]) if isinstance(event, ValidEvent))
        assert cells[-2:] == [f"{last.step:,}", f"{last.loss:.3f}"], name


def test_every_evaluation_is_listed_with_its_perplexity() -> None:
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("evaluations/*.json")}
    assert files
    assert {name: cells[-1] for name, cells in listed("evaluations").items()} == {
        name: f"{found['perplexity']:.1f}" for name, found in files.items()
    }
