"""A small model with texts and a datastore, and the same computed in plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.store import TokenStoreWriter, open_store
from megatron_style.evaluate import main as evaluate
from megatron_style.neighbours import main as neighbours
from tests.support.tiny import VOCAB_SIZE, Done, read_model, run_here, write_tiny_model

TRAIN = 90
VALID = 40
Array = NDArray[np.float64]


def write_texts(folder: Path, train: int = TRAIN) -> None:
    """Write texts in which a token often depends on the one before it."""
    rng = np.random.default_rng(11)
    for name, tokens in (("train", train), ("valid", VALID)):
        stream = rng.integers(0, VOCAB_SIZE, tokens)
        stream[1::2] = (stream[::2][: len(stream[1::2])] * 3 + 1) % VOCAB_SIZE
        write_tokens(folder / name, stream)


def write_tokens(prefix: Path, tokens: NDArray[Any], vocab_size: int = VOCAB_SIZE) -> None:
    with TokenStoreWriter(prefix, vocab_size) as writer:
        writer.append(tokens, np.array([len(tokens)]))


def write_model_and_texts(folder: Path, config: ModelFolderConfig | None = None) -> None:
    write_tiny_model(folder / "model", config)
    write_texts(folder)


def build(folder: Path, *flags: object, output: str = "store") -> Done:
    """Build the datastore of the folder's model and training text, by the command."""
    where = ("--data", folder / "train", "--output", folder / output)
    return run_here(neighbours, "build", folder / "model", *where, *flags)


def measure(folder: Path, *flags: object, mode: str = "cached") -> tuple[dict[str, Any], Array, Array]:
    """Return the reported facts, and the losses of model and mixture."""
    out = folder / "nll.npz"
    words = ("--data", folder / "valid", "--mode", mode, "--dtype", "float64", "--nll", out, "--json", *flags)
    done = run_here(evaluate, folder / "model", *words)
    assert done.code == 0, done
    with np.load(out) as held:
        return json.loads(done.out), held["nll"], held["mixture_nll"]


@torch.no_grad()
def walk(folder: Path, text: str, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return the key of each token of a text, and the distribution of the token [tokens, vocabulary] in logarithms."""
    model, config = read_model(folder / "model", dtype)
    stream = torch.tensor([[config.eos, *open_store(folder / text).tokens[:-1].tolist()]])
    memory = model.empty_memory(1, config.cache_length)
    keys = []
    log_probs = []
    for segment in stream.split(config.segment_length, 1):
        x, memory, key, *_ = model.features(segment, memory)
        keys.append(key[0].double())
        log_probs.append(model.vocabulary.log_probs(x[0]).double())
    return torch.cat(keys).numpy(), torch.cat(log_probs).numpy()


def tokens_of(folder: Path, text: str) -> NDArray[np.int64]:
    return open_store(folder / text).tokens.astype(np.int64)


def stored_keys(folder: Path, dtype: str = "<f2") -> NDArray[Any]:
    return np.fromfile(folder / "keys.bin", dtype)
