"""The passes over a corpus: count, build a tokenizer, encode. The pool returns the chunks in order.

Workers read the text and the tokenizer from the same paths (on several machines: of a shared file system). They get
addresses of chunks, or their content where a file can only be read from its beginning, and return counts and ids.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.command import log
from megatron_style.data.preparation.work import Work
from megatron_style.data.preparation.workers import Result, WorkerPool
from megatron_style.data.progress import byte_progress
from megatron_style.data.readers.chunks import Chunk, ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.readers.parse import Texts, read_texts
from megatron_style.data.store import TokenStoreWriter, Written, token_dtype
from megatron_style.data.text import lines_of
from megatron_style.data.tokenizer import BPE_FILE, UNK, BpeTokenizer, Tokenizer, WordDictionary, load_tokenizer

_COUNTS = "counts"  # the pass that counts words or byte pairs
_REPORTED = 5  # parts left out that are named, of each split


@dataclass(frozen=True)
class Passes:
    """What all passes over the text share."""

    pool: WorkerPool
    work: Work
    options: ReadOptions


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
class SplitCounts:
    lines: int = 0
    tokens: int = 0
    words: int = 0
    unknown: int = 0
    bytes: int = 0
    sha256: str = ""  # of the .bin
    documents: int = 0
    left_out: int = 0  # damaged lines, records, rows and files


def build_word_dictionary(
    passes: Passes, files: Sequence[InputFile], *, threshold: int, vocab_size: int | None
) -> WordDictionary:
    state = passes.work.state(_COUNTS) or {"files": 0, "counts": {}}
    counts: Counter[str] = Counter(state["counts"])
    for done in _each_chunk(passes, partial(count_words, passes.options), files, state["files"], "counting words"):
        counts.update(done.result)
        if done.closes and passes.work.is_due():
            passes.work.save(_COUNTS, {"files": done.files, "counts": counts})
    return WordDictionary.build(counts, threshold=threshold, vocab_size=vocab_size)


def build_bpe_tokenizer(passes: Passes, files: Sequence[InputFile], *, vocab_size: int) -> BpeTokenizer:
    """Learn byte pairs, then number them by how often the training text uses them."""
    folder = passes.work.folder / "learnt"
    folder.mkdir(exist_ok=True)
    if not (folder / BPE_FILE).is_file():
        # In a worker, because the trainer starts threads, and a process with threads must not fork workers.
        list(passes.pool.map(partial(train_bpe, tuple(files), vocab_size, passes.options), [folder]))
    tokenizer = BpeTokenizer.load(folder / BPE_FILE)
    state = passes.work.state(_COUNTS) or {"files": 0, "counts": [0] * tokenizer.vocab_size}
    counts = np.array(state["counts"], np.int64)
    count = partial(count_ids, folder, passes.options)
    for done in _each_chunk(passes, count, files, state["files"], "counting byte pairs"):
        counts += done.result
        if done.closes and passes.work.is_due():
            passes.work.save(_COUNTS, {"files": done.files, "counts": counts.tolist()})
    (folder / BPE_FILE).unlink()
    folder.rmdir()
    return tokenizer.sorted_by(counts)


@dataclass(frozen=True)
class EncodeOptions:
    tokenizer_folder: Path
    dialect: str = "fairseq"  # of the store
    end_of_document: int | None = None  # the id that follows each document


def encode_split(passes: Passes, files: Sequence[InputFile], options: EncodeOptions, prefix: Path) -> SplitCounts:
    """Encode the files into one store, in their order."""
    state = passes.work.state(prefix.name) or {"files": 0, "written": {}, "counts": {}}
    counts = SplitCounts(**state["counts"])
    if counts.sha256:  # the split is complete
        return counts
    vocab_size = load_tokenizer(options.tokenizer_folder).vocab_size
    written = Written(**state["written"])
    with TokenStoreWriter(prefix, vocab_size, dialect=options.dialect, done=written) as writer:
        encode = partial(encode_chunk, options, passes.options)
        for done in _each_chunk(passes, encode, files, state["files"], f"encoding {prefix.name}"):
            writer.append(done.result.ids, done.result.line_sizes, done.result.document_ends)
            counts = _added(counts, done.result)
            if done.closes and passes.work.is_due():
                state = {"files": done.files, "written": asdict(writer.sync()), "counts": asdict(counts)}
                passes.work.save(prefix.name, state)
    counts = replace(
        counts,
        lines=writer.lines,
        tokens=writer.tokens,
        documents=writer.done.documents,
        bytes=sum(file.size for file in files),
        sha256=writer.sha256,
    )
    passes.work.save(prefix.name, {"files": len(files), "written": {}, "counts": asdict(counts)})
    return counts


def _added(counts: SplitCounts, encoded: EncodedChunk) -> SplitCounts:
    if encoded.first_left_out and counts.left_out < _REPORTED:
        log(f"left out: {encoded.first_left_out}")
    return replace(
        counts,
        words=counts.words + encoded.words,
        unknown=counts.unknown + encoded.unknown,
        left_out=counts.left_out + encoded.left_out,
    )


def count_words(options: ReadOptions, chunk: Chunk) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in read_texts(chunk, options).texts:
        counts.update(text.split())
    return counts


def train_bpe(files: Sequence[InputFile], vocab_size: int, options: ReadOptions, folder: Path) -> None:
    texts = chain.from_iterable(read_texts(chunk, options).texts for chunk in chunks_of(files, options))
    lines = chain.from_iterable(map(lines_of, texts))
    BpeTokenizer.train(filter(None, lines), vocab_size).save(folder)


def count_ids(tokenizer_folder: Path, options: ReadOptions, chunk: Chunk) -> NDArray[np.int64]:
    tokenizer = _tokenizer_in(tokenizer_folder)
    encoded = tokenizer.encode_texts(read_texts(chunk, options).texts)
    return np.bincount(encoded.ids, minlength=tokenizer.vocab_size)


def encode_chunk(options: EncodeOptions, read_options: ReadOptions, chunk: Chunk) -> EncodedChunk:
    tokenizer = _tokenizer_in(options.tokenizer_folder)
    found = read_texts(chunk, read_options)
    encoded = tokenizer.encode_texts(found.texts)
    ids = encoded.ids
    sizes = encoded.line_sizes
    if options.end_of_document is not None and tokenizer.kind == "words":  # only ends of documents may have that id
        ids[ids == options.end_of_document] = UNK
    unknown = 0 if tokenizer.unk is None else int(np.count_nonzero(ids == tokenizer.unk))
    last_lines = _lines_up_to_documents(found, encoded.text_lines, closes=chunk.closes)
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[last_lines]
    if options.end_of_document is not None:
        ids = np.insert(ids, ends, options.end_of_document)
        sizes = _longer(sizes, last_lines)
        ends += np.arange(1, len(ends) + 1)
    return EncodedChunk(
        ids.astype(token_dtype(tokenizer.vocab_size)),
        sizes,
        ends,
        encoded.words,
        unknown,
        found.left_out,
        found.first_left_out,
    )


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


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of one chunk."""

    result: Result
    files: int  # complete files up to here
    closes: bool


def _each_chunk(
    passes: Passes, function: Callable[[Chunk], Result], files: Sequence[InputFile], skip: int, label: str
) -> Iterator[Done[Result]]:
    """Map over all chunks of the files after the first `skip`, and show the progress."""
    left = files[skip:]
    total = sum(file.size for file in left)
    is_known = not any(file.compression or file.format in ("parquet", "arrow") for file in left)
    complete = skip
    with byte_progress(label, total if is_known else None) as advance:
        chunks = chunks_of(left, passes.options)
        for size, closes, result in passes.pool.map(partial(_with_size, function), chunks):
            advance(size)
            complete += closes
            yield Done(result, complete, closes)


def _with_size(function: Callable[[Chunk], Result], chunk: Chunk) -> tuple[int, bool, Result]:
    return len(chunk.content), chunk.closes, function(chunk)
