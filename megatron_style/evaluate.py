"""Measure the perplexity of a text under a model by a named protocol. docs/evaluation.md is the guide.

python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("evaluate")  # imports this file

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_style.base.command import (
    add_json_flag,
    command_parser,
    output_file,
    show,
    show_table,
)
from megatron_style.base.errors import UserError
from megatron_style.data.corpus import check_same_tokenizer
from megatron_style.data.store import open_store
from megatron_style.datastore.arguments import (
    add_continuous_flags,
    add_neighbour_flags,
    continuous_cache,
    open_retrieval,
)
from megatron_style.datastore.retrieval import TextMixture
from megatron_style.formats.formats import open_model
from megatron_style.hosts.launcher import NO_LAUNCHER, accelerator, find_launcher
from megatron_style.inference.arguments import DTYPES, add_protocol_flags, request_of
from megatron_style.inference.by_position import draw_by_position, stretches
from megatron_style.inference.measure import Measurement, measure
from megatron_style.inference.scoring.modes import MODES, make_protocol
from megatron_style.inference.scoring.score import perplexity
from megatron_style.parallel.topology import Topology

_LIMITS = ("same_length", "clamp_distance")  # of what a model with relative positions sees


def main() -> None:
    args = parse_args()
    source = open_model(args.model)
    store = open_store(args.data)
    check_same_tokenizer(source.tokenizer(), args.data, f"{args.model} was trained with")
    protocol = make_protocol(
        request_of(args, source.config.model), source.config, tokens=len(store), where=str(args.model)
    )
    store.check_ids(source.config.vocab_size)
    continuous = continuous_cache(args)
    retrieval = open_retrieval(args, source.digest, source.config.vocab_size)
    with process_grid(args.tensor, "evaluate") as topology:
        model = source.load(DTYPES[args.dtype], topology.tensor).to(accelerator())
        mixture = TextMixture(store.tokens, model, retrieval, continuous) if retrieval or continuous else None
        measured = measure(model, store.tokens, protocol, eos=source.config.eos, topology=topology, mixture=mixture)
        if topology.is_first:
            if args.nll:
                measured.save_nll(args.nll)
            show_results(measured.facts(source.tokenizer()), measured, args.by_position, as_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "evaluate",
        "Measure the perplexity of a token store under a model, alone and with a kNN-LM or a continuous cache. Under a "
        "launcher its processes share the work; their number does not change the result.",
        "python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid\n"
        "  deepspeed --num_gpus 8 --module megatron_style.evaluate runs/mine --data data/mine/test --mode sliding "
        "--stride 64\n"
        "  python -m megatron_style.evaluate runs/quickstart/model --data data/sotu/valid --mode cached --neighbours "
        "stores/sotu --k 64",
    )
    add = parser.add_argument
    add("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    add("--data", type=Path, required=True, metavar="PREFIX", help="a token store: PREFIX.bin and PREFIX.idx")
    add("--mode", choices=list(MODES), help="default: cached, or nonoverlapping for a model without a cache")
    add_protocol_flags(parser, lanes="1, the exact walk")
    add("--dtype", choices=list(DTYPES), default="float32")
    add(
        "--nll",
        type=output_file,
        metavar="OUT.npz",
        help="write `tokens`, `nll` (nats) and `mixture_nll` in stream order",
    )
    add(
        "--by-position", type=output_file, nargs="?", const=Path("loss_by_position.png"), metavar="OUT.png",
        help="report the mean loss by position in the segment, as a table and a picture; default: loss_by_position.png",
    )  # fmt: skip
    add_neighbour_flags(parser, "--temperature")
    add_continuous_flags(parser)
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    add_json_flag(parser)
    return parser.parse_args()


@contextmanager
def process_grid(tensor: int, command: str) -> Iterator[Topology]:
    """Join the launcher's process grid; without a launcher there is one process."""
    if find_launcher() is not NO_LAUNCHER:
        from megatron_style.engine.session import distributed_session  # DeepSpeed takes seconds to import

        with distributed_session(tensor=tensor) as topology:
            yield topology
    elif tensor == 1:
        yield Topology()
    else:
        raise UserError(
            f"--tensor {tensor} needs that many processes; start it with a launcher, as in "
            f"`deepspeed --num_gpus {tensor} --module megatron_style.{command} ...`"
        )


def show_results(facts: dict[str, object], measured: Measurement, picture: Path | None, *, as_json: bool) -> None:
    """Show the facts and, if a picture of it is wanted, the loss by position. The output for people leaves out
    limits that were not set."""
    if not as_json:
        facts = {key: value for key, value in facts.items() if value or key not in _LIMITS}
    if picture is None:
        show(facts, as_json=as_json)
        return
    counts, losses = measured.score.by_place(measured.protocol)
    means = list(stretches(counts, losses))
    draw_by_position(losses, means, measured.protocol, picture)
    if as_json:
        facts["by_position"] = [None if math.isnan(loss) else loss for loss in losses]
    show(facts, as_json=as_json)
    if not as_json:
        rows = ((mean, mean.tokens, mean.loss, perplexity(mean.loss)) for mean in means)
        show_table(("position", "tokens", "loss nats", "perplexity"), rows)
