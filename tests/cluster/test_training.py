"""A run on several hosts equals the run on one host, step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_style.config.run import load_run
from megatron_style.engine.local_ranks import run_ranks
from megatron_style.train import train
from tests.cluster.hosts import Cluster
from tests.support.small_run import losses, write_small_run

pytestmark = pytest.mark.slow
LAUNCHERS = {"multi_node.sh": "deepspeed", "mpi.sh": "mpirun"}


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


@pytest.mark.parametrize("script", LAUNCHERS)
def test_two_hosts_train_what_one_host_trains(
    two_hosts: Cluster, two_ranks: list[float], script: str, tmp_path: Path
) -> None:
    expect_same_losses(two_hosts, script, tmp_path, two_ranks, slots=1)


@pytest.mark.parametrize("script", ["multi_node.sh", pytest.param("mpi.sh", marks=pytest.mark.sweep)])
def test_four_hosts_train_what_one_host_trains(
    four_hosts: Cluster, four_ranks: list[float], script: str, tmp_path: Path
) -> None:
    expect_same_losses(four_hosts, script, tmp_path, four_ranks, slots=1)


@pytest.mark.sweep
@pytest.mark.parametrize("script", LAUNCHERS)
def test_four_hosts_with_two_ranks_each(four_hosts: Cluster, script: str, tmp_path: Path) -> None:
    expected = one_host(tmp_path / "one_host", 8)
    expect_same_losses(four_hosts, script, tmp_path / "four_hosts", expected, slots=2)
