"""Signals to `multi_node.sh`: they reach the ranks of every host, and DeepSpeed's own `pkill` is never run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_style.supervision.record import RankRecord, read_records, saved_step
from tests.cluster.hosts import Cluster
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.slow
ENDLESS = ("--set", "stages.1.steps=50000", "--set", "output.log_every=1000", "--set", "output.heartbeat_timeout=5")


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM], 75),
        pytest.param([signal.SIGUSR1], 75, marks=pytest.mark.sweep),
        pytest.param([signal.SIGINT], 75, marks=pytest.mark.sweep),
        pytest.param([signal.SIGINT, signal.SIGINT], 130, marks=pytest.mark.sweep),
    ],
)
def test_a_signal_reaches_every_host(
    two_hosts: Cluster, tmp_path: Path, numbers: list[signal.Signals], code: int
) -> None:
    run_file = write_small_run(tmp_path, ranks=2)
    told = tmp_path / "told"
    process = two_hosts.start("launch/multi_node.sh", two_hosts.hostfile(), run_file, *ENDLESS, told=told)
    ranks = wait_until_training(tmp_path, process)
    if len(numbers) > 1:  # a rank that stands still keeps the run from saving in between
        (held,) = [rank for rank in ranks if rank.host == "node2"]
        two_hosts.run("kill", "-STOP", held.pid, host="node2")
    inside = int(
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    )  # of nsenter, which hands on nothing
    for number in numbers:
        os.kill(inside, number)
        time.sleep(1)  # two of a kind at once arrive as one
    assert process.wait(120) == code, told.read_text()
    for host in two_hosts.names:
        assert "python" not in two_hosts.run("ps", "ax", "-o", "comm=", host=host).stdout
    if code == 75:
        assert saved_step(tmp_path / "run") not in (None, 2)
    else:
        assert "; the steps after the checkpoint of step 2 are lost" in told.read_text()


def wait_until_training(folder: Path, process: subprocess.Popen[bytes]) -> list[RankRecord]:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, (folder / "told").read_text()
        found = [seen.record for seen in read_records(folder / "run").values()]
        if len(found) == 2 and all(record.phase == "training" and record.step > 2 for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError((folder / "told").read_text())
