"""Perplexity of a text under a model, by a named protocol.

python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_style.base.command import add_json_flag, command_parser, log, run_command, show, show_table
from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.corpus import check_same_tokenizer
from megatron_style.data.store import TokenStore, open_store
from megatron_style.engine.memory import peak_memory
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource
from megatron_style.hosts.launcher import accelerator, launcher
from megatron_style.inference.perplexity import Mode, Protocol, Score, perplexity, score
from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.topology import Topology

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
WALKS = ("cached", "token-by-token")


def main() -> None:
    args = parse_args()
    for flag, path in (("--nll", args.nll), ("--by-position", args.by_position)):
        if path and (not path.parent.is_dir() or path.is_dir()):
            raise UserError(f"{flag} {path}: must be a file in a folder that exists")
    source, store = open_model(args.model), open_store(args.data)
    check_same_tokenizer(source.tokenizer(), args.data, f"{args.model} was trained with")
    protocol = make_protocol(args, source.config, len(store))
    store.check_ids(source.config.vocab_size)
    with process_grid(args.tensor) as topology:
        result, facts = measure(source, store, protocol, DTYPES[args.dtype], topology)
        if topology.is_first:
            deliver(args, store, protocol, result, facts)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "evaluate",
        "Perplexity of a token store under a model. Under a launcher the work is shared by its processes; "
        "their number does not change the result.",
        "python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached\n"
        "  deepspeed --num_gpus 8 --module megatron_style.evaluate runs/mine --data data/mine/test --mode sliding "
        "--stride 64",
    )
    parser.add_argument("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    parser.add_argument("--data", type=Path, required=True, metavar="PREFIX", help="a token store: PREFIX.bin + .idx")
    parser.add_argument("--mode", choices=get_args(Mode), required=True)
    parser.add_argument("--segment-length", type=int, metavar="L", help="default: the length last trained with")
    parser.add_argument("--stride", type=int, metavar="S", help="sliding mode: how many tokens of a window count")
    parser.add_argument(
        "--cache-length", type=int, metavar="C", help="of the modes that walk; default: as last trained"
    )
    parser.add_argument("--batch-rows", type=int, metavar="N", help="segments or windows at once")
    parser.add_argument(
        "--lanes", type=int, metavar="N",
        help="cut a walk into N lanes that several processes can share, each warmed by the segment before it; "
        "default 1, the exact walk",
    )  # fmt: skip
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="processes that share one model's layers")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--nll", type=Path, metavar="OUT.npz", help="write `tokens` and `nll` (nats) in stream order")
    parser.add_argument(
        "--by-position", type=Path, nargs="?", const=Path("loss_by_position.png"), metavar="OUT.png",
        help="mean loss by position in the segment, as a table and a picture (default: loss_by_position.png)",
    )  # fmt: skip
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    add_json_flag(parser)
    return parser.parse_args()


def make_protocol(args: argparse.Namespace, config: ModelFolderConfig, tokens: int) -> Protocol:
    mode: Mode = args.mode
    for flag in ("segment_length", "cache_length", "batch_rows", "stride", "lanes", "tensor"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1")
    for name in ("heads", "ffn_size"):
        if getattr(config.model, name) % args.tensor:
            raise UserError(f"--tensor {args.tensor}: must divide the model's {name} ({getattr(config.model, name)})")
    if args.stride and mode != "sliding":
        raise UserError(f"--stride {args.stride} needs --mode sliding, not {mode}")
    length = args.segment_length or config.segment_length
    if mode not in WALKS:
        _check_windows(args, length)
        return Protocol(mode, length, batch_rows=args.batch_rows or max(1, 4096 // length), stride=args.stride)
    _check_walk(args, config)
    lanes = args.lanes or 1
    if lanes > -(-tokens // length):
        raise UserError(f"--lanes {lanes}: the text has only {-(-tokens // length)} segments of {length}")
    return Protocol(mode, length, cache_length=args.cache_length or config.cache_length or length, lanes=lanes)


def _check_windows(args: argparse.Namespace, length: int) -> None:
    for flag in ("cache_length", "lanes"):
        if getattr(args, flag):
            name = f"--{flag.replace('_', '-')} {getattr(args, flag)}"
            raise UserError(f"{name} needs --mode cached or token-by-token, not {args.mode}")
    if args.mode == "sliding" and not args.stride:
        raise UserError("--mode sliding needs --stride S: how many tokens of each window count")
    if args.stride and args.stride > length:
        raise UserError(f"--stride {args.stride} must not be above the segment length of {length}")


def _check_walk(args: argparse.Namespace, config: ModelFolderConfig) -> None:
    if config.model.positions == "added" and not config.model.cache:
        raise UserError(
            f"{args.model}: was trained with added positions and no cache, and --mode {args.mode} would ruin it "
            f"(the paper measured a perplexity of 41.59 that way); use --mode nonoverlapping"
        )
    if config.model.positions == "added" and args.mode == "token-by-token":
        raise UserError(f"{args.model}: has added positions, so a cached token cannot be read again; use --mode cached")
    if args.mode == "token-by-token" and args.tensor > 1:
        raise UserError(f"--tensor {args.tensor}: use --mode cached, which gives the same as token-by-token")
    if args.batch_rows not in (None, 1):
        raise UserError(f"--batch-rows {args.batch_rows}: {args.mode} mode walks in one row; --lanes cuts the walk")


@contextmanager
def process_grid(tensor: int) -> Iterator[Topology]:
    if launcher() != "none":
        from megatron_style.engine.session import distributed_session  # DeepSpeed takes seconds to import

        with distributed_session(tensor=tensor) as topology:
            yield topology
    elif tensor == 1:
        yield Topology()
    else:
        raise UserError(
            f"--tensor {tensor} needs that many processes; start it with a launcher, as in "
            f"`deepspeed --num_gpus {tensor} --module megatron_style.evaluate ...`"
        )


def measure(
    source: ModelSource, store: TokenStore, protocol: Protocol, dtype: torch.dtype, topology: Topology
) -> tuple[Score, dict[str, object]]:
    device, axis, tokens = accelerator(), topology.data, len(store)
    if topology.is_first and tokens < protocol.segment_length:
        shorter = f"{tokens} tokens, less than a segment of {protocol.segment_length}"
        log(f"note: the text has {shorter}, so no prediction sees more")
    model = source.load(dtype, topology.tensor).to(device)
    with (
        peak_memory(device) as peak,
        tqdm(total=tokens, unit=" tokens", unit_scale=True, disable=None if topology.is_first else True) as bar,
    ):
        begin = time.monotonic()
        result = score(
            model,
            store.tokens,
            protocol,
            eos=source.config.eos,
            axis=axis,
            progress=lambda done: bar.update(min(done * axis.size, tokens - bar.n)),  # the others are about as far
        )
        seconds = time.monotonic() - begin
        memory = torch.tensor(float(peak()), device=device)
    for each in (topology.data, topology.tensor):
        memory = largest_over_shards(memory, each)
    tokenizer = source.tokenizer()
    words = tokenizer.count_words(store.tokens) if tokenizer else None
    fewest, most = protocol.contexts(tokens)
    return result, {
        "mode": protocol.mode,
        "segment_length": protocol.segment_length,
        "cache_length": protocol.cache_length,
        "stride": protocol.stride or protocol.segment_length,
        "lanes": protocol.lanes,
        "tokens": tokens,
        "words": words,  # line ends count, as tokens do
        "loss_nats": result.loss,
        "loss_bits": result.loss / math.log(2),
        "perplexity": result.perplexity,
        "perplexity_per_word": perplexity(result.loss * tokens / words) if words else None,
        "context_min": fewest,
        "context_max": most,
        "processes": topology.data.size * topology.tensor.size,
        "tokens_per_second": tokens / seconds,
        "peak_memory_mb": memory.item() / 1e6,
    }


def deliver(
    args: argparse.Namespace, store: TokenStore, protocol: Protocol, result: Score, facts: dict[str, object]
) -> None:
    if args.nll:
        with args.nll.open("wb") as file:
            np.savez_compressed(file, tokens=store.tokens.astype(np.int32), nll=result.nll)
    if args.by_position:
        counts, losses = result.by_place(protocol)
        means = list(stretches(counts, losses))
        draw_by_position(losses, means, protocol, args.by_position)
    if args.by_position and args.json:
        facts["by_position"] = [None if math.isnan(loss) else loss for loss in losses]
    show(facts, as_json=args.json)
    if args.by_position and not args.json:
        rows = ((mean, mean.tokens, mean.loss, perplexity(mean.loss)) for mean in means)
        show_table(("position", "tokens", "loss nats", "perplexity"), rows)


class Stretch(NamedTuple):
    """Positions first..last of the segment, from 1."""

    first: int
    last: int
    tokens: int
    loss: float

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


def stretches(counts: NDArray[np.int64], losses: NDArray[np.float64]) -> Iterator[Stretch]:
    """Positions 1, 2, 3-4, 5-8, ...: the losses fall fastest at the start."""
    first, last = 0, 1
    while first < len(counts):
        there = slice(first, min(last, len(counts)))
        tokens = int(counts[there].sum())
        if tokens:
            yield Stretch(first + 1, there.stop, tokens, float(np.nansum(losses[there] * counts[there]) / tokens))
        first, last = last, last * 2


def draw_by_position(losses: NDArray[np.float64], means: Sequence[Stretch], protocol: Protocol, path: Path) -> None:
    from matplotlib.figure import Figure  # half a second, and only here

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.4, label="each position")
    axes.hlines(
        [mean.loss for mean in means],
        [mean.first - 0.5 for mean in means],
        [mean.last + 0.5 for mean in means],
        linewidth=2.5,
        label="mean of the stretch",
    )
    cache = f", cache of {protocol.cache_length}" if protocol.cache_length else ""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="position in the segment", ylabel="loss (nats)", xlim=(0.75, len(losses) * 1.1))
    axes.set_title(f"{protocol.mode}, segments of {protocol.segment_length}{cache}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, format="png")


if __name__ == "__main__":
    run_command(main)
