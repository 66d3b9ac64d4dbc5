"""Convert a model to another format, with proof.

python -m megatron_style.convert export runs/quickstart --output models/mine
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("convert")  # imports this file

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_style.base.command import (
    EXIT_FAILED,
    add_json_flag,
    byte_size,
    command_parser,
    positive_int,
    show,
)
from megatron_style.base.model_files import SHARD_BYTES
from megatron_style.formats import fairseq, transfer, universal


@dataclass(frozen=True)
class Conversion:
    about: str
    convert: Callable[..., transfer.Facts]
    arguments: Mapping[str, Mapping[str, Any]]  # the settings of `add_argument` by name, each a parameter of `convert`


def main() -> None:
    arguments = vars(parse_args())
    conversion = CONVERSIONS[arguments.pop("kind")]
    as_json = arguments.pop("json")
    transfer.return_freed_memory()
    result = conversion.convert(**arguments)
    show(result, as_json=as_json)
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


def _path(metavar: str) -> Mapping[str, Any]:
    return {"type": Path, "metavar": metavar}


def _required(**settings: Any) -> Mapping[str, Any]:
    return {"required": True, **settings}


_MODEL = {"model": _path("MODEL")}
_REPLACES = {"action": "store_true", "help": "replace an output that was made from something else"}
_TO_FOLDER = {"--output": _required(**_path("DIR"))}
_TO_MODEL = _TO_FOLDER | {"--overwrite": _REPLACES}
_SHARDS = {
    "type": byte_size,
    "default": SHARD_BYTES,
    "metavar": "SIZE",
    "help": "most bytes in a file of weights, such as 500MB; larger models are written as several; default: 5GB",
}
_TO_SHARDS = _TO_MODEL | {"--shard-size": _SHARDS}

CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        "import-fairseq": Conversion(
            "a checkpoint of the reference or of fairseq -> a model folder",
            transfer.import_fairseq,
            {"checkpoint": _path("FILE.pt"), "--dictionary": _required(**_path("dict.txt"))} | _TO_SHARDS,
        ),
        "import-transformer-xl": Conversion(
            "a folder of transformers' TransfoXL -> a model folder",
            transfer.import_transformer_xl,
            {"folder": _path("FOLDER")} | _TO_SHARDS,
        ),
        "export": Conversion(
            "a training checkpoint of any grid -> a model folder in float32",
            transfer.export_model,
            _MODEL
            | _TO_SHARDS
            | {"--optimizer": {"action": "store_true", "help": "keep the optimizer state: training can resume"}},
        ),
        "export-fairseq": Conversion(
            "-> a checkpoint that the reference loads",
            partial(transfer.export_as, fairseq),
            _MODEL | {"--output": _required(**_path("FILE.pt")), "--overwrite": _REPLACES},
        ),
        "export-hf": Conversion(
            "-> a folder that transformers loads (AutoModelForCausalLM)",
            transfer.export_huggingface,
            _MODEL | _TO_SHARDS,
        ),
        "export-universal": Conversion(
            "-> a universal checkpoint, for any DeepSpeed engine",
            partial(transfer.export_as, universal),
            _MODEL | _TO_MODEL,
        ),
        "reshard": Conversion(
            "a training checkpoint -> one for another grid (`train` can do it itself)",
            transfer.reshard_checkpoint,
            {
                "checkpoint": _path("CHECKPOINT"),
                "--tensor": _required(type=positive_int, metavar="N", help="tensor-parallel ranks"),
                "--data": _required(type=positive_int, metavar="N", help="data-parallel ranks"),
            }
            | _TO_FOLDER,
        ),
        "verify": Conversion(
            "compare two models of any format; exit code 1 if they differ",
            transfer.verify,
            {
                "first": _path("A"),
                "second": _path("B"),
                "--tolerance": {"type": float, "default": 0.0, "metavar": "X", "help": "allowed difference; default 0"},
            },
        ),
    }
)
