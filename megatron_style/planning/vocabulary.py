"""The bands of a vocabulary as plain sizes, and how often a token falls into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from megatron_style.config.model import ModelConfig


@dataclass(frozen=True)
class BandSize:
    """Token ids first..last and the width of their vectors."""

    first: int
    last: int
    width: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


def bands_of(model: ModelConfig, vocab_size: int) -> tuple[BandSize, ...]:
    """Band 0 is the head; a vocabulary that is not adaptive is one band of full width."""
    vocabulary = model.vocabulary
    edges = pairwise((0, *vocabulary.cutoffs, vocab_size))
    return tuple(BandSize(*edge, model.hidden_size // vocabulary.factor**i) for i, edge in enumerate(edges))


# Frequent words follow 1/rank, rarer ones fall faster: Gerlach & Altmann, "Stochastic model for the vocabulary growth
# in natural languages" (Physical Review X, 2013), who fitted this to English books.
_BEND, _STEEPNESS = 7873, 1.77


def zipf_shares(bands: Sequence[BandSize]) -> tuple[float, ...]:
    """The share of tokens in each band by Zipf's law, for ids in the order of frequency."""
    return _zipf_shares(tuple(band.last for band in bands))


@lru_cache  # the same few vocabularies are asked for at every step of a search
def _zipf_shares(ends: tuple[int, ...]) -> tuple[float, ...]:
    sums = _zipf_sums(ends[-1])
    below = [float(sums[end - 1] / sums[-1]) for end in ends]
    return tuple(high - low for low, high in pairwise([0.0, *below]))


def zipf_ids(vocab_size: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return token ids that are as frequent as Zipf's law says, in growing order."""
    sums = _zipf_sums(vocab_size)
    ids: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(sums, (np.arange(count) + 0.5) / count * sums[-1])
    return ids


def _zipf_sums(vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    ranks = np.arange(1, vocab_size + 1) / _BEND
    return np.cumsum(np.where(ranks <= 1, 1 / ranks, ranks**-_STEEPNESS))
