"""Small models as folders and as checkpoints of the reference, and a way to run commands in this process."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_style.base.command import run_command
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.data.word_dictionary import WordDictionary
from megatron_style.formats.fairseq import fairseq_names
from megatron_style.formats.formats import open_model
from megatron_style.formats.model_folder import write_atomically
from megatron_style.formats.source import ModelSource
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import buffer_layouts_of, initialise
from megatron_style.parallel.topology import Axis

VOCAB_SIZE = 37
L = 6  # segment and cache


def tiny_config(kind: str = "adaptive", **model: Any) -> ModelFolderConfig:
    """Return the settings of a small model; those of its vocabulary may be among the others."""
    vocabulary = {"kind": kind, "cutoffs": [10, 20], "factor": 2} if kind == "adaptive" else {"kind": kind}
    vocabulary |= {key: model.pop(key) for key in ("factor", "biases", "projections") if key in model}
    sizes = {"layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocabulary": vocabulary}
    cache_length = L if model.get("cache", True) else 0
    data = {"model": sizes | model, "vocab_size": VOCAB_SIZE, "segment_length": L, "cache_length": cache_length}
    return ModelFolderConfig.parse(data, source="tiny model")


def tiny_model(config: ModelFolderConfig, dtype: torch.dtype = torch.float64) -> Shortformer:
    model = Shortformer(config.model, config.vocab_size)
    initialise(model, 3, Axis())
    return model.to(dtype)


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Shortformer, ModelFolderConfig]:
    source = open_model(folder)
    return source.load(dtype), source.config


def weights_of(model: Shortformer) -> dict[str, Tensor]:
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return weights | {name: model.get_buffer(name).clone() for name in buffer_layouts_of(model)}


def tiny_dictionary(vocab_size: int = VOCAB_SIZE) -> WordDictionary:
    return WordDictionary({f"w{i}": 100 - i for i in range(vocab_size - 4)})


def write_tiny_model(
    folder: Path, config: ModelFolderConfig | None = None, tokenizer: Tokenizer | None = None
) -> ModelFolderConfig:
    config = config or tiny_config()
    weights = weights_of(tiny_model(config, torch.float32))
    write_model(folder, config, weights.__getitem__, tokenizer or tiny_dictionary())
    return config


def write_model(
    folder: Path, config: ModelFolderConfig, weight: Callable[[str], Tensor], tokenizer: Tokenizer | None
) -> None:
    write_atomically(folder, ModelSource(folder, config, weight, lambda: tokenizer))


def fairseq_state(kind: str = "adaptive", **settings: Any) -> dict[str, Any]:
    """Return what the reference would have saved for the tiny model."""
    config = tiny_config(kind)
    weights = weights_of(tiny_model(config, torch.float32))
    theirs = {name: weights[ours] for ours, name in fairseq_names(config.model).items()}
    if kind == "adaptive":
        theirs["decoder.adaptive_softmax.head.word_proj.weight"] = theirs["decoder.embed_tokens.embeddings.0.0.weight"]
        for tail in range(2):
            source = f"decoder.embed_tokens.embeddings.{tail + 1}"
            theirs[f"decoder.adaptive_softmax.tail.{tail}.0.weight"] = theirs[f"{source}.1.weight"]
            theirs[f"decoder.adaptive_softmax.tail.{tail}.2.weight"] = theirs[f"{source}.0.weight"]
    theirs["decoder.version"] = torch.tensor([3.0])
    args = {
        "decoder_layers": 2,
        "decoder_embed_dim": 16,
        "decoder_attention_heads": 4,
        "decoder_ffn_embed_dim": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "adaptive_softmax_dropout": 0.0,
        "tokens_per_sample": L,
        "tokens_from_prev": L,
        "adaptive_input": kind == "adaptive",
        "adaptive_input_cutoff": "10,20",
        "adaptive_input_factor": 2,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "share_decoder_input_output_embed": kind == "tied",
    }
    return {"args": argparse.Namespace(**(args | settings)), "model": theirs}


@dataclass(frozen=True)
class Done:
    code: int | str | None
    out: str
    err: str


def run_here(main: Callable[[], None], *argv: object) -> Done:
    """Run a command in this process, as if it had been typed."""
    out = io.StringIO()
    err = io.StringIO()
    with patch.object(sys, "argv", ["command", *map(str, argv)]), redirect_stdout(out), redirect_stderr(err):
        try:
            run_command(main)
        except SystemExit as leaving:
            return Done(leaving.code, out.getvalue(), err.getvalue())
    raise AssertionError("a command always leaves with an exit code")


def expect_refusal(done: Done, *words: object) -> None:
    """Expect exit code 2, and one line that says what is wrong."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert str(word) in done.err


def content(folder: Path) -> Mapping[str, bytes]:
    """Return the bytes of every file below a folder by its path; those of folders are empty."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
