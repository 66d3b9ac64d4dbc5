"""constraints.txt has every package that an installation of the requirements brings along, in the tested version."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OF_CUDA = ("nvidia-", "cuda-", "triton")  # a CUDA build of torch brings its own


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonical(name): pin for name, pin in pins}


def needed(names: set[str]) -> set[str]:
    """Return these packages, and all that they need on this machine."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith(OF_CUDA):
            continue
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonical(requirement.name))
    return found


def test_every_package_is_pinned_to_the_installed_version() -> None:
    files = ("requirements.txt", "requirements-neighbours.txt", "requirements-dev.txt")
    direct = {name: pin for file in files for name, pin in pinned(file).items()}
    constraints = pinned("constraints.txt")
    for name in sorted(needed(set(direct))):
        assert name in constraints, f"{name} is not in constraints.txt"
        assert constraints[name] == version(name).partition("+")[0], name
    for name, pin in direct.items():
        assert constraints[name] == pin, f"{name}: constraints.txt and the requirements disagree"


def test_nothing_is_pinned_that_is_not_installed() -> None:
    for name in pinned("constraints.txt"):
        try:
            version(name)
        except PackageNotFoundError:
            raise AssertionError(f"{name} is in constraints.txt, and nothing brings it along") from None
