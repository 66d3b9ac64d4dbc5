"""Commands that run one after the other, and the progress that they report."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_style.paper import jobs as paper_jobs
from megatron_style.paper.jobs import Job, run_jobs


def test_long_work_says_how_much_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=300)  # five minutes whenever one looks
    monkeypatch.setattr(paper_jobs, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    jobs = [Job(name, ("true",), tmp_path / "log", tmp_path / "out") for name in ("one", "two", "three")]
    run_jobs(jobs, at_once=1, threads=1)
    said = ["[1/3] one", "[2/3] two, about 10 min left", "[3/3] three, about 5 min left"]
    assert capsys.readouterr().err.splitlines() == said
