"""The text of an experiment: its source, its preparation, and the parts of it that are scored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_folder
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.data.preparation.corpora import SPLITS
from megatron_style.data.store import TokenStoreWriter, open_store, store_files
from megatron_style.data.text import file_digest
from megatron_style.paper.measures import Split
from megatron_style.paper.runs import PreparedText, Text
from megatron_style.paper.scale import ExperimentScale


@dataclass(frozen=True)
class Source:
    identity: str  # identifies the corpus, before and after it is prepared
    folder: Path  # where the prepared corpus is, or will be
    prepare: tuple[str, ...] | None = None  # the command that makes it; None: it was given prepared

    @property
    def is_ready(self) -> bool:
        return _is_prepared(self.folder)


def find_source(given: Path | None, scale: ExperimentScale, texts: Sequence[Text], output: Path) -> Source:
    """Return the source of the text. A prepared folder is used as it is; text files, or a built-in corpus, are prepared
    into the output."""
    folder = output / "corpus"
    if given is None:
        if scale.is_paper and "tbc" in texts:
            raise UserError(
                "--corpus: missing; Toronto Books is no longer distributed: give the folder of a prepared copy"
            )
        name = "wikitext-103" if scale.is_paper else "sotu"
        return Source(name, folder, _prepare("--corpus", name, "--output", str(folder)))
    if _is_prepared(given):
        return Source(file_digest(store_files(given / "train")[0]), given)
    if not given.is_dir():
        raise UserError(f"--corpus {given}: no such folder; one with a prepared corpus or with text files is expected")
    files = {split: file for split in SPLITS if (file := _text_of(given, split))}
    flags = chain.from_iterable((f"--{split}", str(file)) for split, file in files.items())
    identity = " ".join(map(file_digest, files.values()))
    return Source(identity, folder, _prepare(*flags, "--tokenizer", "words", "--output", str(folder)))


def _is_prepared(folder: Path) -> bool:
    return all(_has_store(folder / split) for split in ("train", "valid"))


def _has_store(prefix: Path) -> bool:
    return all(file.is_file() for file in store_files(prefix))


def _prepare(*flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "megatron_style.prepare", *flags)


def _text_of(folder: Path, split: str) -> Path | None:
    found = sorted(path for path in folder.iterdir() if path.is_file() and split in path.name)
    if len(found) > 1 or (not found and split != "test"):
        many = f"{len(found)} files" if found else "no file"
        raise UserError(f"--corpus {folder}: has {many} with `{split}` in the name; exactly one is expected")
    return found[0] if found else None


def corpus_of(source: Source, scale: ExperimentScale, output: Path) -> PreparedText:
    """Return the corpus as the runs read it. Only runs at the paper's scale can be made before it is prepared."""
    tokenizer = tokenizer_beside(source.folder / "train") if source.is_ready else None
    if source.is_ready and tokenizer is None:
        raise UserError(f"--corpus {source.folder}: has no dictionary next to its token store; prepare it with one")
    valid = held_out(source, scale, output, "valid")
    return PreparedText(source.folder / "train", valid, tokenizer.vocab_size if tokenizer else None)


def held_out(source: Source, scale: ExperimentScale, output: Path, split: Split) -> Path:
    """Return the prefix of the text that is scored: an entire split, or its beginning."""
    is_complete = scale.held_out_tokens is None and split != "short"
    return (source.folder if is_complete else output / "held_out") / split


def write_held_out(source: Source, corpus: PreparedText, scale: ExperimentScale, output: Path) -> None:
    """Write the beginnings of the held-out splits as separate stores, so that every protocol scores the same text."""
    if (output / "held_out").is_dir():
        return
    assert corpus.vocab_size is not None
    splits: tuple[Split, ...] = ("valid", "test", "short")
    with atomic_folder(output / "held_out") as folder:
        for split in splits:
            origin = source.folder / ("valid" if split == "short" else split)
            tokens = scale.short_tokens if split == "short" else scale.held_out_tokens
            if tokens is not None and store_files(origin)[0].is_file():
                ids = open_store(origin).tokens[:tokens]
                with TokenStoreWriter(folder / split, corpus.vocab_size) as writer:
                    writer.append(ids, np.array([len(ids)]))


def check_test_split(source: Source) -> None:
    """Refuse a corpus without a test split, before anything is trained that could not be scored."""
    made_from_files = source.prepare is not None and "--train" in source.prepare
    lacks_file = made_from_files and "--test" not in (source.prepare or ())
    if lacks_file or (source.is_ready and not store_files(source.folder / "test")[0].is_file()):
        raise UserError(
            "--corpus: has no test split, which this table is measured on; add one, or choose another table"
        )
