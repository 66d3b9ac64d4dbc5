"""Commands that run one after the other, and the progress that they report."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_style.paper.corpus import Source
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.runs import PreparedText, RunSpec
from megatron_style.paper.scale import scale_named
from megatron_style.paper.tables import table
from megatron_style.paper.work import jobs, processes
from megatron_style.paper.work.processes import Job, Workers, run_jobs


def test_long_work_says_how_much_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=300)  # five minutes whenever one looks
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    work = [Job(name, ("true",), tmp_path / "log", tmp_path / "out") for name in ("one", "two", "three")]
    run_jobs(work, Workers(at_once=1, threads=1))
    said = ["[1/3] one", "[2/3] two, about 10 min left", "[3/3] three, about 5 min left"]
    assert capsys.readouterr().err.splitlines() == said


def test_what_follows_a_job_is_run_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def job(name: str, *following: Job) -> Job:
        return Job(name, ("true",), tmp_path / "log", tmp_path / "out", then=lambda: following)

    run_jobs([job("train 1", job("evaluate 1")), job("train 2", job("evaluate 2"))], Workers(at_once=1, threads=1))
    said = ["[1/2] train 1", "[2/3] evaluate 1", "[3/3] train 2", "[4/4] evaluate 2"]
    assert capsys.readouterr().err.splitlines() == said


def test_only_one_of_the_seeds_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[RunSpec] = []
    monkeypatch.setattr(jobs, "_prepare", lambda *_: None)
    monkeypatch.setattr(jobs, "_run_all", lambda _, needs, __: worked.extend(needs))
    text = PreparedText(tmp_path / "train", tmp_path / "valid", vocab_size=8192)
    monkeypatch.setattr(Experiment, "corpus", text)
    experiment = Experiment(scale_named("miniature"), Source("made up", tmp_path), tmp_path, seeds=3)
    tables = [table(number).at(experiment.scale) for number in (1, 5)]
    jobs.measure(experiment, tables, at_once=1, only_seed=2)
    assert {spec.seed for spec in worked} == {2}
    one_seed = len(worked)
    worked.clear()
    jobs.measure(experiment, tables, at_once=1)
    assert {spec.seed for spec in worked} == {1, 2, 3}
    assert len(worked) == 3 * one_seed
