"""Convert a model to another format, with proof.

python -m megatron_style.convert export runs/quickstart --output models/mine
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_style.base.command import EXIT_FAILED, add_json_flag, command_parser, positive_int, run_command, show
from megatron_style.base.errors import UserError
from megatron_style.data.tokenizer import WordDictionary
from megatron_style.formats import fairseq, huggingface, model_folder, run_checkpoint, universal
from megatron_style.formats.certificate import Certificate, certify
from megatron_style.formats.formats import Writable, open_model
from megatron_style.formats.source import ModelSource
from megatron_style.formats.transfer import deliver, return_freed_memory, transfer
from megatron_style.model.shape import count_parameters

Result = dict[str, object]


@dataclass(frozen=True)
class Conversion:
    about: str
    convert: Callable[[argparse.Namespace], Result]
    arguments: Mapping[str, Mapping[str, Any]]  # the settings of `add_argument` by name


def main() -> None:
    args = parse_args()
    return_freed_memory()
    result = CONVERSIONS[args.kind].convert(args)
    show(result, as_json=args.json)
    if result.get("equal") is False:
        sys.exit(EXIT_FAILED)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "convert",
        "Convert a model to another format. The output is read back and compared with the source on a fixed text; the "
        "proof is in certificate.json. MODEL is a model folder, a run, one of its checkpoints, or any output of this "
        "command.",
        "python -m megatron_style.convert export runs/quickstart --output models/mine",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, conversion in CONVERSIONS.items():
        kind = kinds.add_parser(name, help=conversion.about, description=conversion.about)
        add_json_flag(kind)
        for argument, settings in conversion.arguments.items():
            kind.add_argument(argument, **settings)
    return parser.parse_args()


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
    return _write(replace(source, tokenizer=lambda: dictionary), model_folder, args)


def export_model(args: argparse.Namespace) -> Result:
    source = open_model(args.model)
    if args.optimizer and source.state is None:
        raise UserError(f"{args.model}: holds no optimizer state, so --optimizer has nothing to export")
    return _write(source if args.optimizer else source.without_optimizer(), model_folder, args)


def export_huggingface(args: argparse.Namespace) -> Result:
    source = open_model(args.model).without_optimizer()
    certificate = transfer(source, huggingface, args.output, huggingface.certify_export, overwrite=args.overwrite)
    return _summary(args.output, source, certificate) | {"computed_by": certificate.computed_by}


def export_as(form: Writable, args: argparse.Namespace) -> Result:
    return _write(open_model(args.model), form, args)


def reshard_checkpoint(args: argparse.Namespace) -> Result:
    # DeepSpeed reads this on import. The ranks of the other grid may be many, and need no accelerator.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from megatron_style.checkpoint.reshard import reshard  # imports DeepSpeed, which takes seconds

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


def _write(source: ModelSource, form: Writable, args: argparse.Namespace) -> Result:
    return _summary(args.output, source, transfer(source, form, args.output, overwrite=args.overwrite))


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


def _path(metavar: str) -> Mapping[str, Any]:
    return {"type": Path, "metavar": metavar}


def _required(**settings: Any) -> Mapping[str, Any]:
    return {"required": True, **settings}


_MODEL = {"model": _path("MODEL")}
_REPLACES = {"action": "store_true", "help": "replace an output that was made from something else"}
_TO_FOLDER = {"--output": _required(**_path("DIR"))}
_TO_MODEL = _TO_FOLDER | {"--overwrite": _REPLACES}

CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        "import-fairseq": Conversion(
            "a checkpoint of the reference or of fairseq -> a model folder",
            import_fairseq,
            {"checkpoint": _path("FILE.pt"), "--dictionary": _required(**_path("dict.txt"))} | _TO_MODEL,
        ),
        "export": Conversion(
            "a training checkpoint of any grid -> a model folder in float32",
            export_model,
            _MODEL
            | _TO_MODEL
            | {"--optimizer": {"action": "store_true", "help": "keep the optimizer state: training can resume"}},
        ),
        "export-fairseq": Conversion(
            "-> a checkpoint that the reference loads",
            partial(export_as, fairseq),
            _MODEL | {"--output": _required(**_path("FILE.pt")), "--overwrite": _REPLACES},
        ),
        "export-hf": Conversion(
            "-> a folder that transformers loads (AutoModelForCausalLM)",
            export_huggingface,
            _MODEL | _TO_MODEL,
        ),
        "export-universal": Conversion(
            "-> a universal checkpoint, for any DeepSpeed engine",
            partial(export_as, universal),
            _MODEL | _TO_MODEL,
        ),
        "reshard": Conversion(
            "a training checkpoint -> one for another grid (`train` can do it itself)",
            reshard_checkpoint,
            {
                "checkpoint": _path("CHECKPOINT"),
                "--tensor": _required(type=positive_int, metavar="N", help="tensor-parallel ranks"),
                "--data": _required(type=positive_int, metavar="N", help="data-parallel ranks"),
            }
            | _TO_FOLDER,
        ),
        "verify": Conversion(
            "compare two models of any format; exit code 1 if they differ",
            verify,
            {
                "first": _path("A"),
                "second": _path("B"),
                "--tolerance": {"type": float, "default": 0.0, "metavar": "X", "help": "allowed difference; default 0"},
            },
        ),
    }
)


if __name__ == "__main__":
    run_command(main)
