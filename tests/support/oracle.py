"""Recorded outputs of the reference implementation, where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_style.checkpoint import fairseq
from megatron_style.model.shortformer import Shortformer

ORACLE = Path(__file__).resolve().parents[2].parent / "shared" / "oracle"
needs_oracle = pytest.mark.skipif(
    not ORACLE.is_dir(), reason="the reference's recorded outputs (shared/oracle beside this checkout) are absent"
)


def reference_model(checkpoint: str, dtype: torch.dtype = torch.float64) -> Shortformer:
    return fairseq.read(ORACLE / "ckpt" / f"{checkpoint}.pt").load(dtype)


def recorded(path: str) -> Any:
    return json.loads((ORACLE / path).read_text())


def recorded_tokens(split: str) -> NDArray[np.int64]:
    return np.fromfile(ORACLE / "data" / f"{split}.bin", dtype="<u2").astype(np.int64)
