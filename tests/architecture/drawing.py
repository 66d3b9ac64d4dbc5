"""The drawing of the house: which room may import which, who may import which library, and what is free of torch.

A new arrow is a line here and a sentence in docs/decisions.md. `python -m tests.architecture.drawing` prints the graph
for the README.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

NEEDS: Mapping[str, frozenset[str]] = {
    room: frozenset(needs.split())
    for room, needs in {
        "config": "",
        "schedule": "config",
        "data": "config schedule",
        "planning": "config data schedule",
        "reporting": "config",
        "reproduction": "config data planning reporting schedule",
        "parallel": "config",
        "model": "config parallel",
        "inference": "config data model parallel schedule",
        "runtime": "config data inference model parallel planning schedule",
        "checkpoint": "config data model parallel runtime schedule",
        "commands": "checkpoint config data inference model parallel planning reporting reproduction runtime schedule",
    }.items()
}
TORCH_FREE = frozenset({"config", "schedule", "data", "planning", "reporting", "reproduction"})
ONLY_IN: Mapping[str, frozenset[str]] = {
    "deepspeed": frozenset({"runtime"}),
    "yaml": frozenset({"config"}),
    "pydantic": frozenset({"config"}),
    "mpi4py": frozenset({"data", "runtime"}),
    "transformers": frozenset({"checkpoint"}),
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
