"""Relative positions (Transformer-XL) against position-infused attention: models of the same shape, side by side.

    python -m benchmarks.systems [--layers 6] [--hidden 512] [--length 512] [--rows 4] [--rounds 8] [--json]

Each ratio is the time per token of relative positions divided by that of position-infused attention, the median of
rounds in which the two take turns. The paper has 22% slower inference and 26% more parameters for Transformer-XL; its
model has another shape, so the ratios here have no target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.inference import Result, Work, compare, text_of, walk_from
from benchmarks.machine import machine
from megatron_style.config.model import ModelConfig
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.shape import count_parameters
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis

VOCAB_SIZE = 20_000
KINDS = ("relative", "infused")


def make_config(positions: str, layers: int, hidden: int) -> ModelConfig:
    data = {
        "layers": layers,
        "hidden_size": hidden,
        "heads": max(1, hidden // 64),
        "ffn_size": 4 * hidden,
        "positions": positions,
        "vocabulary": {"kind": "adaptive", "cutoffs": [5_000]},
    }
    return ModelConfig.parse(data, source="benchmark")


def make_model(positions: str, layers: int, hidden: int) -> Shortformer:
    model = Shortformer(make_config(positions, layers, hidden), VOCAB_SIZE)
    initialise(model, 1, Axis())
    return model


def training(model: Shortformer, rows: int, length: int) -> Work:
    """Return work that computes the gradients of a cached segment."""
    ids = text_of(rows * (length + 1)).view(rows, length + 1)
    with torch.no_grad():
        memory = model.features(ids[:, :-1], model.empty_memory(rows, length)).memory

    def work() -> int:
        model(ids[:, :-1], ids[:, 1:], memory).nll.mean().backward()
        model.zero_grad()
        return rows * length

    return work


def evaluation(model: Shortformer, length: int) -> Work:
    text = text_of(4 * length).numpy()
    return lambda: len(score(model, text, Protocol("cached", length, length), eos=2).nll)


def measure(layers: int, hidden: int, length: int, rows: int, rounds: int) -> Iterator[Result]:
    relative, infused = (make_model(kind, layers, hidden) for kind in KINDS)
    yield compare("training", training(relative, rows, length), training(infused, rows, length), rounds)
    yield compare("evaluation, cached", evaluation(relative, length), evaluation(infused, length), rounds)
    with torch.no_grad():
        place = length * 9 // 4
        tokens = max(1, length // 2 // (rounds + 1))
        walks = (walk_from(model, place, length, tokens) for model in (relative, infused))
        yield compare("generation, token by token", *walks, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("hidden", 512), ("length", 512), ("rows", 4), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    counts = [count_parameters(make_config(kind, args.layers, args.hidden), VOCAB_SIZE) for kind in KINDS]
    results = measure(args.layers, args.hidden, args.length, args.rows, args.rounds)
    if args.json:
        found = {"machine": machine(), "parameters": dict(zip(KINDS, counts, strict=True))}
        print(json.dumps(found | {"results": [asdict(result) for result in results]}))
        return
    print(f"{args.layers} layers, {args.hidden} wide, segments of {args.length}; {torch.get_num_threads()} threads")
    print(f"{'parameters':30}{counts[0]:>14,} /{counts[1]:>13,}{counts[0] / counts[1]:8.2f}x")
    for result in results:
        first, second = result.milliseconds
        print(f"{result.name:30}{first:11.3f} ms /{second:10.3f} ms{result.ratio:8.2f}x", flush=True)


if __name__ == "__main__":
    main()
