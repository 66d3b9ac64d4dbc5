"""Turn text files into token stores, their tokenizer, and a record of the recipe.

python -m megatron_style.prepare --corpus sotu --output data/sotu
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("prepare")  # imports this file

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_style.base.command import add_json_flag, command_parser, positive_int, show
from megatron_style.base.files import DEFAULT_CACHE, writing_to
from megatron_style.data.index_writer import INDEX_WRITERS
from megatron_style.data.preparation.corpora import SPLITS
from megatron_style.data.preparation.flags import recipe_from, share_of_text
from megatron_style.data.preparation.prepare import prepare_corpus
from megatron_style.data.preparation.workers import usable_cpus, worker_pool

_COUNTED = ("documents", "lines", "words", "tokens", "unknown")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    with writing_to(args.output), worker_pool(args.workers) as pool:  # under mpirun only rank 0 continues here
        recipe = recipe_from(args)
        record, is_new = prepare_corpus(recipe, args.output, pool, overwrite=args.overwrite)
    show(_summary(args.output, record, is_new=is_new), as_json=args.json)


def _summary(output: Path, record: Mapping[str, Any], *, is_new: bool) -> dict[str, object]:
    summary: dict[str, object] = {
        "output": str(output),
        "status": "written" if is_new else "unchanged",
        "tokenizer": record["tokenizer"],
        "vocab_size": record["vocab_size"],
    }
    for split, content in record["splits"].items():
        counted = [what for what in _COUNTED if what in content]  # an earlier version counted no documents
        summary |= {f"{split}_{what}": content[what] for what in counted}
        if content.get("left_out"):
            summary[f"{split}_left_out"] = content["left_out"]
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "prepare",
        "Turn text into token stores (.bin and .idx of train, valid and test), their tokenizer and corpus.json. Inputs "
        "are files, quoted patterns and folders of plain text, JSON lines (either also as .gz, .zst, .bz2 or .xz), "
        "Parquet, and folders that `datasets` has saved. An interrupted preparation resumes after the last complete "
        "input file when it is started again.",
        "python -m megatron_style.prepare --corpus sotu --output data/sotu\n"
        "  python -m megatron_style.prepare --train a.txt b.txt --valid v.txt --output data/mine\n"
        "  python -m megatron_style.prepare --train one.txt --valid-share 0.01 --output data/mine\n"
        "  python -m megatron_style.prepare --train 'shards/*.jsonl.zst' --valid valid.parquet --key content \\\n"
        "      --tokenizer bpe --vocab-size 32000 --skip-bad --output data/web\n"
        "  python -m megatron_style.prepare --train wiki/train --valid wiki/validation --tokenizer models/gpt2 \\\n"
        "      --format megatron --output data/wiki",
    )
    _add_input_flags(parser)
    _add_tokenizer_flags(parser)
    _add_output_flags(parser)
    add_json_flag(parser)
    return parser


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("what to prepare: your own text, or a built-in corpus")
    for split in SPLITS:
        files.add_argument(
            f"--{split}", nargs="+", action="extend", type=Path, metavar="PATH", help=f"files or folders for {split}"
        )
    files.add_argument(
        "--valid-share",
        type=share_of_text,
        metavar="0.01",
        help="instead of --valid: hold out the last part of files",
    )
    files.add_argument("--key", default="text", help="the key or column of the text in JSON lines, Parquet and Arrow")
    files.add_argument(
        "--skip-bad", action="store_true", help="leave out damaged lines, records and files, and count them"
    )
    files.add_argument("--corpus", metavar="NAME", help="sotu, python or wikitext-103 (downloaded)")
    files.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help="the folder of downloads")


def _add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_argument_group("tokenizer")
    words.add_argument(
        "--tokenizer",
        metavar="KIND",
        help="words, bpe, or the path of an existing tokenizer.json or Hugging Face folder, which is used as it is "
        "(default: bpe, for any text; words is for text that is already tokenised, as wikitext-103 is)",
    )
    words.add_argument("--vocab-size", type=int, metavar="N", help="at most N ids, then padded to a multiple of 8")
    words.add_argument("--threshold", type=int, metavar="N", help="words seen fewer than N times become <unk>")
    words.add_argument("--dictionary", type=Path, metavar="FILE_OR_DIR", help="encode with an existing tokenizer")
    words.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="a token that follows each document (a JSON record, a row or a file of text), such as <s>; default: none, "
        "and for an existing tokenizer its own end token",
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--format", choices=tuple(INDEX_WRITERS), default="fairseq", help="the dialect of the stores (default: fairseq)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that was made from something else")
    parser.add_argument(
        "--workers", type=positive_int, default=usable_cpus(), metavar="N", help="processes (default: all CPUs)"
    )
