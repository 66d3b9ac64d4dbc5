"""Score a text with a model, on one process or a grid, and measure what that takes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from megatron_style.base.command import log
from megatron_style.base.files import atomic_file
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.inference.scoring import Protocol, Score, Tokens, perplexity, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.peak_memory import peak_memory
from megatron_style.parallel.topology import Topology


@dataclass(frozen=True)
class Measurement:
    tokens: Tokens
    protocol: Protocol
    score: Score
    processes: int
    seconds: float
    peak_bytes: float  # the largest of all processes

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, object]:
        """Return what is reported. Line ends count as words, as they count as tokens."""
        protocol = self.protocol
        tokens = len(self.tokens)
        words = tokenizer.count_words(self.tokens) if tokenizer else None
        fewest, most = protocol.contexts(tokens)
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
            "loss_nats": self.score.loss,
            "loss_bits": self.score.loss / math.log(2),
            "perplexity": self.score.perplexity,
            "perplexity_per_word": perplexity(self.score.loss * tokens / words) if words else None,
            "context_min": fewest,
            "context_max": most,
            "processes": self.processes,
            "tokens_per_second": tokens / self.seconds,
            "peak_memory_mb": self.peak_bytes / 1e6,
        }

    def save_nll(self, path: Path) -> None:
        """Write the loss of each token, in stream order."""
        with atomic_file(path) as new, new.open("wb") as file:
            np.savez_compressed(file, tokens=self.tokens.astype(np.int32), nll=self.score.nll)


def measure(model: Shortformer, tokens: Tokens, protocol: Protocol, *, eos: int, topology: Topology) -> Measurement:
    device = model.positions.table.device
    axis = topology.data
    total = len(tokens)
    if topology.is_first and total < protocol.segment_length:
        shorter = f"{total} tokens, less than a segment of {protocol.segment_length}"
        log(f"note: the text has {shorter}, so no prediction sees more")
    with (
        peak_memory(device) as peak,
        tqdm(total=total, unit=" tokens", unit_scale=True, disable=None if topology.is_first else True) as bar,
    ):
        begin = time.monotonic()
        found = score(
            model,
            tokens,
            protocol,
            eos=eos,
            axis=axis,
            progress=lambda done: bar.update(min(done * axis.size, total - bar.n)),  # the other ranks are about as far
        )
        seconds = time.monotonic() - begin
        memory = torch.tensor(float(peak()), device=device)
    for each in (topology.data, topology.tensor):
        memory = largest_over_shards(memory, each)
    processes = topology.data.size * topology.tensor.size
    return Measurement(tokens, protocol, found, processes, seconds, memory.item())
