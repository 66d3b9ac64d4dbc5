"""`doctor` on this machine alone, and how it judges the answers of hosts. tests/cluster asks real hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_style.base.command import run_command
from megatron_style.doctor import main
from megatron_style.hosts.diagnosis import judge_clocks, judge_disk, judge_host, judge_versions
from megatron_style.hosts.hosts import Host
from tests.support.in_child import in_child
from tests.support.launch import free_port, launch
from tests.support.small_run import write_small_run
from tests.support.tiny import expect_refusal, run_here

A, B = Host("a", 4), Host("b", 4)


@pytest.fixture(autouse=True)
def port_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.mark.slow
def test_a_run_that_would_start_here(tmp_path: Path) -> None:
    result = launch("doctor", write_small_run(tmp_path, ranks=1))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    assert "4 steps on 1 process(es)" in result.stdout


@pytest.mark.slow
def test_a_run_that_would_not_start_is_reported_first(tmp_path: Path) -> None:
    run_file = write_small_run(tmp_path, ranks=1)
    done = in_child(run_here, main, run_file, "--set", "parallel.tensor=2")
    assert done.code == 1, done.out + done.err
    assert "parallel.tensor (2) must divide the 1 processes" in done.out.splitlines()[0]
    (tmp_path / "train.bin").unlink()
    findings = json.loads(in_child(run_here, main, run_file, "--json").out)["findings"]
    assert [finding["subject"] for finding in findings if finding["level"] == "FAIL"] == ["localhost", "run"]
    assert f"cannot read {tmp_path / 'train.bin'}" in findings[0]["message"]


def test_wrong_input_is_reported_in_one_line(tmp_path: Path) -> None:
    for argv in (["nowhere.yaml"], ["--hostfile", tmp_path / "hosts"]):
        expect_refusal(run_here(main, *argv), str(argv[-1]))


@pytest.mark.slow
def test_a_rehearsal_of_one_rank_of_many(tmp_path: Path) -> None:
    run_file = write_small_run(tmp_path, ranks=4, parallel={"tensor": 2})
    done = in_child(run_here, main, run_file, "--rehearse", 8, "--rank", 5, "--json")
    assert done.code == 0, done.out + done.err
    told = json.loads(done.out)
    rehearsal = told["rehearsal"]
    assert (rehearsal["rank"], rehearsal["ranks"], rehearsal["failure"]) == (5, 8, None)
    assert [each["stage"]["segment_length"] for each in rehearsal["stages"]] == [8, 24]
    assert all(each["peak"] == max(each["passes"], each["update"]) > 0 for each in rehearsal["stages"])
    assert [finding["level"] for finding in told["findings"]] == ["ok"] * 4
    assert {finding["subject"] for finding in told["findings"]} == {"stage 1", "stage 2", "rank 5", "run"}


@pytest.mark.slow
def test_a_rehearsed_run_that_is_too_large_fails_with_a_remedy(tmp_path: Path) -> None:
    run_file = write_small_run(tmp_path, ranks=1)
    (tmp_path / "valid.bin").unlink()
    done = in_child(run_here, main, run_file, "--rehearse", 1, "--gpu-memory", "0.01MB")
    assert done.code == 1, done.out + done.err
    first, second, third, *_ = done.out.splitlines()
    assert first.startswith("FAIL  stage 1")
    assert "that are usable; set parallel.recompute to true" in first
    assert second.startswith("FAIL  stage 2")
    assert third.startswith("WARN  run")
    assert f"cannot read {tmp_path / 'valid.bin'}" in third
    assert "rehearsed against planned" in done.out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--rehearse", "3", "--set", "parallel.tensor=2"], "parallel.tensor (2) must divide the 3 processes"),
        (["--rehearse", "4", "--rank", "4"], "--rank 4: not in a grid of 4 processes; it must be 0 to 3"),
        (["--rehearse", "0"], "--rehearse: '0' is not a whole number of at least 1; "),
        (["--rehearse", "many"], "--rehearse: 'many' is not a whole number of at least 1; "),
        (["--rehearse", "4", "--hostfile", "hosts"], "--hostfile: a rehearsal asks no hosts"),
        (["--rehearse", "4", "--gpu-memory", "plenty"], "--gpu-memory plenty: not a size"),
        (["--rank", "1"], "--rank: belongs to a rehearsal"),
        (["--rehearse", "4", "--set", "data.train=nowhere/train", "--set", "data.vocab_size=null"],
         "data.vocab_size: missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_reported_in_one_line(
    argv: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert told in refusal([str(write_small_run(tmp_path, ranks=1)), *argv], capsys, monkeypatch)


def test_a_rehearsal_needs_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--rehearse: needs a run" in refusal(["--rehearse", "4"], capsys, monkeypatch)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the one line that the command leaves with exit code 2."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # a rehearsal sets it
    monkeypatch.setattr(sys, "argv", ["doctor", *argv])
    with pytest.raises(SystemExit) as left:
        run_command(main)
    assert left.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_clocks_are_compared_with_each_other() -> None:
    (apart,) = judge_clocks({A: -3.0, B: 4.5})
    assert (apart.level, apart.message) == ("WARN", "b is 7.5 s ahead of a; synchronize them with NTP")
    assert [finding.level for finding in judge_clocks({A: 100.0, B: 100.5})] == ["ok"]


@pytest.mark.parametrize(
    ("slots", "kind", "count", "level"),
    [
        (4, "cuda", 4, "ok"),
        (4, "cuda", 2, "FAIL"),
        (2, "cuda", 4, "WARN"),
        (4, "core", 2, "WARN"),
        (2, "core", 4, "ok"),
    ],
)
def test_slots_against_devices(slots: int, kind: str, count: int, level: str) -> None:
    told = {"devices": {"kind": kind, "count": count}, "memory": 2**40, "missing": [], "bf16": []}
    assert next(judge_host(Host("a", slots), told)).level == level


@pytest.mark.parametrize(
    ("kind", "instructions", "told"),
    [
        ("core", ["avx512_bf16"], ["bfloat16 instructions: avx512_bf16"]),
        ("core", [], ["no bfloat16 instructions, so float32 trains faster on this CPU"]),
        ("cuda", [], []),
    ],
)
def test_whether_a_cpu_multiplies_bfloat16_is_reported(kind: str, instructions: list[str], told: list[str]) -> None:
    facts = {"devices": {"kind": kind, "count": 2}, "memory": 2**40, "missing": [], "bf16": instructions}
    messages = [finding.message for finding in judge_host(Host("a", 2), facts)]
    assert [message for message in messages if "bfloat16" in message] == told


def test_disk_against_checkpoints() -> None:
    assert [judge_disk(A, free, 100, kept=3).level for free in (99, 299, 300)] == ["FAIL", "WARN", "ok"]


def test_a_differing_version_is_reported_with_both() -> None:
    facts = {host: {"same": {"torch": name, "Python": "3.11"}} for host, name in ((A, "2.13"), (B, "2.12"))}
    (finding,) = judge_versions(facts)
    assert (finding.level, finding.subject, finding.message) == ("FAIL", "b", "torch is 2.12, on a it is 2.13")
