"""The drawing of the house: which room may import which, who may import which library, and what is free of torch.

A new arrow is a line here and a sentence in docs/decisions.md. `python -m tests.architecture.drawing` prints the graph
for the README.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_style"
MODULES = tuple(sorted(PACKAGE.rglob("*.py")))
NEEDS: Mapping[str, frozenset[str]] = {
    room: frozenset(needs.split())
    for room, needs in {
        "base": "",
        "config": "base",
        "schedule": "base config",
        "data": "base config schedule",
        "parallel": "base",
        "model": "config parallel",
        "inference": "base config data model parallel schedule",
        "datastore": "base config inference model parallel",
        "hosts": "base",
        "supervision": "base config hosts parallel",
        "engine": "base config data hosts model parallel schedule",
        "checkpoint": "base config data engine model parallel schedule",
        "formats": "base checkpoint config data engine model parallel schedule",
        "planning": "base config data model schedule",
        "rehearsal": "base config data engine hosts model parallel planning schedule",
        "journal": "base config engine inference parallel planning schedule",
        "reporting": "base config",
        "paper": "base config data model planning reporting schedule",
        "commands": "base checkpoint config data datastore engine formats hosts inference journal paper parallel "
        "planning rehearsal reporting schedule supervision",
    }.items()
}
TORCH_FREE = frozenset({"base", "config", "schedule", "data", "planning", "reporting", "paper"})
TORCH_FREE_MODULES = frozenset({"megatron_style.model.shape", "megatron_style.parallel.split"})  # of other rooms
ONLY_IN: Mapping[str, frozenset[str]] = {
    "deepspeed": frozenset({"engine", "rehearsal"}),
    "yaml": frozenset({"config"}),
    "pydantic": frozenset({"config"}),
    "mpi4py": frozenset({"data", "hosts"}),
    "transformers": frozenset({"formats"}),
    "faiss": frozenset({"datastore"}),
    "pyarrow": frozenset({"data"}),
    "zstandard": frozenset({"data"}),
}


def reachable(room: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return every room that can be reached from this one."""
    for need in NEEDS[room] - seen:
        seen = reachable(need, seen | {need})
    return seen


def graph() -> str:
    """Return the arrows as Mermaid draws them, without those that follow from others."""
    lines = ["graph TD"]
    for room in sorted(NEEDS):
        implied = frozenset[str]().union(*(reachable(need) for need in NEEDS[room]))
        lines += [f"    {room} --> {need}" for need in sorted(NEEDS[room] - implied)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{graph()}\n")
