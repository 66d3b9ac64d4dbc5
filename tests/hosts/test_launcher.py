"""The launcher is detected by the environment alone."""

from __future__ import annotations

import os

import pytest

from megatron_style.base.errors import UserError
from megatron_style.hosts.launcher import LAUNCHERS, NO_LAUNCHER, Launcher, adopt_srun, find_launcher

TASK = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456", "PMI_SIZE": "4"}  # fmt: skip
FOUND = {
    "none": {},
    "srun": TASK,
    "deepspeed": TASK | {"RANK": "0", "WORLD_SIZE": "4"},
    "local": TASK | {"RANK": "0", "WORLD_SIZE": "4", "MEGATRON_STYLE_STARTED_HERE": "1"},
    "torchrun": TASK | {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"},
    "mpirun": TASK | {"OMPI_COMM_WORLD_SIZE": "4"},
}


def test_mpich_is_recognised_by_its_variable_outside_a_step_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, {"PMI_SIZE": "4"})
    assert find_launcher().name == "mpirun"


def become(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Only these, and for this test only."""
    monkeypatch.setattr(os, "environ", dict(variables))


def launcher_named(name: str) -> Launcher:
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


@pytest.mark.parametrize("expected", FOUND)
def test_launchers_are_distinguished_also_inside_a_slurm_job(monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    become(monkeypatch, FOUND[expected])
    assert find_launcher().name == expected


def test_a_batch_script_is_no_task_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"})
    assert find_launcher() is NO_LAUNCHER


def test_srun_is_said_in_the_words_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, TASK | {"MASTER_ADDR": "node1"})
    adopt_srun(29500)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["3", "1", "4", "node1", "23456"]


def test_srun_over_hosts_needs_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, TASK)
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        adopt_srun(29500)
    become(monkeypatch, TASK | {"SLURM_STEP_NUM_NODES": "1"})
    adopt_srun(29500)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


def test_a_launcher_that_does_not_say_how_many_hosts_may_have_used_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of several hosts must not wait on the loopback of each."""
    become(monkeypatch, {"RANK": "0", "WORLD_SIZE": "4"})
    assert launcher_named("deepspeed").count_hosts() is None
    become(monkeypatch, {"CROSS_SIZE": "1"})
    assert launcher_named("deepspeed").count_hosts() == 1
    become(monkeypatch, {"GROUP_WORLD_SIZE": "3"})
    assert launcher_named("torchrun").count_hosts() == 3
    become(monkeypatch, {})
    assert NO_LAUNCHER.count_hosts() == 1
