"""From the flags of `prepare` to a recipe: flags are checked against one another, and files are found."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.data.preparation.corpora import SPLITS, built_in_corpus
from megatron_style.data.preparation.prepare import Recipe
from megatron_style.data.pretrained import import_tokenizer
from megatron_style.data.readers.chunks import ReadOptions
from megatron_style.data.readers.inputs import InputFile, find_inputs, warn_of_records
from megatron_style.data.readers.share import hold_out
from megatron_style.data.text import check_text_file
from megatron_style.data.tokenizer import SMALLEST_BPE_VOCAB, load_tokenizer


def recipe_from(args: argparse.Namespace) -> Recipe:
    """Check the flags against one another, and find the files."""
    if args.valid_share is not None and (args.valid or args.corpus):
        given = "--valid" if args.valid else "--corpus"
        raise UserError(f"--valid-share {args.valid_share}: {given} brings held-out text of its own; leave out one")
    splits, suited = _sources(args)
    for file in chain.from_iterable(splits.values()):
        check_input(file, skip_bad=args.skip_bad)
    if args.valid_share is not None:
        kept, held_out = hold_out(splits["train"], args.valid_share)
        splits = {"train": kept, "valid": held_out, **{name: files for name, files in splits.items() if name == "test"}}
    kind = args.tokenizer or suited
    imported = None
    if args.dictionary is not None:
        kind = _reused_kind(args)
    elif kind not in ("words", "bpe"):
        imported = Path(kind)
        kind = _imported_kind(args)
    elif kind == "bpe":
        if args.threshold is not None:
            raise UserError(f"--threshold {args.threshold} is for --tokenizer words; bpe takes --vocab-size only")
        if args.vocab_size is not None and args.vocab_size < SMALLEST_BPE_VOCAB:
            raise UserError(f"--vocab-size {args.vocab_size} is too small for bpe: at least {SMALLEST_BPE_VOCAB}")
    return Recipe(
        splits,
        kind,
        args.vocab_size,
        args.threshold or 0,
        args.dictionary,
        imported,
        ReadOptions(args.key, args.skip_bad),
        args.format,
        args.end_of_document,
        args.valid_share,
    )


def check_input(file: InputFile, *, skip_bad: bool) -> None:
    """Refuse what cannot be read, before any work is done."""
    if not skip_bad or not file.path.is_file():
        check_text_file(file.path)


def _sources(args: argparse.Namespace) -> tuple[Mapping[str, list[InputFile]], str]:
    """Return the files of each split, and the kind of tokenizer that suits them."""
    given = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
    if args.corpus is not None:
        if given:
            raise UserError(f"--corpus {args.corpus} brings its own files; leave out --{' and --'.join(given)}")
        corpus = built_in_corpus(args.corpus, args.cache)
        return corpus.splits, corpus.tokenizer
    if "train" not in given:
        raise UserError("nothing to prepare: give --train FILE... and --valid FILE..., or --corpus NAME")
    if "valid" not in given and args.valid_share is None:
        raise UserError("there is no held-out text; give --valid FILE..., or --valid-share 0.01, a part of --train")
    suited = "bpe" if args.threshold is None else "words"  # a threshold is one of words
    found = {split: find_inputs(paths) for split, paths in given.items()}
    for file in chain.from_iterable(found.values()):
        warn_of_records(file)
    return found, suited


def _imported_kind(args: argparse.Namespace) -> str:
    if (Path(args.tokenizer) / "dict.txt").is_file() or (Path(args.tokenizer) / "corpus.json").is_file():
        raise UserError(f"--tokenizer {args.tokenizer}: was made by `prepare`; use --dictionary {args.tokenizer}")
    for flag, value in (("--vocab-size", args.vocab_size), ("--threshold", args.threshold)):
        if value is not None:
            raise UserError(f"{flag} {value} has no effect on --tokenizer {args.tokenizer}, which exists; leave it out")
    return import_tokenizer(Path(args.tokenizer), args.end_of_document).kind


def _reused_kind(args: argparse.Namespace) -> str:
    for flag, value in (("--vocab-size", args.vocab_size), ("--threshold", args.threshold)):
        if value is not None:
            raise UserError(f"{flag} {value} has no effect with --dictionary, which is used as it is; leave one out")
    kind = load_tokenizer(args.dictionary).kind
    if args.tokenizer not in (None, kind):
        raise UserError(f"--tokenizer {args.tokenizer} contradicts --dictionary {args.dictionary}, which is of {kind}")
    return kind


def share_of_text(text: str) -> float:
    """Read the value of a flag that is a share, more than nothing and less than all."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.01, between 0 and 1")
    return share
