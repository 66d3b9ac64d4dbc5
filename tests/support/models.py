"""One small model of every kind: what holds for all models is tested on each of these."""

from __future__ import annotations

from typing import Any

from megatron_style.config.model import ModelFolderConfig
from tests.support.tiny import tiny_config

COMPRESSED = {"compressed": 4, "rate": 2}
ROUTED = {"positions": "added", "cache": False, "heads": 8, "hidden_size": 32}
CLUSTERS = {"heads": 4, "clusters": 3, "window": 3, "local": 2}
MODELS: dict[str, dict[str, Any]] = {
    "baseline": {"positions": "added", "cache": False},
    "shortformer": {},
    "shortformer-tied": {"kind": "tied"},
    "shortformer-untied": {"kind": "untied"},
    "sandwich": {"layers": 3, "sandwich": 2, "positions": "added", "cache": False},
    "sandwich-shortformer": {"layers": 3, "sandwich": 1},
    "norm-after": {"norm": "after"},
    "transformer-xl": {"positions": "relative", "norm": "after", "kind": "tied", "biases": True},
    "transformer-xl-before": {"positions": "relative", "kind": "untied", "biases": True},
    "transformer-xl-adaptive": {"positions": "relative", "norm": "after", "biases": True, "projections": "both"},
    "transformer-xl-base": {
        "positions": "relative",
        "norm": "after",
        "biases": True,
        "factor": 1,
        "projections": "none",
    },
    "routing": {**ROUTED, "routing": CLUSTERS},
    "routing-first-local": {**ROUTED, "layers": 3, "norm": "after", "routing": {**CLUSTERS, "first_layer": 1}},
    "sandwich-transformer-xl": {"layers": 3, "sandwich": 1, "positions": "relative"},
    "compressive": {"positions": "relative", "norm": "after", "memory": COMPRESSED},
    "compressive-before": {"positions": "relative", "kind": "tied", "memory": COMPRESSED},
    "compressive-mean": {"positions": "relative", "norm": "after", "memory": COMPRESSED | {"function": "mean"}},
    "compressive-shortformer": {"memory": COMPRESSED},
}


def model_config(name: str) -> ModelFolderConfig:
    return tiny_config(**MODELS[name])
