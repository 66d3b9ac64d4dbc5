"""What a worker does with a chunk: it reads the texts, and returns their ids with the ends of lines and documents.

Workers read the text and the tokenizer from the same paths (on several machines: of a shared file system). They get
addresses of chunks, or their content where a file can only be read from its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.data.readers.chunks import Chunk, ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.readers.parse import Texts, read_texts
from megatron_style.data.store import token_dtype
from megatron_style.data.text import lines_of
from megatron_style.data.tokenizer import UNK, BpeTokenizer, Encoded, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class EncodedChunk:
    ids: NDArray[Any]
    line_sizes: NDArray[Any]
    document_ends: NDArray[np.int64]
    words: int
    unknown: int
    left_out: int
    first_left_out: str | None


@dataclass(frozen=True)
class CountedChunk:
    encoded: EncodedChunk
    words: Sequence[str]  # that the ids stand for, unless a tokenizer says it
    counts: NDArray[np.int64]  # of each id


@dataclass(frozen=True)
class EncodeOptions:
    tokenizer_folder: Path
    dialect: str = "fairseq"  # of the store
    end_of_document: int | None = None  # the id that follows each document


def encode_chunk(options: EncodeOptions, read_options: ReadOptions, chunk: Chunk) -> EncodedChunk:
    tokenizer = _tokenizer_in(options.tokenizer_folder)
    found = read_texts(chunk, read_options)
    encoded = tokenizer.encode_texts(found.texts)
    if options.end_of_document is not None and tokenizer.kind == "words":  # only ends of documents may have that id
        encoded.ids[encoded.ids == options.end_of_document] = UNK
    unknown = 0 if tokenizer.unk is None else int(np.count_nonzero(encoded.ids == tokenizer.unk))
    done = chunk_of(found, encoded, closes=chunk.closes, end_of_document=options.end_of_document)
    return replace(done, ids=done.ids.astype(token_dtype(tokenizer.vocab_size)), unknown=unknown)


def chunk_of(found: Texts, encoded: Encoded, *, closes: bool, end_of_document: int | None) -> EncodedChunk:
    """Return the ids with the end of each document, which is marked by a token if there is one for it."""
    ids = encoded.ids
    sizes = encoded.line_sizes
    last_lines = _lines_up_to_documents(found, encoded.text_lines, closes=closes)
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[last_lines]
    if end_of_document is not None:
        ids = np.insert(ids, ends, end_of_document)
        sizes = _longer(sizes, last_lines)
        ends += np.arange(1, len(ends) + 1)
    return EncodedChunk(ids, sizes, ends, encoded.words, 0, found.left_out, found.first_left_out)


def count_ids(options: EncodeOptions, read_options: ReadOptions, chunk: Chunk) -> CountedChunk:
    encoded = encode_chunk(options, read_options, chunk)
    counts = np.bincount(encoded.ids, minlength=_tokenizer_in(options.tokenizer_folder).vocab_size)
    return CountedChunk(encoded, (), counts)


def train_bpe(files: Sequence[InputFile], vocab_size: int, options: ReadOptions, folder: Path) -> None:
    texts = chain.from_iterable(read_texts(chunk, options).texts for chunk in chunks_of(files, options))
    lines = chain.from_iterable(map(lines_of, texts))
    BpeTokenizer.train(filter(None, lines), vocab_size).save(folder)


def _lines_up_to_documents(found: Texts, text_lines: NDArray[np.int64], *, closes: bool) -> NDArray[np.int64]:
    """Return the number of lines of the chunk up to the end of each document that ends in it."""
    if found.are_documents:
        return np.cumsum(text_lines)
    return np.array([text_lines.sum()] if closes else [], np.int64)


def _longer(sizes: NDArray[Any], last_lines: NDArray[np.int64]) -> NDArray[Any]:
    """Return the sizes of lines of which some have one more token; without any line, that token is one."""
    if not len(sizes):
        return np.ones(len(last_lines), np.int32)
    sizes = sizes.copy()
    np.add.at(sizes, last_lines - 1, 1)
    return sizes


@lru_cache(maxsize=1)
def _tokenizer_in(folder: Path) -> Tokenizer:
    """Load the tokenizer once per worker, not once per chunk."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    return load_tokenizer(folder)
