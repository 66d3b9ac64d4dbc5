"""Hosts of our own on one machine: Linux namespaces with an address, a name and an ssh server each.

Each host has its own network, PID, UTS and mount namespace. The PID namespace matters: the deepspeed launcher ends
processes by a pattern of their command line, and must not see those of others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "sshd", "ssh", "ssh-keygen", "pdsh")
SCRIPT = Path(__file__).with_name("host.sh")


def why_not() -> str | None:
    """What this machine lacks to make hosts, if anything."""
    if os.geteuid() != 0:
        return "network namespaces need root: run the tests as root, on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; install iproute2, openssh-client, openssh-server and pdsh"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True)
    return (
        f"no namespaces here: {probe.stderr.strip()}; a container needs CAP_SYS_ADMIN for them"
        if probe.returncode
        else None
    )


@dataclass(frozen=True)
class Cluster:
    folder: Path
    first_processes: Mapping[str, int]  # of each host's PID namespace, by host name
    cables: Mapping[str, str]  # this machine's ends of them

    @property
    def names(self) -> list[str]:
        return list(self.first_processes)

    def hostfile(self, *, slots: int = 1) -> Path:
        path = self.folder / f"hostfile_{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return path

    def run(self, *command: object, host: str | None = None, **more: object) -> subprocess.CompletedProcess[str]:
        """A command on one of the hosts, by default the first, from the project's root."""
        words = self._inside(host) + list(map(str, command))
        return subprocess.run(words, env=_environment(more), capture_output=True, text=True, timeout=240)

    def start(self, *command: object, told: Path | None = None) -> subprocess.Popen[bytes]:
        """The same on the first host, without waiting for its end. What it says may go to a file."""
        words = self._inside(None) + list(map(str, command))
        with (told or Path("/dev/stderr")).open("wb") as file:
            return subprocess.Popen(words, env=_environment({}), stdout=file, stderr=file)

    @property
    def disk(self) -> Path:
        """A small one, common to all hosts."""
        return self.folder / "disk"

    def plug(self, host: str, state: Literal["up", "down"]) -> None:
        _ip("link", "set", self.cables[host], state)

    def start_ssh(self, host: str) -> None:
        done = self.run(shutil.which("sshd"), "-f", self.folder / "sshd_config", "-o", "PidFile=none", host=host)
        assert done.returncode == 0, done.stderr

    def _inside(self, host: str | None) -> list[str]:
        target = str(self.first_processes[host or self.names[0]])
        return ["nsenter", "--target", target, "--net", "--uts", "--pid", "--mount", f"--wd={Path.cwd()}"]


def _environment(more: Mapping[str, object]) -> dict[str, str]:
    return os.environ | {key: str(value) for key, value in (_VARIABLES | dict(more)).items()}


_VARIABLES: dict[str, object] = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@contextlib.contextmanager
def cluster(folder: Path, count: int) -> Iterator[Cluster]:
    """`count` hosts on a private bridge; all of it is gone afterwards.

    Namespaces have no names, so they end with their processes, and these with ours, even if we are killed."""
    tag = f"s{os.getpid() % 100000}x{count}"  # names of interfaces have 15 characters at most
    names = [f"node{index}" for index in range(1, count + 1)]
    _write_settings(folder, names)
    (folder / "disk").mkdir()
    with contextlib.ExitStack() as undo:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder / "disk")], check=True)
        undo.callback(subprocess.run, ["umount", "--lazy", str(folder / "disk")], check=True)
        _ip("link", "add", f"{tag}b", "type", "bridge")
        undo.callback(_ip, "link", "delete", f"{tag}b")
        _ip("link", "set", f"{tag}b", "up")
        first_processes, cables = {}, {}
        for index, name in enumerate(names, start=1):
            host = _start(folder, name)
            undo.callback(_end, host)
            first_processes[name] = _first_process(host)
            cables[name] = f"{tag}v{index}"
            _plug_in(f"{tag}b", cables[name], _address(index), first_processes[name])
            undo.callback(_ip, "link", "delete", cables[name])  # before the host: its last words keep a cable alive
        made = Cluster(folder, first_processes, cables)
        _wait_for_ssh(made)
        yield made


def _write_settings(folder: Path, names: list[str]) -> None:
    key, host_key = folder / "key", folder / "host_key"
    for path in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    addresses = "".join(f"{_address(index)} {name}\n" for index, name in enumerate(names, start=1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    (folder / "ssh_config").write_text(
        f"IdentityFile {key}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"HostKey {host_key}\nAuthorizedKeysFile {key}.pub\nPermitRootLogin yes\nStrictModes no\n"
        f"PasswordAuthentication no\nUsePAM no\nMaxStartups 100\n"
    )


def _plug_in(bridge: str, cable: str, address: str, process: int) -> None:
    """A cable from the bridge into the host's network, where its end is called eth0."""
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(process))
    _ip("link", "set", cable, "master", bridge, "up")
    _ip("address", "add", f"{address}/24", "dev", "eth0", inside=process)
    _ip("link", "set", "eth0", "up", inside=process)
    _ip("link", "set", "lo", "up", inside=process)


def _start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    spaces = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["setpriv", "--pdeathsig", "KILL", *spaces, "bash", str(SCRIPT), str(folder), name]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _first_process(host: subprocess.Popen[bytes]) -> int:
    """The one child of `unshare`; ending it ends every process of the host."""
    children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
    for _ in range(200):
        if pids := children.read_text().split():
            return int(pids[0])
        time.sleep(0.05)
    raise AssertionError("the host did not start")


def _wait_for_ssh(made: Cluster) -> None:
    for name in made.names:
        for _ in range(100):
            if made.run("ssh", "-o", "ConnectTimeout=2", name, "true").returncode == 0:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{name}: no ssh: {(made.folder / f'{name}.log').read_text()}")


def _end(host: subprocess.Popen[bytes]) -> None:
    host.kill()  # with it goes its child, and with that the host's PID namespace
    host.wait()


def _address(index: int) -> str:
    return f"10.77.0.{index}"


def _ip(*words: str, inside: int | None = None) -> None:
    """Set up the network of this machine, or that of a process."""
    there = ["nsenter", "--target", str(inside), "--net"] if inside else []
    subprocess.run([*there, "ip", *words], check=True)
