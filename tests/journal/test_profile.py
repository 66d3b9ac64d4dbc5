"""`train --profile`: a trace of the steps that were asked for, and a snapshot where the accelerator has one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_style.base.errors import UserError
from megatron_style.config.train_arguments import parse_train_arguments
from megatron_style.journal import profile as profiling
from megatron_style.journal.profile import NoProfile, StepProfile, open_profile
from megatron_style.parallel.device.phase_times import PhaseTimes
from tests.support.runs import tiny_run

CPU = torch.device("cpu")


def test_the_trace_has_the_steps_that_were_asked_for_and_their_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = StepProfile(tmp_path / "profile", 2, CPU)
    times = PhaseTimes(CPU)
    for size in range(2, 9):
        with times.measure("forward"):
            torch.ones(size, size) @ torch.ones(size, size)
        profile.step()
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))
    events = trace["traceEvents"]
    shapes = [event["args"]["Input Dims"] for event in events if event.get("name") == "aten::mm"]
    assert shapes == [[[size, size], [size, size]] for size in (4, 5)]
    assert len([event for event in events if event.get("name") == "forward" and event["cat"] == "user_annotation"]) == 2
    assert "aten::mm" in (tmp_path / "profile" / "operators.txt").read_text()
    assert "profile: 2 steps in" in capsys.readouterr().err


def test_an_accelerator_with_a_record_of_its_memory_leaves_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler and the accelerator are stand-ins."""
    calls: list[Any] = []

    class Profile:
        def __init__(self, **given: Any) -> None:
            self.ready = given["on_trace_ready"]
            assert len(given["activities"]) == 2

        def start(self) -> None:
            calls.append("start")

        def step(self) -> None:
            calls.append("step")

        def stop(self) -> None:
            self.ready(self)

        def export_chrome_trace(self, path: str) -> None:
            calls.append(Path(path).name)

        def key_averages(self) -> SimpleNamespace:
            return SimpleNamespace(table=lambda sort_by, row_limit: sort_by)

    monkeypatch.setattr(profiling, "profile", Profile)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    profile = StepProfile(tmp_path, 1, torch.device("cuda"))
    for _ in range(5):
        profile.step()
    assert calls == [
        "start", "step", {"max_entries": 100_000}, "step", "step", "trace.json.gz", "memory.pickle", {"enabled": None},
    ]  # fmt: skip
    assert "cuda" in (tmp_path / "operators.txt").read_text()


def test_only_the_first_rank_profiles_and_a_run_that_is_too_short_is_refused_by_all(tmp_path: Path) -> None:
    run = tiny_run(output={"path": str(tmp_path / "run")})
    assert isinstance(open_profile(run, CPU, None, of=1, writes=True), NoProfile)
    assert isinstance(open_profile(run, CPU, 3, of=5, writes=False), NoProfile)
    for writes in (True, False):
        with pytest.raises(UserError, match=r"--profile 3: 4 steps are left, .* use at most 2, or leave it out"):
            open_profile(run, CPU, 3, of=4, writes=writes)


def test_the_flag() -> None:
    assert parse_train_arguments(["run.yaml", "--profile", "5"]).profile == 5
    assert parse_train_arguments(["run.yaml"]).profile is None
    with pytest.raises(SystemExit):
        parse_train_arguments(["run.yaml", "--profile", "0"])
