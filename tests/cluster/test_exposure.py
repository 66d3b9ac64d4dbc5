"""The network sees no open port of a run on one machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.slow


def test_one_host_in_a_network_listens_on_loopback_only(two_hosts: Cluster, tmp_path: Path) -> None:
    """Its name leads to its address in the network, where gloo would listen by default."""
    run_file, told = write_small_run(tmp_path, ranks=2), tmp_path / "told"
    run = ["env", "-u", "GLOO_SOCKET_IFNAME", "PROCESSES=2", "launch/local.sh", run_file]
    launch = two_hosts.start(*run, told=told)
    listening: set[str] = set()
    while launch.poll() is None:
        lines = two_hosts.run("ss", "-H", "-l", "-t", "-n").stdout.splitlines()
        listening |= {line.split()[3].rpartition(":")[0] for line in lines if not line.split()[3].endswith(":22")}
        time.sleep(0.5)
    assert launch.returncode == 0, told.read_text()
    assert listening == {"127.0.0.1"}
