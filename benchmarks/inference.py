"""The cost of a token, as ratios measured side by side in one run, each next to its target.

    python -m benchmarks.inference [--layers 6] [--hidden 512] [--length 512] [--rounds 20] [--json]

On this machine's CPU, with torch's default number of threads. The two sides of a ratio take turns, so that other work
on the machine slows both; a ratio is the median of its rounds. Batching of windows, and of consecutive segments in a
walk with a cache, is measured with the model and with a tiny one: it saves calls, not arithmetic, and one window of a
larger model already keeps a CPU busy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import cast

import torch

from benchmarks.machine import machine
from megatron_style.config.model import ModelConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.scoring.modes import MODES
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.reader import Reader
from megatron_style.inference.scoring.score import score
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary
from megatron_style.parallel.device.products import linear
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis

WINDOW, STRIDE = 128, 32  # tokens, where windows are batched
Work = Callable[[], int]  # returns the number of tokens that it has processed


@dataclass(frozen=True)
class Result:
    name: str
    milliseconds: tuple[float, float]  # per token, of either side
    ratio: float
    mark: str
    met: bool


def compare(name: str, one: Work, other: Work, rounds: int, *, least: float = 0, most: float = float("inf")) -> Result:
    """Measure the time per token of `one` relative to that of `other`."""
    one()
    other()
    pairs = [(seconds_per_token(one), seconds_per_token(other)) for _ in range(rounds)]
    first, second = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    mark = f"at least {least}" if least else f"at most {most}"
    return Result(name, (first, second), ratio, mark, met=least <= ratio <= most)


def seconds_per_token(work: Work) -> float:
    begin = time.perf_counter()
    tokens = work()
    return (time.perf_counter() - begin) / tokens


def make_model(layers: int, hidden: int, frequent: int = 5_000) -> Shortformer:
    data = {
        "layers": layers,
        "hidden_size": hidden,
        "heads": max(1, hidden // 64),
        "ffn_size": 4 * hidden,
        "vocabulary": {"kind": "adaptive", "cutoffs": [frequent]},
    }
    model = Shortformer(ModelConfig.parse(data, source="benchmark"), 4 * frequent)
    initialise(model, 1, Axis())
    return model


def text_of(tokens: int) -> torch.Tensor:
    """Return random tokens, drawn from the 500 most frequent."""
    return torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(0))


def walk_from(model: Shortformer, place: int, length: int, tokens: int) -> Work:
    """Return work that decodes `tokens` tokens, one by one, after a text that ends at `place`."""
    decoder = Decoder(model, rows=1, segment_length=length, cache_length=length)
    decoder.read(text := text_of(place))
    following = itertools.cycle(text.split(1))

    def work() -> int:
        for token in itertools.islice(following, tokens):
            model.vocabulary.nll(decoder.step(token).x, token, None)
        return tokens

    return work


def window_anew(model: Shortformer, length: int) -> Work:
    """Return work that encodes a window for its last token only."""
    ids = text_of(length)[None]

    def work() -> int:
        model(ids, ids[:, -1:], model.empty_memory(1, 0))
        return 1

    return work


def matrices_of(model: Shortformer) -> list[torch.Tensor]:
    """Return the weights that a frequent token needs: those of the blocks, and of the first band."""
    blocks = itertools.chain.from_iterable(block.parameters() for block in model.blocks)
    weights: list[torch.Tensor] = [param for param in blocks if param.dim() == 2]
    return [*weights, cast(AdaptiveVocabulary, model.vocabulary).bands[0].table.weight]


def weights_once(model: Shortformer) -> Work:
    """Return work that multiplies a vector with each weight that a frequent token needs."""
    weights = matrices_of(model)
    vectors = [torch.randn(weight.shape[1]) for weight in weights]

    def work() -> int:
        for weight, vector in zip(weights, vectors, strict=True):
            torch.mv(weight, vector)
        return 1

    return work


def forward_pass(model: Shortformer, rows: int) -> Work:
    ids = text_of(rows * WINDOW).view(rows, WINDOW)

    def work() -> int:
        model(ids, ids, model.empty_memory(rows, 0))
        return ids.numel()

    return work


def evaluation(model: Shortformer, protocol: Protocol, windows: int) -> Work:
    text = text_of(WINDOW + (windows - 1) * (protocol.stride or WINDOW)).numpy()
    return lambda: len(score(model, text, protocol, eos=2).nll)


def batching(name: str, model: Shortformer, rows: int, rounds: int) -> Result:
    alone, together = (
        evaluation(model, Protocol("sliding", WINDOW, batch_rows=n, stride=STRIDE), 1 + 4 * rows) for n in (1, rows)
    )
    return compare(f"sliding, {name}: batch 1 / {rows}", alone, together, rounds, least=3)


def products(model: Shortformer, tokens: int) -> Work:
    """Return work that multiplies the vectors of all tokens with each weight that a frequent token needs."""
    weights = matrices_of(model)
    vectors = [torch.randn(tokens, weight.shape[1]) for weight in weights]

    def work() -> int:
        for weight, x in zip(weights, vectors, strict=True):
            linear(x, weight)
        return tokens

    return work


def walking(name: str, model: Shortformer, rows: int, rounds: int) -> Iterator[Result]:
    """Compare the walk of one row with the one that reads many segments at once, as evaluation during training does,
    and with the matrix products alone: however many rows there are, no more than that can be gained."""
    text = text_of(WINDOW * (1 + 2 * rows)).numpy()
    protocol = Protocol("cached", WINDOW, WINDOW, batch_rows=rows)
    reader = Reader(model, text, eos=2)

    def one_row() -> int:
        return sum(len(part.nll) for part in MODES["cached"].read(reader, protocol, [range(len(text))]))

    def together() -> int:
        return len(score(model, text, protocol, eos=2).nll)

    yield compare(f"walk, {name}: 1 row / {rows}", one_row, together, rounds, least=3)
    bare = products(model, rows * WINDOW)
    yield compare(f"walk, {name}: 1 row / products of {rows}", one_row, bare, rounds, least=3)


@torch.no_grad()
def measure(layers: int, hidden: int, length: int, rounds: int) -> Iterator[Result]:
    model = make_model(layers, hidden)
    fewer = max(1, rounds // 2)
    # At either place the rounds decode half a segment, in the middle of which the context has its mean length.
    early, late = length * 9 // 4, length * 77 // 4
    tokens = max(1, length // 2 // (rounds + 1))

    def walk(place: int) -> Work:
        return walk_from(model, place, length, tokens)

    yield compare("window encoded anew / token by token", window_anew(model, length), walk(early), rounds, least=20)
    yield compare(f"token {late:,} / token {early:,}", walk(late), walk(early), rounds, most=1.05)
    yield compare("token by token / weights read once", walk(early), weights_once(model), rounds, most=2)
    segments = evaluation(model, Protocol("nonoverlapping", WINDOW, batch_rows=16), 32)
    yield compare("nonoverlapping / forward pass", segments, forward_pass(model, 16), fewer, most=1.15)
    yield batching(f"{layers} x {hidden}", model, 8, fewer)
    tiny = make_model(2, 32, frequent=500)
    yield batching("2 x 32", tiny, 32, fewer)
    yield from walking(f"{layers} x {hidden}", model, 32, fewer)
    yield from walking("2 x 32", tiny, 32, fewer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--length", type=int, default=512, help="segment and cache length, where tokens are decoded one by one"
    )
    parser.add_argument("--rounds", type=int, default=20, help="measurements per ratio")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    results = measure(args.layers, args.hidden, args.length, args.rounds)
    if args.json:
        print(json.dumps({"machine": machine(), "results": [asdict(result) for result in results]}))
        return
    print(f"{args.layers} layers, {args.hidden} wide, segments of {args.length}; {torch.get_num_threads()} threads")
    print(f"{'':38}{'ms per token':>18}{'ratio':>9}")
    for result in results:
        first, second = result.milliseconds
        print(
            f"{result.name:38}{first:9.3f} /{second:7.3f}{result.ratio:8.2f}x  {result.mark}, "
            f"{'met' if result.met else 'missed'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
