"""The tokens/s of generation for several rows at once, and the reading of long prompts against evaluation.

    python -m benchmarks.generation [--layers 6] [--hidden 512] [--length 512] [--rounds 5] [--output generation.json]

The sides of a ratio take turns; a ratio is the median of its rounds. A prompt comes first, so that contexts have their
mean length. The limit of several rows is what no step can do without: the matrix products, and one reading of the keys
and values, of which each row has its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch

from benchmarks.inference import Result, Work, compare, make_model, products, text_of
from benchmarks.machine import machine
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.shortformer import Shortformer

TOKENS = 8  # of a row, in a round
SAMPLERS = {"sampled": Sampler(), "top 40": Sampler(top_k=40)}


def context_of(length: int) -> int:
    """Return the mean number of tokens that one sees: a cache, and half a segment."""
    return length * 3 // 2


def writing(model: Shortformer, sampler: Sampler, rows: int, length: int) -> Work:
    """Return work that generates some tokens for each row."""
    prompts = [text_of(context_of(length)).tolist()] * rows
    stream = generate(model, prompts, sampler, segment_length=length, cache_length=length, eos=2, seed=1)
    next(stream)

    def work() -> int:
        return sum(map(len, islice(stream, TOKENS)))

    return work


def unavoidable(model: Shortformer, rows: int, length: int) -> Work:
    """Return work that no step for several rows can do without: the products, and reading keys and values once."""
    multiply = products(model, rows)
    keys_and_values = torch.randn(len(model.blocks), 2, rows, context_of(length), model.config.hidden_size)

    def work() -> int:
        keys_and_values.sum()
        return multiply()

    return work


def prefill(model: Shortformer, text: torch.Tensor, length: int) -> Work:
    """Return work that reads a prompt of several segments."""

    def work() -> int:
        decoder = Decoder(model, rows=1, segment_length=length, cache_length=length)
        decoder.read(text)
        return len(text)

    return work


def evaluation(model: Shortformer, text: torch.Tensor, length: int) -> Work:
    return lambda: len(score(model, text.numpy(), Protocol("cached", length, length), eos=2).nll)


@torch.no_grad()
def measure(layers: int, hidden: int, length: int, rounds: int) -> Iterator[Result]:
    model = make_model(layers, hidden)
    for name, sampler in SAMPLERS.items():
        one = writing(model, sampler, 1, length)
        yield compare(f"{name}: 1 row / 8 rows", one, writing(model, sampler, 8, length), rounds)
        yield compare(f"{name}: 1 row / 32 rows", one, writing(model, sampler, 32, length), rounds, least=8)
        yield compare(f"{name}: 1 row / limit of 32", one, unavoidable(model, 32, length), rounds)
    text = text_of(4 * length)
    yield compare(
        "prompt / evaluation", prefill(model, text, length), evaluation(model, text, length), rounds, most=1.1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("hidden", 512), ("length", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    results = []
    print(f"{args.layers} layers, {args.hidden} wide, segments of {args.length}; {torch.get_num_threads()} threads")
    for result in measure(args.layers, args.hidden, args.length, args.rounds):
        results.append(result)
        first, second = (1000 / milliseconds for milliseconds in result.milliseconds)
        judged = "" if result.mark.endswith("inf") else f"  {result.mark}, {'met' if result.met else 'missed'}"
        print(f"{result.name:28}{first:9,.0f} /{second:9,.0f} tokens/s{result.ratio:8.2f}x{judged}", flush=True)
    if args.output:
        sizes = {name: getattr(args, name) for name in ("layers", "hidden", "length", "rounds")}
        found = {"machine": machine()} | sizes | {"results": [asdict(result) for result in results]}
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
