"""When a supervisor restarts a run and when it does not, with launches that only pretend to train."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.supervision.cluster import Hosts, divisible, signal_ranks
from megatron_style.supervision.lock import FolderLock
from megatron_style.supervision.process import Process, started_at, this_process
from megatron_style.supervision.record import RankRecord, read_records, write_record
from megatron_style.supervision.supervisor import Failed, LaunchSpec, Supervisor
from tests.support.runs import tiny_run

pytestmark = pytest.mark.slow

PRETEND = """
import os, sys, time, uuid
from pathlib import Path
from megatron_style.supervision.process import this_process
from megatron_style.supervision.record import RankRecord, Status, write_record, write_status
folder = Path(sys.argv[1])
def count():
    with (folder / "attempts").open("a") as file:
        file.write(".")
    return (folder / "attempts").stat().st_size
def end(state):
    launch = uuid.uuid4().hex
    key = os.environ["MEGATRON_STYLE_LAUNCH"]
    (folder / "ranks").mkdir(exist_ok=True)
    me = vars(this_process())
    write_record(folder, RankRecord(**me, rank=0, launch=launch, step=7, phase="ended", time="", key=key))
    write_status(folder, Status(launch, state, 7, "", "the disk is full"))
def save(name):
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "latest").write_text(name)
attempt = count()
"""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_style.supervision.supervisor.LOOK_SECONDS", 0.05)


class Pretends(Supervisor):
    script = ""

    def _command(self, directory: Path, hosts: Hosts) -> list[str]:
        return [sys.executable, "-c", PRETEND + self.script, str(self._folder)]


def launch_spec(folder: Path, **settings: Any) -> LaunchSpec:
    run = tiny_run(output={"path": str(folder)}, parallel={"tensor": settings.pop("tensor", 1)})
    return LaunchSpec(run=run, arguments=(), pause=0.0, **settings)


def supervise(folder: Path, script: str, **settings: Any) -> int:
    supervisor = Pretends(launch_spec(folder, **settings))
    supervisor.script = script
    return supervisor.run()


def attempts(folder: Path) -> int:
    return (folder / "attempts").stat().st_size


def test_what_the_run_records_decides_and_not_the_exit_code(tmp_path: Path) -> None:
    assert supervise(tmp_path, "end('finished') if attempt == 3 else None\nsys.exit(attempt == 3)") == 0
    assert attempts(tmp_path) == 3
    assert supervise(tmp_path, "end('stopped')") == 75
    assert attempts(tmp_path) == 4
    assert not (tmp_path / "supervisor.json").exists()


def test_retries_are_bounded_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, "end('failed')\nsys.exit(1)", retries=2) == 1
    assert attempts(tmp_path) == 3
    told = capsys.readouterr().err
    assert "given up after 3 attempts" in told
    assert "  3. step 7: the disk is full" in told


def test_the_count_starts_anew_with_every_checkpoint(tmp_path: Path) -> None:
    assert supervise(tmp_path, "end('finished') if attempt == 6 else save(str(attempt))", retries=1) == 0
    assert attempts(tmp_path) == 6


def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    assert supervise(tmp_path, "sys.exit(2)") == 2
    assert attempts(tmp_path) == 1


def test_a_run_that_stalls_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "end('finished') if attempt == 2 else time.sleep(100)"
    assert supervise(tmp_path, script, stall=2.0) == 0
    assert "no new step for 2 s" in capsys.readouterr().err


def test_the_second_supervisor_is_refused(tmp_path: Path) -> None:
    first = FolderLock(tmp_path / "supervisor.json")
    assert first.take() is None
    with pytest.raises(UserError, match="another run is at work there"):
        supervise(tmp_path, "end('finished')")
    assert not (tmp_path / "attempts").exists()


def rank_of(process: subprocess.Popen[bytes]) -> RankRecord:
    who = replace(this_process(), pid=process.pid, started=started_at(process.pid))
    return RankRecord(**vars(who), rank=1, launch="before", step=7, phase="training", time="")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def test_leftovers_are_ended_before_a_start(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    (tmp_path / "ranks").mkdir()
    write_record(tmp_path, rank_of(sleeper))
    assert supervise(tmp_path, "end('finished')") == 0
    assert sleeper.wait(5) == -signal.SIGKILL


def test_a_run_that_is_at_work_is_refused_and_not_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    (tmp_path / "ranks").mkdir()
    write_record(tmp_path, rank_of(sleeper))
    lock = FolderLock(tmp_path / "lock.json")
    assert lock.take() is None
    with pytest.raises(UserError, match="another run is at work there"):
        supervise(tmp_path, "end('finished')")
    assert sleeper.poll() is None


def test_a_pid_of_someone_else_is_spared_on_other_hosts_too(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The command that would go over ssh, run by a shell of this host."""

    def ssh(host: str, command: str) -> bool:
        return subprocess.run(["sh", "-c", command], check=False).returncode == 0

    there = replace(rank_of(sleeper), place="another boot")
    for other in (replace(there, started=there.started + 1), replace(there, host="node-7")):
        signal_ranks([other], ["10.0.0.2"], ssh, signal.SIGTERM)
    time.sleep(0.2)
    assert sleeper.poll() is None
    signal_ranks([there], ["10.0.0.2"], ssh)
    assert sleeper.wait(5) == -signal.SIGKILL


HOSTS = {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize(
    ("silent", "tensor", "kept"),
    [
        ("", 1, "a slots=4\nb slots=4\nc slots=4\n"),
        ("b", 2, "a slots=4\nc slots=4\n"),
        ("a", 3, "b slots=4\nc slots=2\n"),
        ("ab", 4, "c slots=4\n"),
    ],
)
def test_hosts_that_do_not_answer_are_left_out(tmp_path: Path, silent: str, tensor: int, kept: str) -> None:
    run = tiny_run(
        output={"path": str(tmp_path)},
        parallel={"tensor": tensor},
        model={**tiny_run().model.as_data(), "heads": 12, "ffn_size": 24, "hidden_size": 24},
    )
    supervisor = Supervisor(
        LaunchSpec(run=run, arguments=("run.yaml",), hosts=HOSTS), ssh=lambda host, _: host not in silent
    )
    command = supervisor._command(tmp_path, supervisor._usable_hosts())
    assert (tmp_path / "hostfile").read_text() == kept
    assert "--force_multi" in command, "or a single host that is left would be taken for this machine"


def test_without_hosts_an_attempt_fails_and_can_be_repeated(tmp_path: Path) -> None:
    supervisor = Supervisor(launch_spec(tmp_path, hosts=HOSTS), ssh=lambda *_: False)
    with pytest.raises(Failed, match="room for 0 ranks"):
        supervisor._command(tmp_path, supervisor._usable_hosts())


def test_too_few_slots_for_one_model_are_no_hosts() -> None:
    assert divisible({"a": 1, "b": 1}, 4) == {}


def test_records_of_processes_elsewhere_are_never_taken_for_dead(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    who = Process("node-7", "another boot", 1, 1)
    write_record(tmp_path, RankRecord(**vars(who), rank=3, launch="", step=0, phase="training", time=""))
    assert not read_records(tmp_path)[3].record.is_gone
