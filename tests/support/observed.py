"""Observe what running processes expose: command lines, and the sockets that they listen on."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]

RANK_VARIABLES = {"RANK", "OMPI_COMM_WORLD_RANK"}


def listening(pid: int) -> set[tuple[str, str]]:
    """Return the program (rank or launcher) and the address of each socket on which it or a descendant listens."""
    top = psutil.Process(pid)
    found = set()
    for process in [top, *top.children(recursive=True)]:
        try:
            sockets = process.net_connections(kind="tcp")
            program = "rank" if RANK_VARIABLES & process.environ().keys() else "launcher"
        except psutil.Error:  # it has ended meanwhile
            continue
        found |= {(program, socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


def shown_to_everybody() -> list[str]:
    """Return the command line of every process of this machine, including those in other namespaces."""
    return [text for path in Path("/proc").glob("[0-9]*/cmdline") if (text := _text(path))]


def ranks_with(variable: str) -> set[str]:
    """Return the rank of every process whose environment has NAME=value."""
    ranks = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        lines = _text(path).split("\0")
        if variable in lines:
            pairs = [line.partition("=") for line in lines]
            ranks |= {value for name, _, value in pairs if name in RANK_VARIABLES}
    return ranks


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def held_folders(secret: str) -> list[Path]:
    """Return the folders in which a holder keeps this value; other holders may end while this looks."""
    folders = Path("/tmp").glob("megatron_style-*")
    return [folder for folder in folders if any(secret in _text(file) for file in _files(folder))]


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has been removed meanwhile
        return []
