"""Perplexity of a text under a model, by a named protocol.

python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from tqdm import tqdm

from megatron_style.checkpoint.source import open_model
from megatron_style.config.command import add_json_flag, command_parser, run_command, show
from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.store import open_store
from megatron_style.inference.perplexity import Mode, Protocol, score

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def main() -> None:
    args = parse_args()
    if args.nll and (not args.nll.parent.is_dir() or args.nll.is_dir()):
        raise UserError(f"--nll {args.nll}: must be a file in a folder that exists")
    source = open_model(args.model)
    config = source.config
    protocol = make_protocol(args, config)
    store = open_store(args.data)
    store.check_ids(config.vocab_size)
    tokens = store.tokens
    model = source.load(DTYPES[args.dtype])
    begin = time.monotonic()
    with tqdm(total=len(tokens), unit=" tokens", unit_scale=True, disable=None) as bar:  # None: not in a log file
        result = score(model, tokens, protocol, eos=config.eos, progress=bar.update)
    seconds = time.monotonic() - begin
    if args.nll:
        with args.nll.open("wb") as file:
            np.savez_compressed(file, tokens=tokens.astype(np.int32), nll=result.nll)
    fewest, most = protocol.contexts
    facts = {
        "mode": protocol.mode,
        "segment_length": protocol.segment_length,
        "cache_length": protocol.cache_length,
        "tokens": len(tokens),
        "loss_nats": result.loss,
        "loss_bits": result.loss / math.log(2),
        "perplexity": result.perplexity,
        "context_min": fewest,
        "context_max": most,
        "tokens_per_second": len(tokens) / seconds,
    }
    show(facts, as_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "evaluate",
        "Perplexity of a token store under a model.",
        "python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached",
    )
    parser.add_argument("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    parser.add_argument("--data", type=Path, required=True, metavar="PREFIX", help="a token store: PREFIX.bin + .idx")
    parser.add_argument("--mode", choices=get_args(Mode), required=True)
    parser.add_argument("--segment-length", type=int, metavar="L", help="default: the length last trained with")
    parser.add_argument("--stride", type=int, metavar="S", help="sliding mode: how many tokens of a window count")
    parser.add_argument(
        "--cache-length", type=int, metavar="C", help="of the modes that walk; default: as last trained"
    )
    parser.add_argument("--batch-rows", type=int, metavar="N", help="segments at once; cached mode walks one by one")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--nll", type=Path, metavar="OUT.npz", help="write `tokens` and `nll` (nats) in stream order")
    add_json_flag(parser)
    return parser.parse_args()


def make_protocol(args: argparse.Namespace, config: ModelFolderConfig) -> Protocol:
    mode: Mode = args.mode
    for flag in ("segment_length", "cache_length", "batch_rows", "stride"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1")
    length = args.segment_length or config.segment_length
    if args.stride and mode != "sliding":
        raise UserError(f"--stride {args.stride} needs --mode sliding, not {mode}")
    if mode in ("nonoverlapping", "sliding"):
        if args.cache_length:
            raise UserError(f"--cache-length {args.cache_length} needs --mode cached, not {mode}")
        if mode == "sliding" and not args.stride:
            raise UserError("--mode sliding needs --stride S: how many tokens of each window count")
        if args.stride and args.stride > length:
            raise UserError(f"--stride {args.stride} must not be above the segment length of {length}")
        return Protocol(mode, length, batch_rows=args.batch_rows or max(1, 4096 // length), stride=args.stride)
    _check_walk(args, config)
    return Protocol(mode, length, cache_length=args.cache_length or config.cache_length or length)


def _check_walk(args: argparse.Namespace, config: ModelFolderConfig) -> None:
    if config.model.positions == "added" and not config.model.cache:
        raise UserError(
            f"{args.model}: was trained with added positions and no cache, and --mode {args.mode} would ruin it "
            f"(the paper measured a perplexity of 41.59 that way); use --mode nonoverlapping"
        )
    if config.model.positions == "added" and args.mode == "token-by-token":
        raise UserError(f"{args.model}: has added positions, so a cached token cannot be read again; use --mode cached")
    if args.batch_rows not in (None, 1):
        raise UserError(f"--batch-rows {args.batch_rows}: {args.mode} mode walks the text in one row; leave it out")


if __name__ == "__main__":
    run_command(main)
