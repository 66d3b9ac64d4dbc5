"""A run on several hosts equals the run on one host, step by step, and other users of the hosts see no secret of it."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from megatron_style.config.run import load_run
from megatron_style.engine.local_ranks import run_ranks
from megatron_style.train import train
from tests.cluster.hosts import Cluster
from tests.support.launch import ROOT
from tests.support.observed import held_folders, ranks_with, shown_to_everybody
from tests.support.small_run import losses, write_small_run

pytestmark = pytest.mark.slow
LAUNCHERS = {"multi_node.sh": "deepspeed", "mpi.sh": "mpirun", "supervise.sh --hostfile": "deepspeed"}


def one_host(folder: Path, ranks: int) -> list[float]:
    run_ranks(ranks, train, load_run(write_small_run(folder, ranks=ranks), []))
    return losses(folder)


def expect_same_losses(hosts: Cluster, script: str, folder: Path, expected: list[float], *, slots: int) -> None:
    ranks = slots * len(hosts.names)
    run_file = write_small_run(folder, ranks=ranks)
    result = hosts.run(f"launch/{script}", hosts.hostfile(slots=slots), run_file)
    assert result.returncode == 0, result.stdout + result.stderr
    found = f"launcher: {LAUNCHERS[script]}; processes: {ranks}; hosts: {len(hosts.names)}"
    assert found in result.stderr
    np.testing.assert_allclose(losses(folder), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return one_host(tmp_path_factory.mktemp("one_host"), 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return one_host(tmp_path_factory.mktemp("one_host"), 4)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A root of its own: the user's own `.deepspeed_env` lies in the real one."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("launch", "megatron_style", ".venv"):
        (root / name).symlink_to(ROOT / name)
    return root


@pytest.mark.parametrize("script", LAUNCHERS)
def test_two_hosts_train_what_one_host_trains_and_show_no_secret(
    two_hosts: Cluster, two_ranks: list[float], script: str, project: Path
) -> None:
    """A variable reaches the ranks, and no command line of any host."""
    secret = uuid.uuid4().hex
    variable = f"WANDB_API_KEY={secret} $HOME 'x' %n"  # a shell or pdsh would change what it sees of this
    (project / ".deepspeed_env").write_text(f"{variable}\n")
    folder = project.parent
    run_file = write_small_run(folder, ranks=2)
    command = f"{project}/launch/{script}".split()
    launch = two_hosts.start(*command, two_hosts.hostfile(), run_file, told=folder / "told")
    ranks: set[str] = set()
    while launch.poll() is None:
        assert not [line for line in shown_to_everybody() if secret in line]
        ranks |= ranks_with(variable)
        time.sleep(0.2)
    told = (folder / "told").read_text()
    assert launch.returncode == 0, told
    assert f"launcher: {LAUNCHERS[script]}; processes: 2; hosts: 2" in told
    np.testing.assert_allclose(losses(folder), two_ranks, rtol=1e-6)
    assert ranks == {"0", "1"}
    assert secret not in told
    assert not held_folders(secret)


@pytest.mark.parametrize("script", ["multi_node.sh", pytest.param("mpi.sh", marks=pytest.mark.sweep)])
def test_four_hosts_train_what_one_host_trains(
    four_hosts: Cluster, four_ranks: list[float], script: str, tmp_path: Path
) -> None:
    expect_same_losses(four_hosts, script, tmp_path, four_ranks, slots=1)


@pytest.mark.sweep
@pytest.mark.parametrize("script", ["multi_node.sh", "mpi.sh"])
def test_four_hosts_with_two_ranks_each(four_hosts: Cluster, script: str, tmp_path: Path) -> None:
    expected = one_host(tmp_path / "one_host", 8)
    expect_same_losses(four_hosts, script, tmp_path / "four_hosts", expected, slots=2)
