"""Score a text with a model, on one process or a grid, and measure what that takes."""

from __future__ import annotations

import math
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from megatron_style.base.command import log
from megatron_style.base.files import atomic_file
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.inference.scoring.modes import contexts
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.reader import Tokens
from megatron_style.inference.scoring.score import Progress, Score, perplexity, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.device.peak_memory import peak_memory
from megatron_style.parallel.topology import Axis, Topology


@dataclass(frozen=True)
class Measurement:
    tokens: Tokens
    protocol: Protocol
    score: Score
    mixed: Score | None  # with what a mixture remembers
    processes: int
    seconds: float
    peak_bytes: float  # the largest of all processes

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, object]:
        """Return what is reported. Line ends count as words, as they count as tokens."""
        protocol = self.protocol
        tokens = len(self.tokens)
        words = tokenizer.count_words(self.tokens) if tokenizer else None
        fewest, most = contexts(protocol, tokens)
        mixture: dict[str, float | None] = {}
        if self.mixed:
            finite = math.isfinite(self.mixed.loss)  # a weight of 1 can make a token impossible
            mixture["mixture_loss_nats"] = self.mixed.loss if finite else None
            mixture["mixture_perplexity"] = self.mixed.perplexity if finite else None
        return {
            "mode": protocol.mode,
            "segment_length": protocol.segment_length,
            "cache_length": protocol.cache_length,
            "stride": protocol.stride or protocol.segment_length,
            "lanes": protocol.lanes,
            "same_length": protocol.reach.window is not None,
            "clamp_distance": protocol.reach.clamp,
            "tokens": tokens,
            "words": words,
            "unknown_share": self._unknown_share(tokenizer),
            "loss_nats": self.score.loss,
            "loss_bits": self.score.loss / math.log(2),
            "perplexity": self.score.perplexity,
            "perplexity_per_word": perplexity(self.score.loss * tokens / words) if words else None,
            **mixture,
            "context_min": fewest,
            "context_max": most,
            "processes": self.processes,
            "tokens_per_second": tokens / self.seconds,
            "peak_memory_mb": self.peak_bytes / 1e6,
        }

    def _unknown_share(self, tokenizer: Tokenizer | None) -> float | None:
        """Return the share of the tokens that stand for any unknown word: predicting one of them is easy."""
        if tokenizer is None or tokenizer.unk is None:
            return None if tokenizer is None else 0.0
        return float(np.count_nonzero(np.asarray(self.tokens) == tokenizer.unk)) / len(self.tokens)

    def save_nll(self, path: Path) -> None:
        """Write the loss of each token, in stream order."""
        with atomic_file(path) as new, new.open("wb") as file:
            arrays: dict[str, Any] = {"tokens": self.tokens.astype(np.int32), "nll": self.score.nll}
            if self.mixed:
                arrays["mixture_nll"] = self.mixed.nll
            np.savez_compressed(file, **arrays)


class Mixture(typing.Protocol):
    """Something that is mixed with the model's predictions, by the keys of the text."""

    def keep(self, first: int, keys: Tensor) -> None:
        """Keep the keys of the tokens from `first` on."""

    def mixed(self, nll: NDArray[np.float64], axis: Axis, progress: Progress) -> NDArray[np.float64]:
        """Return the losses of the mixture, when all keys are kept."""


def measure(
    model: Shortformer,
    tokens: Tokens,
    protocol: Protocol,
    *,
    eos: int,
    topology: Topology,
    mixture: Mixture | None = None,
) -> Measurement:
    device = model.positions.table.device
    axis = topology.data
    total = len(tokens)
    if topology.is_first and total < protocol.segment_length:
        shorter = f"{total} tokens, less than a segment of {protocol.segment_length}"
        log(f"note: the text has {shorter}, so no prediction sees more")
    with peak_memory(device) as peak:
        begin = time.monotonic()
        with token_bar(total, topology) as progress:
            found = score(
                model,
                tokens,
                protocol,
                eos=eos,
                axis=axis,
                progress=lambda done: progress(done * axis.size),  # the other ranks are about as far
                keep_keys=mixture.keep if mixture else None,
            )
        mixed = None
        if mixture:
            with token_bar(total, topology) as progress:
                mixed = Score(mixture.mixed(found.nll, axis, progress))
        seconds = time.monotonic() - begin
        memory = torch.tensor(float(peak()), device=device)
    for each in (topology.data, topology.tensor):
        memory = largest_over_shards(memory, each)
    processes = topology.data.size * topology.tensor.size
    return Measurement(tokens, protocol, found, mixed, processes, seconds, memory.item())


@contextmanager
def token_bar(total: int, topology: Topology) -> Iterator[Progress]:
    """Show a progress bar on a terminal. Yield the function to call with the number of tokens just done."""
    with tqdm(total=total, unit=" tokens", unit_scale=True, disable=None if topology.is_first else True) as bar:
        yield lambda done: bar.update(min(done, total - bar.n))
