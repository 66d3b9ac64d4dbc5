"""Tokenizers that are built from the training text. The pass that counts its tokens keeps their provisional ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron_style.data.preparation.encode import EncodeOptions, count_ids, train_bpe
from megatron_style.data.preparation.passes import Passes, each_chunk
from megatron_style.data.preparation.provisional import ChunksWriter, keep_final_ids
from megatron_style.data.preparation.words import WordCounts, number_words
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.store import token_dtype
from megatron_style.data.tokenizer import BPE_FILE, SPECIALS, BpeTokenizer, Tokenizer, WordDictionary

_STATE = "first_pass"


def build_word_dictionary(
    passes: Passes,
    files: Sequence[InputFile],
    *,
    threshold: int,
    vocab_size: int | None,
    end_of_document: str | None,
) -> WordDictionary:
    work = passes.work
    state = work.state(_STATE) or {"files": 0, "counts": {}, "chunks": 0}
    counts = WordCounts(state["counts"])
    number = partial(number_words, passes.options, end_of_document is not None)
    with ChunksWriter(work.folder, done=state["chunks"]) as chunks:
        for done in each_chunk(passes, number, files, state["files"], "counting words"):
            labels = counts.add(done.result.words, done.result.counts)
            chunks.append(done.result.encoded, labels, size=done.size, closes=done.closes)
            if done.closes and work.is_due():
                state = {"files": done.files, "counts": counts.totals(), "chunks": chunks.sync()}
                work.save(_STATE, state)
    dictionary = WordDictionary.build(counts.words(), threshold=threshold, vocab_size=vocab_size)
    keep_final_ids(work.folder, counts.ids_in(dictionary).astype(token_dtype(dictionary.vocab_size)))
    return dictionary


def build_bpe_tokenizer(
    passes: Passes, files: Sequence[InputFile], *, vocab_size: int, end_of_document: str | None
) -> BpeTokenizer:
    """Learn byte pairs, then number them by how often the training text uses them."""
    work = passes.work
    folder = work.folder / "learnt"
    folder.mkdir(exist_ok=True)
    if not (folder / BPE_FILE).is_file():
        # In a worker, because the trainer starts threads, and a process with threads must not fork workers.
        list(passes.pool.map(partial(train_bpe, tuple(files), vocab_size, passes.options), [folder]))
    learnt = BpeTokenizer.load(folder / BPE_FILE)
    state = work.state(_STATE) or {"files": 0, "counts": [0] * learnt.vocab_size, "chunks": 0}
    counts = np.array(state["counts"], np.int64)
    end = None if end_of_document is None else SPECIALS.index(end_of_document)  # specials keep their ids
    count = partial(count_ids, EncodeOptions(folder, end_of_document=end), passes.options)
    with ChunksWriter(work.folder, done=state["chunks"]) as chunks:
        for done in each_chunk(passes, count, files, state["files"], "counting byte pairs"):
            encoded, found = done.result
            counts += found
            chunks.append(encoded, np.empty(0, np.int32), size=done.size, closes=done.closes)
            if done.closes and work.is_due():
                state = {"files": done.files, "counts": counts.tolist(), "chunks": chunks.sync()}
                work.save(_STATE, state)
    tokenizer = learnt.sorted_by(counts)
    keep_final_ids(work.folder, _renumbering(learnt, tokenizer).astype(token_dtype(tokenizer.vocab_size)))
    (folder / BPE_FILE).unlink()
    folder.rmdir()
    return tokenizer


def _renumbering(old: Tokenizer, new: Tokenizer) -> NDArray[np.int64]:
    """Return the new id of each old one."""
    ids = {token: index for index, token in enumerate(new.tokens())}
    return np.array([ids[token] for token in old.tokens()], np.int64)
