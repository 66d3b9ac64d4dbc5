"""A model and the text that it reads, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.model.documents import ages_of
from megatron_style.model.memory import Memory
from megatron_style.model.shortformer import Shortformer

Tokens = NDArray[np.integer]


class Window(NamedTuple):
    begin: int
    counted: int  # the first token that counts
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.begin, self.end - self.counted


class Part(NamedTuple):
    """The results of a stretch of the text."""

    first: int  # the index of its first token in the stream
    nll: Tensor  # of each token; empty if only keys are wanted
    keys: Tensor | None  # [tokens, D], if they are wanted


@dataclass(frozen=True)
class Reader:
    """A model, and the text that it reads. The text may be a mapped file: only what is read is in memory."""

    model: Shortformer
    tokens: Tokens
    eos: int
    wants_losses: bool = True
    wants_keys: bool = False
    lookback: int = 0  # the length of the cache

    def inputs(self, begin: int, end: int) -> Tensor:
        """Return what comes before each of these tokens. The text starts as if a line had just ended."""
        before = self.tokens[max(0, begin - 1) : end - 1].astype(np.int64)
        ids = before if begin else np.concatenate([[self.eos], before])
        return torch.from_numpy(ids).to(self.model.positions.table.device)

    def targets(self, begin: int, end: int) -> Tensor:
        ids = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        return (ids if self.wants_losses else ids[:0]).to(self.model.positions.table.device)

    def ages(self, begin: int, end: int, document_end: int) -> Tensor:
        """Return the ages of the inputs of these tokens, as far as the cache can tell."""
        first = max(0, begin - self.lookback)
        unlimited = torch.tensor([self.lookback if first else -1])
        return ages_of(self.inputs(first, end)[None].cpu(), document_end, unlimited)[0, begin - first :]

    def read(self, windows: Sequence[Window], memory: Memory, length: int = 0) -> tuple[list[Part], Memory]:
        """Read windows after what is in the memory. All begin to count at the same place. Shorter ones than the longest
        or `length` are padded at their end, which no token before that sees."""
        longest = max(length, *(window.end - window.begin for window in windows))
        inputs = torch.stack([_padded(self.inputs(w.begin, w.end), longest) for w in windows])
        counted = longest - (windows[0].counted - windows[0].begin) if self.wants_losses else 0
        targets = torch.stack([_padded(self.targets(w.counted, w.end), counted) for w in windows])
        ages = None
        if (document_end := self.model.config.document_end) is not None:
            ages = torch.stack([_padded(self.ages(w.begin, w.end, document_end), longest) for w in windows])
        output = self.model(inputs, targets, memory, None, ages, key=self.wants_keys)
        parts = []
        for row, window in enumerate(windows):
            tokens, counted = window.shape
            keys = None if output.key is None else output.key[row, tokens - counted : tokens]
            parts.append(Part(window.counted, output.nll[row, :counted], keys))
        return parts, output.memory


def _padded(ids: Tensor, length: int) -> Tensor:
    return F.pad(ids, (0, length - len(ids)))
