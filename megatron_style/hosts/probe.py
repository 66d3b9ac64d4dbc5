"""Answer a question of `doctor` on the host that it asks: one JSON line on standard output.

python -m megatron_style.hosts.probe facts '{"folder": "runs/first", "files": []}' <<<'{"NAME": "value"}'

Standard input holds the variables that a rank would have there; they may be secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import megatron_style
from megatron_style.base.cpu import bf16_instructions

PACKAGE = Path(megatron_style.__file__).parent
_MEGABYTE = 2**20


def facts(*, folder: str, files: list[str]) -> dict[str, object]:
    """Return what must be the same on all hosts, what this one has, and which of the files it lacks."""
    return {
        "same": {
            "Python": platform.python_version(),
            "torch": version("torch"),
            "DeepSpeed": version("deepspeed"),
            "project": megatron_style.__version__,
            "commit": _commit(),
            "code": _digest_of_code(),
        },
        "devices": _devices(),
        "bf16": bf16_instructions(),
        "memory": _available_memory(),
        "disk": shutil.disk_usage(existing_part(Path(folder))).free,
        "address": _address(),
        "missing": [name for name in files if not os.access(name, os.R_OK)],
    }


def leave(*, folder: str, name: str) -> dict[str, object]:
    """Create a file for the other hosts to find, where the run would write. No folder is created."""
    path = existing_part(Path(folder)).resolve() / name
    try:
        path.touch()
    except OSError as error:
        return {"error": f"{path.parent}: {error.strerror}"}
    return {"path": str(path)}


def look(*, path: str) -> dict[str, object]:
    return {"found": Path(path).exists()}


def remove(*, path: str) -> dict[str, object]:
    Path(path).unlink(missing_ok=True)
    return {}


def listen(*, port: int, guests: int, seconds: float) -> dict[str, object]:
    """Take the port as the first rank would, until all guests have called."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            return {"error": error.strerror}
        server.listen(guests + 1)
        deadline = time.monotonic() + seconds
        with suppress(TimeoutError):
            for _ in range(guests):
                server.settimeout(max(0.01, deadline - time.monotonic()))
                server.accept()[0].close()
    return {}


def call(*, address: str, port: int, seconds: float) -> dict[str, object]:
    """Connect to the port, retrying until the other side listens: both start at the same time."""
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return {"reached": True}
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.1)
    return {"reached": False, "reason": reason}


def reduce(*, rank: int, world: int, address: str, port: int) -> dict[str, object]:
    """Run and time the collective that training uses. May block for ever: the caller must set a timeout."""
    import torch
    import torch.distributed as dist

    from megatron_style.hosts.launcher import accelerator

    device = accelerator()
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world)
    values = torch.ones(_MEGABYTE // 4, device=device)
    repeats = 10
    dist.all_reduce(values)  # the first one opens the connections
    right = bool((values == world).all())
    begin = time.monotonic()
    for _ in range(repeats):
        dist.all_reduce(values)
    values.sum().item()  # wait for the accelerator, which computes asynchronously
    spent = (time.monotonic() - begin) / repeats
    dist.barrier()
    dist.destroy_process_group()
    return {"backend": backend, "right": right, "seconds": spent}


def existing_part(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _commit() -> str | None:
    command = ["git", "-C", str(PACKAGE), "rev-parse", "--short", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None


def _digest_of_code() -> str:
    """Return a digest of the code, including what is not committed."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _devices() -> dict[str, object]:
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        import torch  # takes seconds

        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None:
            return {"kind": found.type, "count": torch.accelerator.device_count()}
    return {"kind": "core", "count": len(os.sched_getaffinity(0))}


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _address() -> str:
    """Return this host's first address, as DeepSpeed's launcher finds it."""
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return addresses[0] if addresses else "127.0.0.1"


QUESTIONS: dict[str, Callable[..., dict[str, object]]] = {
    question.__name__: question for question in (facts, leave, look, remove, listen, call, reduce)
}

if __name__ == "__main__":
    os.environ |= json.load(sys.stdin)
    print(json.dumps(QUESTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))  # noqa: T201
