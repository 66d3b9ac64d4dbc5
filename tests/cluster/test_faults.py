"""Faults of a cluster during a supervised run: it ends with the losses of an undisturbed run, and shows no secret."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.supervision.record import RankRecord, read_records
from tests.cluster.hosts import Cluster
from tests.support.observed import ranks_with, shown_to_everybody
from tests.support.resuming import expect_bitwise, make_run, metrics, on_ranks
from tests.support.training import write_corpus

pytestmark = pytest.mark.slow
STEPS = 120
TIMEOUT = 2.5  # seconds without a heartbeat after which a rank is lost
FLAGS = ("--pause", "0.2s", "--retries", "6", "--hostfile")
SECRET = uuid.uuid4().hex
VARIABLE = f"WANDB_API_KEY={SECRET}"


def kill_a_rank(hosts: Cluster, folder: Path) -> None:
    (rank,) = [record for record in ranks(folder) if record.host == "node2"]
    kill(hosts, rank.pid)


def kill_the_ssh_server_and_the_ranks(hosts: Cluster, folder: Path) -> None:
    """All that answers on a host, as when it starts anew; it comes back before the others have noticed."""
    silence(hosts)
    time.sleep(1)
    hosts.start_ssh("node2")


def cut_the_link(hosts: Cluster, folder: Path) -> None:
    """For longer than a silent rank is waited for: the heartbeat does not need the link."""
    hosts.plug("node2", "down")
    time.sleep(TIMEOUT + 0.4)  # TCP tries again after 3.0 s, then after 6.2 s
    hosts.plug("node2", "up")


def fill_the_disk(hosts: Cluster, folder: Path) -> None:
    """Until a launch has failed of it."""
    filler, failures = hosts.disk / "filler", told(folder).count("failed:")
    until = time.monotonic() + 60
    with filler.open("wb", buffering=0) as file:
        while told(folder).count("failed:") == failures and time.monotonic() < until:
            try:
                file.write(bytes(2**20))
            except OSError:
                time.sleep(0.05)
    filler.unlink()
    assert told(folder).count("failed:") > failures


FAULTS: dict[str, Callable[[Cluster, Path], None]] = {
    "rank": kill_a_rank,
    "host": kill_the_ssh_server_and_the_ranks,
    "disk": fill_the_disk,
    "link": cut_the_link,
}


def test_a_run_that_meets_every_fault_equals_one_that_meets_none(two_hosts: Cluster, project: Path) -> None:
    """Its rank is killed with its host; alone, in the sweep and in tests/end_to_end/test_supervision.py."""
    expect_undisturbed_losses(two_hosts, project, ["host", "disk", "link"])


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_meets_one_fault_equals_one_that_meets_none(two_hosts: Cluster, project: Path, fault: str) -> None:
    expect_undisturbed_losses(two_hosts, project, [fault])


@pytest.mark.sweep
def test_a_host_that_stays_away_is_left_out_and_no_token_is_lost(two_hosts: Cluster, project: Path) -> None:
    folder = two_hosts.disk / "fewer"
    run = write_run(folder, "run")
    with supervised(two_hosts, project, folder) as supervisor:
        wait_for_step(folder, 20, supervisor)
        silence(two_hosts)
        try:
            assert supervisor.wait(120) == 0, told(folder)
        finally:
            two_hosts.start_ssh("node2")
    assert "without node2, which do not answer: 1 ranks" in told(folder)
    steps = metrics(run)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    batch = run.data.tokens_per_batch
    sizes = [after["tokens"] - before["tokens"] for before, after in pairwise(steps)]
    assert max(sizes[:15]) == 2 * batch, "two ranks"
    assert max(sizes[-20:]) == batch, "one rank"
    assert {record.host for record in ranks(folder) if record.phase == "ended"} == {"node1"}


def expect_undisturbed_losses(hosts: Cluster, project: Path, faults: list[str]) -> None:
    folder = hosts.disk / "-".join(faults)
    whole, run = write_run(folder, "whole"), write_run(folder, "run")
    on_ranks(whole, 2)
    (project / ".deepspeed_env").write_text(f"{VARIABLE}\n")
    informed: set[str] = set()
    with supervised(hosts, project, folder) as supervisor:
        for number, fault in enumerate(faults):
            wait_for_step(folder, 15 + number * (STEPS - 40) // len(faults), supervisor)
            informed |= ranks_with(VARIABLE)
            assert not [line for line in shown_to_everybody() if SECRET in line]
            before = {record.launch for record in ranks(folder)}
            FAULTS[fault](hosts, folder)
            if fault != "link":  # which a run survives
                wait_for_launch(folder, before, supervisor)
        assert supervisor.wait(180) == 0, told(folder)
    assert "launcher: deepspeed; processes: 2; hosts: 2" in told(folder)
    assert f"finished at step {STEPS}" in told(folder)
    assert informed == {"0", "1"}
    assert SECRET not in told(folder)
    expect_bitwise(run, whole)
    for host in hosts.names:
        assert "python" not in hosts.run("ps", "ax", "-o", "comm=", host=host).stdout


def wait_for_launch(folder: Path, before: set[str], supervisor: subprocess.Popen[bytes]) -> None:
    """Until both ranks train again: two faults at once would leave a host out."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        found = ranks(folder)
        if len(found) == 2 and all(each.launch not in before and each.phase == "training" for each in found):
            return
        assert supervisor.poll() is None, told(folder)
        time.sleep(0.1)
    raise AssertionError(told(folder))


def write_run(folder: Path, name: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    run = make_run(
        folder,
        name,
        data=2,
        steps=STEPS,
        dropout=True,
        output={"save_every": 10, "keep_last": 1, "evaluate_every": 60, "heartbeat_timeout": TIMEOUT},
    )
    (folder / f"{name}.yaml").write_text(json.dumps(run.as_data()))  # JSON is YAML
    return run


@contextmanager
def supervised(hosts: Cluster, project: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    script = project / "launch" / "supervise.sh"
    process = hosts.start(script, *FLAGS, hosts.hostfile(), folder / "run.yaml", told=said_in(folder))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def said_in(folder: Path) -> Path:
    """Not on the disk that may be full."""
    return folder.parent.with_name(f"{folder.name}.told")


def told(folder: Path) -> str:
    return said_in(folder).read_text()


def ranks(folder: Path) -> list[RankRecord]:
    return [seen.record for seen in read_records(folder / "run").values()]


def wait_for_step(folder: Path, step: int, supervisor: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert supervisor.poll() is None, told(folder)
        if last_step(folder) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(told(folder))


def last_step(folder: Path) -> int:
    """As it is recorded; a launch that goes on from a checkpoint takes the lines behind it back."""
    try:
        lines = (folder / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def silence(hosts: Cluster) -> None:
    """Everything on node2 but its first process ends at once."""
    hosts.run("bash", "-c", "kill -9 $(ps ax -o pid=,comm= | awk '$2 ~ /sshd|python/ {print $1}')", host="node2")


def kill(hosts: Cluster, pid: int) -> None:
    """As node2 numbers it."""
    done = hosts.run("kill", "-9", pid, host="node2")
    assert done.returncode == 0, done.stderr
