"""`doctor` on two hosts: no complaint when all is well, and the name of the fault when something is broken."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.support.launch import ROOT
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.slow
PORT = 29511


def doctor(
    hosts: Cluster, hostfile: Path, run_file: Path, *before: str
) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Its exit code, and by level the subject and message of each finding."""
    command = [*before, sys.executable, "-m", "megatron_style.doctor", "--hostfile", hostfile, run_file, "--json"]
    result = hosts.run(*command, MASTER_PORT=PORT)
    assert result.returncode in (0, 1), result.stderr
    levels: dict[str, list[tuple[str, str]]] = {"FAIL": [], "WARN": [], "ok": []}
    for finding in json.loads(result.stdout)["findings"]:
        levels[finding["level"]].append((finding["subject"], finding["message"]))
    return result.returncode, levels


@contextlib.contextmanager
def mounted(hosts: Cluster, *words: object, host: str = "node2") -> Iterator[None]:
    """On one host only; the last word is where."""
    done = hosts.run("mount", *words, host=host)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        done = hosts.run("umount", words[-1], host=host)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def unreachable_host(hosts: Cluster, hostfile: Path, output: Path) -> Iterator[None]:
    hostfile.write_text(hostfile.read_text() + "node9 slots=1\n")
    yield


@contextlib.contextmanager
def other_version(hosts: Cluster, hostfile: Path, output: Path) -> Iterator[None]:
    copy = output.parent / "megatron_style"
    shutil.copytree(ROOT / "megatron_style", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").write_text('__version__ = "0.0.7"\n')
    with mounted(hosts, "--bind", copy, ROOT / "megatron_style"):
        yield


@contextlib.contextmanager
def port_in_use(hosts: Cluster, hostfile: Path, output: Path) -> Iterator[None]:
    details, own_id = json.dumps({"port": PORT, "guests": 99, "seconds": 120}), output.parent / "listener"
    probe = f"echo $$ >{own_id}; exec {sys.executable} -m megatron_style.hosts.probe listen '{details}' <<<'{{}}'"
    listener = hosts.start("bash", "-c", probe)
    hosts.run("bash", "-c", f"until ss -ltn | grep -q :{PORT}; do sleep 0.1; done")
    try:
        yield
    finally:
        hosts.run("kill", own_id.read_text().strip())  # as the host numbers it
        listener.wait(timeout=20)


@contextlib.contextmanager
def full_disk(hosts: Cluster, hostfile: Path, output: Path) -> Iterator[None]:
    output.mkdir(exist_ok=True)
    with mounted(hosts, "-t", "tmpfs", "-o", "size=4k", "none", output):
        yield


@contextlib.contextmanager
def folder_not_shared(hosts: Cluster, hostfile: Path, output: Path) -> Iterator[None]:
    output.mkdir(exist_ok=True)
    with mounted(hosts, "-t", "tmpfs", "-o", "size=1g", "none", output):
        yield


Fault = Callable[[Cluster, Path, Path], contextlib.AbstractContextManager[None]]
NOT_SHARED = ("output", "is not shared: checkpoints would lack the part of node2")
FAULTS: dict[str, tuple[Fault, list[tuple[str, str]]]] = {
    "unreachable host": (unreachable_host, [("node9", "not reachable by ssh")]),
    "other version": (
        other_version,
        [("node2", "project is 0.0.7, on node1 it is"), ("node2", "code is .*, on node1 it is")],
    ),
    "port in use": (port_in_use, [("node1", f"port {PORT} cannot be used: .* set MASTER_PORT")]),
    "full disk": (full_disk, [("node2", "MiB of disk space free; one checkpoint takes"), NOT_SHARED]),
    "folder not shared": (folder_not_shared, [NOT_SHARED]),
}


def expect_faults(hosts: Cluster, folder: Path, names: list[str]) -> None:
    run_file, hostfile = write_small_run(folder, ranks=2), folder / "hostfile"
    hostfile.write_text(hosts.hostfile().read_text())
    with contextlib.ExitStack() as broken:
        for name in names:
            broken.enter_context(FAULTS[name][0](hosts, hostfile, folder / "run"))
        code, levels = doctor(hosts, hostfile, run_file)
    expected = [words for name in names for words in FAULTS[name][1]]
    assert code == 1
    assert len(levels["FAIL"]) == len(expected), levels
    for about, told in expected:
        assert any(who == about and re.search(told, text) for who, text in levels["FAIL"]), (about, told, levels)


def test_two_sound_hosts_get_no_complaint(two_hosts: Cluster, tmp_path: Path) -> None:
    code, levels = doctor(two_hosts, two_hosts.hostfile(), write_small_run(tmp_path, ranks=2))
    assert (code, levels["FAIL"], levels["WARN"]) == (0, [], [])
    told = dict(levels["ok"])
    assert re.match(r"1 MB over gloo: \S+ ms, \S+ MB/s per host", told["all-reduce"])
    assert told["rendezvous"] == f"port {PORT} of node1 (10.77.0.1) is free and reachable from all hosts"
    assert told["output"].endswith("is shared by all hosts")
    assert told["run"] == "4 steps on 2 process(es)"
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".doctor*"))


def test_every_fault_is_named_also_next_to_others(two_hosts: Cluster, tmp_path: Path) -> None:
    expect_faults(two_hosts, tmp_path, ["unreachable host", "other version", "port in use", "full disk"])


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named_alone(two_hosts: Cluster, tmp_path: Path, name: str) -> None:
    expect_faults(two_hosts, tmp_path, [name])


@pytest.mark.sweep
def test_hosts_whose_names_lead_to_themselves_need_the_interface_named(two_hosts: Cluster, tmp_path: Path) -> None:
    """As Debian's installer leaves it. The hosts meet at the rendezvous, and then wait for each other."""
    hostfile, run_file = two_hosts.hostfile(), write_small_run(tmp_path, ranks=2)
    with contextlib.ExitStack() as broken:
        for name in two_hosts.names:
            names = tmp_path / name
            names.write_text(f"127.0.1.1 {name}\n" + (two_hosts.folder / "hosts").read_text())
            broken.enter_context(mounted(two_hosts, "--bind", names, "/etc/hosts", host=name))
        code, levels = doctor(two_hosts, hostfile, run_file, "env", "-u", "GLOO_SOCKET_IFNAME")
        assert doctor(two_hosts, hostfile, run_file)[0] == 0
    ((about, told),) = levels["FAIL"]
    assert (code, about) == (1, "all-reduce")
    assert "name the network interface in GLOO_SOCKET_IFNAME" in told


def test_commands_on_a_host_see_its_own_processes_only(two_hosts: Cluster) -> None:
    """Else the launcher's way of ending processes could reach those of others."""
    seen = two_hosts.run("ps", "ax", "-o", "args=")
    assert [line.split()[0] for line in seen.stdout.splitlines()] == ["bash", "sshd:", "sleep", "ps"]
