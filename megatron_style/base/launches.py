"""`launches.jsonl`: a line for each start of a run, with the grid, the precision and the code it was started with."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from megatron_style.base.json_text import parse_json

ROOT = Path(__file__).parents[2]  # the folder that has the package: a checkout, or site-packages
_MOST_BYTES = 1 << 24  # of a file that a stranger may have written


@dataclass(frozen=True, kw_only=True)
class Launch:
    step: int | None = None  # the last one done before it
    began: str | None = None  # date and time, in UTC
    parameters: int | None = None
    corpus_tokens: int | None = None  # of one epoch
    total_steps: int | None = None
    data: int | None = None  # ranks
    tensor: int | None = None  # ranks that share each layer
    zero: int | None = None
    precision: str | None = None
    device: str | None = None
    commit: str | None = None  # of the code; None: it is not a checkout


def append_launch(path: Path, launch: Launch) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(launch)) + "\n")


def read_launches(path: Path) -> list[Launch]:
    """Return the launches, the first one first; none if there is no such file. A value of another type than ours is
    None, and a line that is not an object is left out."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    return [launch for line in lines if (launch := _parse(line)) is not None]


def _parse(line: bytes) -> Launch | None:
    try:
        data = parse_json(line)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    hints = get_type_hints(Launch)
    values = {field.name: data.get(field.name) for field in fields(Launch)}
    known = {key: value for key, value in values.items() if isinstance(value, hints[key]) and value is not True}
    return Launch(**known)


def commit() -> str | None:
    """Return the commit of the code, marked if files have changed since; None if the code is not a checkout."""
    if not (ROOT / ".git").exists():  # a checkout around an installed package has other code
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
