"""Words are numbered in the order in which they occur first, and counted, before there is a dictionary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from megatron_style.data.preparation.encode import CountedChunk, chunk_of
from megatron_style.data.readers.chunks import Chunk, ReadOptions
from megatron_style.data.readers.parse import read_texts
from megatron_style.data.tokenizer import EOS
from megatron_style.data.word_dictionary import LINE_END, WordDictionary, encode_words

_DOCUMENT_END = 2 * LINE_END
_MARKS = (LINE_END, _DOCUMENT_END)  # have the first numbers
_LINE_END_NUMBER, DOCUMENT_END_NUMBER = range(2)


def number_words(options: ReadOptions, marks_documents: bool, chunk: Chunk) -> CountedChunk:
    """Number the words of one chunk for itself, so that its numbers do not depend on who has read the other chunks."""
    found = read_texts(chunk, options)
    numbers = _numbering(_MARKS)
    encoded = encode_words(found.texts, partial(map, numbers.__getitem__), line_end=_LINE_END_NUMBER)
    counts = np.bincount(encoded.ids, minlength=len(numbers))
    end_of_document = DOCUMENT_END_NUMBER if marks_documents else None
    done = chunk_of(found, encoded, closes=chunk.closes, end_of_document=end_of_document)
    smallest = np.min_scalar_type(len(numbers))
    return CountedChunk(replace(done, ids=done.ids.astype(smallest)), list(numbers), counts)


class WordCounts:
    """The words of all chunks, with their numbers and counts. The only thing here that grows with the vocabulary."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        counts = counts or dict.fromkeys(_MARKS, 0)
        self._numbers = _numbering(counts)
        self._counts = np.array(list(counts.values()), np.int64)

    def add(self, chunk: CountedChunk) -> NDArray[np.int32]:
        """Count the words of a chunk, each of which is listed once, and return their numbers."""
        numbers = np.fromiter(map(self._numbers.__getitem__, chunk.words), np.int32, len(chunk.words))
        missing = len(self._numbers) - len(self._counts)
        if missing > 0:
            self._counts = np.pad(self._counts, (0, max(missing, len(self._counts))))
        self._counts[numbers] += chunk.counts
        return numbers

    def state(self) -> dict[str, int]:
        """Return the count of each word, in the order of the numbers; from there the counting can be continued."""
        return dict(zip(self._numbers, self._counts.tolist(), strict=False))

    def of_text(self) -> dict[str, int]:
        """Return the count of each word of the text."""
        return {word: total for word, total in self.state().items() if word not in _MARKS}

    def ids_in(self, dictionary: WordDictionary) -> NDArray[np.int32]:
        """Return the id of each number; that of the end of a document is not known here."""
        ids = dictionary.ids_of(self._numbers)
        ids[_LINE_END_NUMBER] = EOS
        return ids


def _numbering(words: Iterable[str]) -> defaultdict[str, int]:
    """Return a dictionary that begins with these words, and gives each further one the next number."""
    numbers = {word: number for number, word in enumerate(words)}
    return defaultdict(count(len(numbers)).__next__, numbers)
