"""Change the form of a model.

python -m megatron_style.convert import-fairseq model.pt --dictionary dict.txt --output models/reference
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_style.checkpoint.fairseq import read_fairseq
from megatron_style.checkpoint.model_folder import write_model
from megatron_style.config.command import add_json_flag, command_parser, run_command, show
from megatron_style.config.errors import UserError
from megatron_style.data.tokenizer import WordDictionary


def main() -> None:
    args = parse_args()
    import_fairseq(args)


def parse_args() -> argparse.Namespace:
    example = "python -m megatron_style.convert import-fairseq model.pt --dictionary dict.txt --output models/reference"
    parser = command_parser("convert", "Change the form of a model.", example)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    fairseq = kinds.add_parser("import-fairseq", help="a checkpoint of the reference implementation -> a model folder")
    fairseq.add_argument("checkpoint", type=Path, metavar="FILE.pt")
    fairseq.add_argument("--dictionary", type=Path, required=True, metavar="dict.txt")
    fairseq.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_json_flag(fairseq)
    return parser.parse_args()


def import_fairseq(args: argparse.Namespace) -> None:
    if not args.dictionary.is_file():
        raise UserError(f"--dictionary {args.dictionary}: no such file; fairseq's dict.txt is expected")
    dictionary = WordDictionary.load(args.dictionary)
    imported = read_fairseq(args.checkpoint)
    if dictionary.vocab_size != imported.config.vocab_size:
        raise UserError(
            f"{args.dictionary}: makes {dictionary.vocab_size} ids, but {args.checkpoint} has vectors for "
            f"{imported.config.vocab_size}; the dictionary it was trained with is needed"
        )
    write_model(args.output, imported.config, imported.weights, dictionary)
    facts = {
        "output": str(args.output),
        "parameters": sum(tensor.numel() for tensor in imported.weights.values()),
        "vocabulary": imported.config.vocab_size,
        "steps": imported.config.step,
    }
    show(facts, as_json=args.json)


if __name__ == "__main__":
    run_command(main)
