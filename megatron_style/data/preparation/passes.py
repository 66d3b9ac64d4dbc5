"""The passes over a corpus: each maps over the chunks of its files, in their order; the last one writes a store.

A training text whose tokens have been counted is not read again: its ids are renumbered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic

import numpy as np

from megatron_style.base.command import log
from megatron_style.data.preparation.encode import EncodedChunk, EncodeOptions, encode_chunk
from megatron_style.data.preparation.provisional import kept_chunks, kept_final_ids
from megatron_style.data.preparation.words import DOCUMENT_END_NUMBER
from megatron_style.data.preparation.work import Work
from megatron_style.data.preparation.workers import Result, WorkerPool
from megatron_style.data.progress import byte_progress
from megatron_style.data.readers.chunks import Chunk, ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.store import TokenStoreWriter, Written
from megatron_style.data.tokenizer import UNK, Tokenizer, load_tokenizer

_REPORTED = 5  # parts left out that are named, of each split


@dataclass(frozen=True)
class Passes:
    """What all passes over the text share."""

    pool: WorkerPool
    work: Work
    options: ReadOptions


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


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of one chunk."""

    result: Result
    size: int  # of its text, in bytes
    files: int  # complete files up to here
    closes: bool  # the last chunk of its file


def each_chunk(
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
            yield Done(result, size, complete, closes)


def _with_size(function: Callable[[Chunk], Result], chunk: Chunk) -> tuple[int, bool, Result]:
    return len(chunk.content), chunk.closes, function(chunk)


def encode_split(
    passes: Passes, files: Sequence[InputFile], options: EncodeOptions, prefix: Path, *, is_counted: bool = False
) -> SplitCounts:
    """Encode the files into one store, in their order. If their tokens have been counted, their ids are at hand."""
    state = passes.work.state(prefix.name) or {"files": 0, "written": {}, "counts": {}}
    counts = SplitCounts(**state["counts"])
    if counts.sha256:  # the split is complete
        return counts
    tokenizer = load_tokenizer(options.tokenizer_folder)
    label = f"encoding {prefix.name}"
    if is_counted:
        encoded = _renumbered(passes, options, tokenizer, state["files"], label)
    else:
        encoded = each_chunk(passes, partial(encode_chunk, options, passes.options), files, state["files"], label)
    written = Written(**state["written"])
    with TokenStoreWriter(prefix, tokenizer.vocab_size, dialect=options.dialect, done=written) as writer:
        for done in encoded:
            writer.append(done.result.ids, done.result.line_sizes, done.result.document_ends)
            if not is_counted:  # then they have been reported
                report_left_out(done.result, counts.left_out)
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


def _renumbered(
    passes: Passes, options: EncodeOptions, tokenizer: Tokenizer, skip: int, label: str
) -> Iterator[Done[EncodedChunk]]:
    """Yield the chunks that counting has kept, after the first `skip` files, with their final ids."""
    final_ids = kept_final_ids(passes.work.folder)
    if options.end_of_document is not None and tokenizer.kind == "words":
        final_ids[final_ids == options.end_of_document] = UNK  # only ends of documents may have that id
        final_ids[DOCUMENT_END_NUMBER] = options.end_of_document
    complete = 0
    with byte_progress(label, None) as advance:
        for size, closes, chunk in kept_chunks(passes.work.folder, final_ids):
            is_done = complete < skip
            complete += closes
            if is_done:
                continue
            advance(size)
            unknown = int(np.count_nonzero(chunk.ids == tokenizer.unk))
            yield Done(replace(chunk, unknown=unknown), size, complete, closes)


def report_left_out(encoded: EncodedChunk, before: int) -> None:
    """Name the first part that was left out of a chunk, unless `before` says that enough are known."""
    if encoded.first_left_out and before < _REPORTED:
        log(f"left out: {encoded.first_left_out}")


def _added(counts: SplitCounts, encoded: EncodedChunk) -> SplitCounts:
    return replace(
        counts,
        words=counts.words + encoded.words,
        unknown=counts.unknown + encoded.unknown,
        left_out=counts.left_out + encoded.left_out,
    )
