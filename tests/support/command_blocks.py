"""The command blocks of the documents, and a folder in which they can be run: a corpus of 200 lines and a tiny model.

A fresh shell runs a block with stand-ins for `python` and the launchers, which write down their words. So the shell's
part (quotes, loops, continued lines) is real, and a test can run the commands in its own process.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINKED = ("megatron_style", "run_configs", "ds_configs", "launch")
SHORT = "--set stages.0.steps=2 --set stages.1.steps=2 --set output.log_every=1 --set output.sample_tokens=2"
SHORT += " --set model.layers=2 --set model.hidden_size=32 --set model.ffn_size=64"
_STAND_IN = """#!/bin/sh
exec {python} -c 'import json, sys; open("{record}", "a").write(json.dumps(sys.argv[1:]) + "\\n")' {name} "$@"
"""


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        texts = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [Block(page.stem, number, text) for number, text in enumerate(texts, start=1)]
    return found


def own_text_block() -> str:
    (text,) = [block.text for block in blocks() if block.page == "README" and "megatron_style.prepare" in block.text]
    return text


def make_world(folder: Path) -> None:
    """Make a folder that looks like a clone after the quickstart, with text of one's own."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    words = ["Once", "upon", "a", "time", *(f"word{i}" for i in range(300))]
    draw = random.Random(1).choices
    lines = [" ".join(draw(words, k=12)) + "\n" for _ in range(220)]
    (folder / "train.txt").write_text("".join(lines[:200]), encoding="utf-8")
    (folder / "valid.txt").write_text("".join(lines[200:]), encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("".join(lines[:200]), encoding="utf-8")
    (folder / "questions.txt").write_text("Once upon\na time\n", encoding="utf-8")
    _write_web(folder, lines)


def _write_web(folder: Path, lines: list[str]) -> None:
    import pyarrow as arrow
    import pyarrow.parquet
    import zstandard

    (folder / "shards").mkdir()
    records = "".join(json.dumps({"content": line}) + "\n" for line in lines[:200])
    packed = zstandard.ZstdCompressor().compress(records.encode())
    (folder / "shards" / "one.jsonl.zst").write_bytes(packed)
    (folder / "shards" / "two.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    arrow.parquet.write_table(arrow.table({"content": lines[200:]}), folder / "valid.parquet")


def fresh_environment(folder: Path, first: Path | None = None) -> dict[str, str]:
    """Return the environment of a shell that has just been opened. `first` comes first in its PATH."""
    path = ":".join([*([str(first)] if first else []), "/usr/local/bin", "/usr/bin", "/bin"])
    return {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def run_block(text: str, folder: Path, environment: dict[str, str], timeout: float = 300.0) -> str:
    """Run a block in a fresh shell, and return its output; any failure is one of the block."""
    command = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def recorded(text: str, folder: Path, scratch: Path) -> Iterator[list[str]]:
    """Run a block with stand-ins, and yield the words of each command in its order."""
    record = scratch / "words.jsonl"
    tools = scratch / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("python", "deepspeed"):
        stand_in = tools / name
        stand_in.write_text(_STAND_IN.format(python=sys.executable, record=record, name=name))
        stand_in.chmod(0o755)
    scripts = re.sub(r"^\./(launch/\w+\.sh)", lambda found: _script(found[1], tools, record), text, flags=re.MULTILINE)
    lines = [line for line in scripts.splitlines() if not line.startswith("source .venv")]
    run_block("\n".join(lines), folder, fresh_environment(folder, tools))
    for line in record.read_text().splitlines():
        yield json.loads(line)


def _script(name: str, tools: Path, record: Path) -> str:
    """Make a stand-in for a launch script, which must exist, and return its path."""
    assert os.access(ROOT / name, os.X_OK), f"{name} cannot be run"
    stand_in = tools / Path(name).name
    stand_in.write_text(_STAND_IN.format(python=sys.executable, record=record, name=name))
    stand_in.chmod(0o755)
    return str(stand_in)
