"""Make a kNN-LM datastore of a text and, for approximate search, its index. docs/systems.md is the guide.

python -m megatron_style.neighbours build runs/quickstart/model --data data/sotu/train --output stores/sotu
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("neighbours")  # imports this file

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tqdm import tqdm

from megatron_style.base.command import add_json_flag, command_parser, log, positive_int, show
from megatron_style.config.datastore import KEY_DTYPES
from megatron_style.data.corpus import check_same_tokenizer
from megatron_style.data.store import open_store
from megatron_style.datastore.approximate import index_shape, write_index
from megatron_style.datastore.build import (
    TOKENS_PER_LANE,
    WALKS,
    build,
    describe,
    facts_of,
    is_built,
    make_manifest,
    walk_of,
)
from megatron_style.datastore.store import open_datastore
from megatron_style.evaluate import process_grid
from megatron_style.formats.formats import open_model
from megatron_style.hosts.launcher import accelerator
from megatron_style.inference.arguments import DTYPES, add_protocol_flags, request_of
from megatron_style.inference.measure import token_bar
from megatron_style.inference.scoring.reader import Reader


def main() -> None:
    args = parse_args()
    COMMANDS[args.kind].run(args)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "neighbours",
        "Make a kNN-LM datastore of a text, which `evaluate --neighbours` and `generate --neighbours` mix with the "
        "model's predictions.",
        "python -m megatron_style.neighbours build runs/quickstart/model --data data/sotu/train --output stores/sotu\n"
        "  deepspeed --num_gpus 8 --module megatron_style.neighbours build runs/mine --data data/mine/train --output "
        "stores/mine\n"
        "  python -m megatron_style.neighbours index stores/mine",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (about, add_flags, _) in COMMANDS.items():
        add_flags(kinds.add_parser(name, help=about, description=about))
    return parser.parse_args()


def add_build_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    add("--data", type=Path, required=True, metavar="PREFIX", help="the text to remember: PREFIX.bin and PREFIX.idx")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--dtype", choices=KEY_DTYPES, default="float16", help="of the keys on disk (float16)")
    add("--compute-dtype", choices=list(DTYPES), default="float32", help="of the model (float32)")
    add("--mode", choices=WALKS, help="default: cached, or nonoverlapping for a model without a cache")
    add_protocol_flags(parser, lanes=f"one per {TOKENS_PER_LANE:,} tokens")
    add_json_flag(parser)


def add_index_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("datastore", type=Path, metavar="DIR")
    add("--lists", type=positive_int, metavar="N", help="default: one per 256 keys, at most 4,096")
    add("--code-bytes", type=positive_int, metavar="N", help="per key; default: 64, or fewer that divide its size")
    add_json_flag(parser)


def build_datastore(args: argparse.Namespace) -> None:
    source = open_model(args.model)
    store = open_store(args.data, source.config.vocab_size)
    check_same_tokenizer(source.tokenizer(), args.data, f"{args.model} was trained with")
    protocol = walk_of(request_of(args, source.config.model), source.config, tokens=len(store), where=str(args.model))
    manifest = make_manifest(source.digest(), source.config, store.tokens, protocol, args.dtype, args.compute_dtype)
    built = is_built(args.output, manifest)
    with process_grid(args.tensor, "neighbours build") as topology:
        if not built:
            if topology.is_first:
                log(f"{args.output}: {describe(manifest)}")
            model = source.load(DTYPES[args.compute_dtype], topology.tensor).to(accelerator())
            reader = Reader(
                model,
                store.tokens,
                source.config.eos,
                wants_losses=False,
                wants_keys=True,
                lookback=protocol.cache_length,
            )
            with token_bar(len(store), topology) as progress:
                build(reader, protocol, manifest, args.output, topology=topology, progress=progress)
        if topology.is_first:
            show({"output": str(args.output), **facts_of(manifest, protocol)}, as_json=args.json)


def index_datastore(args: argparse.Namespace) -> None:
    store = open_datastore(args.datastore)
    shape = index_shape(store, args.lists, args.code_bytes)
    with tqdm(total=store.manifest.count, unit=" keys", unit_scale=True, disable=None) as bar:
        path = write_index(store, shape, bar.update)
    show(
        {"index": str(path), "lists": shape.lists, "code_bytes": shape.code_bytes, "bytes": path.stat().st_size},
        as_json=args.json,
    )


class Command(NamedTuple):
    about: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "build": Command(
            "write a key and the token of every place of a text; an interrupted build resumes",
            add_build_flags,
            build_datastore,
        ),
        "index": Command("make the index for approximate search; needs faiss", add_index_flags, index_datastore),
    }
)
