"""Tokenizers that are built from the training text. The pass that counts its tokens keeps their provisional ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_style.data.preparation.encode import CountedChunk, EncodeOptions, count_ids, train_bpe
from megatron_style.data.preparation.passes import Passes, each_chunk, report_left_out
from megatron_style.data.preparation.provisional import ChunksWriter, keep_final_ids
from megatron_style.data.preparation.words import WordCounts, number_words
from megatron_style.data.readers.chunks import Chunk
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.store import token_dtype
from megatron_style.data.tokenizer import BPE_FILE, SPECIALS, BpeTokenizer
from megatron_style.data.word_dictionary import WordDictionary

_STATE = "first_pass"


class _Counts(Protocol):
    """The counts of provisional ids."""

    def add(self, chunk: CountedChunk) -> NDArray[Any]:
        """Add those of a chunk, and return the provisional id of each of the chunk's ids."""

    def state(self) -> Any:
        """Return what can be written as JSON, and from which the counting can be continued."""


def build_word_dictionary(
    passes: Passes,
    files: Sequence[InputFile],
    *,
    threshold: int,
    vocab_size: int | None,
    end_of_document: str | None,
) -> WordDictionary:
    counts = WordCounts(_state_of(passes)["counts"] or {})
    number = partial(number_words, passes.options, end_of_document is not None)
    _count(passes, number, files, counts, "counting words")
    dictionary = WordDictionary.build(counts.of_text(), threshold=threshold, vocab_size=vocab_size)
    keep_final_ids(passes.work.folder, counts.ids_in(dictionary).astype(token_dtype(dictionary.vocab_size)))
    return dictionary


class _IdCounts(_Counts):
    """The counts of the ids of a tokenizer."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, np.int64)

    def add(self, chunk: CountedChunk) -> NDArray[Any]:
        self.counts += chunk.counts
        return np.empty(0, np.int32)

    def state(self) -> list[int]:
        found: list[int] = self.counts.tolist()
        return found


def build_bpe_tokenizer(
    passes: Passes, files: Sequence[InputFile], *, vocab_size: int, end_of_document: str | None
) -> BpeTokenizer:
    """Learn byte pairs, then number them by how often the training text uses them."""
    folder = passes.work.folder / "learnt"
    folder.mkdir(exist_ok=True)
    if not (folder / BPE_FILE).is_file():
        # In a worker, because the trainer starts threads, and a process with threads must not fork workers.
        list(passes.pool.map(partial(train_bpe, tuple(files), vocab_size, passes.options), [folder]))
    learnt = BpeTokenizer.load(folder / BPE_FILE)
    counts = _IdCounts(_state_of(passes)["counts"] or [0] * learnt.vocab_size)
    end = None if end_of_document is None else SPECIALS.index(end_of_document)  # specials keep their ids
    count = partial(count_ids, EncodeOptions(folder, end_of_document=end), passes.options)
    _count(passes, count, files, counts, "counting byte pairs")
    tokenizer = learnt.sorted_by(counts.counts)
    ids = {token: index for index, token in enumerate(tokenizer.tokens())}
    final_ids = np.array([ids[token] for token in learnt.tokens()], token_dtype(tokenizer.vocab_size))
    keep_final_ids(passes.work.folder, final_ids)
    (folder / BPE_FILE).unlink()
    folder.rmdir()
    return tokenizer


def _state_of(passes: Passes) -> dict[str, Any]:
    return passes.work.state(_STATE) or {"files": 0, "counts": None, "chunks": 0}


def _count(
    passes: Passes,
    function: Callable[[Chunk], CountedChunk],
    files: Sequence[InputFile],
    counts: _Counts,
    label: str,
) -> None:
    """Count the tokens of all files that have not been counted, and keep their provisional ids."""
    state = _state_of(passes)
    left_out = 0
    with ChunksWriter(passes.work.folder, done=state["chunks"]) as chunks:
        for done in each_chunk(passes, function, files, state["files"], label):
            encoded = done.result.encoded
            report_left_out(encoded, left_out)
            left_out += encoded.left_out
            chunks.append(encoded, counts.add(done.result), size=done.size, closes=done.closes)
            if done.closes and passes.work.is_due():
                chunks.sync()
                state = {"files": done.files, "counts": counts.state(), "chunks": chunks.size}
                passes.work.save(_STATE, state)
