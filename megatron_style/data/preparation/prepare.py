"""Make token stores of input files, with their tokenizer and a record of the recipe.

The training text is counted, the tokenizer is built, and all texts are encoded. The output does not depend on the
number of workers, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.data.corpus import END_OF_DOCUMENT, RECORD_FILE
from megatron_style.data.documents import DOCUMENTS_SUFFIX
from megatron_style.data.inspection import RECORD_SUFFIX
from megatron_style.data.preparation.build import build_bpe_tokenizer, build_word_dictionary
from megatron_style.data.preparation.corpora import SPLITS
from megatron_style.data.preparation.encode import EncodeOptions
from megatron_style.data.preparation.passes import Passes, encode_split
from megatron_style.data.preparation.provisional import has_provisional, remove_provisional
from megatron_style.data.preparation.work import SAVE_SECONDS, work_folder
from megatron_style.data.preparation.workers import WorkerPool
from megatron_style.data.pretrained import import_tokenizer
from megatron_style.data.readers.chunks import ReadOptions
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.text import file_digest
from megatron_style.data.tokenizer import (
    BPE_FILE,
    DEFAULT_BPE_VOCAB,
    DICTIONARY_FILE,
    EOS,
    PRETRAINED_FILE,
    SPECIALS,
    TOKENIZER_FILES,
    UNK,
    Tokenizer,
    load_tokenizer,
)

_RECORD_FORMAT = 1
_MANY_UNKNOWN = 0.02  # of the words of a held-out text
_FILES_OF_KINDS = {"words": DICTIONARY_FILE, "bpe": BPE_FILE, "pretrained": PRETRAINED_FILE}
_REPLACE_HINT = "use --overwrite to replace it, or another folder"
_STORE_SUFFIXES = (".bin", ".idx", DOCUMENTS_SUFFIX, RECORD_SUFFIX)
_STORE_FILES = {f"{split}{suffix}" for split, suffix in product(SPLITS, _STORE_SUFFIXES)}
_OUTPUT_FILES = {RECORD_FILE, *TOKENIZER_FILES} | _STORE_FILES


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the output."""

    splits: Mapping[str, Sequence[InputFile]]
    tokenizer: str
    vocab_size: int | None = None
    threshold: int = 0
    dictionary: Path | None = None  # an existing tokenizer to encode with, instead of building one
    imported: Path | None = None  # a tokenizer of the Hugging Face libraries to encode with
    reading: ReadOptions = field(default_factory=ReadOptions)
    dialect: str = "fairseq"  # of the stores
    end_of_document: str | None = None  # the token that follows each document
    valid_share: float | None = None  # of the training files that is held out

    def settings(self) -> dict[str, Any]:
        """Return the settings as the record keeps them; those of later versions only where they are not the default."""
        later = {
            "key": self.reading.key,
            "skip_bad": self.reading.skip_bad,
            "format": self.dialect,
            "end_of_document": self.end_of_document,
            "imported": self.imported and import_tokenizer(self.imported, self.end_of_document).digest,
            "valid_share": self.valid_share,
        }
        defaults = {"key": "text", "skip_bad": False, "format": "fairseq"}
        return {
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "threshold": self.threshold,
            "dictionary": None if self.dictionary is None else _tokenizer_digest(self.dictionary),
            **{name: value for name, value in later.items() if value != defaults.get(name)},
        }


