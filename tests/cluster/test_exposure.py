"""Other users of a host and its network see no secret of a run, and no open port of a run on one machine."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.support.launch import ROOT
from tests.support.observed import held_folders, ranks_with, shown_to_everybody
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.slow
LAUNCHES = {"multi_node.sh": [], "mpi.sh": [], "supervise.sh": ["--hostfile"]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A root of its own: the user's own `.deepspeed_env` lies in the real one."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("launch", "megatron_style", ".venv"):
        (root / name).symlink_to(ROOT / name)
    return root


@pytest.mark.parametrize("script", LAUNCHES)
def test_a_secret_reaches_the_ranks_and_no_command_line(two_hosts: Cluster, script: str, project: Path) -> None:
    secret = uuid.uuid4().hex
    variable = f"WANDB_API_KEY={secret} $HOME 'x' %n"  # a shell or pdsh would change what it sees of this
    (project / ".deepspeed_env").write_text(f"{variable}\n")
    run_file, told = write_small_run(project.parent, ranks=2), project.parent / "told"
    launch = two_hosts.start(project / "launch" / script, *LAUNCHES[script], two_hosts.hostfile(), run_file, told=told)
    ranks: set[str] = set()
    while launch.poll() is None:
        assert not [line for line in shown_to_everybody() if secret in line]
        ranks |= ranks_with(variable)
        time.sleep(0.2)
    assert launch.returncode == 0, told.read_text()
    assert ranks == {"0", "1"}
    assert secret not in told.read_text()
    assert not held_folders(secret)


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
