"""Every message that docs/troubleshooting.md explains is one that the code has."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import ROOT

ROWS = [
    line
    for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
OF_THE_SHELL = {"command not found"}


def code() -> str:
    """Return the package's code with the strings of a message joined."""
    files = sorted((ROOT / "megatron_style").rglob("*.py"))
    text = " ".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r'"\s+f?"', "", text)


@pytest.fixture(scope="module")
def messages() -> str:
    return code()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_the_message_exists(row: str, messages: str) -> None:
    first = row.split("|")[1]
    parts = re.findall(r"`([^`]+)`", first)
    assert parts
    for part in parts:
        assert part in OF_THE_SHELL or part in messages, f"no message has {part!r}"
