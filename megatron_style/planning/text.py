"""The figures of a corpus that an estimate needs: counted if the corpus is there, else derived from Zipf's law."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import tokenizer_of
from megatron_style.data.store import TokenStore, open_store, store_files
from megatron_style.model.shape import bands
from megatron_style.schedule.blend import sources_of

# The text is sampled in evenly spread blocks: 17M tokens at most.
_BLOCK = 1 << 18
_BLOCKS = 64
# Frequent words follow 1/rank, rarer ones fall faster: Gerlach & Altmann, "Stochastic model for the vocabulary growth
# in natural languages" (Physical Review X, 2013), who fitted this to English books.
_BEND = 7873
_STEEPNESS = 1.77


@dataclass(frozen=True)
class TextFacts:
    vocab_size: int
    tokens: int | None  # None: the corpus is not there
    band_shares: tuple[float, ...]  # by Zipf's law when the corpus is not there
    source_tokens: tuple[int, ...] = ()  # of each source; empty if the corpus is not there


def text_facts(run: RunConfig) -> TextFacts:
    vocab_size = run.data.vocab_size
    prefixes = [source.path for source in run.data.sources]
    if vocab_size is None:
        tokenizer = tokenizer_of(run.data)
        if tokenizer is None:
            raise UserError(
                f"data.vocab_size: missing, and there is no dictionary in {prefixes[0].parent} to read it from; "
                f"prepare the corpus, or give the number of token ids: --set data.vocab_size=50000"
            )
        vocab_size = tokenizer.vocab_size
    model = run.model.with_vocabulary(vocab_size)
    if not all(path.is_file() for prefix in prefixes for path in store_files(prefix)):
        return TextFacts(vocab_size, None, zipf_shares(model, vocab_size))
    stores = [open_store(prefix) for prefix in prefixes]
    tokens = tuple(len(store) for store in stores)
    by_source = [measured_shares(store, model, vocab_size) for store in stores]
    shares = np.array(sources_of(run.data, tokens).shares) @ np.array(by_source)
    return TextFacts(vocab_size, sum(tokens), tuple(shares.tolist()), tokens)


def measured_shares(store: TokenStore, model: ModelConfig, vocab_size: int) -> tuple[float, ...]:
    """Return the share of the text's tokens in each band."""
    edges = [0, *(band.last for band in bands(model, vocab_size))]
    counts = np.zeros(len(edges) - 1, np.int64)
    stride = max(_BLOCK, len(store) // _BLOCKS)
    for first in range(0, len(store), stride):
        counts += np.histogram(store.tokens[first : first + _BLOCK], edges)[0]
    return tuple(float(share) for share in counts / max(1, counts.sum()))


def zipf_shares(model: ModelConfig, vocab_size: int) -> tuple[float, ...]:
    """Return the share of tokens in each band by Zipf's law, for ids in descending order of frequency."""
    return _zipf_shares(tuple(band.last for band in bands(model, vocab_size)))


@lru_cache  # the same few vocabularies are asked for at every step of a search
def _zipf_shares(ends: tuple[int, ...]) -> tuple[float, ...]:
    sums = _zipf_sums(ends[-1])
    below = [float(sums[end - 1] / sums[-1]) for end in ends]
    return tuple(high - low for low, high in pairwise([0.0, *below]))


def zipf_ids(vocab_size: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return token ids as frequent as Zipf's law says, in ascending order."""
    sums = _zipf_sums(vocab_size)
    ids: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(sums, (np.arange(count) + 0.5) / count * sums[-1])
    return ids


def _zipf_sums(vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    ranks = np.arange(1, vocab_size + 1) / _BEND
    return np.cumsum(np.where(ranks <= 1, 1 / ranks, ranks**-_STEEPNESS))
