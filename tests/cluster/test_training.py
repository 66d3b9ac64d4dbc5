"""A run on several hosts equals the run on one host, step by step, and other users of the hosts see no secret of it."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from megatron_style.config.run_file import load_run
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.cluster.hosts import Cluster
from tests.support.observed import held_folders, ranks_with, shown_to_everybody
from tests.support.small_run import losses, write_small_run

pytestmark = pytest.mark.slow
MORE_CASES = [
    ("supervise.sh --hostfile", 2, 1),  # test_faults.py has a longer run of it
    ("multi_node.sh", 4, 1),
    ("mpi.sh", 2, 1),
    ("multi_node.sh", 4, 2),
    ("mpi.sh", 4, 2),
]
LAUNCHERS = {"multi_node.sh": "deepspeed", "mpi.sh": "mpirun", "supervise.sh --hostfile": "deepspeed"}


@pytest.mark.parametrize(
    ("script", "count", "slots"),
    [("multi_node.sh", 2, 1), ("mpi.sh", 4, 1)] + [pytest.param(*case, marks=pytest.mark.sweep) for case in MORE_CASES],
)
def test_several_hosts_train_what_one_host_trains_and_show_no_secret(
    request: pytest.FixtureRequest, script: str, count: int, slots: int, project: Path
) -> None:
    """A variable reaches the ranks, and no command line of any host."""
    hosts: Cluster = request.getfixturevalue({2: "two_hosts", 4: "four_hosts"}[count])
    secret = uuid.uuid4().hex
    variable = f"WANDB_API_KEY={secret} $HOME 'x' %n"  # a shell or pdsh would change what it sees of this
    (project / ".deepspeed_env").write_text(f"{variable}\n")
    world = count * slots
    folder = project.parent
    run_file = write_small_run(folder, ranks=world)
    command = f"{project}/launch/{script}".split()
    launch = hosts.start(*command, hosts.hostfile(slots=slots), run_file, told=folder / "told")
    ranks: set[str] = set()
    while launch.poll() is None:
        assert not [line for line in shown_to_everybody() if secret in line]
        ranks |= ranks_with(variable)
        time.sleep(0.2)
    told = (folder / "told").read_text()
    assert launch.returncode == 0, told
    assert f"launcher: {LAUNCHERS[script]}; processes: {world}; hosts: {count}" in told
    assert ranks == set(map(str, range(world)))
    assert secret not in told
    assert not held_folders(secret)
    expected = folder / "one_host"
    run_ranks(world, train, load_run(write_small_run(expected, ranks=world)))
    np.testing.assert_allclose(losses(folder), losses(expected), rtol=1e-6)