def prepare_corpus(
    recipe: Recipe, output: Path, pool: WorkerPool, *, overwrite: bool = False, save_seconds: float = SAVE_SECONDS
) -> tuple[dict[str, Any], bool]:
    """Write the output folder. Return its record, and False if the same recipe has made it before."""
    output = output.expanduser().resolve()
    _check_replaceable(output)
    identity = _identity(recipe, pool)
    if not overwrite and (record := _existing_record(output, identity)) is not None:
        log(f"{output}: already holds this corpus; nothing to do")
        return record, False
    with work_folder(output, identity, save_seconds=save_seconds) as work:
        record = _prepare(recipe, identity, Passes(pool, work, recipe.reading))
        (work.folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record, True


def _prepare(recipe: Recipe, identity: Mapping[str, Any], passes: Passes) -> dict[str, Any]:
    _check_end_of_document(recipe)
    folder = passes.work.folder
    tokenizer = _make_tokenizer(recipe, passes)
    options = EncodeOptions(folder, recipe.dialect, _end_of_document(recipe, tokenizer))
    splits = {}
    for split, files in recipe.splits.items():
        is_counted = split == "train" and has_provisional(folder)
        counts = encode_split(passes, files, options, folder / split, is_counted=is_counted)
        if is_counted:
            remove_provisional(folder)  # it is as large as the store
        if not counts.tokens:
            raise UserError(f"--{split}: nothing is left of its text; see the parts that were left out above")
        splits[split] = asdict(counts)
        if split != "train" and counts.unknown > _MANY_UNKNOWN * counts.words:
            log(
                f"warning: {counts.unknown / counts.words:.1%} of the words of {split} are unknown, and a model cannot "
                f"tell them apart; prepare it with --tokenizer bpe, or with more words"
            )
    return _record(identity, tokenizer, splits, options.end_of_document)


def _check_end_of_document(recipe: Recipe) -> None:
    """Refuse a token that does not tell the end of a document from its text."""
    name = recipe.end_of_document
    if name is None or recipe.tokenizer == "pretrained":
        return
    if name in (SPECIALS[EOS], SPECIALS[UNK]):
        raise UserError(f"--end-of-document {name}: documents have this token, too; name <s> or <pad>")
    if recipe.tokenizer == "bpe" and name not in SPECIALS:  # of words, the text's own are made unknown
        raise UserError(f"--end-of-document {name}: is not a special token of byte pairs; name <s> or <pad>")


def _end_of_document(recipe: Recipe, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that follows each document."""
    name = recipe.end_of_document
    if name is None:
        return tokenizer.eos if tokenizer.kind == "pretrained" else None
    if name not in tokenizer.tokens():
        raise UserError(f"--end-of-document {name}: the tokenizer has no such token; name one of its special tokens")
    return tokenizer.tokens().index(name)


def _make_tokenizer(recipe: Recipe, passes: Passes) -> Tokenizer:
    """Build the tokenizer from the training text, or reuse one, and save it for the workers to read."""
    folder = passes.work.folder
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(folder)  # of a preparation that is being resumed
    train = recipe.splits["train"]
    tokenizer: Tokenizer
    if recipe.dictionary is not None:
        tokenizer = load_tokenizer(recipe.dictionary)
    elif recipe.imported is not None:
        tokenizer = import_tokenizer(recipe.imported, recipe.end_of_document)
    elif recipe.tokenizer == "bpe":
        size = recipe.vocab_size or DEFAULT_BPE_VOCAB
        tokenizer = build_bpe_tokenizer(passes, train, vocab_size=size, end_of_document=recipe.end_of_document)
    else:
        tokenizer = build_word_dictionary(
            passes,
            train,
            threshold=recipe.threshold,
            vocab_size=recipe.vocab_size,
            end_of_document=recipe.end_of_document,
        )
    tokenizer.save(folder)
    return tokenizer


def _identity(recipe: Recipe, pool: WorkerPool) -> dict[str, Any]:
    """Return the recipe as the record keeps it: settings, and sources by digest, so that moved files are the same."""
    paths = dict.fromkeys(file.path for file in chain.from_iterable(recipe.splits.values()))
    digests = dict(zip(paths, pool.map(file_digest, paths), strict=True))
    sources = {}
    for split, files in recipe.splits.items():
        sources[split] = [_source(file, digests[file.path]) for file in files]
    return {"settings": recipe.settings(), "sources": sources}


def _source(file: InputFile, digest: str) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.size, "sha256": digest}


def _tokenizer_digest(path: Path) -> str:
    if path.is_dir():
        path = path / _FILES_OF_KINDS[load_tokenizer(path).kind]
    return file_digest(path)


def _record(
    identity: Mapping[str, Any], tokenizer: Tokenizer, splits: Mapping[str, Any], end_of_document: int | None
) -> dict[str, Any]:
    """Return the record. Equal corpora have equal records: time, machine and workers are left out."""
    return {
        "format": _RECORD_FORMAT,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        END_OF_DOCUMENT: end_of_document,
        "settings": identity["settings"],
        "splits": {split: {**counts, "sources": identity["sources"][split]} for split, counts in splits.items()},
    }


def _check_replaceable(output: Path) -> None:
    """Refuse a folder with other files than this command writes: replacing it would remove them."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output}: is a file; expected a folder, or a name for a new one")
    foreign = sorted(path.name for path in output.iterdir() if path.name not in _OUTPUT_FILES)
    if foreign:
        raise UserError(f"--output {output}: holds {foreign[0]}, which is not a prepared file; name a new folder")


def _existing_record(output: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of an output of the same recipe; None if there is no output. Any other output is refused."""
    if not output.exists() or not any(output.iterdir()):
        return None
    try:
        record: dict[str, Any] = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
        found = {
            "settings": record["settings"],
            "sources": {split: content["sources"] for split, content in record["splits"].items()},
        }
        damaged = [
            f"{split}.bin"
            for split, content in record["splits"].items()
            if file_digest(output / f"{split}.bin") != content["sha256"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--output {output}: exists and is not a complete corpus ({error}); {_REPLACE_HINT}") from error
    if damaged:
        raise UserError(f"--output {output}: {damaged[0]} is not what {RECORD_FILE} says; {_REPLACE_HINT}")
    if found != identity:
        raise UserError(f"--output {output}: holds another corpus ({_difference(found, identity)}); {_REPLACE_HINT}")
    return record


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for key in {**wanted["settings"], **found["settings"]}:
        if found["settings"].get(key) != wanted["settings"].get(key):
            return f"its {key} is {found['settings'].get(key)}, not {wanted['settings'].get(key)}"
    return "its text files are others"
