"""Read the record of a run, and check that TensorBoard shows exactly this."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_style.config.run import RunConfig

LINES = {
    "train": {
        "loss": "loss/train", "tokens": "progress/tokens", "grad_norm": "optimizer/grad_norm",
        "learning_rate": "optimizer/learning_rate", "skipped": "optimizer/skipped", "stage": "stage/index",
        "stage_seconds": "stage/seconds", "tokens_per_second": "speed/tokens_per_second",
        "flops_per_second": "speed/flops_per_second", "seconds": "progress/seconds", "flops": "progress/flops",
        "memory_bytes": "memory/peak_gib",
    },
    "valid": {"loss": "loss/valid", "perplexity": "perplexity/valid"},
    "save": {"stall_seconds": "save/stall_seconds", "write_seconds": "save/write_seconds"},
}  # fmt: skip


def events(run: RunConfig, *kinds: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run.output.path / "metrics.jsonl").read_text().splitlines())
    return [event for event in found if not kinds or event["kind"] in kinds]


def board(run: RunConfig, log: str = "tensorboard") -> EventAccumulator:
    folder = run.output.path / log / run.output.path.resolve().name
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def expect_points(run: RunConfig) -> None:
    """Expect all numbers of `train`, `valid` and `save` lines, each once, and nothing else; against tokens, too, if the
    run asks for it."""
    shapes = {event["index"]: event for event in events(run, "stage")}
    axes = {"step": "tensorboard"} | ({"tokens": "tensorboard_by_tokens"} if run.watch.by_tokens else {})
    for axis, folder in axes.items():
        expected: dict[str, list[tuple[int, np.float32]]] = {}
        for event in events(run, *LINES):
            points = {tag: event[key] for key, tag in LINES[event["kind"]].items()}
            points |= {f"valid_by_position/{n:02d}": x for n, x in enumerate(event.get("by_position", ()), start=1)}
            if event["kind"] == "train":
                points["memory/peak_gib"] = event["memory_bytes"] / 2**30
                for key in ("segment_length", "cache_length", "rows", "micro_rows", "flops_per_token"):
                    points[f"stage/{key}"] = shapes[event["stage"]][key]
            for tag, value in points.items():
                expected.setdefault(tag, []).append((event[axis], np.float32(value)))
        found = board(run, folder)
        points_of = {
            tag: [(p.step, np.float32(p.value)) for p in found.Scalars(tag)] for tag in found.Tags()["scalars"]
        }
        assert points_of == expected
