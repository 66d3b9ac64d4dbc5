"""A run of four steps as files on disk, for tests that start `train` as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus

STAGES = [{"segment_length": 8, "steps": 2}, {"segment_length": 24, "steps": 2}]


def write_small_run(folder: Path, *, ranks: int, **changes: Any) -> Path:
    """Write a run with 192 tokens per update on any number of data-parallel ranks, so that losses are comparable."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder)
    run = tiny_run(
        stages=STAGES,
        tokens_per_batch=192 // ranks,
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        output={"path": str(folder / "run"), "log_every": 1},
        **changes,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.as_data()))
    return path


def losses(folder: Path) -> list[float]:
    """Return the recorded loss of every step."""
    events = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "train"]
