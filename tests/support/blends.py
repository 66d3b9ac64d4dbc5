"""Blends of small corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_style.config.run import RunConfig
from tests.support.training import write_corpus

SIZES = {"news": 1200, "books": 260}  # tokens
WEIGHTS = {"news": 2, "books": 1}


def write_blend(folder: Path) -> None:
    """Write a corpus for each source. Their epochs end at different steps."""
    for seed, (name, tokens) in enumerate(SIZES.items()):
        write_corpus(folder / name, tokens=tokens, seed=seed)
    write_corpus(folder)  # whose held-out text the tests use


def blend_in(folder: Path) -> list[dict[str, Any]]:
    """Return these sources as the value of data.train."""
    return [{"path": str(folder / name / "train"), "weight": weight} for name, weight in WEIGHTS.items()]


def with_data(run: RunConfig, **data: Any) -> RunConfig:
    settings = run.as_data()
    return RunConfig.parse(settings | {"data": settings["data"] | data}, source="a blend")
