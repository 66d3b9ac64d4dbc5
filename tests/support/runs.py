"""Small runs for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_style.config.run import RunConfig


def tiny_run(
    *,
    stages: Sequence[Mapping[str, Any]] = ({"segment_length": 4, "epochs": 1},),
    tokens_per_batch: int = 24,
    micro_rows: int | None = None,
    cache: bool = True,
    **sections: Any,
) -> RunConfig:
    if micro_rows is not None:
        stages = [{**stage, "micro_rows": micro_rows} for stage in stages]
    data: dict[str, Any] = {
        "model": {
            "layers": 2,
            "hidden_size": 16,
            "heads": 4,
            "ffn_size": 32,
            "cache": cache,
            "vocabulary": {"kind": "adaptive", "cutoffs": [10, 20], "factor": 2},
        },
        "data": {"train": "train", "valid": "valid", "tokens_per_batch": tokens_per_batch},
        "stages": [dict(stage) for stage in stages],
        "optimizer": {"learning_rate": {"peak": 0.1}},
        "output": {"path": "runs/tiny"},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, Mapping) else values
    return RunConfig.parse(data, source="tiny run")
