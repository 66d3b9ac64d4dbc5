"""Change the form of a model.

python -m megatron_style.convert export runs/quickstart --output models/mine
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_style.base.command import EXIT_FAILED, add_json_flag, command_parser, run_command, show
from megatron_style.base.errors import UserError
from megatron_style.data.tokenizer import WordDictionary
from megatron_style.formats import fairseq, huggingface, model_folder, run_checkpoint, universal
from megatron_style.formats.certificate import Certificate, certify
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource
from megatron_style.formats.transfer import deliver, return_freed_memory, transfer
from megatron_style.model.shape import count_parameters

Result = dict[str, object]


def main() -> None:
    args = parse_args()
    return_freed_memory()
    result = args.convert(args)
    show(result, as_json=args.json)
    if result.get("equal") is False:
        sys.exit(EXIT_FAILED)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "convert",
        "Change the form of a model. What was written is read back and compared with the source on a fixed text; the "
        "proof is in certificate.json. MODEL is a model folder, a run, one of its checkpoints, or anything that this "
        "command writes.",
        "python -m megatron_style.convert export runs/quickstart --output models/mine",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add(name: str, convert: Callable[[argparse.Namespace], Result], about: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=about, description=about)
        kind.set_defaults(convert=convert)
        add_json_flag(kind)
        return kind

    incoming = add("import-fairseq", import_fairseq, "a checkpoint of the reference or of fairseq -> a model folder")
    incoming.add_argument("checkpoint", type=Path, metavar="FILE.pt")
    incoming.add_argument("--dictionary", type=Path, required=True, metavar="dict.txt")
    incoming.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_overwrite_flag(incoming)

    export = add("export", export_model, "a training checkpoint of any grid -> a model folder in float32")
    export.add_argument("model", type=Path, metavar="MODEL")
    export.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_overwrite_flag(export)
    export.add_argument("--optimizer", action="store_true", help="with the optimizer's state: training can go on")

    outgoing = add("export-fairseq", export_fairseq, "-> a checkpoint that the reference loads")
    outgoing.add_argument("model", type=Path, metavar="MODEL")
    outgoing.add_argument("--output", type=Path, required=True, metavar="FILE.pt")
    add_overwrite_flag(outgoing)

    hub = add("export-hf", export_huggingface, "-> a folder that transformers loads (AutoModelForCausalLM)")
    hub.add_argument("model", type=Path, metavar="MODEL")
    hub.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_overwrite_flag(hub)

    everywhere = add("export-universal", export_universal, "-> a universal checkpoint, for any engine of DeepSpeed's")
    everywhere.add_argument("model", type=Path, metavar="MODEL")
    everywhere.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_overwrite_flag(everywhere)

    again = add(
        "reshard", reshard_checkpoint, "a training checkpoint -> one for another grid (`train` can do it itself)"
    )
    again.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    again.add_argument("--tensor", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    again.add_argument("--data", type=int, required=True, metavar="N", help="data-parallel ranks")
    again.add_argument("--output", type=Path, required=True, metavar="DIR")

    both = add("verify", verify, "are two models, in whatever form, the same? Exit code 1 if not")
    both.add_argument("first", type=Path, metavar="A")
    both.add_argument("second", type=Path, metavar="B")
    both.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="largest difference allowed; default 0")
    return parser.parse_args()


def add_overwrite_flag(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--overwrite", action="store_true", help="replace an output that was made from something else")


def import_fairseq(args: argparse.Namespace) -> Result:
    if not args.dictionary.is_file():
        raise UserError(f"--dictionary {args.dictionary}: no such file; fairseq's dict.txt is expected")
    dictionary = WordDictionary.load(args.dictionary)
    source = fairseq.read(args.checkpoint)
    if dictionary.vocab_size != source.config.vocab_size:
        raise UserError(
            f"{args.dictionary}: makes {dictionary.vocab_size} ids, but {args.checkpoint} has vectors for "
            f"{source.config.vocab_size}; the dictionary it was trained with is needed"
        )
    source = replace(source, tokenizer=lambda: dictionary)
    return _summary(args.output, source, transfer(source, model_folder, args.output, overwrite=args.overwrite))


def export_model(args: argparse.Namespace) -> Result:
    source = open_model(args.model)
    if not args.optimizer:
        source = source.without_optimizer()
    elif source.state is None:
        raise UserError(f"{args.model}: holds no optimizer state, so --optimizer has nothing to export")
    return _summary(args.output, source, transfer(source, model_folder, args.output, overwrite=args.overwrite))


def export_fairseq(args: argparse.Namespace) -> Result:
    source = open_model(args.model)
    return _summary(args.output, source, transfer(source, fairseq, args.output, overwrite=args.overwrite))


def export_huggingface(args: argparse.Namespace) -> Result:
    source = open_model(args.model).without_optimizer()
    certificate = transfer(source, huggingface, args.output, huggingface.certify_export, overwrite=args.overwrite)
    return _summary(args.output, source, certificate) | {"computed_by": certificate.computed_by}


def export_universal(args: argparse.Namespace) -> Result:
    source = open_model(args.model)
    return _summary(args.output, source, transfer(source, universal, args.output, overwrite=args.overwrite))


def reshard_checkpoint(args: argparse.Namespace) -> Result:
    for flag in ("tensor", "data"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    if os.environ.get("DS_ACCELERATOR") != "cpu":  # the other grid's ranks need no accelerator, and may be many
        os.execve(sys.executable, sys.orig_argv, os.environ | {"DS_ACCELERATOR": "cpu"})
    from megatron_style.checkpoint.reshard import reshard  # the one kind that needs DeepSpeed, which is slow to import

    reshard(args.checkpoint, args.output, tensor=args.tensor, data=args.data)
    source = run_checkpoint.read(args.checkpoint)
    certificate = certify(source, run_checkpoint.read(args.output))
    deliver(args.output, certificate, args.output)
    return {**_summary(args.output, source, certificate), "tensor": args.tensor, "data": args.data}


def verify(args: argparse.Namespace) -> Result:
    found = certify(open_model(args.first), open_model(args.second), tolerance=args.tolerance)
    return {
        "tensors": found.tensors,
        "largest_weight_difference": found.largest_weight_difference,
        "largest_nll_difference": found.largest_nll_difference,
        "equal": found.passed,
    }


def _summary(output: Path, source: ModelSource, certificate: Certificate) -> Result:
    config = source.config
    return {
        "output": str(output),
        "parameters": count_parameters(config.model, config.vocab_size),
        "vocabulary": config.vocab_size,
        "steps": config.step,
        "optimizer": "kept" if source.state else "none",
        "largest_nll_difference": certificate.largest_nll_difference,
    }


if __name__ == "__main__":
    run_command(main)
