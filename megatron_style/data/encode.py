"""The passes over a corpus: count, build a tokenizer, encode. The pool returns the chunks in order.

Workers read the text and the tokenizer from the same paths (on several machines: of a shared file system), so that only
chunk addresses are sent to them and only counts and ids come back.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.data.progress import byte_progress
from megatron_style.data.store import TokenStoreWriter, token_dtype
from megatron_style.data.text import Chunk, TextFile, chunks_of, read_lines
from megatron_style.data.tokenizer import BPE_FILE, UNK, BpeTokenizer, Tokenizer, WordDictionary, load_tokenizer
from megatron_style.data.workers import Result, WorkerPool


@dataclass(frozen=True)
class EncodedChunk:
    ids: NDArray[Any]
    line_sizes: NDArray[Any]
    words: int  # separated by white space, whatever the tokenizer: perplexity per word needs them
    unknown: int


@dataclass(frozen=True)
class SplitCounts:
    lines: int
    tokens: int
    words: int
    unknown: int
    bytes: int
    sha256: str  # of the .bin


def build_word_dictionary(
    pool: WorkerPool, files: Sequence[TextFile], chunk_bytes: int, *, threshold: int, vocab_size: int | None
) -> WordDictionary:
    counts: Counter[str] = Counter()
    for chunk_counts in _pass(pool, count_words, files, chunk_bytes, "counting words"):
        counts.update(chunk_counts)
    return WordDictionary.build(counts, threshold=threshold, vocab_size=vocab_size)


def build_bpe_tokenizer(
    pool: WorkerPool, files: Sequence[TextFile], chunk_bytes: int, *, vocab_size: int, scratch: Path
) -> BpeTokenizer:
    """Learn byte pairs, then number them by how often the training text uses them."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        # In a worker, because the trainer starts threads, and a process with threads must not fork workers.
        (learnt,) = pool.map(partial(train_bpe, tuple(files), vocab_size, chunk_bytes), [folder])
        tokenizer = BpeTokenizer.load(learnt)
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        for chunk_counts in _pass(pool, partial(count_ids, folder), files, chunk_bytes, "counting byte pairs"):
            counts += chunk_counts
    return tokenizer.sorted_by(counts)


def encode_split(
    pool: WorkerPool, files: Sequence[TextFile], chunk_bytes: int, *, tokenizer_folder: Path, prefix: Path
) -> SplitCounts:
    """Encode the files into one store, in their order."""
    vocab_size = load_tokenizer(tokenizer_folder).vocab_size
    words = unknown = 0
    with TokenStoreWriter(prefix, vocab_size) as writer:
        encode = partial(encode_chunk, tokenizer_folder)
        for encoded in _pass(pool, encode, files, chunk_bytes, f"encoding {prefix.name}"):
            writer.append(encoded.ids, encoded.line_sizes)
            words += encoded.words
            unknown += encoded.unknown
    size = sum(file.path.stat().st_size for file in files)
    return SplitCounts(writer.lines, writer.tokens, words, unknown, size, writer.sha256)


def count_words(chunk: Chunk) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in read_lines(chunk):
        counts.update(line.split())
    return counts


def train_bpe(files: Sequence[TextFile], vocab_size: int, chunk_bytes: int, folder: Path) -> Path:
    lines = chain.from_iterable(map(read_lines, chunks_of(files, chunk_bytes)))
    BpeTokenizer.train(filter(None, lines), vocab_size).save(folder)
    return folder / BPE_FILE


def count_ids(tokenizer_folder: Path, chunk: Chunk) -> NDArray[np.int64]:
    tokenizer = _tokenizer_in(tokenizer_folder)
    ids, _ = _encode_lines(tokenizer, read_lines(chunk))
    return np.bincount(ids, minlength=tokenizer.vocab_size)


def encode_chunk(tokenizer_folder: Path, chunk: Chunk) -> EncodedChunk:
    tokenizer = _tokenizer_in(tokenizer_folder)
    lines = read_lines(chunk)
    ids, line_sizes = _encode_lines(tokenizer, lines)
    return EncodedChunk(
        ids=ids.astype(token_dtype(tokenizer.vocab_size)),
        line_sizes=line_sizes,
        words=sum(len(line.split()) for line in lines),
        unknown=int(np.count_nonzero(ids == UNK)),
    )


def _encode_lines(tokenizer: Tokenizer, lines: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the ids of all lines in sequence, and the number of ids of each line."""
    ids = array("i")  # four bytes per id; a list would take ten times as much
    sizes = array("i")
    for line in lines:
        encoded = tokenizer.encode_line(line)
        ids.extend(encoded)
        sizes.append(len(encoded))
    return np.frombuffer(ids, np.int32), np.frombuffer(sizes, np.int32)


@lru_cache(maxsize=1)
def _tokenizer_in(folder: Path) -> Tokenizer:
    """Load the tokenizer once per worker, not once per chunk."""
    return load_tokenizer(folder)


def _pass(
    pool: WorkerPool, function: Callable[[Chunk], Result], files: Sequence[TextFile], chunk_bytes: int, label: str
) -> Iterator[Result]:
    """Map over all chunks of the files, and show the progress."""
    total = sum(file.path.stat().st_size for file in files)
    with byte_progress(label, total) as advance:
        for size, result in pool.map(partial(_with_size, function), chunks_of(files, chunk_bytes)):
            advance(size)
            yield result


def _with_size(function: Callable[[Chunk], Result], chunk: Chunk) -> tuple[int, Result]:
    return len(chunk), function(chunk)
