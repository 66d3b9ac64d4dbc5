"""The scripts in launch/ start the same program everywhere: each is read, and its commands are really run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_style.config.run_file import load_run
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.supervision.launch import main
from megatron_style.train import train
from tests.support.launch import LAUNCH, ROOT, SLURM, TAKE_A_HOSTFILE, script_environment
from tests.support.small_run import losses, write_small_run
from tests.support.tiny import expect_refusal, run_here

SCRIPTS = ["local.sh", "multi_node.sh", "mpi.sh", "torchrun.sh", "slurm.sbatch"]


def script(name: str, *argv: object, **variables: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / name), *map(str, argv)]
    return subprocess.run(command, env=script_environment(**variables), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What one process computes."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(1, train, load_run(write_small_run(folder, ranks=1)))
    return losses(folder)


def test_words_that_start_no_training_are_refused() -> None:
    expect_refusal(run_here(main, "deepspeed", "--module", "train"), "deepspeed --module train: starts no megatron")
    expect_refusal(run_here(main), "no command: starts no megatron_style.train")


def test_every_script_is_short_and_sound() -> None:
    for path in LAUNCH.iterdir():
        longest = 60 if path.name == "environment.sh" else 45  # what the scripts share
        assert len(path.read_text().splitlines()) <= longest, path
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_run_file_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    before = [hosts] if name in TAKE_A_HOSTFILE else []
    for argv, told in ([*before, "nowhere.yaml"], "nowhere.yaml"), (before, "RUN.yaml"):
        result = script(name, *argv, **SLURM)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: {told}: no such file; usage: ")
        assert name in line


CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "local": ("local.sh", {"PROCESSES": "2"}, "launcher: local; processes: 2; hosts: 1"),
    "torchrun": ("torchrun.sh", {"PROCESSES": "2"}, "launcher: torchrun; processes: 2; hosts: 1"),
    "mpirun": ("mpi.sh", {}, "launcher: mpirun; processes: 2; hosts: 1"),
    "srun": ("slurm.sbatch", SLURM, "launcher: srun; processes: 2; hosts: 2"),
    "deepspeed over srun": (
        "slurm.sbatch",
        SLURM | {"VIA": "deepspeed"},
        "launcher: srun; processes: 2; hosts: 2",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_each_launcher_trains_what_one_process_trains(case: str, tmp_path: Path, alone: list[float]) -> None:
    name, variables, found = CASES[case]
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    before = [hosts] if name in TAKE_A_HOSTFILE else []
    result = script(name, *before, write_small_run(tmp_path, ranks=2), **variables)
    assert result.returncode == 0, result.stderr
    assert found in result.stderr
    np.testing.assert_allclose(losses(tmp_path), alone, rtol=1e-5)


def test_slurm_directives_are_what_they_should_be() -> None:
    """Slurm ignores directives after the first command, silently."""
    head, _, body = (LAUNCH / "slurm.sbatch").read_text().partition("set -euo pipefail")
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head, flags=re.MULTILINE))
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    assert given["signal"] == "USR1@300"  # train saves on it; without B: it goes to the processes, not to the script
    assert "requeue" in given
    assert "#SBATCH" not in body


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_the_kubernetes_job_fits_its_service() -> None:
    service, job = kubernetes()
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, variables = job["metadata"]["name"], {item["name"]: item["value"] for item in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert int(variables["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.slow
def test_the_pods_of_the_kubernetes_job_train_together(tmp_path: Path, alone: list[float]) -> None:
    """Its own command and variables, but for the name of the first pod, the paths and one process a pod."""
    _, job = kubernetes()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, run_file = container["command"]
    assert Path(program).parts[-2:] == ("launch", "torchrun.sh")
    assert run_file.endswith(".yaml")
    variables = {item["name"]: item["value"] for item in container["env"]} | {"MASTER_ADDR": "127.0.0.1"}
    command = ["bash", str(LAUNCH / "torchrun.sh"), str(write_small_run(tmp_path, ranks=2))]
    shared = script_environment(**variables, PROCESSES=1)
    pods = []
    for index in range(job["spec"]["completions"]):
        own = shared | {"JOB_COMPLETION_INDEX": str(index)}
        pods.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    told = [pod.communicate(timeout=300)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    assert "launcher: torchrun; processes: 2; hosts: 2" in told[0]
    np.testing.assert_allclose(losses(tmp_path), alone, rtol=1e-5)


def test_an_installation_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Also where nothing else stops at an error, as in a container's build."""
    for file in (LAUNCH / "environment.sh", *ROOT.glob("requirements*.txt"), ROOT / "constraints.txt"):
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(ROOT)).write_bytes(file.read_bytes())
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for code, stamps in ((1, 0), (0, 1)):
        (tools / "pip").write_text(f"#!/bin/sh\nexit {code}\n")
        (tools / "pip").chmod(0o755)
        command = "source launch/environment.sh && install_requirements requirements.txt"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=script_environment(), check=False)
        assert done.returncode == code
        assert len(list(tmp_path.glob(".venv/*.installed"))) == stamps


def test_the_dockerfile_fits_the_files_and_commands_that_exist() -> None:
    """It installs as the quickstart does, and copies nothing that the quickstart makes."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    install = "source launch/environment.sh && install_requirements requirements.txt"
    assert text.count(f"RUN bash -c '{install}'") == len(re.findall(r"^FROM base AS (?:cpu|cuda)$", text, re.MULTILINE))
    assert "install_requirements requirements.txt" in (LAUNCH / "quickstart.sh").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"torch==(\S+)", text)) == {torch}
    for script in re.findall(r"\./(launch/\S+)", text):
        assert (ROOT / script).is_file()
    left_out = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    made = (line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split())
    assert {name for name in made if name in ("data", "models", "runs", "wandb", ".venv")} <= left_out
