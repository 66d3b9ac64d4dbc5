"""What a plan needs to know about the text: from the corpus where it is there, from the run file where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.data.store import TokenStore, open_store, store_files
from megatron_style.model.shape import BandShape, bands
from megatron_style.planning.vocabulary import zipf_shares

_BLOCK, _BLOCKS = 1 << 18, 64  # so much of the text is looked at, evenly spread: 17M tokens at most


@dataclass(frozen=True)
class TextFacts:
    vocab_size: int
    tokens: int | None  # None: the corpus is not there
    band_shares: tuple[float, ...]  # by Zipf's law when the corpus is not there


def text_facts(run: RunConfig) -> TextFacts:
    vocab_size = run.data.vocab_size
    if vocab_size is None:
        tokenizer = tokenizer_beside(run.data.train)
        if tokenizer is None:
            raise UserError(
                f"data.vocab_size: missing, and there is no dictionary in {run.data.train.parent} to take it from; "
                f"prepare the corpus, or give the number of token ids: --set data.vocab_size=50000"
            )
        vocab_size = tokenizer.vocab_size
    run.model.check_vocabulary(vocab_size)
    if not all(path.is_file() for path in store_files(run.data.train)):
        return TextFacts(vocab_size, None, zipf_shares(run.model, vocab_size))
    store = open_store(run.data.train)
    return TextFacts(vocab_size, len(store), measured_shares(store, bands(run.model, vocab_size)))


def measured_shares(store: TokenStore, bands: Sequence[BandShape]) -> tuple[float, ...]:
    """The share of the text's tokens in each band."""
    edges = [bands[0].first, *(band.last for band in bands)]
    counts = np.zeros(len(bands), np.int64)
    stride = max(_BLOCK, len(store) // _BLOCKS)
    for first in range(0, len(store), stride):
        counts += np.histogram(store.tokens[first : first + _BLOCK], edges)[0]
    return tuple(float(share) for share in counts / max(1, counts.sum()))
