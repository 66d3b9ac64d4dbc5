"""The findings of a check before a launch, and their severity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["FAIL", "WARN", "ok"]
_LEVELS: tuple[Level, ...] = ("FAIL", "WARN", "ok")


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str  # a host, or what was checked
    message: str


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))
