"""The run that a supervisor keeps going, and the command that launches it on the hosts that answer."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron_style.config.run import RunConfig
from megatron_style.supervision.cluster import Hosts

_LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")


@dataclass(frozen=True)
class LaunchSpec:
    run: RunConfig
    arguments: tuple[str, ...]  # of train
    hosts: Hosts = field(default_factory=dict)  # none: this machine
    processes: int | None = None
    retries: int = 5
    pause: float = 5.0
    stall: float = 1800.0

    def command(self, directory: Path, hosts: Hosts) -> list[str]:
        """Return the launch command. Hosts are always reached by ssh: DeepSpeed would start a single one here."""
        where = ["--hostfile", str(directory / "none")]
        if hosts:
            (directory / "hostfile").write_text("".join(f"{name} slots={n}\n" for name, n in hosts.items()))
            where = ["--hostfile", str(directory / "hostfile"), "--force_multi"]
        elif self.processes:
            where += ["--num_accelerators", str(self.processes)]
        where += ["--master_port", str(_free_port())]
        return [*_LAUNCHER, *where, "--module", "megatron_style.train", *self.arguments]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
