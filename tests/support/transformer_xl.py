"""Folders in the layout of transformers' TransfoXL, made of the recorded weights of the authors' code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from tests.support.oracle import ORACLE

Arrays = Mapping[str, NDArray[Any]]
SETTINGS = {
    "model_type": "transfo-xl",
    "n_layer": 3,
    "d_model": 32,
    "d_embed": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
    "vocab_size": 200,
    "tgt_len": 12,
    "mem_len": 12,
    "ext_len": 0,
    "clamp_len": -1,
    "same_length": False,
    "untie_r": False,
    "dropout": 0.0,
    "dropatt": 0.0,
    "eos_token_id": 0,
}
KINDS: Mapping[str, dict[str, Any]] = {
    "plain": {"cutoffs": [], "div_val": 1, "pre_lnorm": False},
    "div4": {"cutoffs": [40, 120], "div_val": 4, "pre_lnorm": False},
    "plain_prenorm": {"cutoffs": [], "div_val": 1, "pre_lnorm": True},
}


def recorded(name: str) -> Arrays:
    with np.load(ORACLE / "systems" / f"{name}.npz") as file:
        return dict(file)


def their_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return the tensors as TransfoXL names them. It counts clusters upwards, the authors' PyTorch code downwards."""
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if name.startswith("crit.cluster_"):
            tensor = tensor.flip(0)
        tensors[name if name.startswith("crit.") else f"transformer.{name}"] = tensor.contiguous()
    return tensors


def write_folder(folder: Path, kind: str, *, pickled: bool = False, **settings: Any) -> Path:
    folder.mkdir()
    weights = recorded(f"transformer_xl_{kind.removesuffix('_prenorm')}_weights")
    tensors = their_tensors(weights)
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | KINDS[kind] | settings))
    return folder
