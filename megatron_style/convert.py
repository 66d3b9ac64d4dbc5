"""Change the form of a model.

python -m megatron_style.convert export runs/quickstart --output models/mine
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_style.checkpoint.compare import compare
from megatron_style.checkpoint.fairseq import read_fairseq
from megatron_style.checkpoint.model_folder import parameter_shapes, write_model
from megatron_style.checkpoint.source import open_model
from megatron_style.config.command import EXIT_FAILED, add_json_flag, command_parser, run_command, show
from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import WordDictionary


def main() -> None:
    args = parse_args()
    result = args.convert(args)
    show(result, as_json=args.json)
    if result.get("equal") is False:
        sys.exit(EXIT_FAILED)


def parse_args() -> argparse.Namespace:
    example = "python -m megatron_style.convert export runs/quickstart --output models/mine"
    parser = command_parser("convert", "Change the form of a model.", example)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    fairseq = kinds.add_parser("import-fairseq", help="a checkpoint of the reference implementation -> a model folder")
    fairseq.add_argument("checkpoint", type=Path, metavar="FILE.pt")
    fairseq.add_argument("--dictionary", type=Path, required=True, metavar="dict.txt")
    fairseq.set_defaults(convert=import_fairseq)

    export = kinds.add_parser("export", help="a training checkpoint of any grid -> a model folder in float32")
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a run's folder, or one global_stepN")
    export.set_defaults(convert=export_model)

    again = kinds.add_parser("reshard", help="a training checkpoint -> one for another grid; `train` does it by itself")
    again.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    again.add_argument("--tensor", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    again.add_argument("--data", type=int, required=True, metavar="N", help="data-parallel ranks")
    again.set_defaults(convert=reshard_checkpoint)
    for kind in (fairseq, export, again):
        kind.add_argument("--output", type=Path, required=True, metavar="DIR")

    both = kinds.add_parser("verify", help="are two models, in whatever form, the same? Exit code 1 if not")
    both.add_argument("first", type=Path, metavar="A")
    both.add_argument("second", type=Path, metavar="B")
    both.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="largest difference allowed; default 0")
    both.set_defaults(convert=verify)
    for kind in (fairseq, export, again, both):
        add_json_flag(kind)
    return parser.parse_args()


def import_fairseq(args: argparse.Namespace) -> dict[str, object]:
    if not args.dictionary.is_file():
        raise UserError(f"--dictionary {args.dictionary}: no such file; fairseq's dict.txt is expected")
    dictionary = WordDictionary.load(args.dictionary)
    imported = read_fairseq(args.checkpoint)
    if dictionary.vocab_size != imported.config.vocab_size:
        raise UserError(
            f"{args.dictionary}: makes {dictionary.vocab_size} ids, but {args.checkpoint} has vectors for "
            f"{imported.config.vocab_size}; the dictionary it was trained with is needed"
        )
    write_model(args.output, imported.config, imported.weights.__getitem__, dictionary)
    return _summary(args.output, imported.config)


def export_model(args: argparse.Namespace) -> dict[str, object]:
    source = open_model(args.checkpoint)
    write_model(args.output, source.config, source.weight, source.tokenizer())
    return _summary(args.output, source.config)


def reshard_checkpoint(args: argparse.Namespace) -> dict[str, object]:
    for flag in ("tensor", "data"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    if os.environ.get("DS_ACCELERATOR") != "cpu":  # the other grid's ranks need no accelerator, and may be many
        os.execve(sys.executable, sys.orig_argv, os.environ | {"DS_ACCELERATOR": "cpu"})
    from megatron_style.checkpoint.reshard import reshard  # the one kind that needs DeepSpeed, which is slow to import

    step = reshard(args.checkpoint, args.output, tensor=args.tensor, data=args.data)
    return {"output": str(args.output), "step": step, "tensor": args.tensor, "data": args.data}


def verify(args: argparse.Namespace) -> dict[str, object]:
    result = compare(open_model(args.first), open_model(args.second))
    return {**asdict(result), "equal": result.largest <= args.tolerance}


def _summary(output: Path, config: ModelFolderConfig) -> dict[str, object]:
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    return {"output": str(output), "parameters": parameters, "vocabulary": config.vocab_size, "steps": config.step}


if __name__ == "__main__":
    run_command(main)
