"""How often a token falls into each band of a vocabulary, by Zipf's law."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from megatron_style.config.model import ModelConfig
from megatron_style.model.shape import bands

# Frequent words follow 1/rank, rarer ones fall faster: Gerlach & Altmann, "Stochastic model for the vocabulary growth
# in natural languages" (Physical Review X, 2013), who fitted this to English books.
_BEND, _STEEPNESS = 7873, 1.77


def zipf_shares(model: ModelConfig, vocab_size: int) -> tuple[float, ...]:
    """Return the share of tokens in each band, for ids in the order of frequency."""
    return _zipf_shares(tuple(band.last for band in bands(model, vocab_size)))


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
