"""What a token costs, as ratios measured side by side in one run.

    python benchmarks/inference.py [--layers 6] [--hidden 512] [--length 512] [--tokens 60]

Batch 1 on the CPU. Token by token with the cache, against encoding the window anew for every token (stride 1, the same
model without cache), against a bare matrix-vector product over the same parameters, and far into the text.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from megatron_style.config.model import ModelConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis

VOCAB_SIZE = 20_000


def make_model(layers: int, hidden: int) -> Shortformer:
    data = {
        "layers": layers,
        "hidden_size": hidden,
        "heads": 8,
        "ffn_size": 4 * hidden,
        "vocabulary": {"kind": "adaptive", "cutoffs": [5_000]},
    }
    model = Shortformer(ModelConfig.parse(data, source="benchmark"), VOCAB_SIZE)
    initialise(model, 1, Axis())
    return model


def seconds_of(body: Callable[[], object], times: int) -> float:
    """The median of single calls."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        body()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


@torch.no_grad()
def measure(layers: int, hidden: int, length: int, tokens: int) -> dict[str, float]:
    model = make_model(layers, hidden)
    ids = torch.randint(0, 5_000, (1, 20 * length), generator=torch.Generator().manual_seed(0))
    target = torch.tensor([7])

    def next_token(features: torch.Tensor) -> None:
        model.vocabulary.nll(features, target, None)

    def window() -> None:
        next_token(model.features(ids[:, :length], model.empty_cache(1, 0))[0][0, -1:])

    def walk_from(position: int) -> Callable[[], None]:
        decoder = Decoder(model, rows=1, segment_length=length, cache_length=length)
        for segment in ids[:, :position].split(length, 1):
            decoder.feed(segment)
        following = itertools.count(position)
        return lambda: next_token(decoder.feed(ids[:, (place := next(following)) : place + 1])[0])

    # The adaptive head reads its first band; the rest of the parameters is read once by a token.
    weights = [param for param in model.blocks.parameters() if param.dim() == 2]
    weights.append(model.vocabulary.bands[0].table.weight)
    vectors = [torch.randn(weight.shape[1]) for weight in weights]

    def bare() -> None:
        for weight, vector in zip(weights, vectors, strict=True):
            torch.mv(weight, vector)

    half = length // 2  # the context is as long at both places
    early, late = walk_from(2 * length - tokens - half), walk_from(18 * length - tokens - half)
    return {
        "window": seconds_of(window, max(3, tokens // 10)),
        "early": seconds_of(early, tokens),
        "late": seconds_of(late, tokens),
        "bare": seconds_of(bare, tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=60, help="how many are timed at each place")
    args = parser.parse_args()
    found = measure(args.layers, args.hidden, args.length, args.tokens)
    print(f"milliseconds a token: {', '.join(f'{name} {1000 * value:.2f}' for name, value in found.items())}")
    print(f"encoding the window anew / token by token   {found['window'] / found['early']:6.1f}x")
    print(
        f"token {18 * args.length} / token {2 * args.length}                    {found['late'] / found['early']:6.2f}x"
    )
    print(f"token by token / reading the weights once   {found['early'] / found['bare']:6.2f}x")


if __name__ == "__main__":
    main()
